"""The run as a plot: each step's allocated peak, reserved and device as lines, the capacity above, and where it leads.

Vertical marks show regime changes. Where bytes are kept from step to step, a dashed line goes on at that pace.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping

import msgspec
from msgspec.structs import replace
from textual.events import Click

from gpumon.analysis import ledger
from gpumon.analysis.answer import clock
from gpumon.analysis.types import KEPT
from gpumon.analysis.units import in_unit, size, unit_for
from gpumon.session.frame import RankFrame, StepRecord
from gpumon.tui.plot import UPRIGHT, Curve, Scale, axis_top, columns, level, plot, round_down, steady
from gpumon.tui.styles import Glyphs
from gpumon.tui.text_layout import Line, Span, fit, right, spread, width
from gpumon.tui.view import WHOLE_FROM, View, device_of
from gpumon.tui.widgets.panel import Panel

AXIS_ROOM = 8
"""Cells beside the plot: numbers, axis, edge."""

AHEAD = 4
"""A leak is drawn on for a fourth of the steps shown."""

HALF = 0.55
"""A round number below this share of the capacity is written in the middle."""

READING_LASTS_NS = 3_000_000_000
"""How long a driver reading is used for the steps after it."""

READING_COMES_NS = 500_000_000
"""A reading this long after a step still counts for it."""


class Point(msgspec.Struct, frozen=True):
    step: int
    allocated_peak: int | None
    reserved: int | None
    device: int | None
    since: int = 0  # of the quiet steps before it, whose highest peak it has, the first
    rss: int | None = None  # resident memory of a process that trains on the CPU


class TimelineData(msgspec.Struct, frozen=True):
    points: tuple[Point, ...]
    span: int
    capacity: int | None
    any_device: bool
    regimes: tuple[int, ...] = ()  # steps at which a regime began
    grows: int = 0  # bytes that are kept, per step
    full: str = ""  # when memory is full at that pace
    resident: bool = False  # the peaks are the process's resident memory: the allocator counts nothing
    cursor: int | None = None  # the step that the other panels show, if it is a past one
    events: bool = False  # a snapshot's events instead of steps, and requested bytes instead of allocated ones


def point(record: StepRecord, device: int, used: int | None) -> Point:
    phases = record.on(device)
    reserved = [r for p in phases if (r := p.reserved_peak if p.reserved_peak is not None else p.reserved) is not None]
    quiet = record.closed.quiet if record.closed is not None else 0
    resident = max((p.rss for p in phases if p.rss is not None), default=None)
    return Point(record.step, record.peak(device), max(reserved, default=None), used, record.step - quiet, resident)


class Series:
    """One device's points. A closed step never changes, so each is looked at once."""

    def __init__(self) -> None:
        self._key: tuple[str, int] | None = None
        self._known: dict[int, Point] = {}

    def follow(self, rank: RankFrame, device: int, uuid: str | None) -> list[Point]:
        """A point for each step of the run's history, oldest first."""
        if self._key != (rank.source, device):
            self._key, self._known = (rank.source, device), {}
        known, readings, points = self._known, None, {}
        for record in rank.steps:
            found = known.get(record.step)
            if found is None:
                readings = _readings(rank, uuid) if readings is None else readings
                found = point(record, device, _at(readings, rank, record))
            points[record.step] = found
        self._known = points
        return list(points.values())


def _readings(rank: RankFrame, uuid: str | None) -> list[tuple[int, int]]:
    """(unix_ns, used bytes of the device) of the viewer's readings, oldest first."""
    made: list[tuple[int, int]] = []
    for sample in rank.host_samples:
        reading = ledger.reading_of(sample.host, uuid)
        if reading is not None and reading.used is not None:
            made.append((sample.unix_ns, reading.used))
    return made


def _at(readings: list[tuple[int, int]], rank: RankFrame, record: StepRecord) -> int | None:
    """The reading when the step closed; None if old."""
    if not readings or record.closed is None:
        return None
    unix_ns = rank.unix_ns(record.closed.t_ns)
    i = bisect_right(readings, (unix_ns + READING_COMES_NS, 0)) - 1
    return readings[i][1] if i >= 0 and unix_ns - readings[i][0] < READING_LASTS_NS else None


