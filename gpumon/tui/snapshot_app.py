"""`gpumon snapshot FILE --screen`: a memory snapshot with a cursor that moves through its events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar, cast

import msgspec
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen

from gpumon.analysis.units import count, percent, size
from gpumon.session.frame import Frame
from gpumon.snapshots.history import History
from gpumon.snapshots.model import Device, Snapshot
from gpumon.snapshots.summary import Alike, DeviceSummary, Part, Use, alike_of, parts, short, uses_at
from gpumon.tui.screens.base import MonitorScreen
from gpumon.tui.styles import Glyphs
from gpumon.tui.table import Column, TablePanel, heads, place, row_cells
from gpumon.tui.text_layout import Line, clip, fit, words
from gpumon.tui.themed_app import Options, ThemedApp
from gpumon.tui.view import View
from gpumon.tui.widgets.key_line import KeyLine
from gpumon.tui.widgets.panel import Panel
from gpumon.tui.widgets.timeline import Point, Timeline, TimelineData

STRETCHES = 2_048
LINE_LEAST = 24


class LineRow(msgspec.Struct, frozen=True):
    """What one line of code holds. Bytes are requested ones."""

    line: str
    here: int
    peak: int
    blocks: int


class Opened(msgspec.Struct, frozen=True):
    """One device, prepared for the cursor."""

    summary: DeviceSummary
    device: Device
    history: History
    points: tuple[Point, ...]


class Cursor(msgspec.Struct, frozen=True):
    """Where the cursor is; what the panels show depends on nothing else."""

    device: int  # which of the opened
    event: int


class SnapshotApp(ThemedApp):
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit", id="app.quit", tooltip="Quit"),
        Binding("ctrl+c,ctrl+q", "quit", "Quit", show=False, id="app.interrupt", tooltip="Like q", priority=True),
        Binding("question_mark", "help", "Help", id="app.help", key_display="?", tooltip="All keys"),
        Binding("1", "mode('lines')", "Lines", id="app.lines", tooltip="Which line of code holds what"),
        Binding("2", "mode('blocks')", "Blocks", id="app.blocks", tooltip="The blocks in use, the largest first"),
        Binding("right", "column(1)", "Event", id="snapshot.right", key_display="←/→",
                tooltip="One column of the plot further, to its highest event"),
        Binding("left", "column(-1)", "Back", show=False, id="snapshot.left", tooltip="One column of the plot back"),
        Binding("full_stop", "event(1)", "By one", id="snapshot.next", key_display=",/.", tooltip="The next event"),
        Binding("comma", "event(-1)", "Back by one", show=False, id="snapshot.previous", tooltip="The event before"),
        Binding("p", "peak", "Peak", id="snapshot.peak", tooltip="The event at which most was requested"),
        Binding("home", "first", "First", show=False, id="snapshot.first", tooltip="The first event"),
        Binding("end", "last", "Last", show=False, id="snapshot.last", tooltip="The last event: the end of the file"),
        Binding("d", "device", "Device", id="snapshot.device", tooltip="The next device of the file"),
        Binding("t", "theme", "Theme", id="app.theme", tooltip="Dark, light, or the terminal's own colours"),
    ]  # fmt: skip

    def __init__(self, file: Path, snapshot: Snapshot, summaries: Sequence[DeviceSummary], options: Options) -> None:
        """`summaries`: of the devices to show. At least one must have events."""
        super().__init__(options)
        self.file, self.snapshot = file, snapshot
        self.view = View(Frame(0, ()))
        of = {device.index: device for device in snapshot.devices}
        self.opened = [
            Opened(summary, of[summary.index], history, _points(history))
            for summary in summaries
            if (trace := of[summary.index].trace) is not None
            for history in (History(of[summary.index], trace),)
        ]
        self.cursor = Cursor(0, self.opened[0].history.peak)

    MODES: ClassVar[dict[str, Callable[[], Screen[None]]]] = {}  # type: ignore[assignment]
    DEFAULT_MODE = "lines"

    @property
    def here(self) -> Opened:
        return self.opened[self.cursor.device]

    def redraw(self) -> None:
        if isinstance(self.screen, MonitorScreen):
            self.screen.show(self.view)

    def go_to_step(self, event: int) -> None:
        self.cursor = msgspec.structs.replace(self.cursor, event=max(0, min(event, self.here.history.last)))
        self.redraw()

    def action_mode(self, name: str) -> None:
        self.switch_mode(name)

    def action_column(self, by: int) -> None:
        event = self.screen.query_one(EventCurve).beside(self.cursor.event, by)
        if event is not None:
            self.go_to_step(event)

    def action_event(self, by: int) -> None:
        self.go_to_step(self.cursor.event + by)

    def action_peak(self) -> None:
        self.go_to_step(self.here.history.peak)

    def action_first(self) -> None:
        self.go_to_step(0)

    def action_last(self) -> None:
        self.go_to_step(self.here.history.last)

    def action_device(self) -> None:
        device = (self.cursor.device + 1) % len(self.opened)
        self.cursor = Cursor(device, self.opened[device].history.peak)
        self.redraw()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return len(self.opened) > 1 if action == "device" else True


def _points(history: History) -> tuple[Point, ...]:
    return tuple(
        Point(last, requested, reserved, None, since=first)
        for first, last, requested, reserved in history.stretches(STRETCHES)
    )


class _SnapshotPanel(Panel):
    """Its data are the app's, not a View's."""

    @property
    def shown(self) -> SnapshotApp:
        return cast("SnapshotApp", self.app)


class CursorLines(_SnapshotPanel):
    """The file's answer, and what was in use at the cursor."""

    can_focus = False

    def pick(self, view: View) -> tuple[int, int]:
        return self.shown.cursor.device, self.shown.cursor.event

    def draw(self, slice_: tuple[int, int], width: int, height: int, glyphs: Glyphs) -> list[Line]:
        opened, event = self.shown.here, self.shown.cursor.event
        history, summary = opened.history, opened.summary
        where = f" · device {summary.index}" if len(self.shown.opened) > 1 else ""
        requested, reserved = history.requested(event), history.reserved(event)
        text = f" Event {count(event)} of {count(history.last + 1)}"
        text += ", the peak" if event == history.peak else ", the end" if event == history.last else ""
        text += f": {size(requested)} requested"
        if reserved is not None:
            text += f" of {size(reserved)} reserved"
            share = f" ({percent((reserved - requested) / reserved)} free or rounding)" if reserved else ""
            text += share if len(text + share) <= width else ""
        return [
            fit([(f" {self.shown.file.name}{where}", "strong"), ("   bytes are requested ones", "dim")], width),
            fit([(text, "key")], width),
            *((*each, (" ", ""))[::-1] for each in words(summary.answer, "text", width - 2)),
        ]


