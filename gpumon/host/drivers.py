"""The child process that reads the drivers of GPUs: one that hangs blocks only this process.

For each line on standard input it reads all devices once and writes one line: the JSON of a protocol.DriverReading,
from plain lists. This process does without msgspec and the wire's types, typing and pathlib: each viewer has one, and
they were a third of its memory. It ends with its input, or with its parent.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys

from gpumon.host import amd_smi, nvml

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_ABSENT = {
    nvml.NO_LIBRARY, nvml.NO_DRIVER, nvml.NO_DEVICE,
    amd_smi.NO_MODULE, amd_smi.NO_LIBRARY, amd_smi.NO_DRIVER, amd_smi.NO_DEVICE,
}  # fmt: skip
"""Not told if there are devices of another maker."""


def together(readings: list[dict[str, Any]]) -> dict[str, Any]:
    """The fields of one DriverReading from those of each driver."""
    devices = [device for reading in readings for device in reading.get("devices", ())]
    drivers = [reading["driver"] for reading in readings if reading.get("driver")]
    why = [reading["why"] for reading in readings if reading.get("why")]
    told = [each for each in why if not devices or each not in _ABSENT]
    return {"driver": ", ".join(drivers) or None, "devices": devices, "why": "; ".join(told) or None}


def end_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when the thread that started it ends, even by SIGKILL."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the line above
            os._exit(0)


def main(parent: int) -> None:
    end_with_parent(parent)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # amdsmi and its library print
    readers = nvml.Reader(), amd_smi.Reader()
    for _ in sys.stdin.buffer:
        answers.write(json.dumps(together([reader.read() for reader in readers])).encode() + b"\n")
        answers.flush()
