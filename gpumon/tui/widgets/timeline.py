"""The last steps as a plot: allocated peak as an area, reserved and device as lines, the capacity above.

Vertical marks show regime changes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

from gpumon.analysis import ledger
from gpumon.analysis.units import in_unit, size, unit_for
from gpumon.session.frame import RankFrame, StepRecord
from gpumon.tui.plot import UPRIGHT, Curve, columns, plot
from gpumon.tui.styles import Glyphs
from gpumon.tui.text_layout import Line, Span, fit, right, spread, width
from gpumon.tui.view import WHOLE_FROM, View, device_of
from gpumon.tui.widgets.panel import Panel

SHORTEST = 10
"""Fewer steps than this are not stretched over the full width."""

AXIS_ROOM = 8
"""Cells beside the plot: numbers, axis, edge."""

READING_LASTS_NS = 3_000_000_000
"""How long a driver reading is used for the steps after it."""

READING_COMES_NS = 500_000_000
"""A reading this long after a step still counts for it."""


@dataclass(frozen=True, slots=True)
class Point:
    step: int
    allocated_peak: int | None
    reserved: int | None
    device: int | None


@dataclass(frozen=True, slots=True)
class TimelineData:
    points: tuple[Point, ...]
    span: int
    capacity: int | None
    any_device: bool
    regimes: tuple[int, ...] = ()  # steps at which a regime began


def point(record: StepRecord, device: int, used: int | None) -> Point:
    phases = record.on(device)
    reserved = [r for p in phases if (r := p.reserved_peak if p.reserved_peak is not None else p.reserved) is not None]
    return Point(record.step, record.peak(device), max(reserved, default=None), used)


class Series:
    """One device's points; only new steps are appended, since closed ones never change."""

    def __init__(self, keep: int = 2000) -> None:
        self._key: tuple[str, int] | None = None
        self._points: list[Point] = []
        self._first: int | None = None
        self._last: StepRecord | None = None
        self._keep = keep

    def follow(self, rank: RankFrame, device: int, uuid: str | None) -> list[Point]:
        """All points so far, oldest first. If older steps arrive late (the snapshot), the list is rebuilt."""
        steps = rank.steps
        first = steps[0].step if steps else None
        late = first is not None and self._first is not None and first < self._first
        back = self._last is not None and (not steps or steps[-1].step < self._last.step)
        if self._key != (rank.source, device) or late or back:
            self._key, self._points, self._last = (rank.source, device), [], None
        self._first = first
        new = len(steps)
        while new and (self._last is None or steps[new - 1].step > self._last.step):
            new -= 1
        if new < len(steps):
            readings = _readings(rank, uuid)
            for record in steps[new:]:
                self._points.append(point(record, device, _at(readings, rank, record)))
            self._last = steps[-1]
            del self._points[: -self._keep]
        return self._points


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
    """The plot; `+` and `-` set the number of steps."""

    NAME = "Memory over the last steps"
    TERMS = ("allocated", "peak", "reserved", "device", "capacity", "step")
    CALM = True

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._series = Series()
        self._shown: object = None
        self._waited = False

    def show(self, view: View) -> None:
        """New steps are drawn only every second time, once per second: a moving plot is the most expensive widget."""
        shown = (view.rank.source, view.rank.status) if view.rank else None, view.index, view.span, view.paused
        if shown == self._shown and not self._waited:
            self._waited = True
            return
        self._shown, self._waited = shown, False
        super().show(view)

    def pick(self, view: View) -> TimelineData:
        if view.rank is None or view.index is None:
            return TimelineData((), view.span, None, False)
        device, described = view.device, device_of(view)
        points = self._series.follow(view.rank, view.index, described.uuid if described else None)
        shown = tuple(points[-fill(view.span, 2 * (self.size.width - AXIS_ROOM)) :])
        regimes = device.regimes if device and shown else ()
        return TimelineData(
            shown,
            view.span,
            device.capacity if device else None,
            any(p.device for p in shown),
            tuple([step for step in regimes if step > shown[0].step]),
        )

    def draw(self, slice_: TimelineData, width: int, height: int, glyphs: Glyphs) -> list[Line]:
        return timeline_lines(slice_, width, height, glyphs, self.title_role)


