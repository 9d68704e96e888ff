"""The Leaks screen: what grows and who holds it, sorted, told to the byte, asked for by key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from pictured import text_of

from gpumon.analysis.census import ORDERS, alive, rows_of
from gpumon.analysis.types import Growth
from gpumon.link.errors import NotAnswering
from gpumon.tui.feed import Pace
from gpumon.tui.styles import ASCII, UNICODE
from gpumon.tui.text_layout import plain, width
from gpumon.tui.widgets.checkpoint_lines import checkpoint_lines
from gpumon.tui.widgets.findings_strip import FindingsStrip
from gpumon.tui.widgets.growth_plot import Grown, growth_lines, height_without_plot
from gpumon.tui.widgets.leak_table import Leaks, LeakTable, leak_lines, order_at
from gpumon_agent import wire

LARGE = (120, 40)
HELD = wire.Group(
    (8, 512), "float32", 0, 10, 163_840, True, 16_384, 4, (wire.Holder("outputs[*]", "local", "t.py:58", 10),)
)
FEW = wire.Group((), "float32", 0, 30, 15_360, grown=20)
ELSEWHERE = wire.Group((4,), "int64", 1, 1, 512)
NOW = wire.Census(200, 9, 1, "growth", (HELD, FEW, ELSEWHERE), 41, 179_712, 1000, 3, 900)
BEFORE = wire.Census(100, 8, 0, "asked")


def test_groups_of_the_device_are_sorted_and_told_by_the_step() -> None:
    rows = rows_of(NOW, BEFORE, 0, "bytes")
    assert [row.group.count for row in rows] == [10, 30]
    assert [row.per_step for row in rows] == [
        4 * (163_840 + 16_384) // 10 // 100 + 1,
        20 * 512 // 100,
    ]  # to the nearest
    assert [row.group.count for row in rows_of(NOW, BEFORE, 0, "count")] == [30, 10]
    assert [row.per_step for row in rows_of(NOW, None, 0, "bytes")] == [None, None]
    assert len(rows_of(NOW, None, None, "bytes")) == 3


def test_a_checkpoint_that_was_let_go_is_not_alive() -> None:
    held = wire.Checkpoint(0, 0, 0, 1, "torch.load", alive=7)
    assert alive([held, wire.Checkpoint(1, 0, 0, 1, "torch.load"), wire.Checkpoint(2, 1, 0, 1, "x", alive=9)], 0) == (
        held,
    )


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII], ids=["unicode", "ascii"])
def test_lines_keep_their_room(glyphs: Any) -> None:
    rows = rows_of(NOW, BEFORE, None, "bytes")
    blocks = Growth("blocks", True, 40, 1.0, 0.9, 1.1, 60, points=tuple((i, 900 + i) for i in range(100)))
    bytes_ = Growth("allocated", True, 40, 512.0, 500.0, 520.0, 30_720, tuple((i, 10**9 + 512 * i) for i in range(100)))
    for room in (10, 20, 40, 80, 120, 200):
        for height in (1, 3, 6, 12, 30):
            for order in ORDERS:
                lines = leak_lines(Leaks(NOW, rows), order, 0, 0, room, height, glyphs, "strong")
                assert all(width(line) <= room for line in lines)
            lines = growth_lines(Grown("cuda:0", (bytes_, blocks)), room, height, glyphs, "strong")
            assert all(width(line) <= room for line in lines)
            assert len(lines) <= height


def test_what_grows_is_told_with_its_interval_and_what_does_not_is_named() -> None:
    grows = Growth("blocks", True, 40, 1.0, 0.9, 1.1, 60)
    shown = plain(growth_lines(Grown("cuda:0", (grows, Growth("slack"))), 120, 10, UNICODE, "strong"))
    assert "live blocks  +1.0/step (0.9 to 1.1) since 40 · 60 so far" in shown
    assert "steady: cached" in shown
    assert "nothing grows: cached" in plain(growth_lines(Grown("cpu", (Growth("slack"),)), 80, 5, UNICODE, "strong"))


def test_four_holders_are_named_and_three_groups_keep_their_lines_on_a_low_screen() -> None:
    named = tuple(wire.Holder(f"kept{n}", "local", "t.py:58", 10) for n in range(6))
    many = msgspec.structs.replace(HELD, holders=named)
    leaks = Leaks(NOW, rows_of(msgspec.structs.replace(NOW, groups=(many, FEW, ELSEWHERE)), None, None, "bytes"))
    high, low = (plain(leak_lines(leaks, "bytes", 0, 0, 120, height, UNICODE, "")) for height in (30, 10))
    assert high.count("   held by kept") == 4
    assert ("[8, 512]" in low, "scalar" in low, "int64" in low, low.count("   held by kept")) == (True, True, True, 3)


def test_three_checkpoints_are_listed_and_all_are_counted() -> None:
    found = tuple(wire.Checkpoint(n, 0, 0, 1, "torch.load", alive=1 << 30) for n in range(5))
    title, *lines = plain(checkpoint_lines(found, 120, UNICODE, "")).splitlines()
    assert "5.00 GiB still alive" in title
    assert len(lines) == 3


def rising(figure: str, first: int, by: int) -> Growth:
    return Growth(figure, True, 40, by, by, by, 60, points=tuple((i, first + by * i) for i in range(100)))


def test_growth_has_a_plot_from_four_rows_on_and_no_more_than_five_lines_without() -> None:
    grows = Grown("cuda:0", (rising("allocated", 1 << 30, 512),))
    assert [len(growth_lines(grows, 120, height, UNICODE, "")) > 2 for height in (7, 8)] == [False, True]
    assert height_without_plot(Grown("", tuple(rising(f"worker {pid}", 0, 1) for pid in range(8)))) == 6


def test_blocks_that_grow_as_bytes_do_are_drawn_below_them() -> None:
    """One in step with the other: at the same height one curve would hide the other."""
    grows = Grown("cuda:0", (rising("allocated", 1 << 30, 512), rising("blocks", 900, 1)))
    _, _, _, _, highest, second, third, *_ = growth_lines(grows, 120, 26, UNICODE, "")
    drawn = [any(role == "line:reserved" for _, role in row) for row in (highest, second, third)]
    assert drawn == [False, False, True]


def test_a_click_on_a_heading_finds_its_column() -> None:
    found = [order_at(x, 120, "bytes") for x in range(120)]
    assert [name for name in dict.fromkeys(found) if name] == ["step", "grown", "count", "bytes"]


# ---------------------------------------------------------------------------------------------------------- in the app


@pytest.fixture
def a_run(new_run: Callable[..., Any]) -> Any:
    run = new_run().hello().model()
    for step in range(240):
        run.step(step, leak=step * 40 * (1 << 20))
    return run.host().census(120, 0, 600).census(239, 1).checkpoint().beat(240).synced().host()


async def test_enter_on_the_findings_leads_there_and_keys_sort(app_of, a_run, settled, asked) -> None:
    app = app_of(a_run, asker=asked)
    async with app.run_test(size=LARGE) as pilot:
        await settled(pilot)
        app.screen.query_one(FindingsStrip).focus()
        await pilot.press("enter")
        await settled(pilot)
        assert "What to do here" in text_of(app)
        await pilot.press("d")
        await settled(pilot)
        shown = text_of(app)
        assert app.current_mode == "leaks"
        assert "retained-graph" in shown
        assert "allocated  +40.0 MiB/step" in shown
        assert "held by outputs[*]  local, train.py:58 · 1,227 tensors" in shown
        assert "12.1 GiB of 12.1 GiB held by ckpt since torch.load last.pt at train.py:31" in shown
        table = app.screen.query_one(LeakTable)
        await pilot.press("o", "o")
        assert (table.order, table.here.group.count) == ("count", 1227)
        await pilot.press("end")
        assert table.here.group.count == 3
        assert "2 of them only by a reference cycle" in text_of(app)
        await pilot.press("home", "e")
        await settled(pilot)
        assert "1,227 tensors [8, 1024, 512] float32: 20,585,644,032 B of storages" in text_of(app)


async def test_enter_on_no_finding_explains_as_before(app_of, new_run, settled) -> None:
    app = app_of(new_run().usual())
    async with app.run_test(size=LARGE) as pilot:
        await settled(pilot)
        app.screen.query_one(FindingsStrip).focus()
        await pilot.press("enter")
        await settled(pilot)
        assert app.current_mode == "overview"
        assert type(app.screen).__name__ == "ExplainScreen"


async def test_a_census_is_asked_for_by_key_and_a_refusal_is_told(app_of, a_run, settled, asked) -> None:
    app = app_of(a_run, asker=asked)
    async with app.run_test(size=LARGE, notifications=True) as pilot:
        await settled(pilot)
        await pilot.press("4", "c")
        await settled(pilot)
        assert asked.heard == [(a_run.source, "census", 0)]
        assert "census: at the next phase boundary" in text_of(app)
        asked.reply = NotAnswering("the agent of process 9 does not answer", "try again in a moment")
        await pilot.press("c", "7")
        await settled(pilot)
        assert "the agent of process 9 does not answer; try again in a moment" in text_of(app)


async def test_a_snapshots_path_is_told_once_it_is_written(app_of, new_run, reader_of, settled, asked) -> None:
    run = new_run().hello().model().steps(0, 9)
    run.say(wire.Snapshot(1, 3, "/old/one.pickle", 4096))  # from before this viewer came
    reader = reader_of(run.synced())
    app = app_of(reader=reader, asker=asked)
    async with app.run_test(size=LARGE, notifications=True) as pilot:
        await settled(pilot)
        await pilot.press("s")
        await settled(pilot)
        assert asked.heard == [(run.source, "snapshot", 0)]
        assert "one.pickle" not in text_of(app)
        run.say(wire.Snapshot(run.t_ns, 12_431, "/run/oom/new.pickle", 2 << 20))
        reader.add(run)
        await settled(pilot)
        assert "/run/oom/new.pickle (2.00 MiB, on node1)" in text_of(app)
        run.say(wire.Notice(run.t_ns, f"{wire.NOT_DONE}blocks were not read: too many", 9), numbered=True)
        reader.add(run)
        await settled(pilot)
        assert "pid 41873: asked for, not done: blocks were not read: too many" in [
            n.message for n in app._notifications
        ]


async def test_a_replay_asks_nobody_and_says_so(app_of, new_run, settled, asked) -> None:
    app = app_of(new_run().hello().model().steps(0, 30), pace=Pace(0.0))
    async with app.run_test(size=LARGE) as pilot:
        await settled(pilot)
        await pilot.press("s", "4", "c")
        await settled(pilot)
        assert "none can be requested: this is a replay" in text_of(app)
        await pilot.press("6", "b")
        await settled(pilot)
        assert "none can be requested: this is a replay" in text_of(app)
        assert asked.heard == []
