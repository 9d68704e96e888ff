"""When the newest phases ran, while the user records torch's history: marks for the events of gpumon's snapshots.

They become `external_annotations` of the snapshot, as torch writes for its optimizer steps. So `gpumon snapshot` and
PyTorch's memory_viz page show them, and what the user's code sets or reads (`_set_memory_metadata`, its own snapshots)
stays as it is. Source: torch/csrc/cuda/memory_snapshot.cpp (`external_annotations`).
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from gpumon_agent import wire
from gpumon_agent.noted import Noted, flat

PHASES_MAX = 4_096

Annotation = dict[str, Any]


class RecordedPhases:
    """`recorded`: whether the user records. Nothing is kept while not."""

    def __init__(self, recorded: Callable[[], bool]) -> None:
        self._recorded = recorded
        self._ended: deque[wire.Phase] = deque(maxlen=PHASES_MAX)

    def drained(self, events: Iterable[tuple[int, wire.NumberedEvent | Noted]]) -> None:
        if self._recorded():
            self._ended.extend(event for _, event in flat(events) if isinstance(event, wire.Phase))

    def annotated(self, theirs: Iterable[Annotation], now: tuple[int, str, int], device: int) -> list[Annotation]:
        """`theirs` and ours, by time. `now`: the running step, its phase and its start (monotonic ns), on `device`."""
        offset_ns = time.time_ns() - time.monotonic_ns()
        step, phase, since_ns = now
        ours = [each for ended in self._ended for each in _annotations(ended, offset_ns)]
        ours.sort(key=_time_us)  # several devices; stable, so an end stays before the next beginning
        if self._ended:
            ours.append(_annotation(device, "START", step, phase, since_ns + offset_ns))
        return list(heapq.merge(ours, theirs, key=_time_us))


def _annotations(ended: wire.Phase, offset_ns: int) -> Iterator[Annotation]:
    end_ns = ended.t_ns + offset_ns
    if ended.duration_ns >= 1_000:  # shorter ones would end before they begin: times are whole µs
        yield _annotation(ended.device, "START", ended.step, ended.phase, end_ns - ended.duration_ns)
        yield _annotation(ended.device, "END", ended.step, ended.phase, end_ns)


def _annotation(device: int, stage: str, step: int, phase: str, unix_ns: int) -> Annotation:
    return {"device": device, "name": f"step {step}, {phase}", "stage": stage, "time_us": unix_ns // 1_000}


def _time_us(annotation: Annotation) -> int:
    at: int = annotation["time_us"]
    return at
