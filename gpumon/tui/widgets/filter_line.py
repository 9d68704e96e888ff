"""An input line for a filter, hidden until requested."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widgets import Input


class FilterLine(Input):
    """Filters while typing. Enter keeps the text, esc drops it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(
            "enter,down",
            "done(True)",
            "Keep",
            id="filter.keep",
            key_display="⏎",
            tooltip="Keep it, back to the list",
        ),
        Binding("escape", "done(False)", "Drop", id="filter.drop", key_display="esc", tooltip="Remove the filter"),
    ]

    class Done(Message):
        def __init__(self, kept: bool) -> None:
            super().__init__()
            self.kept = kept

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(placeholder="part of a path or kind", compact=True, id=id)
        self.display = False

    def action_done(self, kept: bool) -> None:
        self.post_message(self.Done(kept))
