"""Reads a log for its last out-of-memory: the message, the user's line that raised it, and the phase.

Model. Frames come from the traceback above the message: plain, with a rank's prefix, IPython's or rich's. The phase is
that of the innermost frame with one of the marks below. A forward inside a backward is a recomputation and counts as
backward.
Known limitations. A message without a traceback has no phase.
"""

from __future__ import annotations

import re

import msgspec
from msgspec.structs import replace

from gpumon.analysis.diagnosis.message_parser import OomMessage, find_all, newest
from gpumon_agent import wire

TRACEBACK_CHARS = 20_000
"""How far above the message its traceback is searched."""

PROGRESS_CHARS = 200_000
"""How far above the message the newest step number is searched."""


class FrameLine(msgspec.Struct, frozen=True):
    file: str
    line: int | None
    function: str
    code: str = ""

    @property
    def foreign(self) -> bool:
        """In an installed package, in Python itself, or without a file: not the user's code."""
        return bool(re.search(r"(?:site|dist)-packages|/lib/python3|\\lib\\|^<|conda\w*/lib", self.file))

    @property
    def place(self) -> str:
        name = re.split(r"[/\\]", self.file)[-1]
        return name if self.line is None else f"{name}:{self.line}"


class Story(msgspec.Struct, frozen=True):
    """The last out-of-memory in a text."""

    message: OomMessage
    frames: tuple[FrameLine, ...] = ()  # outermost first
    phase: str | None = None  # wire.LOAD, FORWARD, BACKWARD, OPTIMIZER, BETWEEN, EVAL
    times: int = 1  # number of such messages in the text
    progress: tuple[int, int] | None = None  # (step, total) before it; total 0: unknown

    @property
    def where(self) -> str | None:
        """file.py:LINE of the innermost user frame."""
        own = [frame for frame in self.frames if not frame.foreign]
        return own[-1].place if own else None

    @property
    def code(self) -> str | None:
        own = [frame for frame in self.frames if not frame.foreign]
        return own[-1].code or None if own else None

    @property
    def inner(self) -> FrameLine | None:
        """The innermost frame, the user's or not."""
        return self.frames[-1] if self.frames else None


