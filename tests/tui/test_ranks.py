"""The Ranks screen: late, missing, restarted and dead ranks; median, worst, skew; 64 at once; sorted; opened."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from textual.pilot import Pilot
from watched import Run

from gpumon.analysis import Reporter, report
from gpumon.analysis.answer import answer, parts
from gpumon.analysis.job import job, spread
from gpumon.analysis.job_findings import job_findings
from gpumon.analysis.reports import RankReport
from gpumon.analysis.types import Finding
from gpumon.session.frame import Frame
from gpumon.session.store import SessionStore
from gpumon.tui.styles import ASCII, UNICODE
from gpumon.tui.text_layout import plain, width
from gpumon.tui.view import View
from gpumon.tui.widgets.rank_lines import answer_of, rank_lines
from gpumon.tui.widgets.rank_rows import PeakHistory, ordered, rank_page
from gpumon.tui.widgets.rank_table import RankTable
from gpumon_agent import wire

GIB, MIB = 1 << 30, 1 << 20
LARGE, SMALL = (120, 40), (80, 24)
DDP = wire.Parallel(
    "ddp", 8, (40 * MIB, 24 * MIB), True, gradient_as_bucket_view=False, comm_hook="powerSGD_hook", comm_hook_bytes=MIB
)


def rank(number: int, world: int, *, local: int = 8, steps: int = 40, last: int = 100, **how: Any) -> Run:
    """A rank of a launcher's job, `local` of them a machine."""
    node = number // local
    extra = (number == 5) * 8 * GIB + (number % 7) * 20 * MIB
    made = Run(rank=number, world_size=world, pid=5000 + number + how.pop("later", 0), extra=extra)
    hello = {
        "host": f"box{node}", "node": str(node), "local_rank": number % local, "local_world_size": local,
        "run_id": "night", **how,
    }  # fmt: skip
    made.hello(**hello).model()
    made.events = [_spread(each) for each in made.events]
    return made.steps(last - steps + 1, steps).beat(last + 1).synced()


def _spread(received: wire.Received) -> wire.Received:
    event = received.event
    if isinstance(event, wire.Model):
        return wire.Received(received.source, received.unix_ns, _with(event, parallel=DDP), received.seq)
    return received


def _viewing(received: wire.Received) -> wire.Received:
    event = received.event
    if isinstance(event, wire.Model):
        views = msgspec.structs.replace(DDP, gradient_as_bucket_view=True)
        return wire.Received(received.source, received.unix_ns, _with(event, parallel=views), received.seq)
    return received


def _with(model: wire.Model, **changes: Any) -> wire.Model:
    return wire.Model(**{**{name: getattr(model, name) for name in model.__struct_fields__}, **changes})


def troubled() -> list[Run]:
    """Eight expected: 6 was never heard, 2 died, 3 lags, 4 was started anew, 1 failed."""
    runs = [rank(number, 8) for number in (0, 5, 7)]
    runs.append(rank(1, 8).goodbye("exception", 101, "backward", "RuntimeError: x"))
    follows = rank(2, 8)
    follows.t_ns += 300_000_000
    runs.append(follows.goodbye("lost", 101, "forward"))
    runs.append(rank(3, 8, last=60))
    runs.append(rank(4, 8, restarts=2))
    return runs


def frame_of(runs: list[Run]) -> Frame:
    store = SessionStore()
    for run in runs:
        for received in run.events:
            store.apply(received)
    newest = max(received.unix_ns for run in runs for received in run.events)
    return store.frame(newest)


def page_of(runs: list[Run], order: str = "rank", reverse: bool = False) -> Any:
    frame = frame_of(runs)
    return rank_page(View(frame, Reporter().report(frame)), PeakHistory(), order, reverse)


def test_each_rank_is_told_as_what_it_is() -> None:
    rows = {row.rank: row for row in page_of(troubled()).rows}
    states = {number: row.state for number, row in rows.items()}
    assert states == {0: "live", 1: "failed", 2: "dead", 3: "late", 4: "live", 5: "live", 6: "missing", 7: "live"}
    assert rows[4].restarts == 2
    assert rows[3].behind == 40


