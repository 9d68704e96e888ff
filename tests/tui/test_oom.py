"""After an allocation failed: the picture stays, a panel says what it comes to, a key reads the whole."""

from __future__ import annotations

import pytest
from pictured import text_of

from gpumon.analysis import Reporter
from gpumon.analysis.units import size
from gpumon.tui.screens.help import OomScreen
from gpumon.tui.styles import ASCII, UNICODE
from gpumon.tui.text_layout import plain, width
from gpumon.tui.view import choose
from gpumon.tui.widgets.device_bar import bars
from gpumon.tui.widgets.oom_panel import OomPanel, oom_lines


def view_of(store):
    frame = store.frame(1_790_000_000_000_000_000 + 10**12)
    return choose(frame, Reporter().report(frame), None, None)


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII], ids=["unicode", "ascii"])
def test_the_panel_keeps_its_size_and_always_says_what_to_do(store_of, new_run, glyphs):
    report = view_of(store_of(new_run().leaking())).report.oom
    for room in (20, 46, 80, 120):
        for height in (2, 3, 6, 9):
            lines = oom_lines(report, room, height, glyphs)
            assert len(lines) <= height
            assert all(width(line) <= room for line in lines)
            assert "1. " in plain(lines)


def test_the_panel_names_verdict_request_moment_and_place(store_of, new_run):
    report = view_of(store_of(new_run().leaking())).report.oom
    shown = plain(oom_lines(report, 120, 9, UNICODE))
    for words in ("2.00 GiB requested in backward, step 12,433", report.verdict, "train.py:58", "in blocks.11.mlp"):
        assert words in shown


@pytest.mark.parametrize("room", [40, 60, 80, 120])
def test_where_there_is_room_no_way_out_is_cut(store_of, new_run, room):
    report = view_of(store_of(new_run().leaking())).report.oom
    shown = " ".join(plain(oom_lines(report, room, 30, UNICODE)).split())
    for number, remedy in enumerate(report.remedies, start=1):
        saves = f" saves {size(remedy.saves)}" if remedy.saves else ""
        assert f"{number}. {remedy.text}{saves}" in shown


def test_nothing_is_forecast_any_more(store_of, new_run):
    assert bars(view_of(store_of(new_run().usual(20)))).forecast is not None
    assert bars(view_of(store_of(new_run().leaking()))).forecast is None


@pytest.mark.parametrize("size", [(120, 40), (80, 24), (46, 14)], ids=lambda size: f"{size[0]}x{size[1]}")
async def test_the_last_picture_stays_and_o_reads_the_whole(app_of, new_run, settled, size) -> None:
    run = new_run().leaking().goodbye("exception", 12_433, "backward", "OutOfMemoryError: CUDA out of memory.")
    app = app_of(run)
    async with app.run_test(size=size) as pilot:
        await settled(pilot)
        assert "ended" in text_of(app)
        assert "Out of memory" in text_of(app)
        assert "at the peak" in text_of(app) or size[0] < 80
        await pilot.press("o")
        await settled(pilot)
        assert isinstance(app.screen, OomScreen)
        assert "GPU 0 has" in text_of(app) or "more lines" in text_of(app)
        await pilot.press("escape")
        assert app.screen.query_one(OomPanel).display


async def test_without_an_oom_there_is_neither_panel_nor_key(app_of, new_run, settled) -> None:
    app = app_of(new_run().usual(20))
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        assert not app.screen.query_one(OomPanel).display
        assert "Out of memory" not in text_of(app)
        await pilot.press("o")
        assert not isinstance(app.screen, OomScreen)
