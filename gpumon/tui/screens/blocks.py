"""The allocator's segments and blocks, as read on request or at an OOM."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from gpumon.tui.screens.base import RankScreen
from gpumon.tui.widgets.answer_line import AnswerLine
from gpumon.tui.widgets.block_map import BlockMap
from gpumon.tui.widgets.header import Header
from gpumon.tui.widgets.key_line import KeyLine
from gpumon_agent import wire


class BlocksScreen(RankScreen):
    AUTO_FOCUS = "#blocks"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("b", "read", "Read", id="blocks.read",
                tooltip="Read the allocator's blocks now, once, between two phases: the training waits about a"
                        " microsecond for each block"),
    ]  # fmt: skip

    def compose(self) -> ComposeResult:
        yield Header(id="header")
        yield AnswerLine(id="answer")
        yield BlockMap(id="blocks")
        yield KeyLine(id="keys")

    def action_read(self) -> None:
        self.monitor.ask(wire.BLOCKS)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "read":
            return self.monitor.view.cannot_ask is None
        return super().check_action(action, parameters)
