"""The device as bars by owner, now and at the step's peak, to one scale, with a legend in numbers."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from textual.events import Click

from gpumon.analysis.answer import of_rank
from gpumon.analysis.job_findings import LEAKS, JobFinding, job_findings
from gpumon.analysis.types import DRIVER, OWNERS, REST, Breakdown, Forecast, HighestStep, Peak
from gpumon.analysis.units import Unit, in_unit, size, unit_for
from gpumon.tui.glossary import TERMS
from gpumon.tui.styles import Glyphs, line_role
from gpumon.tui.text_layout import Line, Span, fit, flow, left, spread
from gpumon.tui.view import WHOLE_FROM, View, age, device_name, device_of
from gpumon.tui.widgets.panel import Panel
from gpumon_agent import wire

ORDER = (*OWNERS, *REST, *DRIVER)
LABELS = {
    "other_processes": "other processes", "other_models": "other models", "held": "kept after the step",
    "step_adds": "step adds", "update_adds": "update adds", "slack": "cached",
}  # fmt: skip
SMALL = 4096
"""A line below 1/4096 of what is reserved is not in the legend (the explain page shows it, to the byte)."""

LITTLE_OF_PEAK = 500
"""A line below 1/500 of a peak is not listed for that peak."""

HIGHER = 1.01
"""The highest peak so far is shown if it exceeds the newest by more than 1 %."""

HOLDER_CELLS = 32
"""Longer names are cut in the legend; Leaks shows them whole."""

TALL = 32
"""From this height of the screen on the panel has as many rows as it needs."""

STALE_S = 3.0
"""Older driver figures are shown with their age."""


class Bars(msgspec.Struct, frozen=True):
    name: str
    now: Breakdown | None
    stale_s: int | None
    peak: Peak | None
    composed: Peak | None  # newest peak with a breakdown
    forecast: Forecast | None
    word: str | None  # the forecast's verdict, or "leak"
    capacity: int | None
    rss: int | None  # where the allocator reports nothing (CPU)
    learning: bool
    highest: HighestStep | None = None  # peak so far
    holders: tuple[str, ...] = ()  # containers that hold `variables`, largest first
    leak: str = ""  # the variable that grows
    leaked: tuple[int, int] = (0, 0)  # bytes in it, part of `variables`: now, and at the peak
    past: bool = False  # of a past step of a live run


def bars(view: View) -> Bars:
    device, rank = view.device, view.rank
    name = device_name(device_of(view)) if rank else "device"
    rss = rank.heartbeat.rss if rank and rank.heartbeat else None
    if device is None:
        return Bars(name, None, None, None, None, None, None, None, rss, rank is not None)
    old = device.ledger_age_s
    failed = view.report is not None and view.report.oom is not None
    forecast = None if failed else device.forecast  # after an OOM there is no forecast
    stale = int(old) if old is not None and old > STALE_S else None
    read_by = device.read.held_by if device.read is not None else ()
    holders = tuple(dict.fromkeys(each.container for each in read_by or (device.held.by if device.held else ())))
    held = device.held
    newest = rank.steps[-1].step if rank is not None and rank.steps else 0
    return Bars(
        name, device.ledger, stale, device.peak, device.composed, forecast, word_of(view), device.capacity, rss,
        device.ledger is None,
        device.highest, holders, held.by[0].container if held is not None else "",
        (held.at(newest), held.at(device.peak.step if device.peak is not None else newest)) if held is not None
        else (0, 0),
        view.now is not None,
    )  # fmt: skip


class DeviceBar(Panel):
    """Two bars and a legend; on a short screen one bar. A click on an owner explains it, or opens its finding."""

    NAME = "Device"
    TERMS = (
        "allocated", "reserved", "cached", "rounding", "context", "other processes", "free", "weights", "buffers",
        "gradients", "optimizer", "buckets", "inputs", "activations", "unattributed", "unexplained", "workspaces",
        "temporaries", "checkpoints", "variables", "sampled",
    )  # fmt: skip

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._rows: tuple[object, int] = (None, 0)  # of this rank at this size, the most so far

    def pick(self, view: View) -> Bars:
        picked = bars(view)
        if self.app.size.height >= TALL:
            shown = (view.rank.source if view.rank else None, view.index, self.app.size)
            width, height = self.app.size
            rows = len(device_lines(picked, width, height, self.monitor.glyphs, ""))
            rows = max(rows, self._rows[1] if self._rows[0] == shown else 2)
            if self._rows != (shown, rows):
                self._rows = shown, rows
                self.styles.height = rows
        else:
            self.styles.height = None
        return picked

    def sums(self) -> list[str]:
        return sums(self._slice.now) if self._slice else []

    def on_click(self, event: Click) -> None:
        line = self._lines[event.y] if event.y < len(self._lines) else ()
        name = owner_at(line, event.x)
        if name is None or self._slice is None:
            return
        found = self._leak() if name == "leak" else None
        if found is not None:
            self.monitor.open_finding(found)
        else:
            label = LABELS.get(name, name)
            term = "variables" if name == "leak" else label
            title = self._slice.leak if name == "leak" else label.capitalize()
            self.monitor.explain(title, part_sums(self._slice, name), (term,) if term in TERMS else ())

    def _leak(self) -> JobFinding | None:
        """The finding about the variable that grows."""
        view = self.monitor.view
        found = [
            each
            for each in job_findings(view.frame, view.reports)
            if each.finding.code in LEAKS and view.rank is not None and view.rank.source in each.sources
        ]
        return next((each for each in found if each.finding.holder == self._slice.leak), next(iter(found), None))

    def draw(self, slice_: Bars, width: int, height: int, glyphs: Glyphs) -> list[Line]:
        return device_lines(slice_, width, height, glyphs, self.title_role)


def owner_at(line: Line, x: int) -> str | None:
    """The ledger's line whose slice, or place in the legend, is drawn at this cell."""
    owner: str | None = None
    at = 0
    for text, role in line:
        if role.startswith("line:"):
            owner = role.removeprefix("line:")
        elif not text.strip() or not role:
            owner = owner if at + len(text) > x else None
        at += len(text)
        if x < at:
            return owner or None
    return None


