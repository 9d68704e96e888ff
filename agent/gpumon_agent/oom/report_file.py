"""The out-of-memory report on disk, with or without a viewer: JSON for gpumon, text for people.

In `GPUMON_OOM_DIR` ("off": nowhere), else in `oom/` of the agent's runtime directory: the newest `REPORTS_MAX` reports
of all processes together; at most `OF_ONE_PROCESS_MAX` of this one (then each replaces the previous one); none above
`REPORT_BYTES_MAX`. Written completely or not at all. Texts and numbers only, no tensors. Still works if the exception
is caught and training goes on. The helper copies a report to where a logout removes nothing. `gpumon explain --last`
reads the newest.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from gpumon_agent import endpoint, wire
from gpumon_agent.guard import pass_on, tolerate
from gpumon_agent.units import torch_size
from gpumon_agent.wire.base import (
    Bytes,
    Count,
    Few,
    Index,
    Named,
    Ordinal,
    Pid,
    RankNumber,
    Shape,
    StepNumber,
    Text,
)  # fmt: skip

REPORTS_MAX = 16
OF_ONE_PROCESS_MAX = 8
REPORT_BYTES_MAX = 128 * 1024  # a thousand parameters by name and shape
VARIABLE = "GPUMON_OOM_DIR"
OFF = "off"
RECORDING = ".gpumon"
"""Suffix of the recording that the helper writes beside a report: the run's past, as a viewer would have seen it."""
_NAME = re.compile(r"oom-\d{13}-\d+-\d+\.(?:json|txt)")
_AHEAD = re.compile(r"ahead-\d{13}-\d+-\d+\.json")
AHEAD_AGAIN_S = 1.0
_OPEN_DIR = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
OPEN_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Parameter(msgspec.Struct, frozen=True, omit_defaults=True):
    shape: Shape
    width: Index = 4  # bytes an element
    trainable: bool = True
    group: Index | None = 0  # of the optimizer's parameter groups; None: in none


class Stepping(msgspec.Struct, frozen=True):
    """An optimizer, for simulating its step."""

    kind: Text
    foreach: bool | None = None
    fused: bool | None = None
    settings: Named = {}


class Report(msgspec.Struct, frozen=True):
    """One out-of-memory. Bytes; None if unknown."""

    unix: Annotated[float, Meta(ge=0, le=1e11)]
    host: Text
    pid: Pid
    rank: RankNumber | None
    name: Text
    argv: Few
    torch: Text | None
    backend: Text
    settings: Named
    device: Ordinal
    device_total: Bytes | None
    step: StepNumber
    phase: Text
    requested: Bytes
    total: Bytes | None  # from torch's observer: the device's, or this process's limit
    free: Bytes | None
    allocated: Bytes | None
    reserved: Bytes | None
    message: Text
    where: Text | None
    module: Text | None
    stack: Few
    ledger: dict[Text, Bytes]  # owners at the last boundary before it
    ledger_step: StepNumber | None
    ledger_phase: Text | None
    optimizers: tuple[Stepping, ...]
    parameters: dict[Text, Parameter]  # in the model's order
    parameters_left_out: Count = 0  # the smallest, if there were too many
    version: Index = 1  # of this format
    source_line: Text | None = None  # the text of the line `where`; None: not read


def encoded(report: Report) -> bytes:
    """As JSON, up to `REPORT_BYTES_MAX`: drops the smallest parameters, then stack, settings and most of argv."""
    data = msgspec.json.encode(report)
    while len(data) > REPORT_BYTES_MAX and report.parameters:
        keep = int(len(report.parameters) * 0.95 * REPORT_BYTES_MAX / len(data))
        by_size = sorted(report.parameters, key=lambda name: -prod(report.parameters[name].shape))
        kept = set(by_size[:keep])
        report = msgspec.structs.replace(
            report,
            parameters={name: each for name, each in report.parameters.items() if name in kept},
            parameters_left_out=report.parameters_left_out + len(report.parameters) - keep,
        )
        data = msgspec.json.encode(report)
    if len(data) > REPORT_BYTES_MAX:
        data = msgspec.json.encode(msgspec.structs.replace(report, stack=(), argv=report.argv[:4], settings={}))
    return data


