"""What every scenario shares: its common arguments, and the allocator's own figures at each phase's end as JSON lines.

A scenario says `report("forward")` where a phase ends. Without --report that does nothing at all: no figure is read, no
peak is reset. With it, one JSON line a step goes to standard output:

    {"step": 1, "phases": [{"phase": "between", "allocated": 33574912, "allocated_peak": ..., ...}, ...]}

Bytes are ints, a figure the device does not have is null. Step 0 holds `load`. The last line is {"done": true, ...}.
The reading points are those of the project's design: `forward` the model's return, `backward` the engine's return (the
loss belongs to it), `optimizer` the end of `step()`, which also closes the step, `between` just before a forward.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch

FIGURES = {
    "allocated": "allocated_bytes.all.current",
    "allocated_peak": "allocated_bytes.all.peak",
    "reserved": "reserved_bytes.all.current",
    "reserved_peak": "reserved_bytes.all.peak",
    "active": "active_bytes.all.current",
    "inactive_split": "inactive_split_bytes.all.current",
    "requested": "requested_bytes.all.current",
    "blocks": "allocation.all.current",
    "segments": "segment.all.current",
    "retries": "num_alloc_retries",
    "ooms": "num_ooms",
}
"""Name in the report → key of `torch.cuda.memory_stats`; bytes, except the last four, which are counts."""


def arguments(doc: str | None, *, steps: int, twin: str = "") -> argparse.ArgumentParser:
    """The parser every scenario starts from; `twin` says what --clean does, where there is a clean twin."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=steps, help=f"optimizer steps ({steps})")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to train")
    parser.add_argument("--seed", type=int, default=0, help="seed of every random number (0)")
    parser.add_argument("--capacity", type=int, metavar="MIB", help="allocate no more than this many MiB of the device")
    parser.add_argument("--sleep", type=float, default=0.0, metavar="S", help="wait after each step, to be watched (0)")
    parser.add_argument("--report", action="store_true", help="print the allocator's figures, one JSON line a step")
    if twin:
        parser.add_argument("--clean", action="store_true", help=twin)
    return parser


def device_used(device: str) -> int:
    """Bytes in use on the device as NVML counts them, every process together."""
    import pynvml

    pynvml.nvmlInit()
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    if uuid is None:  # torch 2.4
        handle = pynvml.nvmlDeviceGetHandleByIndex(torch.cuda._get_nvml_device_index(device))
    else:
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)


def resident(pid: int | str = "self") -> int:
    """Bytes of host memory a process has resident."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize()


class Report:
    """Prints the allocator's figures; it also seeds and applies --capacity, so it is made before the model."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.device = torch.device(args.device)
        self.wanted = args.report
        self.sleep_s = args.sleep
        self.step = 0
        self.phases: list[dict[str, Any]] = []
        self.notes: dict[str, Any] = {}
        self.started = time.monotonic()
        torch.manual_seed(args.seed)
        if self.device.type == "cuda":
            if self.device.index is not None:
                torch.cuda.set_device(self.device)
            if args.capacity:
                total = torch.cuda.get_device_properties(self.device).total_memory
                # by its number: what names no device it refuses, and the current one is None
                torch.cuda.set_per_process_memory_fraction(min(1.0, args.capacity * 2**20 / total), self.device.index)
        if self.wanted:
            self._line(
                hello=True, torch=torch.__version__, rank=int(os.environ.get("RANK", "0")), device=str(self.device)
            )

    def __call__(self, phase: str, *, skipped: bool = False) -> None:
        """The phase ends here; `optimizer` (or a skipped one) closes the step, `load` is step 0."""
        if self.wanted:
            self.phases.append({"phase": phase, **self._figures()})
        if phase == "load":
            self._close()
        elif phase == "optimizer":
            self.step += 1
            self._close(**({"skipped": True} if skipped else {}))
            if self.sleep_s:
                time.sleep(self.sleep_s)

    def note(self, **facts: Any) -> None:
        """Facts known only to the script (bucket sizes, names of holders), printed with the step's line."""
        self.notes.update(facts)

    def done(self) -> None:
        """The last line: seconds since the start and this process's peak host memory."""
        if self.wanted:
            if self.phases or self.notes:
                self._close(open=True)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            self._line(done=True, seconds=round(time.monotonic() - self.started, 3), peak_rss=peak)

    def _close(self, **more: Any) -> None:
        if self.wanted:
            rank = {"rank": int(os.environ["RANK"])} if "RANK" in os.environ else {}
            self._line(step=self.step, **rank, phases=self.phases, **more, **self.notes)
        self.phases, self.notes = [], {}

    def _figures(self) -> dict[str, int | None]:
        if self.device.type != "cuda":
            return dict.fromkeys(FIGURES)
        # a copy still in flight, or a block that waits for its stream, would make two machines differ by chance
        torch.cuda.synchronize(self.device)
        stats = torch.cuda.memory_stats(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return {name: stats.get(key, 0) for name, key in FIGURES.items()}

    @staticmethod
    def _line(**fields: Any) -> None:
        # one write: torchrun runs python -u, where print() writes the newline apart and two ranks share a line
        sys.stdout.write(json.dumps(fields) + "\n")
        sys.stdout.flush()
