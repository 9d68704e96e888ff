"""The state of the whole job in words, below the header of every screen. As high as its text, at most `MOST_ROWS`."""

from __future__ import annotations

import msgspec

from gpumon.analysis.answer import Answer, State, parts
from gpumon.tui.styles import Glyphs
from gpumon.tui.text_layout import Line, cells, clip, words
from gpumon.tui.view import View, age
from gpumon.tui.widgets.panel import Panel

MOST_ROWS = 6
"""The longest sentence of an out-of-memory with its remedy needs so many at 80 columns."""

INDENT = 7

ROLES: dict[State, str] = {
    "out-of-memory": "bad", "ended": "warn", "will-not-fit": "bad", "leak": "warn", "tight": "warn", "unknown": "dim",
    "ok": "good",
}  # fmt: skip


class Stated(msgspec.Struct, frozen=True):
    state: State
    head: str
    text: str
    do: str
    past: str = ""  # which past step of a live run is shown; the answer is the one of then


def state_glyph(state: State, glyphs: Glyphs) -> str:
    known = {"ok": glyphs.fits, "unknown": glyphs.silent, "ended": glyphs.ended, "out-of-memory": glyphs.ended}
    return known.get(state, glyphs.warning)


def stated(said: Answer, past: str = "") -> Stated:
    return Stated(said.state, *parts(said), past)


def past_of(view: View) -> str:
    """ "step 1,204 of 5,400, 3 min ago · leak found; Esc returns to live"."""
    at, now = view.position, view.now
    if at is None or now is None:
        return ""
    ago = age(max(0, at.last_ns - at.unix_ns) / 1e9)
    happened = f" · {at.moment.kind}" if at.moment is not None else ""
    ended = now.rank is not None and now.rank.status == "ended"
    return (
        f"step {at.step:,} of {max(at.step, at.last_step):,}, {ago} ago{happened};"
        f" Esc returns to {'the last step' if ended else 'live'}"
    )


def answer_lines(said: Stated, width: int, rows: int, glyphs: Glyphs) -> list[Line]:
    """The state, what it is about, and in a row of its own what to do. With few rows the rest is cut, as the last."""
    role = ROLES[said.state]
    head = f" {state_glyph(said.state, glyphs)} {said.head}{' then' if said.past else ''}  "
    lines = _under(f" {glyphs.paused} PAST  ", "warn", said.past, "strong", width) if said.past else []
    lines += _under(head, role, said.text, "text" if said.past else "strong", width)
    if said.do and not said.past:
        lines += _under("   do  ", "good", said.do, "text", width)
    if len(lines) > rows:
        (head, role), (text, kind) = lines[rows - 1]
        lines = [*lines[: rows - 1], ((head, role), (clip(f"{text} and more", width - cells(head) - 1), kind))]
    return lines


def _under(head: str, role: str, text: str, kind: str, width: int) -> list[Line]:
    """`text` beside `head`. Its further rows begin below `do`'s text."""
    filled = "x" * (cells(head) - INDENT)
    (first,), *rest = words(filled + text, kind, width - INDENT - 1) or [((filled, kind),)]
    return [((head, role), (first[0][len(filled) :], kind)), *(((" " * INDENT, ""), *row) for row in rest)]


class AnswerLine(Panel):
    can_focus = False

    def pick(self, view: View) -> Stated:
        picked = stated(view.answer, past_of(view))
        height = self.app.size.height
        rows = 1 if height < 12 else 2 if height < 20 else MOST_ROWS
        lines = answer_lines(picked, max(20, self.app.size.width), rows, self.monitor.glyphs)
        if self.styles.height is None or self.styles.height.value != len(lines):
            self.styles.height = len(lines)
        return picked

    def draw(self, slice_: Stated, width: int, height: int, glyphs: Glyphs) -> list[Line]:
        return answer_lines(slice_, width, height, glyphs)
