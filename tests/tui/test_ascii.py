"""With --ascii nothing but ASCII leaves for the terminal: panels, pages over them, their borders."""

from __future__ import annotations

import html
import re

from gpumon.tui.app import MonitorApp


def drawn(app: MonitorApp) -> set[str]:
    """The characters of the screen as it is drawn, with borders and toasts."""
    text = html.unescape(re.sub(r"<style>.*?</style>|<[^>]*>", "", app.export_screenshot(), flags=re.DOTALL))
    return set(text) - {"\xa0"}  # the picture's own blank


async def test_every_screen_and_page_is_ascii(app_of, new_run, settled) -> None:
    app = app_of(new_run().leaking(), ascii=True)
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        for key in ("1", "n", "escape", "e", "escape", "3", "4", "5", "6", "7", "question_mark", "escape"):
            await pilot.press(key)
            await settled(pilot)
            assert {char for char in drawn(app) if not char.isascii()} == set(), key
        app.toast("Saved deep_深い·file.svg")
        await settled(pilot)
        assert {char for char in drawn(app) if not char.isascii()} == set()
