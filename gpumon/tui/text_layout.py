"""Lines of text with roles, as widgets draw them before colouring, and their width in terminal cells.

Text is never markup: a span is (text, role), so a module named `a[/]b` is six characters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.cells import cell_len, set_cell_size

Span = tuple[str, str]
Line = tuple[Span, ...]

EMPTY: Line = ()


def cells(text: str) -> int:
    return len(text) if text.isascii() else cell_len(text)


def width(line: Iterable[Span]) -> int:
    return sum(cells(text) for text, _ in line)


def clip(text: str, room: int) -> str:
    """At most `room` cells, with an ellipsis if cut."""
    if cells(text) <= room:
        return text
    return "" if room <= 0 else set_cell_size(text, room - 1).rstrip() + "…"


def left(text: str, room: int) -> str:
    text = clip(text, room)
    return text + " " * (room - cells(text))


def right(text: str, room: int) -> str:
    text = clip(text, room)
    return " " * (room - cells(text)) + text


def fit(line: Sequence[Span], room: int) -> Line:
    """The line cut to `room` cells, with an ellipsis if cut."""
    if width(line) <= room:
        return tuple(line)
    kept: list[Span] = []
    for text, role in line:
        size = cells(text)
        if size > room or (size == room and (text, role) != line[-1]):
            kept.append((clip(text + " ", room), role))
            break
        kept.append((text, role))
        room -= size
    return tuple(kept)


def spread(start: Sequence[Span], end: Sequence[Span], room: int) -> Line:
    """`start` at the left edge, `end` at the right one; if both do not fit, `end` is dropped."""
    gap = room - width(start) - width(end)
    if gap < 2:
        return fit(start, room)
    return (*start, (" " * gap, ""), *end)


def flow(items: Iterable[Line], room: int, *, gap: int = 2, indent: int = 0) -> list[Line]:
    """Items side by side, wrapped at `room`; none is cut in two. Lines after the first are indented."""
    lines: list[Line] = []
    line: list[Span] = []
    used = 0
    for item in items:
        size = width(item)
        if line and used + gap + size > room:
            lines.append(tuple(line))
            line, used = [], 0
        lead = " " * (gap if line else indent if lines else 0)
        if lead:
            line.append((lead, ""))
        line.extend(item)
        used += len(lead) + size
    if line:
        lines.append(tuple(line))
    return lines


def words(text: str, role: str, room: int) -> list[Line]:
    return [((row, role),) for row in _wrap(text, max(1, room))]


def chop(text: str, room: int) -> list[str]:
    """The text in rows of at most `room` cells, its spaces unchanged. A wide character needs two cells."""
    room = max(2, room)
    rows: list[str] = []
    while cells(text) > room:
        row = set_cell_size(text, room)
        row = row if text.startswith(row) else row[:-1]  # a wide character is not cut in two
        rows.append(row)
        text = text[len(row) :]
    return [*rows, text]


def _wrap(text: str, room: int) -> list[str]:
    rows: list[str] = []
    row = ""
    for word in text.split():
        if row and cells(row) + 1 + cells(word) > room:
            rows.append(row)
            row = word
        else:
            row = f"{row} {word}" if row else word
    return [clip(r, room) for r in [*rows, row] if r]


_ASCII = str.maketrans({
    "·": "-", "…": "~", "−": "-", "–": "-", "—": "-", "±": "~", "≤": "<", "≥": ">", "≈": "~", "×": "x", "÷": "/",
    "→": ">", "←": "<", "↑": "^", "↓": "v", "•": "-", "°": "'", "µ": "u", "▾": "v", "▴": "^", "Δ": "d", "⏎": "<",
    "▲": "!", "●": "*", "✓": "+", "■": "#", "│": "|", "─": "-", "⁄": "/", "▸": ">",
})  # fmt: skip


def in_ascii(text: str) -> str:
    """With as many cells. What has no sign of its own becomes a question mark: a file name may have any character."""
    if text.isascii():
        return text
    return "".join(sign if sign.isascii() else "?" * cell_len(sign) for sign in text.translate(_ASCII))


def plain(lines: Iterable[Line]) -> str:
    """The text without colour, for tests and `--once`."""
    return "\n".join("".join(text for text, _ in line).rstrip() for line in lines)