def part_sums(b: Bars, name: str) -> list[str]:
    """An owner's bytes now and at the peak."""
    then = "at this step's end" if b.past else "now"
    at_peak = dict(apart(_peak_parts(b.peak, None), b.leaked[1])) if b.peak is not None else {}
    at_end = dict(apart(parts(b.now, None), b.leaked[0])) if b.now is not None else {}
    made = []
    for when, there in ((then, at_end), ("at the peak", at_peak)):
        if name in there:
            made.append(f"{size(there[name])} {when} = {there[name]:,} B")
    return made


def sums(now: Breakdown | None) -> list[str]:
    """The ledger's three equations, in bytes."""
    if now is None:
        return []
    equations = (
        ("allocated", (*OWNERS, *REST[:-1])),
        ("reserved", ("allocated", "slack")),
        ("total", ("reserved", *DRIVER)),
    )
    made: list[str] = []
    for whole, pieces in equations:
        known = [(piece, value) for piece in pieces if (value := getattr(now, piece))]
        value = getattr(now, whole)
        if value is not None and known and value == sum(v for _, v in known):
            right_side = " + ".join(f"{LABELS.get(piece, piece)} {v:,}" for piece, v in known)
            made.append(f"{whole} {value:,} B = {right_side}")
    return made


def parts(lines: Breakdown, capacity: int | None) -> list[tuple[str, int]]:
    """The known lines in the ledger's order. Bytes of the capacity that no line explains stay blank."""
    shown = [(name, value) for name in ORDER if (value := getattr(lines, name))]
    if not any(name in OWNERS or name in REST for name, _ in shown) and lines.allocated:
        shown.insert(0, ("allocated", lines.allocated))
    if lines.free is None and capacity:
        rest = capacity - sum(value for _, value in shown)
        if rest > 0:
            shown.append(("", rest))
    return shown


def apart(shown: list[tuple[str, int]], leaked: int) -> list[tuple[str, int]]:
    """The lines, with what leaks apart from the other variables."""
    found: list[tuple[str, int]] = []
    for name, value in shown:
        part = min(value, leaked) if name == "variables" else 0
        found += [(n, v) for n, v in (("leak", part), (name, value - part)) if v]
    return found


