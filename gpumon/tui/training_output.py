"""What a training prints, read from the file that its output goes to.

gpumon makes that file itself for `gpumon demo` and `gpumon dryrun`. Else it is the user's: `gpumon run train.py > log`.
"""

from __future__ import annotations

import codecs
import os
import re
from collections import deque
from pathlib import Path

from gpumon.session.frame import RankFrame
from gpumon_agent import endpoint, wire

LINES_MAX = 1_000
LINE_CHARS_MAX = 1_000
READ_BYTES = 1 << 18
"""At once. What has come beyond that is passed over, but for its end: more lines are not kept."""

_SEQUENCE = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: colours, movements of the cursor
    r"|\x1b[\]PX^_].*?(?:\x07|\x1b\\)"  # OSC and other texts for the terminal: a title, a link, the clipboard
    r"|\x1b\[?[0-?]*[ -/]*$"  # one whose end has not come yet
    r"|\x1b[ -/]*[0-~]"
)


class TrainingOutput:
    """The last `LINES_MAX` lines, printable characters only."""

    def __init__(self, fd: int, whose: str) -> None:
        """`fd`: a file that is written to at its end. Its position is left as it is. `whose`: for the title."""
        self.whose = whose
        self._fd = fd
        self._at = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._kept: deque[str] = deque(maxlen=LINES_MAX)
        self._begun = ""  # a line without its end
        self._lines: tuple[str, ...] = ()

    def is_same_file(self, other: TrainingOutput) -> bool:
        return os.path.samestat(os.fstat(self._fd), os.fstat(other._fd))

    def lines(self) -> tuple[str, ...]:
        """Oldest first; the last one may not be complete. The same object if nothing came."""
        ahead = os.fstat(self._fd).st_size - self._at
        if ahead < 0:  # cut by whoever rotates logs
            self._at, ahead = 0, ahead + self._at
        if ahead == 0:
            return self._lines
        if ahead > READ_BYTES:
            self._at += ahead - READ_BYTES
            self._begun = ""
            self._kept.append(f"… {ahead - READ_BYTES:,} bytes before this are not shown …")
        data = os.pread(self._fd, READ_BYTES, self._at)
        self._at += len(data)
        *complete, self._begun = (self._begun + self._decoder.decode(data)).split("\n")
        self._begun = self._begun[-8 * LINE_CHARS_MAX :]
        self._kept.extend(map(_shown, complete[-LINES_MAX:]))
        last = _shown(self._begun)
        self._lines = (*self._kept, last) if last else tuple(self._kept)
        return self._lines


class Outputs:
    """Of the processes that are shown. `started`: by gpumon itself; that file has the output of all their ranks.

    `others`: processes that gpumon did not start may be shown, too.
    """

    def __init__(self, started: TrainingOutput | None = None, *, others: bool = True) -> None:
        self._started = started
        self._others = others
        self._fd = -1
        self._found: tuple[str, TrainingOutput | None] = "", None

    def of(self, rank: RankFrame | None) -> TrainingOutput | None:
        """None: the process is not on this machine, or neither its stdout nor its stderr is a file."""
        if rank is None or not self._others:
            return self._started
        if self._found[0] != rank.source:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd, whose = _opened(rank.hello)
            found = TrainingOutput(self._fd, whose) if self._fd >= 0 else None
            if self._started is not None and (
                found.is_same_file(self._started) if found is not None else not _runs(rank.hello)
            ):  # what has ended is mostly what gpumon started
                found = self._started
            self._found = rank.source, found
        return self._found[1]


def _runs(hello: wire.Hello) -> bool:
    """On this machine, now."""
    return hello.boot_id == endpoint.boot_id() and endpoint.start_time(hello.pid) == hello.start_time


def _opened(hello: wire.Hello) -> tuple[int, str]:
    """(file, what it is) of stdout, else of stderr; -1: none of them is a file, or the process is not found here."""
    if not _runs(hello):
        return -1, ""
    for number, name in ((1, "stdout"), (2, "stderr")):
        path = Path(f"/proc/{hello.pid}/fd/{number}")
        try:
            if path.is_file():  # opening anything else may wait or act
                to = path.readlink()
                return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), f"{to}: {name} of {hello.name}"
        except OSError:  # it has ended, is another user's, or its file may not be read
            continue
    return -1, ""


def _shown(line: str) -> str:
    """As a terminal would leave it: a progress bar writes over itself (tqdm ends each with a carriage return)."""
    written = _SEQUENCE.sub("", line).rstrip("\r\n").rpartition("\r")[2]
    return wire.clean(written.expandtabs(), LINE_CHARS_MAX)
