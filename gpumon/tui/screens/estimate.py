"""The estimate next to the measured values, by line and phase, and whether it fits."""

from __future__ import annotations

from textual.app import ComposeResult

from gpumon.tui.screens.base import RankScreen
from gpumon.tui.widgets.answer_line import AnswerLine
from gpumon.tui.widgets.estimate_page import EstimatePage
from gpumon.tui.widgets.header import Header
from gpumon.tui.widgets.key_line import KeyLine


class EstimateScreen(RankScreen):
    AUTO_FOCUS = "#estimated"

    def compose(self) -> ComposeResult:
        yield Header(id="header")
        yield AnswerLine(id="answer")
        yield EstimatePage(id="estimated")
        yield KeyLine(id="keys")