def test_a_rank_with_many_quiet_steps_is_not_late() -> None:
    """Its newest step that was read is long ago, but its heartbeat names the running one."""
    frame = frame_of([rank(0, 2), rank(1, 2, last=60).beat(100)])
    assert [(each.state, each.behind) for each in job(frame, [10.0, 10.0]).ranks] == [("live", 0), ("live", 1)]


def test_a_wide_terminal_has_the_peaks_of_160_steps() -> None:
    """As many as fit beside the labels on a full screen; each is kept for every rank."""
    page = page_of([rank(number, 2, steps=250, last=250) for number in range(2)])
    assert "Peak by rank and step, 91 to 250:" in plain(rank_lines(page, 0, 400, 40, UNICODE).lines)


def test_the_rank_under_the_cursor_says_what_became_of_it() -> None:
    page = page_of(troubled())
    said = {}
    for at, row in enumerate(page.rows):
        lines = plain(rank_lines(page, at, 120, 40, UNICODE).lines).splitlines()
        said[row.rank] = next((line.strip() for line in lines if line.startswith(f"  rank {row.rank}: ")), None)
    assert said[0] is said[4] is None
    assert said[1] == "rank 1: ended by an exception in backward, step 101 · RuntimeError: x"
    assert said[2] == "rank 2: the process is gone without a goodbye (killed?) in forward, step 101"
    assert said[3] == "rank 3: 40 steps behind the first rank: Enter shows its current phase"
    assert said[6] is not None
    assert "no message yet" in said[6]


@pytest.mark.parametrize(
    ("first", "said"),
    [
        ("exception", "ended by an exception in backward, step 101 · RuntimeError: x"),
        ("lost", "the process is gone without a goodbye (killed?) in backward, step 101"),
    ],
)
def test_of_a_job_that_ends_the_answer_names_the_rank_that_died_first(first: str, said: str) -> None:
    runs = [rank(number, 4) for number in range(4)]
    died = runs[2].goodbye(first, 101, "backward", "RuntimeError: x")
    clock = time.strftime("%H:%M:%S", time.localtime(died.events[-1].unix_ns / 1e9))
    for number in (0, 3):
        runs[number].t_ns = died.t_ns + 300_000_000
        runs[number].goodbye("signal", 101, "forward", "SIGTERM")
    frame = frame_of(runs)
    head, text, _ = parts(answer(frame, report(frame)))
    assert head == "ENDED · rank 2"
    assert text.startswith(f"{said}")
    assert text.endswith(f", at {clock}")


@pytest.mark.parametrize(
    ("behind", "pace", "state"), [(2, 0.1, "live"), (3, 0.1, "late"), (10, 10.0, "live"), (30, 10.0, "late")]
)
def test_three_steps_behind_are_late_from_two_seconds_on(behind: int, pace: float, state: str) -> None:
    frame = frame_of([rank(0, 2), rank(1, 2, last=100 - behind)])
    assert [each.state for each in job(frame, [pace, pace]).ranks] == ["live", state]


def test_deaths_that_nobody_can_tell_apart_have_no_order() -> None:
    runs = [rank(number, 2) for number in range(2)]
    died = runs[0].goodbye("lost", 101, "backward")
    runs[1].t_ns = died.t_ns + 100_000_000
    runs[1].goodbye("exception", 101, "forward", "RuntimeError: connection closed by peer")
    assert job(frame_of(runs)).first_to_die is None


def test_a_job_that_was_started_anew_and_one_that_finished_name_no_death() -> None:
    finished = [rank(number, 2).goodbye("finished", 101, "between") for number in range(2)]
    assert job(frame_of(finished)).first_to_die is None
    gone = rank(1, 2).goodbye("exception", 101, "backward")
    anew = rank(1, 2, steps=0, later=900, restarts=1, clock=wire.Clock(0, 1_790_000_000_000_000_001))
    assert job(frame_of([rank(0, 2), gone, anew])).first_to_die is None


def test_ranks_on_other_machines_are_not_missing() -> None:
    standing = job(frame_of([rank(number, 16) for number in range(7)]))
    assert (standing.missing, standing.elsewhere, standing.world_size) == ((7,), 8, 16)


