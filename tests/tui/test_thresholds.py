"""Figures that decide what a screen says: just on either side of each, so that another value is noticed."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from msgspec.structs import replace

from gpumon.analysis import Reporter
from gpumon.analysis.types import Breakdown, Growth, HighestStep, Peak
from gpumon.session.store import SessionStore
from gpumon.tui.app import MonitorApp
from gpumon.tui.ingest import take_events
from gpumon.tui.plot import columns
from gpumon.tui.styles import UNICODE
from gpumon.tui.text_layout import plain
from gpumon.tui.view import choose
from gpumon.tui.widgets.device_bar import Bars, bars, device_lines
from gpumon.tui.widgets.forecast_panel import outlook
from gpumon.tui.widgets.growth_plot import Grown, growth_lines
from gpumon.tui.widgets.phase_table import PhaseRow, PhasesData, phase_lines, phases
from gpumon.tui.widgets.rank_heat import strips
from gpumon.tui.widgets.timeline import Point, Series, TimelineData, timeline_lines
from gpumon_agent import wire

GIB = 1 << 30


def view_of(store):
    frame = store.frame(1_790_000_000_000_000_000 + 10**12)
    return choose(frame, Reporter().report(frame), None, None)


@pytest.mark.parametrize(("above", "role"), [(1.02, "line:allocated"), (1.05, "warn"), (1.09, "warn"), (1.15, "bad")])
def test_a_rank_s_peak_is_coloured_by_how_far_it_is_above_the_others(above: float, role: str) -> None:
    heat = [[100 * GIB], [100 * GIB], [round(above * 100 * GIB)]]
    assert strips(heat, 1, UNICODE)[2][0][1] == role


@pytest.mark.parametrize(("share", "sign"), [(1.0, "█"), (0.99, "█"), (0.5, "▄"), (0.47, "▄"), (0.25, "▂"), (0.0, "▁")])
def test_a_peak_is_as_high_as_its_share_of_the_highest(share: float, sign: str) -> None:
    assert strips([[100 * GIB], [round(share * 100 * GIB)]], 1, UNICODE)[1][0][0] == sign
    assert strips([[0], [0]], 1, UNICODE)[1][0][0] == "▁"


@pytest.mark.parametrize(
    ("steps", "role"), [(999, "bad"), (1_001, "warn"), (9_999, "warn"), (10_001, "dim")]
)  # fmt: skip
def test_a_thousand_steps_before_its_end_a_leak_is_urgent_and_before_ten_thousand_a_warning(
    steps: int, role: str
) -> None:
    """At a step a second: a quarter of an hour is left to stop it, or three hours to look at it."""
    grows = Growth("allocated", True, 40, GIB, GIB, GIB)
    ((*_, (said, found)),) = growth_lines(Grown("cuda:0", (grows,), steps), 200, 9, UNICODE, "")[1:]
    assert "out of memory in about" in said
    assert found == role


@pytest.mark.parametrize(("used", "shown"), [(34, False), (36, True), (60, True)])
def test_plot_and_bar_reach_up_to_the_capacity_where_a_third_of_it_is_used(used: int, shown: bool) -> None:
    points = tuple(Point(step, used * GIB, used * GIB, None, step) for step in range(20))
    lines = timeline_lines(TimelineData(points, 200, 100 * GIB, False), 100, 12, UNICODE, "title")
    assert ("100.0┤" in plain(lines)) is shown
    assert ("⁄⁄" not in device_text(now=Breakdown(weights=used * GIB, free=(100 - used) * GIB))) is shown


@pytest.mark.parametrize(("forwards", "name"), [(7, "eval ×7"), (8, "rollout ×8")])
def test_eight_forwards_without_a_graph_are_a_rollout(forwards: int, name: str) -> None:
    row = PhaseRow(wire.EVAL, 0, GIB, 2 * GIB, GIB, 1, wire.TRAINS, forwards)
    assert name in plain(phase_lines(PhasesData(1, False, (row,), None, None), 80, 9, UNICODE, ""))


@pytest.mark.parametrize(("step_s", "running"), [(0.4, False), (0.6, True)])
def test_only_a_slow_step_is_shown_as_it_goes(store_of, new_run, step_s: float, running: bool) -> None:
    run = new_run().usual(3)
    took = round(step_s * 1e9)
    run.say(wire.Phase(12_432, "forward", 0, 0, run.t_ns, took, GIB, GIB), numbered=True)
    run.say(wire.Step(12_432, run.t_ns, took, phases=1), numbered=True)
    run.say(wire.Phase(12_433, "forward", 0, 0, run.t_ns, took, GIB, GIB), numbered=True)
    assert phases(view_of(store_of(run))).running is running


@pytest.mark.parametrize(("after", "told"), [(90, True), (110, False)])
def test_another_regime_is_told_for_a_hundred_steps(store_of, new_run, after: int, told: bool) -> None:
    view = view_of(store_of(new_run().usual(20)))
    newest = view.rank.steps[-1].step
    report = view.report
    device = msgspec.structs.replace(report.devices[0], regimes=(newest - after,))
    report = msgspec.structs.replace(report, devices=(device,))
    shown = outlook(replace(view, reports=(report,), report=report, device=device))
    assert (shown.regime is not None) is told


def device_text(**known) -> str:
    none = dict.fromkeys(("now", "stale_s", "peak", "composed", "forecast", "word", "rss"))
    shown = Bars(**{**none, "name": "cuda:0", "capacity": 100 * GIB, "learning": False, **known})
    return plain(device_lines(shown, 120, 9, UNICODE, ""))


@pytest.mark.parametrize(("part", "listed"), [(3_000, True), (6_000, False)])
def test_the_legend_leaves_out_lines_below_a_4096th_of_what_is_reserved(part: int, listed: bool) -> None:
    assert ("buffers" in device_text(now=Breakdown(weights=60 * GIB, buffers=60 * GIB // part))) is listed


@pytest.mark.parametrize(("part", "listed"), [(400, True), (700, False)])
def test_what_was_alive_at_a_peak_leaves_out_lines_below_a_500th_of_it(part: int, listed: bool) -> None:
    peak = Peak(9, "backward", 0, 60 * GIB, Breakdown(weights=60 * GIB, buffers=60 * GIB // part))
    assert ("buffers" in device_text(peak=peak, composed=peak)) is listed


@pytest.mark.parametrize(("above", "told"), [(1.005, False), (1.02, True)])
def test_the_highest_peak_is_told_where_it_is_a_hundredth_above_the_newest(above: float, told: bool) -> None:
    text = device_text(peak=Peak(9, "backward", 0, 50 * GIB), highest=HighestStep(3, round(above * 50 * GIB)))
    assert ("highest" in text) is told


def test_a_holder_s_name_has_32_cells_in_the_legend() -> None:
    holding = Breakdown(weights=GIB, variables=GIB)
    assert f"in {'x' * 32}" in device_text(now=holding, holders=("x" * 32,))
    assert f"in {'x' * 31}…" in device_text(now=holding, holders=("x" * 33,))


@pytest.mark.parametrize(("age_s", "told"), [(2.9, None), (4.0, 4)])
def test_the_driver_s_figures_tell_their_age_after_three_seconds(store_of, new_run, age_s: float, told: int) -> None:
    view = view_of(store_of(new_run().usual(20)))
    device = msgspec.structs.replace(view.device, make_ledger_age=lambda: age_s)
    assert bars(replace(view, device=device)).stale_s == told


def test_a_reading_of_the_device_counts_for_the_steps_half_a_second_before_and_three_after(store_of, new_run) -> None:
    run = new_run().hello().steps(0, 10).host().steps(10, 15)  # a step every 312 ms
    points = Series().follow(view_of(store_of(run)).rank, 0, run.uuid)
    assert [point.step for point in points if point.device is not None] == [8, 9, *range(10, 19)]


def test_ten_steps_fill_the_timeline_and_five_fill_half() -> None:
    for count in (5, 10):
        made = columns([(step, step, 1) for step in range(count)], 0, count - 1, 180)
        assert len(made) == pytest.approx(180 * count / 10, abs=4)


def test_of_more_than_16_ranks_a_part_is_analysed_at_a_time_at_least_a_quarter(store_of, new_run) -> None:
    frame = store_of(*(new_run(rank=n, pid=n).hello() for n in range(128))).frame(0)
    due = [MonitorApp()._due(replace(frame, ranks=frame.ranks[:count])) for count in (16, 20, 128)]
    assert [each and len(each - {frame.ranks[0].source}) for each in due] == [None, 10, 32]


def test_the_viewer_keeps_its_newest_200_messages_and_2240_steps_at_least_280_of_each_rank(new_run) -> None:
    app = MonitorApp()
    for number in range(250):
        app.say(str(number))
    assert [each.text for each in app._said] == [str(number) for number in range(50, 250)]
    for ranks, steps, kept in ((1, 2500, 2240), (10, 300, 280)):
        app = MonitorApp()
        for run in [new_run(rank=n, pid=n).hello() for n in range(ranks)]:
            for step in range(steps):
                run.say(wire.Step(step, step, 1), numbered=True)
            for received in run.events:
                app._store.apply(received)
        assert {len(rank.steps) for rank in app._store.frame(0).ranks} == {kept}


async def test_keys_work_while_a_long_past_is_taken_in(new_run) -> None:
    run = new_run().hello()
    for step in range(3000):
        run.say(wire.Step(step, step, 1), numbered=True)
    store, taken = SessionStore(), []

    async def past():
        for received in run.events:
            yield received

    async def key() -> None:
        taken.append(store.frame(0).ranks[0].steps[-1].step)

    async with asyncio.TaskGroup() as group:
        group.create_task(take_events(past(), store, lambda: None))
        group.create_task(key())
    assert taken == [510]  # of 512 events the first is the greeting