_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def cleaned(text: str) -> str:
    """Replaces unprintable characters (a log may hold anything); a progress bar's carriage return is a line end."""
    if text.replace("\n", "").isprintable():
        return text
    text = _COLOUR.sub("", text).replace("\r", "\n").expandtabs(4)
    return "".join(c if c == "\n" or c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def read(text: str) -> Story | None:
    """The last out-of-memory in a text, or None."""
    text = cleaned(text)
    messages = find_all(text)
    message = newest(messages)
    if message is None:
        return None
    return replace(story(text, message), times=sum(each.kind == message.kind for each in messages))


def story(text: str, message: OomMessage) -> Story:
    """The frames, phase and progress that `text` gives for one of its messages."""
    begin = message.where[0]
    frames = _frames(text[max(0, begin - TRACEBACK_CHARS) : begin])
    progress = _progress(text[max(0, begin - PROGRESS_CHARS) : begin])
    return Story(message, frames, phase_of(frames), progress=progress)


_PLAIN = re.compile(
    r'File "(?P<file>[^"\n]{1,1000})", line (?P<line>\d{1,9}), in (?P<function>[^\n]{1,200})'
    r"(?:\n(?P<code>[^\n]{0,200}))?"
)
_IPYTHON = re.compile(
    r"(?:File |^)(?P<file>[~/\w.\-\\ ]{1,1000}\.py):(?P<line>\d{1,9}),? in (?P<function>[\w.<>]{1,200})", re.MULTILINE
)
_CELL = re.compile(r"(?:Cell In\s*\[(?P<cell>\d{1,9})\]|<ipython-input-\S{1,200}>)[^\n]{0,40}?line (?P<line>\d{1,9})")
_RICH = re.compile(r"│\s*(?P<file>\S{1,1000}\.py):(?P<line>\d{1,9}) in (?P<function>[\w.<>]{1,200})")
_BAR = re.compile(r"\b(\d{1,15})/(\d{1,15}) \[\d{1,9}:\d\d")
_WORD = re.compile(
    r"\b(?:step|iter(?:ation)?|batch)\W{1,3}(\d{1,15})(?:\s{0,9}(?:/|of)\s{0,9}(\d{1,15}))?", re.IGNORECASE
)


def _frames(before: str) -> tuple[FrameLine, ...]:
    start = before.rfind("Traceback (most recent call last)")
    if start >= 0:
        before = before[start:]
    found: list[tuple[int, FrameLine]] = []
    for pattern in (_PLAIN, _IPYTHON, _CELL, _RICH):
        for match in pattern.finditer(before):
            parts = match.groupdict()
            code = (parts.get("code") or "").strip()
            found.append(
                (
                    match.start(),
                    FrameLine(
                        (parts.get("file") or f"cell {parts.get('cell') or ''}").strip(),
                        int(parts["line"]),
                        (parts.get("function") or "").split("(")[0].strip(),
                        "" if code.startswith("File ") else re.sub(r"^\[rank\d+\]:\s*|^\([^)]*\)\s*", "", code),
                    ),
                )
            )
    return tuple(frame for _, frame in sorted(found, key=lambda each: each[0]))


_MARKS: tuple[tuple[str, re.Pattern[str]], ...] = (
    (wire.OPTIMIZER, re.compile(r"torch/optim/|/optimization\.py|bitsandbytes/optim|apex/optimizers|deepspeed/ops/adam|"
                                r"clip_grad\.py|amp/grad_scaler\.py|schedulefree")),
    (wire.BACKWARD, re.compile(r"torch/autograd/__init__\.py|torch/_tensor\.py|autograd/(?:graph|function)\.py")),
    (wire.FORWARD, re.compile(r"torch/nn/functional\.py|torch/nn/modules/|transformers/models/")),
    (wire.LOAD, re.compile(r"torch/serialization\.py|modeling_utils\.py|torch/nn/init\.py")),
    (wire.BETWEEN, re.compile(r"utils/data/|pin_memory")),
)  # fmt: skip
_CALLS: tuple[tuple[str, re.Pattern[str]], ...] = (
    (wire.LOAD, re.compile(r"\.to\(|\.cuda\(\)|load_state_dict\(|from_pretrained\(|torch\.load\(")),
    (wire.OPTIMIZER, re.compile(r"\b(?:optim\w*|scaler)\.step\(|clip_grad_norm_?\(")),
    (wire.BACKWARD, re.compile(r"\.backward\(")),
)
_MOVES = {"_apply", "to", "cuda", "convert", "half", "float", "load_state_dict", "load"}


def phase_of(frames: tuple[FrameLine, ...]) -> str | None:
    """The training phase in which a traceback ends."""
    phase: str | None = None
    evaluates = False
    for frame in frames:
        path = frame.file.replace("\\", "/")
        evaluates = evaluates or bool(re.match(r"(?:eval|validat|test|predict|generate|inference)", frame.function))
        mark = next((name for name, pattern in _MARKS if pattern.search(path)), None)
        if mark == wire.FORWARD and frame.function in _MOVES:
            mark = wire.LOAD
        if mark is None:
            mark = next((name for name, pattern in _CALLS if pattern.search(frame.code)), None)
            if mark == wire.LOAD and phase is not None:
                mark = None
            if mark is None and frame.function == "forward":
                mark = wire.FORWARD
        if mark is None or (phase == wire.BACKWARD and mark == wire.FORWARD):
            continue
        phase = mark
    return wire.EVAL if phase == wire.FORWARD and evaluates else phase


def _progress(before: str) -> tuple[int, int] | None:
    bars = _BAR.findall(before)
    if bars:
        return int(bars[-1][0]), int(bars[-1][1])
    words = _WORD.findall(before)
    return (int(words[-1][0]), int(words[-1][1] or 0)) if words else None
