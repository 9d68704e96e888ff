"""The environment in which a command sees virtual GPUs, and sessions that share them."""

from __future__ import annotations

import ctypes
import glob
import os
import re
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from gpumon.virtual_gpu import profiles
from gpumon.virtual_gpu.building import BuildUnavailable, build
from gpumon.virtual_gpu.sizes import parse

MAX_DEVICES = 16
_MAX_FAULT_TEXT = 2047
Hidden = Literal["bytes", "processes", "pids"]
Fault = str | int


def new_session() -> str:
    return f"{os.getpid()}-{secrets.token_hex(4)}"


def session_file(session: str) -> Path:
    """The table through which a session's processes and NVML readers see one set of devices."""
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", session):
        raise ValueError(f"{session!r} is not a session name: use up to 64 letters, digits, '-', '_' and '.'")
    return Path(f"/dev/shm/vgpu.{os.getuid()}.{session}")


def remove_session(session: str) -> None:
    """Remove a session's table and its undelivered messages between ranks. Running processes keep their table."""
    table = session_file(session)
    table.unlink(missing_ok=True)
    for message in table.parent.glob(f"{glob.escape(table.name)}+*"):
        message.unlink(missing_ok=True)


def _sweep() -> None:
    """Remove files of unnamed sessions whose starter ended over an hour ago, e.g. by kill -9."""
    own = f"vgpu.{os.getuid()}.*-????????"
    for path in (*Path("/dev/shm").glob(own), *Path("/dev/shm").glob(f"{own}+*")):
        pid = path.name.split(".")[2].partition("-")[0]
        try:
            if pid.isdigit() and not Path(f"/proc/{pid}").exists() and time.time() - path.stat().st_mtime > 3600:
                path.unlink()
        except FileNotFoundError:
            continue  # another process swept it


def environment(
    devices: int = 1,
    profile: str | Sequence[str] = "a100-80",
    memory: int | str | Sequence[int | str] | None = None,
    context: int | str | None = None,
    session: str | None = None,
    python: str = sys.executable,
    *,
    mig: str | None = None,
    cuda_order: Sequence[int] | None = None,
    stream_delay: int | None = None,
    nccl_buffers: int | str | None = None,
    nccl_wait: int | None = None,
    scalars: Literal["zero", "bytes"] = "zero",
    sensors: Literal["none", "invented"] = "none",
    hide: Hidden | None = None,
    nvml_faults: Mapping[str, Fault] | None = None,
) -> dict[str, str]:
    """The environment to start any command in, so that it sees ``devices`` virtual GPUs.

    ``profile`` is one name for all devices or one for each (the last repeats), and so is ``memory``, which replaces the
    profile's capacity; ``context`` is what each process costs a device beside its allocator. Sizes are bytes or text
    such as ``16GiB``. Processes of one ``session`` share devices and see each other in NVML; by default the session is
    new. ``python`` is the interpreter whose torch will run.

    - ``mig="3g.20gb"``: the devices are MIG instances of one board.
    - ``cuda_order=(1, 0)``: CUDA's device order differs from NVML's, as on a machine with different boards.
    - ``stream_delay``: launches a device lags behind the host, 32 by default; 0 completes everything at once.
    - ``nccl_buffers``: bytes each NCCL communicator takes from the device outside PyTorch's allocator; 0 by default.
    - ``nccl_wait``: seconds that ranks wait for a rank missing in a collective, 60 by default.
    - ``scalars="bytes"``: ``.item()`` of a kernel's result reads stale bytes instead of zero.
    - ``sensors="invented"``: NVML returns utilization, temperature, power and clocks derived from the launch rate; by
      default it does not support them.
    - ``hide``: what NVML hides about processes, as in a container: "bytes", all "processes", or true "pids".
    - ``nvml_faults={"nvmlDeviceGetPowerUsage": "na"}``: na, error, lost, nopermission, nodriver, hang, slow:MS or an
      nvmlReturn_t number, per function; "nvml" means every function.

    Builds the virtual GPU if needed. Raises Unavailable or ValueError.
    """
    if not 0 <= devices <= MAX_DEVICES:
        raise ValueError(f"{devices} devices: choose 0 to {MAX_DEVICES}")
    names = [profile] if isinstance(profile, str) else list(profile)
    boards = [profiles.find(names[min(i, len(names) - 1)]) for i in range(devices)]
    sizes = None if memory is None else [memory] if isinstance(memory, int | str) else list(memory)
    specification = profiles.specification(
        boards, mig, None if sizes is None else [parse(size) for size in sizes],
        None if context is None else parse(context),
    )  # fmt: skip
    if session is None:
        _sweep()
    name = session or new_session()
    session_file(name)
    faults = dict(nvml_faults or {})
    if hide is not None:
        faults["hide"] = hide
    fault_text = _fault_text(faults)
    folder = build(python)  # last, so that errors in the arguments are reported first
    variables = {
        **os.environ,
        "VGPU_SESSION": name,
        "VGPU_DEVICES": specification,
        "VGPU_SCALARS": scalars,
        "VGPU_SENSORS": sensors,
        "LD_PRELOAD": _prepend(f"{folder}/libcuda.so.1:{folder}/libnvidia-ml.so.1", "LD_PRELOAD"),
        "LD_LIBRARY_PATH": _prepend(str(folder), "LD_LIBRARY_PATH"),
    }
    optional = {
        "VGPU_CUDA_ORDER": ",".join(map(str, cuda_order)) if cuda_order is not None else None,
        "VGPU_STREAM_DELAY": str(stream_delay) if stream_delay is not None else None,
        "VGPU_NCCL_BYTES": str(parse(nccl_buffers)) if nccl_buffers is not None else None,
        "VGPU_NCCL_WAIT": str(nccl_wait) if nccl_wait is not None else None,
        "VGPU_NVML_FAULTS": fault_text or None,
    }
    for variable, value in optional.items():
        variables.pop(variable, None)
        if value is not None:
            variables[variable] = value
    return variables


def set_faults(session: str, faults: Mapping[str, Fault], python: str = sys.executable) -> None:
    """Replace the faults of a running session; an empty mapping removes them.

    Keys are NVML functions as in ``environment()``, ``hide``, and ``lost0`` (any value but 0): that device falls off
    the bus, its CUDA calls fail and NVML reports it lost. Raises ValueError or Unavailable.
    """
    if not session_file(session).exists():
        raise ValueError(f"no session {session!r} is known: it begins with its first process")
    library = ctypes.CDLL(str(build(python) / "libnvidia-ml.so.1"))
    if not library.vgpu_set_faults(session.encode(), _fault_text(faults).encode()):
        raise BuildUnavailable(f"Session {session!r} belongs to another version of the virtual GPU.")


def _fault_text(faults: Mapping[str, Fault]) -> str:
    for name, value in faults.items():
        if not re.fullmatch(r"\w+", name) or not re.fullmatch(r"[\w:-]+", str(value)):
            raise ValueError(f"{name}={value} is not a fault: write NAME=WHAT, such as nvmlDeviceGetPowerUsage=na")
    text = ",".join(f"{name}={value}" for name, value in faults.items())
    if len(text) > _MAX_FAULT_TEXT:
        raise ValueError(f"the faults are {len(text)} characters long: {_MAX_FAULT_TEXT} at most")
    return text


def _prepend(value: str, variable: str) -> str:
    present = os.environ.get(variable)
    return f"{value}:{present}" if present else value