def bar(shown: list[tuple[str, int]], total: int, room: int, glyphs: Glyphs) -> Line:
    """Cells in proportion to bytes, by largest remainder; anything worth half a cell or more gets one."""
    if total <= 0 or room <= 0:
        return ()
    exact = [min(value, total) * room / total for _, value in shown]  # no line is longer than the bar
    counts = [max(int(e), 1 if e >= 0.5 else 0) for e in exact]
    spare = max(0, min(room, round(sum(exact)))) - sum(counts)
    by_remainder = sorted(range(len(shown)), key=lambda i: counts[i] - exact[i])
    for i in by_remainder[: max(0, spare)]:
        counts[i] += 1
    while spare < 0:
        widest = max(range(len(shown)), key=counts.__getitem__)
        counts[widest] -= 1
        spare += 1
    spans: list[Span] = []
    for (name, _), count in zip(shown, counts, strict=True):
        if count:
            spans.append((glyphs.lines.get(name, " ") * count, line_role(name)))
    return tuple(spans)


def _legend(
    shown: list[tuple[str, int]], glyphs: Glyphs, label: int = 0, holders: tuple[str, ...] = (), leak: str = ""
) -> list[Line]:
    """The unit (`label` cells wide), then glyph, name and number of each line. `leak`: the variable that grows."""
    unit = unit_for(*(value for name, value in shown if name))
    items: list[Line] = []
    small = sum(value for name, value in shown if name not in ("", *DRIVER)) // SMALL
    for name, value in shown:
        if name and (abs(value) > small or name == "free"):
            item = _item(name, value, unit, glyphs, _short(leak) if name == "leak" else "")
            others = tuple(each for each in holders if each != leak)
            items.append((*item, *(_holders(others) if name == "variables" else ())))
    if items:
        items[0] = ((" " + left(unit.name, max(label, len(unit.name) + 1)), "dim"), *items[0])
    return items


def _holders(names: tuple[str, ...]) -> Line:
    """ " in Trainer.cache and 2 more"."""
    if not names:
        return ()
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return ((f" in {_short(names[0])}{more}", "dim"),)


def _short(name: str) -> str:
    return name if len(name) <= HOLDER_CELLS else name[: HOLDER_CELLS - 1] + "…"


VERDICTS = {"fits": "good", "tight": "warn", "oom-ahead": "bad", "leak": "bad"}


def word_of(view: View) -> str | None:
    """The forecast's verdict for the shown device; "leak" if it fits now but the job's state is a leak."""
    word = view.device.forecast.verdict if view.device is not None and view.device.forecast is not None else None
    if word not in (wire.FITS, wire.TIGHT) or view.rank is None or view.report is None:
        return word
    return "leak" if of_rank(view.rank, view.report, view.frame.unix_ns).state == "leak" else word


def device_lines(b: Bars, room: int, height: int, glyphs: Glyphs, title: str) -> list[Line]:
    return [fit(line, room) for line in _device_lines(b, room, height, glyphs, title)]


