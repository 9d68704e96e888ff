"""The allocator's segments and blocks as a map, with a cursor on a segment."""

from __future__ import annotations

from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType

from gpumon.analysis.blocks import AllocatorMap, Pool, allocator
from gpumon.session.frame import SegmentsRecord
from gpumon.tui.styles import Glyphs
from gpumon.tui.text_layout import Line
from gpumon.tui.view import View, device_name, device_of
from gpumon.tui.widgets.block_lines import Map, map_lines, oom_of, spot, sums
from gpumon.tui.widgets.panel import Panel


def _free_of(view: View) -> tuple[int | None, bool]:
    """What the device has free, by the driver; else the most it can have free: its total minus what is reserved."""
    device = view.device
    lines = device.ledger if device is not None else None
    if device is None or lines is None:
        return None, False
    at_most = lines.free is None
    free = lines.free
    if free is None and device.capacity is not None and lines.reserved is not None:
        free = max(0, device.capacity - lines.reserved)
    return free, at_most


def why_not_read(view: View) -> str | None:
    """Why blocks cannot be read for what is shown; None: they can."""
    return view.cannot_ask if view.now is None else "this is a past step, and only the newest one's blocks can be read"


class BlockMap(Panel):
    """Pools, one below the other. Blocks are parsed once per reading; cells are computed at each draw."""

    NAME = "Blocks"
    TERMS = ("segment", "block", "allocated", "unowned", "waiting", "inactive split", "unused", "largest free block",
             "fragmentation", "pool", "reserved")  # fmt: skip
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("right,l", "move(1)", "Segment", id="blocks.next", key_display="←/→", tooltip="The next segment"),
        Binding("left,h", "move(-1)", "Before", show=False, id="blocks.before", tooltip="The previous segment"),
        Binding("down,j", "pool(1)", "Pool", show=False, id="blocks.pool", tooltip="The next pool"),
        Binding("up,k", "pool(-1)", "Pool before", show=False, id="blocks.pool_before", tooltip="The previous pool"),
        Binding("f", "largest", "Gap", id="blocks.largest", tooltip="The segment with the largest free block"),
    ]

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._record: SegmentsRecord | None = None
        self._found: AllocatorMap | None = None
        self._leaking: frozenset[str] = frozenset()  # containers that grow
        self._free: tuple[int | None, bool] = (None, False)
        self._at = (0, 0)

    def pick(self, view: View) -> Map:
        rank, device = view.rank, device_of(view)
        name = device_name(device)
        why_not = why_not_read(view)
        if rank is None:
            return Map(name, why_not=why_not)
        record = next((r for r in rank.segments if r.device == view.index), None)
        on_gpu = device is None or device.kind != "cpu"
        if record is None:
            return Map(name, why_not=why_not, on_gpu=on_gpu)
        held = view.device.held if view.device is not None else None
        leaking = frozenset(holder.container for holder in held.by) if held is not None else frozenset()
        if record is not self._record:
            self._free = (None, False)
        if record is not self._record or (record.holders and leaking != self._leaking):
            self._record, self._found = record, allocator(record.segments, record.holders, leaking)
        self._leaking = leaking
        if self._free[0] is None:  # kept as it was when the blocks were read: it changes all the time
            self._free = _free_of(view)
        at = rank.unix_ns(record.t_ns)
        return Map(name, record, self._found, oom_of(rank, record), at, why_not, on_gpu, *self._free)

    def draw(self, slice_: Map, width: int, height: int, glyphs: Glyphs) -> list[Line]:
        self._keep()
        return map_lines(slice_, self._at, width, height, glyphs, self.title_role)

    def sums(self) -> list[str]:
        return sums(self._slice) if self._slice is not None else []

    # ------------------------------------------------------------------------------------------------------------ keys

    @property
    def _pools(self) -> tuple[Pool, ...]:
        return self._found.pools if self._found is not None else ()

    def _keep(self) -> None:
        """Clamps the cursor."""
        pools = self._pools
        pool = max(0, min(self._at[0], len(pools) - 1))
        self._at = (pool, max(0, min(self._at[1], len(pools[pool].segments) - 1)) if pools else 0)

    def action_move(self, by: int) -> None:
        pool, segment = self._at
        pools = self._pools
        if not pools:
            return
        segment += by
        if segment < 0 and pool > 0:
            pool, segment = pool - 1, len(pools[pool - 1].segments) - 1
        elif segment >= len(pools[pool].segments) and pool + 1 < len(pools):
            pool, segment = pool + 1, 0
        self._at = (pool, segment)
        self._redraw()

    def on_click(self, event: events.Click) -> None:
        """On a cell: its segment; on a pool's heading: its first one."""
        at = event.get_content_offset(self)
        if at is None or self._slice is None:
            return
        self.focus()
        found = spot(self._slice, self._at, *self.size, self.monitor.glyphs, at.x, at.y)
        if found is not None:
            self._at = found
            self._redraw()

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        event.stop()
        self.action_move(1)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        event.stop()
        self.action_move(-1)

    def action_pool(self, by: int) -> None:
        self._at = (self._at[0] + by, 0)
        self._redraw()

    def action_largest(self) -> None:
        gaps = [
            (segment.totals.largest_free, -p, -s)
            for p, pool in enumerate(self._pools)
            for s, segment in enumerate(pool.segments)
        ]
        if gaps:
            _, pool, segment = max(gaps)
            self._at = (-pool, -segment)
            self._redraw()
