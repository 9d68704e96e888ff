"""The Log screen: what is in it, and what is not."""

from __future__ import annotations

from typing import Any


async def test_it_says_that_the_training_s_own_output_is_elsewhere(app_of: Any, new_run: Any, settled: Any) -> None:
    app = app_of(new_run().usual(3))
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        await pilot.press("7", "e")
        await settled(pilot)
        shown = "\n".join(strip.text for strip in app.screen._compositor.render_strips())
    assert "What the training prints is not here" in shown
