"""The allocator's segments and blocks, as read on request or at an OOM."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from gpumon.analysis.blocks import allocator, outdated
from gpumon.tui.screens.base import RankScreen
from gpumon.tui.view import View, device_of
from gpumon.tui.widgets.answer_line import AnswerLine
from gpumon.tui.widgets.block_map import BlockMap, why_not_read
from gpumon.tui.widgets.header import Header
from gpumon.tui.widgets.key_line import KeyLine
from gpumon_agent import wire


class BlocksScreen(RankScreen):
    AUTO_FOCUS = "#blocks"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("b", "read", "Read", id="blocks.read",
                tooltip="Read the allocator's blocks again, once, between two phases: the training waits about a"
                        " microsecond for each block"),
    ]  # fmt: skip

    def compose(self) -> ComposeResult:
        yield Header(id="header")
        yield AnswerLine(id="answer")
        yield BlockMap(id="blocks")
        yield KeyLine(id="keys")

    def __init__(self) -> None:
        super().__init__()
        self._looked_at: set[tuple[str, int | None]] = set()

    def on_screen_suspend(self) -> None:
        self._looked_at.clear()

    def show(self, view: View) -> None:
        super().show(view)
        self._read_once(view)

    def _read_once(self, view: View) -> None:
        """Asks for the shown device's blocks, once each time the screen is opened, unless the newest reading holds."""
        rank = view.rank
        if rank is None or not rank.synced or view.device is None or why_not_read(view) is not None:
            return
        if (rank.source, view.index) in self._looked_at:
            return
        self._looked_at.add((rank.source, view.index))
        described = device_of(view)
        if described is not None and described.kind == "cpu":
            return
        record = next((each for each in rank.segments if each.device == view.index), None)
        reserved = view.device.ledger.reserved if view.device.ledger is not None else None
        if record is None or outdated(allocator(record.segments), reserved):
            self.monitor.ask(wire.BLOCKS, quietly=True)

    def action_read(self) -> None:
        self.monitor.ask(wire.BLOCKS)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "read":
            return why_not_read(self.monitor.view) is None
        return super().check_action(action, parameters)
