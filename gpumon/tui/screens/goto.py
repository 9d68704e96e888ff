"""`:` asks for a step of a replay, or for a past one of a live run."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen
from textual.widgets import Input


class GotoScreen(ModalScreen[int | None]):
    AUTO_FOCUS = "Input"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave", "Drop", id="goto.drop", key_display="esc", tooltip="Stay at this step")
    ]

    def compose(self) -> ComposeResult:
        yield Input(placeholder="number of a step", compact=True, type="integer", max_length=12)

    def on_input_submitted(self, message: Input.Submitted) -> None:
        digits = message.value.replace(",", "").strip()
        self.dismiss(int(digits) if digits.isdigit() and digits.isascii() else None)

    def action_leave(self) -> None:
        self.dismiss(None)