class Timeline(Panel):
    """The plot; `+` and `-`, or the mouse's wheel, set the number of steps; a click goes to a step."""

    NAME = "Memory over the last steps"
    TERMS = ("allocated", "peak", "reserved", "device", "capacity", "step")

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._series = Series()
        self._shown: object = None
        self._waited = False

    def show(self, view: View) -> None:
        """New steps are drawn only every second time, once per second: a moving plot is the most expensive widget."""
        at = view.position.step if view.now is not None and view.position is not None else None
        shown = (view.rank.source, view.rank.status) if view.rank else None, view.index, view.span, view.paused, at
        if shown == self._shown and not self._waited:
            self._waited = True
            return
        self._shown, self._waited = shown, False
        super().show(view)

    def pick(self, view: View) -> TimelineData:
        cursor = None
        if view.now is not None and view.position is not None:  # the whole run, with the past step marked in it
            cursor = view.position.step
            view = view.now
        if view.rank is None or view.index is None:
            return TimelineData((), view.span, None, False)
        device, described = view.device, device_of(view)
        points = self._series.follow(view.rank, view.index, described.uuid if described else None)
        last = points[-1].step if points else 0
        newest = last
        if cursor is not None and cursor <= last - view.span:
            last = min(last, cursor + view.span // 2)
        shown = tuple([each for each in points if last - view.span < each.step <= last])
        resident = bool(shown) and all(each.allocated_peak is None and each.reserved is None for each in shown)
        if resident:
            shown = tuple([replace(each, allocated_peak=each.rss) for each in shown])
        regimes = device.regimes if device and shown else ()
        failed = view.report is not None and view.report.oom is not None
        forecast = device.forecast if device and view.rank.status != "ended" and not failed else None
        kept = last == newest and forecast is not None and forecast.growth == KEPT and forecast.steps_to_oom is not None
        when = view.answer.when
        return TimelineData(
            shown,
            view.span,
            device.capacity if device else None,
            any(p.device for p in shown),
            tuple([step for step in regimes if step > shown[0].step]),
            (forecast.bytes_per_step or 0) if kept and forecast is not None else 0,
            f"full {clock(when)}" if kept and when is not None and when.unix is not None else "",
            resident,
            cursor,
        )

    def on_click(self, event: Click) -> None:
        """The step of the clicked column: in a live run it is looked at, in a replay one goes there."""
        step = self._step_in(event.x)
        if step is not None:
            self.monitor.go_to_step(step)

    @property
    def drawn(self) -> bool:
        """Whether it shows columns."""
        return self._layout() is not None

    def beside(self, step: int | None, by: int) -> int | None:
        """The step shown so many cells further; None: the plot shows nothing there. `step`: None for the newest."""
        layout = self._layout()
        if layout is None or not self._slice.points:
            return None
        here = self._slice.points[-1].step if step is None else step
        dot = layout.scale.dot(here)
        if dot is None:
            return None
        cell, way = dot // layout.per_cell, 1 if by > 0 else -1
        at, left = layout.axis + cell, abs(by)
        while layout.axis <= (at := at + way) < layout.axis + layout.room:
            found = self._step_in(at)
            if found is not None and (found - here) * way > 0:
                left -= 1
                if not left:
                    return found
        return None

    def _layout(self) -> Layout | None:
        width, height = self.size
        return layout_of(self._slice, width, height, self.monitor.glyphs) if self._slice is not None else None

    def _step_in(self, x: int) -> int | None:
        """The step with the highest peak of those in the plot's column at `x`."""
        layout = self._layout()
        if layout is None or x - layout.axis >= layout.room:
            return None
        dots = [(x - layout.axis) * layout.per_cell + at for at in range(layout.per_cell)]
        spans = [span for dot in dots if (span := layout.scale.steps(dot)) is not None]
        if not spans:
            return None
        first, last = spans[0][0], spans[-1][1]
        there = [each for each in self._slice.points if each.step >= first and each.since <= last]
        if not there:
            return None
        return int(max(there, key=lambda each: (each.allocated_peak or 0, each.step)).step)

    def on_mouse_scroll_up(self) -> None:
        self.monitor.zoom(-1)

    def on_mouse_scroll_down(self) -> None:
        self.monitor.zoom(1)

    def draw(self, slice_: TimelineData, width: int, height: int, glyphs: Glyphs) -> list[Line]:
        return timeline_lines(slice_, width, height, glyphs, self.title_role)


class Layout(msgspec.Struct, frozen=True):
    """Where in the panel what is drawn."""

    axis: int  # cells before the plot
    room: int  # cells of the plot
    rows: int
    scale: Scale
    per_cell: int  # dot columns
    ahead: int  # steps after the newest, in which a leak is drawn on
    newest: int
    top: int
    ticks: dict[int, str]  # by row
    to_capacity: bool


def layout_of(h: TimelineData, room: int, height: int, glyphs: Glyphs) -> Layout | None:
    """None: there is nothing to draw, or no room."""
    highest = max((v for p in h.points for v in (p.allocated_peak, p.reserved, p.device) if v is not None), default=0)
    if not h.points or not highest:
        return None
    first, last = h.points[0].step, h.points[-1].step
    ahead = max(1, (last - first) // AHEAD) if h.grows else 0
    newest = next((p.allocated_peak for p in reversed(h.points) if p.allocated_peak is not None), None) or 0
    highest = max(highest, min(newest + ahead * h.grows, h.capacity or 0) if ahead else 0)
    to_capacity = h.capacity is not None and highest >= WHOLE_FROM * h.capacity
    rows = height - 2
    top, top_text, half_text = axis_top(highest)
    middle = rows // 2
    if to_capacity and h.capacity:
        top = max(h.capacity, highest)
        unit = unit_for(top)
        half = round_down(top / unit.bytes * HALF)
        top_text, half_text = in_unit(top, unit), f"{half:g}"
        middle = rows - 1 - (level(round(half * unit.bytes), top, rows) - 1) // 4
    ticks = {middle: half_text} if rows > 2 else {}
    ticks |= {0: top_text, rows - 1: "0"}
    axis = max(AXIS_ROOM - 1, len(top_text) + 2)
    plot_room = room - axis - 1
    if rows < 2 or plot_room < 8:
        return None
    per_cell = 2 if glyphs.braille else 1
    scale = Scale(first, last + ahead, per_cell * plot_room)
    return Layout(axis, plot_room, rows, scale, per_cell, ahead, newest, top, ticks, to_capacity)


def timeline_lines(h: TimelineData, room: int, height: int, glyphs: Glyphs, title: str) -> list[Line]:
    signs = glyphs.lines
    steps = h.points[-1].step - h.points[0].step + 1 if h.points else 0
    head: list[Span] = [(" Memory", title)]
    if not any(v for p in h.points for v in (p.allocated_peak, p.reserved, p.device)):
        what = "nothing is counted on this device" if h.points else "no step closed yet"
        return [tuple(head), ((f"   {what}", "dim"),)]
    layout = layout_of(h, room, height, glyphs)
    if layout is None:
        return [fit(head, room)]
    axis, rows, top, scale, ahead = layout.axis, layout.rows, layout.top, layout.scale, layout.ahead
    unit, first, last = unit_for(top), h.points[0].step, h.points[-1].step
    legend = [] if h.resident else ["reserved"]
    legend += ["device"] if h.any_device else []
    legend += ["capacity"] if layout.to_capacity else []
    words = REQUESTED if h.events else RESIDENT if h.resident else PEAK
    lines = [_head(head, f"{steps:,} events" if h.events else f"last {steps:,} steps", legend, signs, room, words)]

    def column(values: Iterable[tuple[int, int, int | None]]) -> tuple[int | None, ...]:
        made = columns(list(values), scale.first, scale.last, scale.count)
        return tuple(made if glyphs.braille else [v for v in made for _ in range(2)])

    known = [p.allocated_peak for p in h.points if p.allocated_peak is not None]
    curves = [
        Curve(
            "line:allocated",
            column((p.since, p.step, p.allocated_peak) for p in h.points),
            area=not steady(known),
            sign="#",
        ),
        Curve("line:device", column((p.step, p.step, p.device) for p in h.points), sign="=", dotted=True),
        Curve("line:reserved", column((p.since, p.step, p.reserved) for p in h.points), sign="-"),
    ]
    if ahead:
        coming = [(last + k, last + k, min(top, layout.newest + k * h.grows)) for k in range(1, ahead + 1)]
        curves.append(Curve("bad", column(coming), sign="/", dotted=True))
    begun = column((step, step, step) for step in h.regimes) if h.regimes else ()
    drawn = plot(
        curves,
        top,
        layout.room,
        rows,
        braille=glyphs.braille,
        ceiling=h.capacity if layout.to_capacity else None,
        uprights=[at for at, step in enumerate(begun) if step is not None and (not at or begun[at - 1] != step)],
        cursor=_cell(layout, h.cursor),
    )
    edge = "┤" if glyphs.braille else "|"
    for i, row in enumerate(drawn):
        text = layout.ticks.get(i, "")
        lines.append(((right(text, axis - 1), "dim"), (edge if text else "│" if glyphs.braille else "|", "rule"), *row))
    start, end = f"{' ' * axis}{first:,}", f"{h.full or f'{last:,}'} "
    notes = [f"{unit.name} by {'event' if h.events else 'step'}", ""]
    if h.capacity is not None and not layout.to_capacity:
        far = f"{h.capacity / top:.0f}{'×' if glyphs.braille else ' times'}"
        above = (f"capacity {size(h.capacity)} is {far} this height", f"capacity {size(h.capacity)}, {far} as high")
        notes = [f"{unit.name} by step · {above[0]}", f"{unit.name} · {above[0]}", above[0], above[1], *notes]
    if h.resident:
        notes = [f"{unit.name} · {HINT}", HINT, *notes]
    if h.regimes:
        mark = f"{UPRIGHT[0 if glyphs.braille else 1]} new regime"
        notes = [*(f"{n} · {mark}" for n in notes if n), f"{unit.name} · {mark}", *notes]
    note = next(n for n in notes if not n or width(((start + n, ""),)) + 3 + len(end) + 2 <= room)
    lines.append(spread([(f"{start}   {note}" if note else start, "dim")], [(end, "dim")], room))
    return lines


def _cell(layout: Layout, step: int | None) -> int | None:
    dot = layout.scale.dot(min(step, layout.scale.last)) if step is not None else None
    return None if dot is None else dot // layout.per_cell


PEAK = ("allocated peak", "peak", "peak")
REQUESTED = ("requested", "requested", "requested")
RESIDENT = ("resident memory", "RSS", "RSS")
HINT = "--track-cpu counts tensors"


def _head(
    head: list[Span], span: str, legend: list[str], signs: Mapping[str, str], room: int, what: tuple[str, str, str]
) -> Line:
    """Title and legend; if they do not fit, shorter words, then fewer legend entries."""
    longest = "" if span == "last 1 steps" else f", {span}"
    for names in (legend, *(legend[:n] for n in range(len(legend) - 1, 0, -1))):
        for peak, about in zip(what, (longest, longest, longest.replace("last ", "")), strict=True):
            end: list[Span] = [(signs["allocated"], "line:allocated"), (f" {peak}", "dim")]
            for name in names:
                end += [("  ", ""), (signs[name], f"line:{name}"), (f" {name}", "dim")]
            end.append((" ", ""))
            if width(head) + len(about) + 2 + width(end) <= room:
                return spread([*head, (about, "dim")], end, room)
    return fit([*head, (longest, "dim")], room)
