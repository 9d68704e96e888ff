"""Streams a log of any size for its last out-of-memory: runs `log.read` on the text around likely words.

Cost. One pass over the bytes, with a search per word. Then the newest `KEPT_BYTES` around the words, and the text
before the message, are decoded and parsed.
Known limitations. If likely words cover more than `KEPT_BYTES`, earlier messages are only counted, and only PyTorch's
own.
"""

from __future__ import annotations

from collections import deque
from typing import BinaryIO

import msgspec
from msgspec.structs import replace

from gpumon.analysis.diagnosis import log
from gpumon.analysis.diagnosis.message_parser import OomMessage, find_all, newest

CHUNK_BYTES = 1 << 20
BEFORE_BYTES, AFTER_BYTES = 2 << 10, 8 << 10
"""Around a likely word: its line, and the longest message."""

KEPT_BYTES = 512 << 10
"""Per kind of word, so that a log full of weak signs does not hide the one message with figures."""

_COUNTED = b"Tried to allocate"
_WORDS: tuple[tuple[bytes, ...], ...] = (
    (_COUNTED, b"MPS backend", b"allowed memory", b"memory_fraction limit"),
    (
        b"ut of memory", b"OUT_OF_MEMORY", b"OutOfMemory", b"ALLOC_FAILED", b"MemoryAllocation", b"MemoryError",
        b"CPUAllocator", b"Unable to allocate", b"out of shared", b"shared memory", b"Cannot allocate",
        b"INSUFFICIENT_RESOURCES", b"Invalid buffer size", b"oom-kill", b"oom_kill",
    ),
    (
        b"NOT_INITIALIZED", b"INTERNAL_ERROR", b"cuDNN algorithm", b"unable to find an engine", b"NVML_SUCCESS",
        b"DataLoader worker", b"/dev/shm", b"exitcode", b"SIGKILL", b"Killed",
    ),
)  # fmt: skip
_LONGEST = max(len(word) for words in _WORDS for word in words)


class _Found(msgspec.Struct):
    """Spans of bytes around one kind of word, the newest `KEPT_BYTES` of them."""

    spans: deque[tuple[int, int]]
    kept: int = 0
    cut: bool = False

    def add(self, at: int) -> None:
        begin, end = max(0, at - BEFORE_BYTES), at + AFTER_BYTES
        if self.spans and begin <= self.spans[-1][1]:
            begin, last = self.spans.pop()
            self.kept -= last - begin
            if end - begin > KEPT_BYTES:
                begin, self.cut = end - KEPT_BYTES, True
        self.spans.append((begin, end))
        self.kept += end - begin
        while self.kept > KEPT_BYTES:
            begin, end = self.spans.popleft()
            self.kept -= end - begin
            self.cut = True


def scan(file: BinaryIO) -> log.Story | None:
    """The last out-of-memory in a seekable file, or None."""
    found, counted = _look(file)
    windows = [(begin, _text(file, begin, end)) for begin, end in _merged(found)]
    every: list[tuple[OomMessage, int, str]] = []
    for begin, text in windows:
        every += [(message, begin, text) for message in find_all(text)]
    last = newest([message for message, _, _ in every])
    if last is None:
        return None
    begin, text = next((begin, text) for message, begin, text in reversed(every) if message is last)
    before = _text(file, max(0, begin - 4 * log.PROGRESS_CHARS), begin)
    story = log.story(before + text, replace(last, where=(len(before) + last.where[0], len(before) + last.where[1])))
    times = sum(message.kind == last.kind for message, _, _ in every)
    if last.kind == "allocator" and any(each.cut for each in found):
        times = max(times, counted)
    return replace(story, times=times)


def _look(file: BinaryIO) -> tuple[list[_Found], int]:
    """Spans around likely words, and the number of PyTorch's messages."""
    found = [_Found(deque()) for _ in _WORDS]
    counted = 0
    file.seek(0)
    at, rest = 0, b""  # the offset of `rest`, the end of the chunk before
    while chunk := file.read(CHUNK_BYTES):
        data = rest + chunk
        counted += data.count(_COUNTED) - rest.count(_COUNTED)
        for words, into in zip(_WORDS, found, strict=True):
            for place in sorted(_places(data, words)):
                into.add(at + place)
        rest = data[-_LONGEST:]
        at += len(data) - len(rest)
    return found, counted


def _places(data: bytes, words: tuple[bytes, ...]) -> set[int]:
    """Positions of each word, at least `AFTER_BYTES` / 2 apart: closer ones lie within the span."""
    places: set[int] = set()
    for word in words:
        place = data.find(word)
        while place >= 0:
            places.add(place)
            place = data.find(word, place + AFTER_BYTES // 2)
    return places


def _merged(found: list[_Found]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(span for each in found for span in each.spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def _text(file: BinaryIO, begin: int, end: int) -> str:
    file.seek(begin)
    return log.cleaned(file.read(end - begin).decode(errors="replace"))
