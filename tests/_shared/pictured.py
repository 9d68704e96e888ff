"""A screen as text: its characters, and beneath them the colours of each row. Small enough to keep many, and a change
can be read in a diff. Pictures to look at are in test_pictures.

`pytest tests/tui/test_situations.py --snapshot-update` writes them anew.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "tui" / "pictures"


def text_of(app: Any) -> str:
    """The rows as drawn."""
    return "\n".join(strip.text for strip in app.screen._compositor.render_strips())


def picture_of(app: Any) -> str:
    """The rows as drawn, then "row: columns style, …" for each row that has more than plain text."""
    rows = [list(strip) for strip in app.screen._compositor.render_strips()]
    lines = ["".join(segment.text for segment in row).rstrip() for row in rows]
    styles = []
    for number, row in enumerate(rows, 1):
        cells = [(str(segment.style), character) for segment in row for character in segment.text]
        runs, at = [], 1
        for style, run in groupby(cells, key=lambda cell: cell[0]):
            width = len(list(run))
            if style not in ("", "none", "None"):
                runs.append(f"{at}-{at + width - 1} {style}")
            at += width
        styles.append(f"{number}: " + ", ".join(runs))
    same = [f"{first}: {rest}" for first, rest in _together(styles)]
    return "\n".join([*lines, "", *same, ""])


def _together(styles: list[str]) -> list[tuple[str, str]]:
    """Rows with the same styles stand once: "3–7"."""
    numbered = [each.partition(": ")[::2] for each in styles]
    told = []
    for style, rows in groupby(numbered, key=lambda each: each[1]):
        numbers = [number for number, _ in rows]
        told.append((numbers[0] if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}", style))
    return told


def compare(name: str, text: str, *, update: bool) -> None:
    """Fails if the picture of this name is another one."""
    path = FOLDER / f"{name}.txt"
    if update:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return
    if not path.exists():
        pytest.fail(f"there is no picture {path.name}: --snapshot-update makes it; look at it before you keep it")
    assert text == path.read_text(), f"{path.name} is another picture: --snapshot-update, then read the diff"
