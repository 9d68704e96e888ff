"""Ten situations and every screen as they look at each size and in each form.

A picture is text with its colours beneath (pictured.py). test_pictures has pictures to look at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pictured import compare, picture_of
from situations import SITUATIONS, Scene, a_leak
from textual.pilot import Pilot

SIZES = ((80, 24), (120, 40), (200, 60))
FORMS: dict[str, dict[str, object]] = {
    "": {},
    "light": {"theme": "gpumon-light"},
    "no-colour": {},
    "ascii": {"ascii": True},
}
"""The other forms are pictured at 120×40 alone: what fits where does not depend on colours."""

LOOKS = 20
"""Pieces in which a viewer hears a run: what lies on a device is confirmed by several looks."""

SCREENS = {"ranks": "2", "layers": "3", "leaks": "4", "estimate": "5", "blocks": "6", "log": "7", "finding": "n"}


@pytest.fixture(params=FORMS, ids=[form or "dark" for form in FORMS])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "no-colour":
        monkeypatch.setenv("NO_COLOR", "1")
    return str(request.param)


async def heard(pilot: Pilot[Any], scene: Scene, reader: Any) -> None:
    """Plays the scene in pieces. The app's own timer is stopped, so that each run of a test looks as often."""
    app: Any = pilot.app
    app._timer.stop()
    pieces = len(scene.received) // LOOKS + 1
    for at in range(0, len(scene.received), pieces):
        for received in scene.received[at : at + pieces]:
            reader._queue.put_nowait(received)
            reader.now_ns = max(reader.now_ns, received.unix_ns)
        await settled(pilot, reader)
    reader.now_ns = scene.unix_ns
    await settled(pilot, reader)


async def settled(pilot: Pilot[Any], reader: Any) -> None:
    app: Any = pilot.app
    while not reader.taken:
        await pilot.pause(0.01)
    await pilot.pause()
    app.redraw()
    await pilot.pause()


@pytest.fixture
def update(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("update_snapshots"))


async def pictured(pilot: Pilot[Any], reader: Any, name: str, form: str, *, update: bool) -> None:
    sizes = SIZES if not form else SIZES[1:2]
    for width, height in sizes:
        await pilot.resize_terminal(width, height)
        for _ in range(2):  # heights may follow what is shown
            await settled(pilot, reader)
        compare(f"{name}/{width}x{height}{'-' * bool(form)}{form}", picture_of(pilot.app), update=update)


@pytest.mark.parametrize("make", SITUATIONS, ids=lambda make: make.__name__)
async def test_a_situation(app_of, reader_of, make: Callable[[], Scene], form: str, update: bool) -> None:
    scene, reader = make(), reader_of()
    reader.now_ns = scene.received[0].unix_ns
    app = app_of(reader=reader, **FORMS[form])
    async with app.run_test(size=(120, 40)) as pilot:
        await heard(pilot, scene, reader)
        await pictured(pilot, reader, make.__name__, form, update=update)


async def test_every_screen(app_of, reader_of, asked, form: str, update: bool) -> None:
    """Of a run that leaks."""
    scene, reader = a_leak(), reader_of()
    reader.now_ns = scene.received[0].unix_ns
    app = app_of(reader=reader, asker=asked, **FORMS[form])
    async with app.run_test(size=(120, 40)) as pilot:
        await heard(pilot, scene, reader)
        for name, key in SCREENS.items():
            await pilot.press(key)
            await settled(pilot, reader)
            await pictured(pilot, reader, f"screens/{name}", form, update=update)
            await pilot.press("escape" if name == "finding" else "1")