class EventCurve(Timeline):
    """Requested and reserved bytes over the events."""

    NAME = "Requested over the events"
    TERMS = ()  # type: ignore[assignment]

    def sums(self) -> list[str]:
        return [
            "requested: bytes asked for by the blocks in use after an event, until their free is completed",
            "reserved: what the allocator has taken from the device by then",
            "a column: the highest of its events; the cursor goes to that event",
        ]

    def show(self, view: View) -> None:
        Panel.show(self, view)

    def pick(self, view: View) -> TimelineData:
        app = cast("SnapshotApp", self.app)
        points = app.here.points
        return TimelineData(points, len(points), None, False, cursor=app.cursor.event, events=True)

    def on_mouse_scroll_up(self) -> None:
        """The plot always shows all events."""

    def on_mouse_scroll_down(self) -> None:
        """As above."""


class _Rows(_SnapshotPanel, TablePanel):
    """A table about the cursor. `home` and `end` stay the app's."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "Up", show=False, id="rows.up", tooltip="The row above"),
        Binding("down,j", "move(1)", "Down", show=False, id="rows.down", tooltip="The row below"),
        Binding("pageup", "page(-1)", "Page up", show=False, id="rows.page_up", tooltip="One page up"),
        Binding("pagedown", "page(1)", "Page down", show=False, id="rows.page_down", tooltip="One page down"),
    ]

    def rows_at(self, opened: Opened, event: int) -> tuple[LineRow | Alike, ...]:
        raise NotImplementedError

    def columns(self, room: int) -> Sequence[Column[LineRow | Alike, int]]:
        raise NotImplementedError

    def pick(self, view: View) -> tuple[LineRow | Alike, ...]:
        return self.rows_at(self.shown.here, self.shown.cursor.event)

    def draw(self, slice_: tuple[LineRow | Alike, ...], width: int, height: int, glyphs: Glyphs) -> list[Line]:
        columns = place(self.columns(width), width)
        lines: list[Line] = [tuple(heads(columns))]
        self.scroll(height - 1, 1)
        for at, row in enumerate(slice_[self._top : self._top + self._space], self._top):
            here = at == self._at and self.has_focus
            lines.append(tuple(row_cells(columns, row, width, "cursor" if here else None)))
        if not slice_:
            lines.append((("  nothing was in use", "dim"),))
        return lines


class LineTable(_Rows):
    """Rows: lines of code; in use at the cursor, at the peak, and the difference."""

    NAME = "By source line"

    def sums(self) -> list[str]:
        return [
            "source line: the innermost line of the stack that is neither torch's nor an installed package's",
            "here: requested bytes of the blocks in use at the cursor that this line allocated",
            "blocks: how many they are",
            "at the peak: the same at the event at which most was requested",
        ]

    def keys(self) -> Sequence[str]:
        return [row.line for row in self._slice or ()]

    def rows_at(self, opened: Opened, event: int) -> tuple[LineRow, ...]:
        snapshot = self.shown.snapshot
        here = {part.name: part for part in parts(uses_at(snapshot, opened.device, opened.history, event), _line)}
        peak = {part.name: part.bytes for part in opened.summary.peak.by_line} if opened.summary.peak else {}
        nothing = Part("", 0, 0)
        rows = [
            LineRow(name, here.get(name, nothing).bytes, peak.get(name, 0), here.get(name, nothing).blocks)
            for name in {*here, *peak}
        ]
        return tuple(sorted(rows, key=lambda row: (-row.here, -row.peak, row.line)))

    def columns(self, room: int) -> Sequence[Column[LineRow, int]]:  # type: ignore[override]
        name = max(LINE_LEAST, room - 4 * 13 - 1)
        return (
            Column("line", "source line", name, 0, lambda row, _: (_fitted(row.line, name - 2), "text"), to_left=True),
            Column("here", "here", 13, 1, lambda row, _: (size(row.here), "strong")),
            Column("blocks", "blocks", 13, 4, lambda row, _: (f"{row.blocks:,}", "dim")),
            Column("peak", "at the peak", 13, 2, lambda row, _: (size(row.peak), "dim")),
            Column("difference", "here − peak", 13, 3, lambda row, _: (size(row.here - row.peak, sign=True), "dim")),
        )


class BlockTable(_Rows):
    """Rows: blocks in use of one line and size."""

    NAME = "Blocks in use"

    def sums(self) -> list[str]:
        return [
            "a row: the blocks in use at the cursor of one line and one size",
            "of bytes: requested bytes of each; together: of all of them",
            "since event: the event that allocated the oldest; before: it was there before the first event",
        ]

    def keys(self) -> Sequence[tuple[str, int]]:
        return [(row.line, row.bytes) for row in self._slice or ()]

    def rows_at(self, opened: Opened, event: int) -> tuple[Alike, ...]:
        found = alike_of(uses_at(self.shown.snapshot, opened.device, opened.history, event))
        return tuple(sorted(found, key=lambda each: (-each.bytes * each.blocks, each.line)))

    def columns(self, room: int) -> Sequence[Column[Alike, int]]:  # type: ignore[override]
        name = max(LINE_LEAST, room - 4 * 13 - 1)
        return (
            Column("line", "allocated at", name, 0, lambda row, _: (_fitted(row.line, name - 2), "text"), to_left=True),
            Column("all", "together", 13, 1, lambda row, _: (size(row.bytes * row.blocks), "strong")),
            Column("blocks", "blocks", 13, 2, lambda row, _: (f"{row.blocks:,}", "dim")),
            Column("bytes", "of bytes", 13, 3, lambda row, _: (size(row.bytes), "dim")),
            Column("event", "since event", 13, 4,
                   lambda row, _: ("before" if row.event is None else count(row.event), "dim")),
        )  # fmt: skip


def _line(use: Use) -> str:
    return use.line


def _fitted(line: str, room: int) -> str:
    """The end of a long path says more than its beginning."""
    return line if len(line) <= room else clip(short(line), room)


class _SnapshotScreen(MonitorScreen):
    TABLE: ClassVar[type[_Rows]]

    def compose(self) -> ComposeResult:
        yield CursorLines(id="cursor")
        yield EventCurve(id="curve")
        yield self.TABLE(id="rows")
        yield KeyLine(id="keys")


class LinesScreen(_SnapshotScreen):
    AUTO_FOCUS = "#rows"
    TABLE = LineTable


class BlocksScreen(_SnapshotScreen):
    AUTO_FOCUS = "#rows"
    TABLE = BlockTable


SnapshotApp.MODES.update(lines=LinesScreen, blocks=BlocksScreen)