def text(report: Report) -> str:
    """Readable without gpumon."""
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(report.unix))
    lines = [
        report.message,
        "",
        f"{at}  {report.name}, pid {report.pid}, {report.host}"
        + ("" if report.rank is None else f", rank {report.rank}"),
        f"step {report.step}, {report.phase}" + (f", in {report.module}" if report.module else ""),
    ]
    if report.where:
        lines.append(f"requested at {report.where}" + (f"  {report.source_line}" if report.source_line else ""))
    if report.ledger:
        lines += ["", f"Owners at the end of {report.ledger_phase}, step {report.ledger_step}, bytes:"]
        lines += [f"  {name:<14}{count:>20,}" for name, count in report.ledger.items()]
    if report.stack:
        lines += ["", "Stack, innermost last:", *(f"  {frame}" for frame in report.stack)]
    return "\n".join((*lines, "", "What it means and what to do: gpumon explain --last", ""))


class ReportFile:
    """Writes reports. `write` returns failures as one sentence; other methods raise."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._named = environment.get(VARIABLE, "")
        self._mine: list[str] = []
        self._written = 0
        self._ahead = 0.0  # unix time of the newest file of `write_ahead`
        self._ahead_stem = ""

    @property
    def off(self) -> bool:
        return self._named == OFF

    def write(self, report: Report) -> tuple[str | None, str | None]:
        """(path of the JSON file, None), or (None, one sentence); (None, None) if reports are off."""
        if self._named == OFF:
            return None, None
        try:
            place, fd = self.directory()
        except (OSError, endpoint.Unavailable) as reason:
            pass_on(reason)
            return None, f"no report of the out-of-memory on disk: {reason}"
        try:
            stem = f"oom-{int(report.unix * 1000):013d}-{report.pid}-{self._written}"
            put(fd, f"{stem}.txt", text(report).encode()[:REPORT_BYTES_MAX])
            put(fd, f"{stem}.json", encoded(report))
            self._written += 1
            if len(self._mine) == OF_ONE_PROCESS_MAX:
                _remove(fd, self._mine.pop())
            self._mine.append(stem)
            tidy(fd)
        except OSError as reason:
            pass_on(reason)
            return None, f"no report of the out-of-memory in {place}: {reason.strerror}"
        finally:
            os.close(fd)
        return str(place / f"{stem}.json"), None

    def write_ahead(self, hello: wire.Hello, outlook: wire.Outlook) -> None:
        """Writes an outlook of out-of-memory: the newest of a process, at most one a second. Raises as `directory`."""
        now = time.time()
        if self._named == OFF or now - self._ahead < AHEAD_AGAIN_S:
            return
        self._ahead = now
        fields = {name: getattr(outlook, name) for name in outlook.__struct_fields__}
        _, fd = self.directory()
        try:
            data = msgspec.json.encode(
                {"unix": now, "host": hello.host, "pid": hello.pid, "rank": hello.rank, **fields}
            )
            put(fd, f"ahead-{int(now * 1000):013d}-{hello.pid}-0.json", data)
            if self._ahead_stem:
                _remove(fd, self._ahead_stem)
            self._ahead_stem = f"ahead-{int(now * 1000):013d}-{hello.pid}-0"
            tidy(fd, _AHEAD)
        finally:
            os.close(fd)

    def write_past(self, report: str, recording: bytes) -> None:
        """Writes the run's past beside `report`, if that exists. Raises as `directory`."""
        _, fd = self.directory()
        try:
            stem = Path(report).stem
            if os.access(f"{stem}.json", os.F_OK, dir_fd=fd):
                put(fd, stem + RECORDING, recording)
        finally:
            os.close(fd)

    def keep(self, report: str) -> None:
        """Copies a report, with the run's past, to where a logout removes nothing. For the helper, as `kept`.

        Not if the user named a folder. Where there is no such place (a home that is missing, full or read-only) the
        report stays where it is.
        """
        if self._named:
            return
        with tolerate(OSError, endpoint.Unavailable):
            _, fd = self.directory()
            try:
                _, kept = self.kept("oom")
                try:
                    for ending in (".txt", RECORDING, ".json"):
                        put(kept, Path(report).stem + ending, _content(fd, Path(report).stem + ending))
                    tidy(kept)
                finally:
                    os.close(kept)
            finally:
                os.close(fd)

    def kept(self, name: str) -> tuple[Path, int]:
        """As `directory`, but where a logout removes nothing. For the helper: a home on a network may not answer."""
        return self.directory() if self._named else endpoint.open_kept(name)

    def directory(self) -> tuple[Path, int]:
        """The folder for this process's files, created if missing. The caller closes the descriptor.

        Raises OSError, or Unavailable.
        """
        if self._named == OFF:
            raise endpoint.Unavailable(f"{VARIABLE} is {OFF}")
        if self._named:
            place = Path(self._named)
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            return place, os.open(place, _OPEN_DIR)
        reasons: list[str] = []
        for parent, above in endpoint.openings(reasons):
            os.close(above)
            return parent / "oom", endpoint.open_directory(parent / "oom", create=True)
        raise endpoint.Unavailable("; ".join(reasons) or "no runtime directory")


