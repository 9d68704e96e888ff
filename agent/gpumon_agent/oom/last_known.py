"""The last known state of a training, on disk: for the case that it was killed together with its helper.

The helper writes it every few seconds, and once more if the training disappears without a Goodbye; after a Goodbye it
removes it. One file a process, in the folder of the out-of-memory reports (`report_file`), at most `FILES_MAX` of all
processes together. `gpumon explain --last` reads the newest of a process that no longer runs.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from gpumon_agent import endpoint
from gpumon_agent.oom import report_file
from gpumon_agent.wire.base import Bytes, Count, Few, Ordinal, Pid, RankNumber, StepNumber, Text

EVERY_S = 5.0
FILES_MAX = 256
_NAME = re.compile(r"last-\d{13}-\d+\.json")


class LastKnown(msgspec.Struct, frozen=True):
    """A training as its helper saw it last. Bytes; None if unknown."""

    unix: Annotated[float, Meta(ge=0, le=1e11)]
    ended: bool  # the helper saw its end
    host: Text
    boot_id: Text
    pid: Pid
    start_time: Count
    rank: RankNumber | None
    name: Text
    argv: Few
    step: StepNumber
    phase: Text
    phase_s: Annotated[float, Meta(ge=0, le=1e11)]  # time spent in the phase
    resident: Bytes | None  # of this process, in host memory
    device: Ordinal | None = None  # from here on: at the newest boundary
    allocated: Bytes | None = None
    reserved: Bytes | None = None


class File:
    """One process's file. Raises OSError or Unavailable."""

    def __init__(self, box: report_file.ReportFile, began_unix_ns: int, pid: int, *, written: bool = False) -> None:
        """`written`: by an earlier helper, which died."""
        self._box = box
        self._name = f"last-{began_unix_ns // 1_000_000:013d}-{pid}.json"
        self._written = written

    def write(self, known: LastKnown) -> None:
        if self._box.off:
            return
        _, fd = self._box.directory()
        try:
            report_file.put(fd, self._name, msgspec.json.encode(known))
            if not self._written:
                report_file.tidy(fd, _NAME, FILES_MAX)
            self._written = True
        finally:
            os.close(fd)

    def remove(self) -> None:
        if self._written and not self._box.off:
            _, fd = self._box.directory()
            try:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._name, dir_fd=fd)
            finally:
                os.close(fd)


def newest(places: Iterable[Path] | None = None) -> LastKnown | None:
    """The newest one whose process does not run on this machine (any more)."""
    found = []
    for place in places if places is not None else report_file.directories():
        with contextlib.suppress(OSError):
            found += [path for path in place.glob("last-*.json") if _NAME.fullmatch(path.name)]
    known = [each for path in found if (each := _load(path)) is not None and not _runs(each)]
    return max(known, key=lambda each: each.unix, default=None)


def _runs(known: LastKnown) -> bool:
    return known.boot_id == endpoint.boot_id() and endpoint.start_time(known.pid) == known.start_time


def _load(path: Path) -> LastKnown | None:
    try:
        known = msgspec.json.decode(report_file.own(path), type=LastKnown)
        return msgspec.convert(report_file.printable(msgspec.to_builtins(known)), type=LastKnown)
    except (OSError, report_file.NotOurs, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