def test_without_local_numbers_all_ranks_are_expected_on_the_one_machine() -> None:
    frame = frame_of([rank(number, 4, local_rank=None, local_world_size=None) for number in (0, 2)])
    assert job(frame).missing == (1, 3)


def test_a_single_process_misses_nobody() -> None:
    assert job(frame_of([Run().usual(5)])).missing == ()
    assert job(frame_of([rank(0, 1, local=1)])).missing == ()


def test_the_newer_process_of_a_rank_replaces_the_older() -> None:
    old = rank(1, 2, local=2).goodbye("signal", 101, "forward")
    new = rank(1, 2, local=2, steps=0, later=900, restarts=1, clock=wire.Clock(0, 1_790_000_000_000_000_001))
    standing = [each for each in job(frame_of([rank(0, 2, local=2), old, new])).ranks if each.rank == 1]
    assert [(each.replaced, each.restarts) for each in standing] == [(True, 0), (False, 1)]
    assert standing[0].state == "killed"


@pytest.mark.parametrize(("with_it", "named"), [(3, "ranks 0, 1, 2"), (4, "4 ranks")])
def test_three_ranks_with_a_finding_are_named_and_more_are_counted(with_it: int, named: str) -> None:
    runs = [rank(number, 8) for number in range(8)]
    leak = Finding("tensor-leak", "warning", 1, "a tensor is kept")
    reports = [RankReport(run.source, (), (leak,), None) for run in runs[:with_it]]
    assert [each.ranks for each in job_findings(frame_of(runs), reports)] == [named]


def test_median_worst_and_skew() -> None:
    apart = spread([10, None, 12, 30, 12])
    assert apart is not None
    assert (apart.median, apart.worst, apart.at, apart.skew) == (12, 30, 3, 1.5)
    assert spread([None, 5]) is None


@pytest.mark.parametrize("order", ["peak", "headroom", "step", "findings"])
def test_sorting_puts_the_worst_first_and_the_unknown_last(order: str) -> None:
    rows = page_of(troubled(), order).rows
    assert rows[-1].state == "missing"
    if order == "peak":
        assert rows[0].rank == 5
        assert [row.peak for row in rows[:-1]] == sorted((row.peak for row in rows[:-1]), reverse=True)
        assert ordered(rows, "peak", True)[-1].state == "missing"


def test_what_buckets_cost_is_said_once_for_the_job() -> None:
    text = plain(rank_lines(page_of([rank(number, 8) for number in range(8)]), 0, 120, 40, UNICODE).lines)
    assert "DDP: 2 buckets of 24.0 MiB to 40.0 MiB, 64.0 MiB a rank, 512.0 MiB on 8 together" in text
    assert "gradient_as_bucket_view=True would return 512.0 MiB" in text
    assert "communication hook powerSGD_hook, whose state keeps 8.00 MiB together" in text


def test_where_only_some_ranks_copy_their_gradients_those_are_named() -> None:
    runs = [rank(number, 8) for number in range(8)]
    for run in runs[:3]:
        run.events = [_viewing(each) for each in run.events]
    text = plain(rank_lines(page_of(runs), 0, 120, 40, UNICODE).lines)
    assert "gradient_as_bucket_view=True would return 320.0 MiB on ranks 3–7" in text


def test_figures_side_by_side_do_not_touch_however_large() -> None:
    runs = [rank(number, 2, local=2) for number in range(2)]
    figures = {
        "peak": 60 * MIB,
        "reserved": 70 * MIB,
        "slack": 9 * MIB,
        "headroom": 18_723 * MIB,
        "headroom_at_most": False,
    }
    page = page_of(runs)
    page = replace(page, rows=tuple(msgspec.structs.replace(row, **figures) for row in page.rows))
    lines = plain(rank_lines(page, 0, 120, 40, UNICODE).lines)
    assert " 18.3 GiB " in lines
    assert "18,723" not in lines


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII], ids=["unicode", "ascii"])
@pytest.mark.parametrize("count", [1, 8, 64])
@pytest.mark.parametrize("size", [(120, 40), (80, 24), (60, 12), (30, 5), (8, 3)], ids=str)
def test_no_line_is_too_wide_and_no_page_too_long(size, count, glyphs) -> None:
    runs = [rank(number, count, steps=3) for number in range(count)]
    page = page_of(runs)
    for cursor in (0, count - 1):
        lines = rank_lines(page, cursor, size[0], size[1], glyphs).lines
        assert len(lines) <= max(size[1], 7)
        if size[0] >= 60:
            assert all(width(line) <= size[0] for line in lines)
    if glyphs is ASCII:
        assert not set(plain(lines)) & set("▁▂▃▄▅▆▇█●◌■↻▸")


