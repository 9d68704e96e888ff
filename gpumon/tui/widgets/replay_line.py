"""Where a replay stands: its time, its step, its speed, and a bar with the recording's events."""

from __future__ import annotations

from gpumon.tui.position import Position
from gpumon.tui.styles import Glyphs
from gpumon.tui.text_layout import Line, Span, fit, width
from gpumon.tui.view import View
from gpumon.tui.widgets.panel import Panel

BAR_MIN = 10
"""A shorter bar shows nothing that the numbers do not."""

_ROLES = {"out of memory": "bad", "leak found": "bad", "growth": "warn"}


class ReplayLine(Panel):
    """Above the keys, in a replay only."""

    can_focus = False

    def pick(self, view: View) -> Position | None:
        return view.position

    def draw(self, slice_: Position | None, width: int, height: int, glyphs: Glyphs) -> list[Line]:
        return [] if slice_ is None else [replay_line(slice_, width, glyphs)]


def clock(nanoseconds: int) -> str:
    """ "0:07", "12:40", "1:02:03"."""
    whole = max(0, nanoseconds) // 10**9
    hours, rest = divmod(whole, 3600)
    minutes, seconds = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def pace_of(speed: float) -> str:
    """ "×8", "×1/4", "at once"."""
    if not speed:
        return "at once"
    return f"×{speed:g}" if speed >= 1 else f"×1/{1 / speed:g}"


def replay_line(at: Position, room: int, glyphs: Glyphs) -> Line:
    state, role = (glyphs.now, "title")
    if at.going_to is not None:
        state, role = "…", "warn"
    elif at.ended:
        state, role = glyphs.ended, "dim"
    elif at.held:
        state, role = glyphs.paused, "warn"
    if not glyphs.braille and state == "…":
        state = "~"
    speed = pace_of(at.speed) if glyphs.braille else pace_of(at.speed).replace("×", "x")
    known = bool(at.last_ns)
    time = clock(at.unix_ns - at.first_ns) if at.unix_ns else clock(0)
    step = f"{at.step:,}" if at.step >= 0 else "none"
    start: list[Span] = [(" ", ""), (f"{state} {speed}", role), ("  ", ""), (time, "strong")]
    end: list[Span] = [("step ", "dim"), (step, "strong")]
    if known:
        start.append((f" of {clock(at.last_ns - at.first_ns)}", "dim"))
        if at.last_step >= 0:
            end.append((f" of {at.last_step:,}", "dim"))
    if (here := at.moment) is not None:
        end.append((f" · {here.kind}", _ROLES.get(here.kind, "strong")))
    if at.going_to is not None:
        end = [("going to step ", "dim"), (f"{at.going_to:,}", "strong")]
    length = room - width(start) - width(end) - 5
    share = at.share
    if share is None or length < BAR_MIN:
        return fit([*start, ("  ", ""), *end], room)
    return fit([*start, ("  ", ""), *_bar(at, share, length, glyphs), ("  ", ""), *end], room)


def _bar(at: Position, share: float, length: int, glyphs: Glyphs) -> list[Span]:
    full, rest = ("━", "─") if glyphs.braille else ("=", "-")
    here = min(length - 1, int(share * length))
    cells: list[Span] = [(full, "title") if cell <= here else (rest, "dim") for cell in range(length)]
    whole = at.last_ns - at.first_ns
    for moment in sorted(at.moments, key=lambda each: each.kind in _ROLES):  # the worst are drawn last
        cell = min(length - 1, max(0, int((moment.unix_ns - at.first_ns) / whole * length)))
        cells[cell] = (glyphs.warning if moment.kind in _ROLES else glyphs.info, _ROLES.get(moment.kind, "strong"))
    joined: list[Span] = []
    for text, role in cells:
        if joined and joined[-1][1] == role:
            joined[-1] = (joined[-1][0] + text, role)
        else:
            joined.append((text, role))
    return joined