def _device_lines(b: Bars, room: int, height: int, glyphs: Glyphs, title: str) -> list[Line]:
    if b.now is None and b.peak is None:
        text = "load: the first step has not closed yet" if b.learning else "no process yet"
        return [fit([(f" {b.name}  ", title), (text, "dim")], room)]
    total = b.capacity or max(sum(v for _, v in parts(b.now, None)) if b.now else 0, b.peak.allocated if b.peak else 0)
    unit = unit_for(total)
    short = room < 60
    label = max(len(b.name) + 1, 6)
    summary: list[Span] = []
    held = None
    if b.now:
        held = b.now.reserved if b.now.reserved is not None else b.now.allocated
    peak = b.peak.allocated if b.peak else None
    if peak is not None and b.peak is not None:
        of = f" of {size(b.capacity)}" if b.capacity else f" {unit.name}"
        where = f"{of} at the peak ({b.peak.phase or 'of the step'})"
        summary += [(_shared(peak, unit, b.capacity), "strong"), (where, "text")]
        if b.peak.module and not short:
            summary.append((f" in {b.peak.module}", "dim"))
    elif held is not None:
        counts = b.now is not None and b.now.allocated is not None
        why = "reserved; the step's peak is not known" if counts else "by owner; the allocator does not count here"
        summary += [(size(held), "strong"), (f" {why}", "dim")]
    if b.rss is not None and peak is None:
        summary.append((f"   RSS {size(b.rss)}", "text"))
    fate: list[Span] = []
    if b.forecast is not None:
        f = b.forecast
        its = unit_for(f.high)
        fate += [("forecast ", "dim"), (f"{in_unit(f.next_peak, its)} {its.name}", "text")]
        dash = "–" if glyphs.braille else "-"
        low, high = in_unit(f.low, its), in_unit(f.high, its)
        if low != high:
            fate.append((f" ({low}{dash}{high})", "dim"))
        if b.word:
            fate += [(" │ " if glyphs.braille else " | ", "rule"), (b.word, VERDICTS[b.word])]
        fate.append((" ", ""))
    lines = [spread([(" " + left(b.name, label), title), *summary], fate, room)]
    inner = room - label - 2
    bar_rows: list[Line] = []
    now_shown = apart(parts(b.now, b.capacity), b.leaked[0]) if b.now else []
    full = _full_scale(b, now_shown, total)
    if b.now:
        cut = _cut(now_shown, full, total, inner, glyphs)
        head: Span = (" " + left("then" if b.past else "now", label), "dim")
        bar_rows.append((head, *_marked(cut, _marks(b, glyphs), full, total, inner)))
    if b.peak is not None:
        shown = apart(_peak_parts(b.peak, b.capacity), b.leaked[1])
        bar_rows.append(((" " + left("peak", label), "dim"), *_cut(shown, full, total, inner, glyphs)))
    items = _legend(now_shown, glyphs, label, b.holders, b.leak)
    items += [((f"{mark.sign} ", mark.role), (mark.said, "dim")) for mark in _marks(b, glyphs)]
    if b.stale_s is not None:
        items.append(((f"driver's figures {age(b.stale_s)} old", "warn"),))
    elif b.past and b.now is not None and b.now.total is None:
        items.append((("the driver's figures of this step are not kept", "dim"),))
    legend = flow(items, room - 2, indent=1 + label)
    alive = _alive(b, label, room, glyphs)
    space = height - 1
    if space >= 2 + len(legend):
        return [*lines, *bar_rows, *legend, *alive][:height]
    # short: one bar, then as much of the legend as fits
    keep = bar_rows[:1] if space >= 1 else []
    lines += keep
    room_left = height - len(lines)
    if room_left < len(legend) and legend and room_left > 0:
        largest = sorted(now_shown, key=lambda part: -part[1])
        while len(largest) > 1:
            kept = [p for p in now_shown if p in largest]
            legend = flow(_legend(kept, glyphs, 0, b.holders, b.leak), room - 2, indent=5)
            if len(legend) <= room_left:
                break
            largest.pop()
    return lines + legend[: max(0, room_left)]


def _alive(b: Bars, label: int, room: int, glyphs: Glyphs) -> list[Line]:
    """The newest peak with a breakdown, in one line; lines that do not fit are summed as "other"."""
    peak = b.composed
    if peak is None:
        return []
    every = apart(_peak_parts(peak, None), b.leaked[1])
    shown = [(name, value) for name, value in every if abs(value) * LITTLE_OF_PEAK >= peak.allocated]
    unit = unit_for(*(value for _, value in shown))
    head: Span = (" " + left("peak", label), "dim")
    by_size = sorted(shown, key=lambda part: -abs(part[1]))
    for kept in range(len(shown), 0, -1):
        items = [
            _item(name, value, unit, glyphs, _short(b.leak) if name == "leak" else "")
            for name, value in shown
            if (name, value) in by_size[:kept]
        ]
        rest = sum(value for _, value in by_size[kept:])
        if rest:
            items.append((("other ", "dim"), (size(rest), "text")))
        if b.peak is None or b.peak.step != peak.step:
            items.append(((f"of step {peak.step:,}", "dim"),))
        (line, *more) = flow(items, room - label - 2)
        if not more:
            return [(head, *line)]
    return []