def newest(places: Iterable[Path] | None = None, refused: list[str] | None = None) -> tuple[Path, Report] | None:
    """The newest valid report of this user, with its path. Adds to `refused` why newer ones were not read."""
    found: list[Path] = []
    for place in places if places is not None else directories():
        with tolerate(OSError):
            found += [path for path in place.glob("oom-*.json") if _NAME.fullmatch(path.name)]
    for path in sorted(found, key=lambda path: path.name, reverse=True):
        try:
            report = load(path)
        except NotOurs as reason:
            if refused is not None:
                refused.append(str(reason))
            continue
        if report is not None:
            return path, report
    return None


def directories() -> list[Path]:
    """Where this user's reports may be."""
    named = os.environ.get(VARIABLE, "")
    if named not in ("", OFF):
        return [Path(named)]
    kept = endpoint.kept()
    return [parent / "oom" for parent in (*endpoint.candidates(), *([kept] if kept is not None else []))]


class NotOurs(Exception):
    """The file is a link, not regular, or another user's. The text is one sentence."""


def load(path: Path) -> Report | None:
    """None if it is no valid report. Raises NotOurs: other users' files are not trusted."""
    try:
        return _cleaned(msgspec.json.decode(own(path), type=Report))
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def own(path: Path) -> bytes:
    """Reads a file of this user, or its beginning if it is too long for a report. Raises OSError, or NotOurs."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotOurs(f"{path} is a symbolic link, so it is not read") from None
        raise
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise NotOurs(f"{path} is no regular file, so it is not read")
        if status.st_uid != os.geteuid():
            raise NotOurs(f"{path} belongs to another user (uid {status.st_uid}), so it is not read")
        return file.read(2 * REPORT_BYTES_MAX)


def _cleaned(report: Report) -> Report:
    """Makes its texts printable: a training process chose them."""
    made = msgspec.to_builtins(report)
    return msgspec.convert(printable(made), type=Report)


def printable(value: Any) -> Any:
    if isinstance(value, str):
        return wire.clean(value, wire.TEXT_CHARS_MAX)
    if isinstance(value, dict):
        return {printable(name): printable(each) for name, each in value.items()}
    return [printable(each) for each in value] if isinstance(value, (list, tuple)) else value


def _content(fd: int, name: str) -> bytes:
    with os.fdopen(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd), "rb") as file:
        return file.read()


def put(fd: int, name: str, data: bytes) -> None:
    draft = f".{name}.{os.getpid()}"
    out = os.open(draft, OPEN_NEW, 0o600, dir_fd=fd)
    try:
        with os.fdopen(out, "wb") as file:
            os.fchmod(out, 0o600)  # regardless of the umask
            file.write(data)
        os.rename(draft, name, src_dir_fd=fd, dst_dir_fd=fd)
    except OSError:
        with tolerate(OSError):
            os.unlink(draft, dir_fd=fd)
        raise


def _remove(fd: int, stem: str) -> None:
    for ending in (".json", ".txt", RECORDING):
        with tolerate(OSError):
            os.unlink(stem + ending, dir_fd=fd)


def tidy(fd: int, names: re.Pattern[str] = _NAME, files_max: int = REPORTS_MAX) -> None:
    """Removes the oldest files that match `names`, no others."""
    stems = sorted({name.rsplit(".", 1)[0] for name in os.listdir(fd) if names.fullmatch(name)})
    for stem in stems[:-files_max]:
        _remove(fd, stem)


def message(oom: wire.Oom, backend: str, device_total: int | None) -> str:
    """What torch's message will say (it does not exist yet). `oom.total` is this process's limit, if set."""
    name = {"hip": "HIP", "xpu": "XPU"}.get(backend, "CUDA")
    total = device_total or oom.total
    said = f"{name} out of memory. Tried to allocate {torch_size(oom.requested)}."
    if total is not None and oom.free is not None:
        said += (
            f" GPU {oom.device} has a total capacity of {torch_size(total)} of which {torch_size(oom.free)} is free."
        )
    if oom.total is not None and total is not None and oom.total < total:
        said += f" {torch_size(oom.total)} allowed;"
    if oom.allocated is not None and oom.reserved is not None:
        said += (
            f" Of the allocated memory {torch_size(oom.allocated)} is allocated by PyTorch, and "
            f"{torch_size(oom.reserved - oom.allocated)} is reserved by PyTorch but unallocated."
        )
    return said
