"""What a training prints, where gpumon itself started it: read from the file that its output goes to."""

from __future__ import annotations

import codecs
import os
import re
from collections import deque

from gpumon_agent import wire

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
    """The last `LINES_MAX` lines, printable characters only. `started_by` names the command of gpumon."""

    def __init__(self, fd: int, started_by: str) -> None:
        """`fd`: a file that is written to at its end. Its position is left as it is."""
        self.started_by = started_by
        self._fd = fd
        self._at = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._kept: deque[str] = deque(maxlen=LINES_MAX)
        self._begun = ""  # a line without its end
        self._lines: tuple[str, ...] = ()

    def lines(self) -> tuple[str, ...]:
        """Oldest first; the last one may not be complete. The same object if nothing came."""
        ahead = os.fstat(self._fd).st_size - self._at
        if ahead <= 0:
            return self._lines
        if ahead > READ_BYTES:
            self._at += ahead - READ_BYTES
            self._begun = ""
            self._kept.append(f"… {ahead - READ_BYTES:,} bytes came too fast to be shown …")
        data = os.pread(self._fd, READ_BYTES, self._at)
        self._at += len(data)
        *complete, self._begun = (self._begun + self._decoder.decode(data)).split("\n")
        self._begun = self._begun[-8 * LINE_CHARS_MAX :]
        self._kept.extend(map(_shown, complete[-LINES_MAX:]))
        last = _shown(self._begun)
        self._lines = (*self._kept, last) if last else tuple(self._kept)
        return self._lines


def _shown(line: str) -> str:
    """As a terminal would leave it: a progress bar writes over itself (tqdm ends each with a carriage return)."""
    written = _SEQUENCE.sub("", line).rstrip("\r\n").rpartition("\r")[2]
    return wire.clean(written.expandtabs(), LINE_CHARS_MAX)