def fill(span: int, dots: int) -> int:
    """About `span` steps, adjusted so that whole columns fill `dots`."""
    if dots <= 0:
        return span
    return dots * max(1, round(span / dots)) if span >= dots else max(SHORTEST, dots // (dots // span))


def timeline_lines(h: TimelineData, room: int, height: int, glyphs: Glyphs, title: str) -> list[Line]:
    signs = glyphs.lines
    steps = h.points[-1].step - h.points[0].step + 1 if h.points else 0
    head: list[Span] = [(" Memory", title)]
    legend = ["reserved"]
    if h.any_device:
        legend.append("device")
    highest = max((v for p in h.points for v in (p.allocated_peak, p.reserved, p.device) if v is not None), default=0)
    if not h.points or not highest:
        what = "the allocator does not count on this device" if h.points else "no step closed yet"
        return [tuple(head), ((f"   {what}", "dim"),)]
    to_capacity = h.capacity is not None and highest >= WHOLE_FROM * h.capacity
    if to_capacity:
        legend.append("capacity")
    top = h.capacity if to_capacity and h.capacity else round(highest * 1.08)
    top = max(top, highest)
    unit = unit_for(top)
    axis = max(AXIS_ROOM - 1, len(in_unit(top, unit)) + 2)
    plot_room, rows = room - axis - 1, height - 2
    if rows < 2 or plot_room < 8:
        return [fit(head, room)]
    lines = [_head(head, steps, legend, signs, room)]
    dots = 2 * plot_room if glyphs.braille else plot_room
    first = h.points[0].step
    short = max(0, SHORTEST - len(h.points))

    def column(values: list[int | None]) -> tuple[int | None, ...]:
        made = columns(values + [None] * short, first, dots)
        return tuple(made if glyphs.braille else [v for v in made for _ in range(2)])

    curves = [
        Curve("line:allocated", column([p.allocated_peak for p in h.points]), area=True, sign="#"),
        Curve("line:device", column([p.device for p in h.points]), sign="=", dotted=True),
        Curve("line:reserved", column([p.reserved for p in h.points]), sign="-"),
    ]
    begun = column([p.step if p.step in h.regimes else None for p in h.points]) if h.regimes else ()
    drawn = plot(
        curves,
        top,
        plot_room,
        rows,
        braille=glyphs.braille,
        ceiling=h.capacity if to_capacity else None,
        uprights=[at for at, step in enumerate(begun) if step is not None and (not at or begun[at - 1] != step)],
    )
    edge = "┤" if glyphs.braille else "|"
    for i, row in enumerate(drawn):
        value = top if i == 0 else round(top / 2) if i == rows // 2 else None
        text = in_unit(value, unit) if value is not None else ""
        lines.append(((right(text, axis - 1), "dim"), (edge if text else "│" if glyphs.braille else "|", "rule"), *row))
    start, end = f"{' ' * axis}{first:,}", f"{h.points[-1].step:,} "
    notes = [f"{unit.name} by step", ""]
    if h.capacity is not None and not to_capacity:
        far = f"{h.capacity / top:.0f}{'×' if glyphs.braille else ' times'}"
        above = (f"capacity {size(h.capacity)} is {far} this height", f"capacity {size(h.capacity)}, {far} as high")
        notes = [f"{unit.name} by step · {above[0]}", f"{unit.name} · {above[0]}", above[0], above[1], *notes]
    if h.regimes:
        mark = f"{UPRIGHT[0 if glyphs.braille else 1]} new regime"
        notes = [*(f"{n} · {mark}" for n in notes if n), f"{unit.name} · {mark}", *notes]
    note = next(n for n in notes if not n or width(((start + n, ""),)) + 3 + len(end) + 2 <= room)
    lines.append(spread([(f"{start}   {note}" if note else start, "dim")], [(end, "dim")], room))
    return lines


def _head(head: list[Span], steps: int, legend: list[str], signs: Mapping[str, str], room: int) -> Line:
    """Title and legend; if they do not fit, shorter words, then fewer legend entries."""
    longest = f", last {steps:,} steps" if steps > 1 else ""
    for names in (legend, *(legend[:n] for n in range(len(legend) - 1, 0, -1))):
        for peak, about in (("allocated peak", longest), ("peak", longest), ("peak", longest.replace("last ", ""))):
            end: list[Span] = [(signs["allocated"], "line:allocated"), (f" {peak}", "dim")]
            for name in names:
                end += [("  ", ""), (signs[name], f"line:{name}"), (f" {name}", "dim")]
            end.append((" ", ""))
            if width(head) + len(about) + 2 + width(end) <= room:
                return spread([*head, (about, "dim")], end, room)
    return fit([*head, (longest, "dim")], room)
