"""Whatever comes over the wire: every screen is drawn, in both sizes, and nothing in it acts on the terminal."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import hostile
import pytest
from hypothesis import given

from gpumon.tui.app import MonitorApp
from gpumon_agent import wire

FEW = hostile.examples(8)
SCREENS = "1234567"


async def drawn(messages: list[wire.Received], size: tuple[int, int]) -> str:
    """The text of every screen, one after the other."""
    taken = asyncio.Event()

    async def feed() -> AsyncIterator[wire.Received]:
        for received in messages:
            yield received
        taken.set()
        await asyncio.Event().wait()

    app = MonitorApp(feed, clock=lambda: messages[-1].unix_ns)
    made: list[str] = []
    async with app.run_test(size=size) as pilot:
        await taken.wait()
        for key in SCREENS:
            await pilot.press(key)
            app.redraw()
            await pilot.pause()
            for widget in app.screen.walk_children(with_self=True):
                made += [widget.render_line(y).text for y in range(widget.size.height)]
    return "\n".join(made)


@pytest.mark.parametrize("size", [(120, 40), (80, 24)])
@given(messages=hostile.changed_runs())
@FEW
def test_every_screen_of_any_run_is_drawn(size: tuple[int, int], messages: list[wire.Received]) -> None:
    with hostile.within(120):
        assert hostile.harm_in(asyncio.run(drawn(messages, size))) == []


@pytest.mark.parametrize("size", [(120, 40), (80, 24)])
@given(messages=hostile.sessions())
@FEW
def test_every_screen_of_any_session_is_drawn(size: tuple[int, int], messages: list[wire.Received]) -> None:
    with hostile.within(120):
        assert hostile.harm_in(asyncio.run(drawn(messages, size))) == []
