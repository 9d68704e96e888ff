"""Figures that decide what a screen says: just on either side of each, so that another value is noticed."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from gpumon.analysis import Reporter
from gpumon.tui.styles import UNICODE
from gpumon.tui.text_layout import plain
from gpumon.tui.view import choose
from gpumon.tui.widgets.forecast_panel import outlook
from gpumon.tui.widgets.phase_table import PhaseRow, PhasesData, phase_lines, phases
from gpumon.tui.widgets.rank_heat import strips
from gpumon.tui.widgets.timeline import Point, TimelineData, timeline_lines
from gpumon_agent import wire

GIB = 1 << 30


def view_of(store):
    frame = store.frame(1_790_000_000_000_000_000 + 10**12)
    return choose(frame, Reporter().report(frame), None, None)


@pytest.mark.parametrize(("above", "role"), [(1.02, "line:allocated"), (1.05, "warn"), (1.09, "warn"), (1.15, "bad")])
def test_a_rank_s_peak_is_coloured_by_how_far_it_is_above_the_others(above: float, role: str) -> None:
    heat = [[100 * GIB], [100 * GIB], [round(above * 100 * GIB)]]
    assert strips(heat, 1, UNICODE)[2][0][1] == role


@pytest.mark.parametrize(("above", "sign"), [(1.009, "▁"), (1.015, "█")])
def test_peaks_within_a_hundredth_are_drawn_alike(above: float, sign: str) -> None:
    assert strips([[100 * GIB], [round(above * 100 * GIB)]], 1, UNICODE)[1][0][0] == sign


@pytest.mark.parametrize(("used", "shown"), [(34, False), (36, True), (60, True)])
def test_the_plot_reaches_up_to_the_capacity_where_a_third_of_it_is_used(used: int, shown: bool) -> None:
    points = tuple(Point(step, used * GIB, used * GIB, None) for step in range(20))
    lines = timeline_lines(TimelineData(points, 200, 100 * GIB, False), 100, 12, UNICODE, "title")
    assert ("100.0┤" in plain(lines)) is shown


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