@pytest.fixture
def pressing(settled: Callable[..., Any]) -> Callable[..., Any]:
    def keys(*pressed: str) -> Callable[..., Any]:
        async def run(pilot: Pilot[Any]) -> None:
            await settled(pilot)
            for key in pressed:
                await pilot.press(key)
                await pilot.pause(0.1)
            await settled(pilot)

        return run

    return keys


@pytest.mark.parametrize("size", [LARGE, SMALL], ids=["120x40", "80x24"])
def test_64_ranks_on_eight_machines(snap_compare, app_of, size, pressing) -> None:
    runs = [rank(number, 64, steps=24) for number in range(64) if number != 42]
    assert snap_compare(app_of(*runs), terminal_size=size, run_before=pressing("2", "down", "down", "right"))


@pytest.mark.parametrize("size", [LARGE, SMALL], ids=["120x40", "80x24"])
def test_a_troubled_job(snap_compare, app_of, size, pressing) -> None:
    assert snap_compare(app_of(*troubled()), terminal_size=size, run_before=pressing("2", "o"))


async def test_enter_opens_the_rank_under_the_cursor_even_when_sorted(app_of, settled) -> None:
    app = app_of(*[rank(number, 8, steps=12) for number in range(8)])
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        await pilot.press("2", "o")  # by peak: rank 5 is the highest, and the cursor stays on rank 0
        await settled(pilot)
        for _ in range(8):
            await pilot.press("up")
        await pilot.press("enter")
        await settled(pilot)
        assert app.current_mode == "overview"
        assert app.view.rank.hello.rank == 5


async def test_of_two_ranks_too_only_the_shown_one_is_learned_from_in_full(app_of, settled, monkeypatch) -> None:
    asked, report_of = [], Reporter.report

    def noted(self: Reporter, frame: Frame, due: Any = None, shown: str | None = None) -> Any:
        asked.append((due, shown))
        return report_of(self, frame, due, shown)

    monkeypatch.setattr(Reporter, "report", noted)
    app = app_of(*(rank(number, 2) for number in range(2)))
    async with app.run_test(size=LARGE) as pilot:
        await settled(pilot)
        first, second = (each.source for each in app.view.frame.ranks)
        assert asked[-1] == (None, first)
        app.next_rank(1)
        await settled(pilot)
        assert asked[-1] == (None, second)


async def test_one_rank_heard_of_eight_has_the_screen_too_and_rank_3_is_shown_first(app_of, settled) -> None:
    app = app_of(rank(0, 8, steps=12))
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        await pilot.press("2")
        await settled(pilot)
        assert app.current_mode == "ranks"
    app = app_of(*[rank(number, 8, steps=12) for number in range(8)], rank=3)
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        assert app.view.rank.hello.rank == 3


def test_the_grid_says_what_it_is_sorted_by() -> None:
    page = page_of([rank(number, 48, steps=2) for number in range(48)], "slack", True)
    assert "by slack, reversed" in plain(rank_lines(page, 0, 120, 36, UNICODE).lines[:1])
    assert "by " not in plain(rank_lines(replace(page, order="rank", reverse=False), 0, 120, 36, UNICODE).lines[:1])


async def test_a_click_goes_to_a_rank_and_once_more_opens_it(app_of, settled) -> None:
    app = app_of(*[rank(number, 8) for number in range(8)])
    async with app.run_test(size=LARGE) as pilot:
        await settled(pilot)
        await pilot.press("2")
        await settled(pilot)
        table = app.screen.query_one(RankTable)
        at = next(y for y, row in enumerate(table._lines_rows) if row == 3)
        await pilot.click(RankTable, offset=(5, at))
        assert table.page.rows[table._at].rank == 3
        await pilot.press("o", "o")
        assert table.page.rows[table._at].rank == 3  # wherever another order puts it
        at = next(y for y, row in enumerate(table._lines_rows) if row == table._at)
        await pilot.click(RankTable, offset=(5, at))
        assert app.current_mode == "overview"
        assert app.view.rank.hello.rank == 3