def _item(name: str, value: int, unit: Unit, glyphs: Glyphs, label: str = "") -> Line:
    number = in_unit(value, unit) if abs(value) >= unit.bytes // 20 else size(value)
    shown = (f"{label or LABELS.get(name, name)} ", "strong" if label else "dim")
    return ((f"{glyphs.lines[name]} ", line_role(name)), shown, (number, "text"))


class Mark(msgspec.Struct, frozen=True):
    """A moment's bytes on the bar's scale."""

    sign: str
    role: str
    said: str
    at: tuple[int, ...]


def _marks(b: Bars, glyphs: Glyphs) -> list[Mark]:
    """The highest peak so far, and the next iteration's interval, where they differ from the newest peak."""
    peak = b.peak.allocated if b.peak is not None else 0
    marks = []
    if b.highest is not None and b.highest.allocated > HIGHER * peak:
        said = f"highest {size(b.highest.allocated)}, step {b.highest.step:,}"
        marks.append(Mark(glyphs.highest, "warn", said, (b.highest.allocated,)))
    f = b.forecast
    if f is not None and f.high > HIGHER * max(peak, f.low):
        marks.append(Mark(glyphs.coming, "key", f"next {size(f.low)} to {size(f.high)}", (f.low, f.high)))
    return marks


def _marked(line: Line, marks: Sequence[Mark], full: int, total: int, room: int) -> Line:
    """The bar with the marks in its free part: what is in use is not covered."""
    scale = room if full >= total else room - 6
    cells = [(char, role) for text, role in line for char in text]
    for mark in marks:
        for value in mark.at:
            at = min(len(cells), scale) - 1 if value >= full else value * scale // full
            if 0 <= at < len(cells) and cells[at][1] in ("", line_role("free"), line_role("slack"), line_role("")):
                cells[at] = (mark.sign, mark.role)
    made: list[Span] = []
    for char, role in cells:
        if made and made[-1][1] == role:
            made[-1] = (made[-1][0] + char, role)
        else:
            made.append((char, role))
    return tuple(made)


def _full_scale(b: Bars, now_shown: list[tuple[str, int]], total: int) -> int:
    """Bytes that the whole bar represents: the total, or less if most of it is free."""
    taken = max(
        sum(v for n, v in now_shown if n not in ("", "free")),
        b.peak.allocated if b.peak else 0,
        b.highest.allocated if b.highest else 0,
        min(b.forecast.high, total) if b.forecast else 0,
    )
    return min(total, round(taken / 0.75)) if taken < WHOLE_FROM * total else total


def _cut(shown: list[tuple[str, int]], full: int, total: int, room: int, glyphs: Glyphs) -> Line:
    """The bar; a shortened scale ends in a torn edge."""
    if full >= total:
        return bar(shown, total, room, glyphs)
    taken = [(n, v) for n, v in shown if n not in ("", "free")]
    rest = next((n for n, _ in shown if n in ("", "free")), "")
    space = full - sum(v for _, v in taken)
    torn = " ⁄⁄ " if glyphs.braille else " // "
    line = bar([*taken, (rest, max(0, space))], full, room - len(torn) - 2, glyphs)
    edge = glyphs.lines["free"] if rest == "free" else " "
    return (*line, (torn, "dim"), (edge * 2, line_role("free")))


def _peak_parts(peak: Peak, capacity: int | None) -> list[tuple[str, int]]:
    if peak.lines is None:
        shown = [("allocated", peak.allocated)]
    else:
        shown = [(n, v) for n in (*OWNERS, *REST) if n != "slack" and (v := getattr(peak.lines, n))]
        if not shown:
            shown = [("allocated", peak.allocated)]
    if capacity and capacity > sum(v for _, v in shown):
        shown.append(("", capacity - sum(v for _, v in shown)))
    return shown


def _shared(value: int, unit: Unit, capacity: int | None) -> str:
    """In the capacity's unit if the value is large enough for it."""
    if value >= unit.bytes:
        return in_unit(value, unit)
    return size(value) if capacity else in_unit(value, unit)