def at_width(page: Any, room: int, cursor: int = 0, glyphs: Any = UNICODE) -> str:
    return plain(rank_lines(page, cursor, room, 40, glyphs).lines)


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII], ids=["unicode", "ascii"])
def test_80_columns_have_rank_state_peak_bar_and_answer(glyphs: Any) -> None:
    page = page_of([rank(number, 4, local=4) for number in range(4)])
    rows = tuple(
        msgspec.structs.replace(
            row, capacity=4 * (row.peak or 0), findings=3 * (row.rank == 1), worst="allocator-retries"
        )
        for row in page.rows
    )
    for room in (80, 120):
        shown = at_width(replace(page, rows=rows), room, glyphs=glyphs).splitlines()
        head = next(line for line in shown if " rank " in line and "state" in line)
        assert all(word in head for word in ("peak", "of capacity", "answer", "spread"))
        filled, free = glyphs.lines["allocated"], glyphs.lines["free"]
        of_ranks = shown[shown.index(head) + 1 :][:4]
        assert all("live" in line and filled * 4 + free * 10 in line for line in of_ranks)
        assert "allocator-retries" not in of_ranks[0]
        assert "allocator-retr" in of_ranks[1]
        assert "+2" in of_ranks[1]


def test_the_answer_of_a_rank_is_never_dropped() -> None:
    page = page_of([rank(number, 4, local=4) for number in range(4)])
    rows = tuple(msgspec.structs.replace(row, findings=1, worst="tensor-leak") for row in page.rows)
    for room in (40, 60, 80, 120, 200):
        assert at_width(replace(page, rows=rows), room).count("tensor-leak") == 4


def test_without_findings_the_answer_is_whether_it_fits() -> None:
    row = page_of([rank(0, 2), rank(1, 2)]).rows[0]
    assert answer_of(msgspec.structs.replace(row, findings=0, word="fits")) == ("fits", "good")
    assert answer_of(msgspec.structs.replace(row, findings=1, worst="x", critical=True)) == ("x", "bad")
    assert answer_of(msgspec.structs.replace(row, findings=2, worst="dominant-embedding")) == (
        "dominant-embed… +1",
        "warn",
    )
    assert answer_of(msgspec.structs.replace(row, findings=1, worst="dominant-embedding"))[0] == "dominant-embedding"


def test_heights_of_the_strip_start_at_0_and_its_title_says_so() -> None:
    page = page_of([rank(number, 2, local=2) for number in range(2)])
    half = replace(page, heat=tuple(tuple(GIB // (2 - at) for _ in row) for at, row in enumerate(page.heat)))
    shown = at_width(half, 120)
    assert "heights from 0 to 1.00 GiB" in shown
    assert "▄▄▄" in next(line for line in shown.splitlines() if line.startswith(" rank 0"))
    assert "███" in next(line for line in shown.splitlines() if line.startswith(" rank 1"))


async def test_a_number_goes_to_its_rank(app_of, settled) -> None:
    app = app_of(*[rank(number, 64, steps=3) for number in range(64)])
    async with app.run_test(size=LARGE) as pilot:
        await settled(pilot)
        await pilot.press("2")
        await settled(pilot)
        table = app.screen.query_one(RankTable)
        await pilot.press("slash", *"37")
        await pilot.pause()
        assert table.page.rows[table._at].rank == 37
        await pilot.press("enter")
        assert app.focused is table
        assert app.current_mode == "ranks"
        await pilot.press("slash", *"rank 5", "enter")
        await pilot.pause()
        assert table.page.rows[table._at].rank == 5
        await pilot.press("slash", *"99", "enter")
        await pilot.pause()
        assert table.page.rows[table._at].rank == 9, "the longest part that is a rank"
        assert [each.message for each in app._notifications] == ["There is no rank 99."]
        await pilot.press("e")
        await settled(pilot)
        assert "rank 9: peak " in "\n".join(strip.text for strip in app.screen._compositor.render_strips())
