"""The pure part of the screen: lines from slices, without an app."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec
import pytest
from msgspec.structs import replace
from rich.segment import Segment
from rich.style import Style

from gpumon.analysis import Reporter
from gpumon.analysis.job import ending
from gpumon.analysis.types import Breakdown, Finding, Forecast
from gpumon.tui.glossary import TERMS
from gpumon.tui.plot import Curve, axis_top, columns, plot
from gpumon.tui.styles import ANSI, ASCII, DARK, LIGHT, UNICODE
from gpumon.tui.text_layout import cells, clip, fit, flow, in_ascii, plain, spread, width
from gpumon.tui.view import choose
from gpumon.tui.widgets.device_bar import ORDER, bar, bars, device_lines, sums
from gpumon.tui.widgets.findings_strip import finding_lines, findings
from gpumon.tui.widgets.forecast_panel import ForecastData, forecast_lines
from gpumon.tui.widgets.header import header_lines, heading
from gpumon.tui.widgets.host_line import host_facts, host_lines
from gpumon.tui.widgets.panel import Panel, joined
from gpumon.tui.widgets.phase_table import PhaseRow, PhasesData, fold, phase_lines, phases
from gpumon.tui.widgets.timeline import Point, Series, TimelineData, timeline_lines
from gpumon_agent import wire

GIB = 1 << 30


def view_of(store):
    frame = store.frame(1_790_000_000_000_000_000 + 10**12)
    return choose(frame, Reporter().report(frame), None, None)


# ------------------------------------------------------------------------------------------------------------- cells


def test_clipped_text_never_exceeds_its_room():
    for text in ("plain", "内存分析工具", "e\u0301mile", "🚀🚀🚀"):
        for room in range(10):
            assert cells(clip(text, room)) <= room


def test_a_fitted_line_never_exceeds_its_room():
    line = (("step ", "dim"), ("内存分析", "strong"), (" tail", "dim"))
    assert all(width(fit(line, room)) <= room for room in range(20))


def test_where_both_ends_do_not_fit_the_right_one_goes():
    assert plain([spread([("left", "")], [("right", "")], 9)]) == "left"
    assert plain([spread([("left", "")], [("right", "")], 12)]) == "left   right"


def test_in_ascii_a_line_has_as_many_cells():
    text = "1.2 GiB ± 0.3 · 4×8 → 深い.py …"
    assert in_ascii(text).isascii()
    assert width([(in_ascii(text), "")]) == width([(text, "")])


def test_flowing_items_are_never_cut_in_two():
    lines = flow([(("alpha", ""),), (("beta", ""),), (("gamma", ""),)], 12)
    assert plain(lines) == "alpha  beta\ngamma"


# -------------------------------------------------------------------------------------------------------------- plot


def in_columns(values: Sequence[int | None], first: int, count: int) -> list[int | None]:
    steps = [(first + at, first + at, value) for at, value in enumerate(values)]
    return columns(steps, first, first + len(values) - 1, count)


def test_a_single_tall_step_keeps_its_height_at_a_wide_span():
    values = [10] * 2000
    values[1234] = 99
    assert max(v for v in in_columns(values, 0, 100) if v is not None) == 99


def test_columns_stay_where_they_are_as_steps_come():
    values = list(range(1000))
    before = in_columns(values[:900], 0, 100)
    after = in_columns(values[9:909], 9, 100)
    assert set(after[1:-1]) <= set(before)


def test_columns_are_never_more_than_asked_for():
    for count in (1, 7, 50):
        for many in (1, 6, 49, 50, 51, 333):
            for first in (0, 3, 17):
                assert len(in_columns(list(range(many)), first, count)) <= count


def test_a_step_with_quiet_ones_before_it_is_as_wide_as_they_are():
    """Only their highest peak is known."""
    assert columns([(0, 0, 1), (1, 6, 5), (7, 7, 2)], 0, 7, 16) == [1, 5, 5, 5, 5, 5, 5, 2]
    assert columns([(0, 0, 1), (1, 39, 5)], 20, 39, 10) == [5] * 10  # those that are shown


@pytest.mark.parametrize(
    ("highest", "top", "half"),
    [
        (GIB, "1", "0.5"), (GIB + 1, "1.2", "0.6"), (round(6.6 * GIB), "8", "4"), (39 * GIB, "40", "20"),
        (500 << 20, "500", "250"), (700 << 20, "800", "400"), (1000 << 20, "1000", "500"), (1 << 20, "1", "0.5"),
    ],
)  # fmt: skip
def test_the_axis_ends_at_a_round_number(highest: int, top: str, half: str) -> None:
    assert axis_top(highest)[1:] == (top, half)
    assert axis_top(highest)[0] >= highest


@pytest.mark.parametrize(("capacity", "half"), [(39.4, "20"), (80, "40"), (23.6, "12"), (11.9, "6"), (15.8, "8")])
def test_an_axis_to_the_capacity_has_a_round_number_in_its_middle(capacity: float, half: str) -> None:
    points = tuple(Point(step, round(capacity / 2 * GIB), None, None, step) for step in range(40))
    shown = plain(timeline_lines(TimelineData(points, 200, round(capacity * GIB), False), 80, 14, UNICODE, ""))
    ticks = {at: line.partition("┤")[0].strip() for at, line in enumerate(shown.splitlines()[1:-1]) if "┤" in line}
    assert list(ticks.values()) == [ticks[0], half, "0"]
    assert list(ticks) == [0, 6, 11]


def test_what_is_kept_is_drawn_on_for_a_fourth_of_the_steps() -> None:
    points = tuple(Point(step, (10 + step) * GIB, 40 * GIB, None, step) for step in range(40))
    history = TimelineData(points, 200, 60 * GIB, False, (), GIB, "full at 02:41")
    shown = plain(timeline_lines(history, 120, 14, UNICODE, "")).splitlines()
    assert shown[-1].rstrip().endswith("full at 02:41")
    ahead = [row[95:] for row in shown[1:-1]]
    assert any(char not in " ╌⠉" for row in ahead for char in row)
    area = max(row.rfind("⣿") for row in shown[1:-1]) - 6
    whole = max(len(row.rstrip("╌ ")) for row in shown[1:-1]) - 7
    assert area / whole == pytest.approx(40 / 50, abs=0.02)
    calm = plain(timeline_lines(TimelineData(points, 200, 60 * GIB, False), 120, 14, UNICODE, ""))
    assert calm.splitlines()[-1].rstrip().endswith("39")


def test_the_curve_of_a_step_gives_each_phase_room_for_its_short_name() -> None:
    rows = tuple(
        PhaseRow(name, 0, start * GIB, peak * GIB, end * GIB, ns, 0)
        for name, start, peak, end, ns in (
            (wire.BETWEEN, 1, 1, 1, 1), ("forward", 1, 5, 4, 1), ("backward", 4, 8, 2, 1), ("optimizer", 2, 4, 2, 97)
        )
    )  # fmt: skip
    data = PhasesData(1, False, rows, None, None)
    lines = plain(phase_lines(data, 55, 11, UNICODE, "")).splitlines()
    assert [row.rstrip() for row in lines[-4:]] == [
        "    8.00┤             ⢀⣴⣧",
        "        │        ⣠⣷⣶⣤⣴⣿⣿⣿⣷⡀       ⣀⣀⣀⣀⣤⣤⣤⣤⣄⣀⣀⣀⡀",
        "       0┤⣤⣤⣤⣤⣤⣤⣤⣾⣿⣿⣿⣿⣿⣿⣿⣿⣿⣷⣶⣶⣾⣿⣿⣿⣿⣿⣿⣿⣿⣿⣿⣿⣿⣿⣿⣿⣿⣿⣿⣿⣿⣷⣶⣶",
        "         │data │fwd  │bwd  │optimizer",
    ]
    assert "┤" not in plain(phase_lines(data, 55, 10, UNICODE, ""))  # 3 rows show nothing
    assert "┤" in plain(phase_lines(data, 40, 11, UNICODE, ""))
    assert "┤" not in plain(phase_lines(data, 39, 11, UNICODE, ""))


@pytest.mark.parametrize(("lowest", "area"), [(8, True), (9.5, False)])
def test_a_step_in_which_little_moves_is_a_line(lowest: float, area: bool) -> None:
    names = wire.BETWEEN, "forward", "backward", "optimizer"
    rows = tuple(PhaseRow(name, 0, round(lowest * GIB), 10 * GIB, round(lowest * GIB), 1, 0) for name in names)
    *_, last, _ = plain(phase_lines(PhasesData(1, False, rows, None, None), 55, 14, UNICODE, "")).splitlines()
    assert bool(last.partition("┤")[2].strip()) is area


def test_where_the_allocator_counts_nothing_resident_memory_is_drawn() -> None:
    points = tuple(Point(step, (100 + step) << 20, None, None, step) for step in range(40))
    shown = plain(timeline_lines(TimelineData(points, 200, None, False, resident=True), 80, 12, UNICODE, ""))
    assert "⣿ resident memory" in shown
    assert "reserved" not in shown
    assert "160┤" in shown
    assert "MiB · --track-cpu counts tensors" in shown


def test_a_process_on_the_cpu_has_its_resident_memory_in_the_plot(store_of, new_run, app_of) -> None:
    run = new_run().hello(devices=(wire.Device(0, "cpu", "cpu", None, None),), backend="cpu")
    for step in range(4):
        run.say(wire.Phase(step, "forward", 0, 0, run.t_ns, 1, rss=(300 + step) << 20), numbered=True)
        run.say(wire.Step(step, run.t_ns, 1, phases=1), numbered=True)
    points = Series().follow(view_of(store_of(run)).rank, 0, None)
    assert [point.rss for point in points] == [(300 + step) << 20 for step in range(4)]
    assert points[0].allocated_peak is None


def dots(peaks: Sequence[int]) -> int:
    points = tuple(Point(step, peak, 110, None, step) for step, peak in enumerate(peaks))
    shown = plain(timeline_lines(TimelineData(points, 200, None, False), 80, 12, UNICODE, ""))
    return sum(0x2800 < ord(char) <= 0x28FF for char in shown)


def test_a_peak_that_stays_the_same_is_a_line_and_one_that_moves_an_area() -> None:
    assert dots([91, 100] * 20) < dots([89, 100] * 20) / 3


def test_a_few_low_peaks_such_as_the_first_steps_make_no_area_of_the_others() -> None:
    assert dots([10] * 4 + [100] * 36) < dots([10] * 5 + [100] * 35) / 3


def test_unknown_steps_leave_a_gap():
    lines = plot([Curve("x", (4, 4, None, None, 4, 4), area=True)], 4, 3, 1, braille=True, ceiling=None)
    assert plain(lines) == "⣿ ⣿"


def test_a_value_at_the_top_reaches_the_upper_edge_and_zero_nothing():
    lines = plot([Curve("x", (8, 8, 0, 0), area=True)], 8, 2, 2, braille=True, ceiling=None)
    assert plain(lines) == "⣿\n⣿"


def test_the_plot_without_braille_uses_ascii_only():
    curves = [Curve("a", (1, 2, 3, 4), area=True), Curve("b", (4, 4, 4, 4), sign="-")]
    assert plain(plot(curves, 5, 2, 4, braille=False, ceiling=5)).isascii()


@pytest.mark.parametrize("top", [5, 5 * 64, 5 << 50])
def test_a_plot_far_above_its_ceiling_has_the_ceiling_at_its_foot(top: int) -> None:
    lines = plot([Curve("x", (top, top, top, top))], top, 2, 4, braille=True, ceiling=5)
    assert len(lines) == 4
    assert plain(lines[3:] if top > 5 else lines[:1]).strip() in ("╌╌", "⠉⠉")


@pytest.mark.parametrize(("glyphs", "mark", "cell"), [(UNICODE, "┊", 20), (ASCII, ":", 20)])
def test_where_another_regime_began_an_upright_mark_stands_above_the_curve(glyphs, mark, cell):
    points = tuple(Point(step, (1 if step < 60 else 2) * GIB, 3 * GIB, None, step) for step in range(20, 120))
    history = TimelineData(points, 100, 5 * GIB, False, (60,))
    shown = plain(timeline_lines(history, 60, 8, glyphs, "")).splitlines()
    assert {row.index(mark) for row in shown[1:-1] if mark in row} == {7 + cell}
    assert f"{mark} new regime" in shown[-1]
    assert all(
        mark not in row for row in plain(timeline_lines(TimelineData(points, 100, 5 * GIB, False), 60, 8, glyphs, ""))
    )


# --------------------------------------------------------------------------------------------------------------- bar


def test_the_bar_is_as_long_as_its_room_and_in_proportion():
    line = bar([("weights", 25), ("optimizer", 50), ("free", 25)], 100, 80, UNICODE)
    assert [len(text) for text, _ in line] == [20, 40, 20]


def test_many_small_lines_never_overflow_the_bar():
    shown = [(name, 1000 + i) for i, name in enumerate(ORDER)]
    for room in range(1, 60):
        assert width(bar(shown, sum(v for _, v in shown), room, UNICODE)) == room


def test_every_category_has_a_glyph_of_its_own_in_every_set():
    for glyphs in (UNICODE, ASCII):
        signs = [glyphs.lines[name] for name in ORDER]
        assert len(set(signs)) == len(ORDER)
        assert all(cells(sign) == 1 for sign in glyphs.lines.values())
    assert all(sign.isascii() for sign in ASCII.lines.values())


def test_every_category_has_a_colour_in_every_palette():
    for palette in (DARK, LIGHT, ANSI):
        assert set(ORDER) <= set(palette.lines)


def test_the_equations_of_the_device_are_exact(store_of, new_run):
    ledger = view_of(store_of(new_run().usual(20))).device.ledger
    equations = sums(ledger)
    assert [text.split()[0] for text in equations] == ["allocated", "reserved", "total"]
    assert f"reserved {ledger.reserved:,} B = allocated {ledger.allocated:,} + cached {ledger.slack:,}" in equations


def test_an_equation_that_does_not_add_up_is_not_written():
    assert sums(Breakdown(weights=1, allocated=3, reserved=3)) == ["reserved 3 B = allocated 3"]


@pytest.mark.parametrize("room", [20, 46, 80, 120])
def test_the_device_panel_keeps_its_size(store_of, new_run, room):
    shown = bars(view_of(store_of(new_run().usual(20))))
    for height in (1, 2, 3, 5):
        lines = device_lines(shown, room, height, UNICODE, "title")
        assert len(lines) <= height
        assert all(width(line) <= room for line in lines)


# ------------------------------------------------------------------------------------------------------------ tables


def test_phases_tile_the_step(store_of, new_run):
    rows = phases(view_of(store_of(new_run().usual(20)))).rows
    assert [r.phase for r in rows] == ["between", "forward", "backward", "optimizer"]
    assert all(later.start == earlier.end for earlier, later in pairwise(rows))


def test_a_step_whose_figures_were_not_read_gives_way_to_one_that_has_them(store_of, new_run):
    run = new_run().usual(20)
    run.say(wire.Phase(12_432, "forward", 0, 0, run.t_ns, 1), numbered=True)
    run.say(wire.Step(12_432, run.t_ns, 1, phases=1), numbered=True)
    shown = phases(view_of(store_of(run)))
    assert shown.step == 12_431
    assert all(row.end is not None for row in shown.rows)


def test_columns_drop_from_the_least_wanted_on(store_of, new_run):
    shown = phases(view_of(store_of(new_run().usual(20))))
    heads = [phase_lines(shown, room, 12, UNICODE, "")[0] for room in (60, 46, 38, 30, 22)]
    words = [[word for word in ("start", "peak", "end", "Δ", "time") if word in plain([head])] for head in heads]
    assert words == [
        ["start", "peak", "end", "Δ", "time"],
        ["start", "peak", "end", "Δ"],
        ["start", "peak", "end"],
        ["peak", "end"],
        ["peak"],
    ]


@pytest.mark.parametrize("quiet", [0, 7])
def test_one_step_in_so_many_is_read_only_after_quiet_steps(store_of, new_run, quiet):
    run = new_run().usual(20)
    run.say(wire.Heartbeat(run.t_ns, 12_433, "between", run.t_ns, sample_every=40))
    run.say(wire.Phase(12_432, "forward", 0, 0, run.t_ns, 1, GIB // 2, GIB), numbered=True)
    run.say(wire.Step(12_432, run.t_ns, 1, phases=1, quiet=quiet), numbered=True)
    lines = plain(phase_lines(phases(view_of(store_of(run))), 80, 9, UNICODE, ""))
    assert ("one step in 40 is read" in lines) == bool(quiet)


def test_many_micro_batches_are_folded_by_phase(store_of, new_run):
    rows = phases(view_of(store_of(new_run().usual(20)))).rows
    folded = fold(rows * 4)
    assert [r.count for r in folded] == [4, 4, 4, 4]
    assert "forward ×4" in plain(phase_lines(phases_with(rows * 4), 60, 8, UNICODE, ""))


@pytest.mark.parametrize("trains", [True, False])
def test_a_rollout_is_one_line_that_counts_what_was_merged(store_of, new_run, trains):
    run = new_run().usual(20)
    flag = wire.TRAINS * trains
    windows = [("eval", at, GIB + at, flag * (at == 0)) for at in range(128)]
    windows += [("eval", 299, 3 * GIB, wire.MERGED), ("forward", 0, GIB, 0)]
    for name, index, peak, flags in windows:
        said = wire.Phase(12_432, name, index, 0, run.t_ns, 1, GIB // 2, peak, flags=flags)
        run.say(said, numbered=True)
    run.say(wire.Step(12_432, run.t_ns, 1, phases=len(windows)), numbered=True)
    lines = plain(phase_lines(phases(view_of(store_of(run))), 80, 9, UNICODE, "")).splitlines()
    line = next(each for each in lines if "eval" in each or "rollout" in each)
    assert line.split()[:2] == ["rollout" if trains else "eval", "×300"]
    assert "3.00" in line


def phases_with(rows):

    return PhasesData(1, False, tuple(rows), None, None)


def test_the_series_takes_each_step_once(store_of, new_run):
    run = new_run().hello().steps(0, 30)
    store = store_of(run)
    series = Series()
    first = list(series.follow(view_of(store).rank, 0, run.uuid))
    assert series.follow(view_of(store).rank, 0, run.uuid) == first
    run.events = []
    for received in run.steps(30, 5).events:
        store.apply(received)
    assert [p.step for p in series.follow(view_of(store).rank, 0, run.uuid)] == list(range(35))


def test_the_series_begins_anew_when_the_past_arrives_late(store_of, new_run):
    run = new_run(seq=1000).hello().steps(100, 3)
    store, series = store_of(run), Series()
    series.follow(view_of(store).rank, 0, run.uuid)
    past = new_run().hello().steps(90, 10, replayed=True)
    for received in past.events:
        store.apply(received)
    assert [p.step for p in series.follow(view_of(store).rank, 0, run.uuid)] == list(range(90, 103))


# ------------------------------------------------------------------------------------------------------------- words


def test_every_word_a_panel_uses_is_explained():
    kinds = [Panel]
    for kind in kinds:
        kinds += kind.__subclasses__()
        assert set(kind.TERMS) <= set(TERMS), kind


def test_until_memory_is_full_steps_and_time_are_said_where_there_is_room():
    forecast = Forecast(
        9 * GIB, 9 * GIB, 9 * GIB, "backward", GIB, 0.0, 231, None, 5, steps_to_oom_low=198, steps_to_oom_high=270
    )
    slice_ = ForecastData(forecast, 10 * GIB, ended=False, left="3 m 05 s")
    said = (
        (72, "trend     rising: full in about 231 steps (198–270), 3 m 05 s"),
        (60, "trend     full in 231 steps (198–270), 3 m 05 s"),
        (45, "trend     full in 231 steps (198–270)"),
        (34, "full in   231 steps (198–270)"),
        (28, "trend    full in 231 steps"),
    )
    for room, text in said:
        lines = ["".join(text for text, _ in line) for line in forecast_lines(slice_, room, 9, UNICODE, "strong")]
        assert next(line for line in lines if "231" in line).strip() == text


def test_a_batch_that_cannot_fit_is_the_verdict_whatever_the_usual_ones_need():
    forecast = Forecast(GIB, GIB, GIB, "backward", 9 * GIB, 0.0, None, 5, 5, verdict=wire.FITS)
    for verdict, said in ((wire.OOM_AHEAD, "OOM ahead"), (wire.FITS, "fits"), (None, "fits")):
        now = verdict and wire.Outlook(60, 0, 1, 20 * GIB, 0, 0, "backward", verdict, -10 * GIB)
        data = ForecastData(forecast, 10 * GIB, ended=False, now=now)
        assert plain(forecast_lines(data, 60, 9, UNICODE, "")[:1]).endswith(f" {said}")


@pytest.mark.parametrize(
    ("headroom", "room", "said"),
    [
        (None, 60, "n/a (no matching reading of the driver)"),
        (None, 38, "n/a (driver not read)"),
        (9 * GIB, 60, "at most 9.00 GiB (no reading of the driver)"),
        (9 * GIB, 48, "at most 9.00 GiB (driver not read)"),
        (9 * GIB, 38, "at most 9.00 GiB"),
    ],
)
def test_why_the_headroom_is_no_figure_is_said_as_fully_as_there_is_room(headroom, room, said):
    forecast = Forecast(
        GIB, GIB, GIB, "backward", headroom, 0.0, None, None, 5, headroom_at_most=headroom is not None
    )  # fmt: skip
    lines = forecast_lines(ForecastData(forecast, 10 * GIB, ended=False), room, 9, UNICODE, "")
    assert next(line for line in plain(lines).splitlines() if "headroom" in line).endswith(f" {said}")


@pytest.mark.parametrize(("factor", "said"), [(99.94, "up to ×99.9"), (100.0, "up to ×100 and more")])
def test_a_batch_a_hundred_times_larger_is_enough(factor: float, said: str) -> None:
    forecast = Forecast(9 * GIB, 9 * GIB, 9 * GIB, "backward", GIB, 0.0, None, factor, 5)
    data = ForecastData(forecast, 10 * GIB, ended=False)
    assert f"{said} the present one" in plain(forecast_lines(data, 60, 9, UNICODE, ""))


@pytest.mark.parametrize(
    ("steps", "said", "role"),
    [
        (999, "999 steps (900–1,100)", "bad"),
        (1_000, "about 1,000 steps", "warn"),
        (4_219_577, "about 4,200,000 steps", "warn"),
    ],
)
def test_a_far_end_has_two_digits_and_is_no_alarm(steps: int, said: str, role: str) -> None:
    forecast = Forecast(
        9 * GIB, 9 * GIB, 9 * GIB, "backward", GIB, 0.0, steps, None, 5, steps_to_oom_low=900, steps_to_oom_high=1_100
    )
    lines = forecast_lines(ForecastData(forecast, 10 * GIB, ended=False), 60, 9, UNICODE, "")
    (text, found) = next(span for line in lines for span in line if "full in" in span[0])
    assert (text.removeprefix("rising: full in ").removeprefix("about ").removeprefix("full in "), found) in (
        (said, role), (said.removeprefix("about "), role)
    )  # fmt: skip


@pytest.mark.parametrize("room", [33, 36, 40, 60])
def test_the_next_peak_s_interval_is_not_cut(room):
    forecast = Forecast(276 << 20, 255 << 20, 300 << 20, "backward", GIB, 0.0, None, None, 5)
    slice_ = ForecastData(forecast, 10 * GIB, ended=False)
    lines = ["".join(text for text, _ in line) for line in forecast_lines(slice_, room, 9, UNICODE, "strong")]
    assert "276.0 MiB (255.0–300.0)" in lines[1]
    assert lines[2].index("1.00 GiB") == lines[1].index("276.0")


def test_the_end_says_reason_phase_and_step(store_of, new_run):
    run = new_run().usual(5).goodbye("signal", 77, "backward", "SIGTERM")
    assert ending(view_of(store_of(run)).rank) == "ended by a signal in backward, step 77 · SIGTERM"


def test_the_header_keeps_the_name_and_the_state_at_any_width(store_of, new_run):
    head = heading(view_of(store_of(new_run().usual(5).goodbye("finished", 5, "optimizer"))))
    for room in range(18, 140):
        (line, *_) = header_lines(head, room, UNICODE)
        assert width(line) <= room
        assert "finished" in plain([line])
        assert "train" in plain([line])


def test_what_the_driver_does_not_tell_is_said(store_of, new_run):
    run = new_run().hello().step(1).host(utilization_percent=None, processes=None, why={"processes": "no permission"})
    facts = host_facts(view_of(store_of(run)))
    assert "utilization n/a" in facts.gpu
    assert facts.others == "other processes n/a (no permission)"


def test_a_device_that_tells_no_figure_of_its_own_says_so_once(store_of, new_run):
    none = {"utilization_percent": None, "temperature_c": None, "power_mw": None, "power_limit_mw": None}
    run = new_run().hello().step(1).host(**none, why=dict.fromkeys(none, "not reported by this device"))
    assert host_facts(view_of(store_of(run))).gpu == "n/a (not reported by this device)"


def test_what_torch_has_pinned_stands_beside_the_process_where_there_is_any(store_of, new_run):
    run = new_run().hello().step(1).host()
    for pinned, shown in ((None, None), (0, None), (GIB, "1.00 GiB")):
        run.say(wire.Heartbeat(run.t_ns, 1, "forward", 0, rss=3 * GIB, pinned=pinned))
        facts = host_facts(view_of(store_of(run)))
        assert facts.pinned == shown
        assert ("pinned" in plain(host_lines(facts, 200, 1, ""))) == bool(shown)


def test_findings_stand_in_order_of_weight_and_stay_in_their_line(store_of, new_run):
    found = (
        Finding("bucket-copy", "info", 3, "buckets hold one more copy", bytes=5 * GIB),
        Finding("host-leak", "warning", 1, "grows", bytes=5 * GIB),  # not the device's
        Finding("oom-ahead", "critical", 9, "full in 20 steps", remedy="smaller batch"),
        Finding("tensor-leak", "warning", 1, "grows", bytes_per_step=4 << 20, holder="`outputs`", where="train.py:58"),
    )
    view = view_of(store_of(new_run().usual(20)))
    ordered = findings(replace(view, reports=(msgspec.structs.replace(view.report, findings=found),)))
    assert [each.finding.code for each in ordered.findings] == ["oom-ahead", "tensor-leak", "host-leak", "bucket-copy"]
    lines = finding_lines(ordered, 70, 4, UNICODE, "")
    assert all(width(line) <= 70 for line in lines)
    assert "tensor-leak  +4.00 MiB/step since 1" in plain(lines)


def test_where_a_findings_line_is_short_its_holder_and_source_line_stay(store_of, new_run):
    leak = Finding(
        "tensor-leak", "warning", 2, "a tensor is kept in every step, it grows", bytes_per_step=32 << 10,
        holder="confidence[*] in train()", where="train.py:146", remedy="bound it",
    )  # fmt: skip
    view = view_of(store_of(new_run().usual(20)))
    found = findings(replace(view, reports=(msgspec.structs.replace(view.report, findings=(leak,)),)))
    said = {room: plain(finding_lines(found, room, 2, UNICODE, "")).splitlines()[1] for room in (78, 90, 100, 200)}
    assert said[78].endswith("held by confidence[*], train.py:146")
    assert said[90].endswith("held by confidence[*] in train(), train.py:146")
    assert said[100].endswith("held by confidence[*] in train(), train.py:146 · bound it")
    assert "a tensor is kept" in said[200]


def of_four(store_of, new_run, *found):
    """The findings of a job of four, of which each rank has stated some, as the shown rank 0's screen has them."""
    runs = [new_run(rank=rank, world_size=4, pid=600 + rank).usual(20) for rank in range(4)]
    view = view_of(store_of(*runs))
    pairs = zip(view.reports, found, strict=True)
    view = replace(view, reports=tuple(msgspec.structs.replace(report, findings=each) for report, each in pairs))
    picked = findings(view)
    return picked, [line.strip() for line in plain(finding_lines(picked, 200, 12, UNICODE, "")).splitlines()[1:]]


def test_a_finding_of_any_rank_is_the_jobs_and_names_it(store_of, new_run):
    def leak(nbytes, holder="`outputs`"):
        return Finding("tensor-leak", "warning", 1, "grows", nbytes, nbytes // 9, holder, "train.py:58", "detach it")

    full = Finding("near-capacity", "warning", 3, "nearly full", bytes=GIB)
    skew = Finding("rank-skew", "warning", 5, "rank 3 peaks 8 GiB above the median", bytes=8 * GIB)
    gone = replace(skew, title="rank 1 peaks above", state="gone")
    picked, lines = of_four(
        store_of, new_run, (full,), (full, gone), (full, leak(GIB, "`kept`")), (full, leak(2 * GIB), skew)
    )
    told = [line.split("  ")[1] for line in lines]
    assert [line.split("  ")[0].split()[1] for line in lines] == [
        "tensor-leak", "near-capacity", "tensor-leak", "rank-skew", "rank-skew",
    ]  # fmt: skip
    assert told[:3] == ["rank 3", "all ranks", "rank 2"]
    assert "rank 3 peaks" in lines[3]
    assert len(picked.findings[1].sources) == 4
    _, lines = of_four(store_of, new_run, (), (leak(GIB),), (leak(2 * GIB),), ())
    assert [line.split("  ")[1] for line in lines] == ["ranks 1, 2"]
    picked, lines = of_four(store_of, new_run, (), (), (), (skew,))
    assert [each.finding.code for each in picked.findings] == ["rank-skew"]


def test_what_was_alive_at_the_peak_is_one_line_at_any_width(store_of, new_run):
    shown = bars(view_of(store_of(new_run().usual(20))))
    assert shown.peak.lines is not None
    for room in (100, 120, 200):
        lines = device_lines(shown, room, 9, UNICODE, "title")
        alive = plain(lines[-1:])
        assert alive.lstrip().startswith("peak")
        assert "activations 12.2" in alive
        assert len([line for line in lines if plain([line]).lstrip().startswith("peak")]) == 2  # the bar and this


def test_what_has_no_room_at_the_peak_is_told_together(store_of, new_run):
    shown = bars(view_of(store_of(new_run().usual(20))))
    narrow = plain(device_lines(shown, 80, 9, UNICODE, "title")[-1:])
    assert "other " in narrow
    assert "rounding" not in narrow


def test_what_was_alive_at_an_older_peak_says_of_which_step(store_of, new_run):
    run = new_run().usual(20)
    run.step(12_432, sampled=False)
    shown = bars(view_of(store_of(run)))
    assert plain(device_lines(shown, 200, 9, UNICODE, "title")[-1:]).endswith("of step 12,431")


def headed(store_of, new_run):
    """Of a live run that told its cost."""
    run = new_run().usual(30)
    run.say(wire.Heartbeat(run.t_ns, 12_432, "forward", 0, cost=4_100, cost_error=1_900))
    return replace(heading(view_of(store_of(run))), state="live")


@pytest.mark.parametrize(
    ("room", "expected"),
    [
        (120, "● live  gpumon costs 0.4 % ± 0.2 · torch 2.15.0 · NVIDIA H200 "),
        (100, "● live  gpumon costs 0.4 % ± 0.2 · torch 2.15.0 "),
        (80, "● live  costs 0.4 % ± 0.2 "),
        (66, "● live "),
    ],
)
def test_the_header_says_what_gpumon_costs_before_what_does_not_change(store_of, new_run, room, expected):
    (line,) = header_lines(headed(store_of, new_run), room, UNICODE)
    assert plain([line]).endswith(expected.rstrip()), plain([line])
    assert " · step 12,431 · " in plain([line])
    assert "it/s ●" not in plain([line])


@pytest.mark.parametrize(
    ("room", "costs", "shown"),
    [(140, True, True), (100, True, False), (80, True, False), (100, False, True), (70, False, False)],
)
def test_the_header_says_where_the_loop_is_if_there_is_room(store_of, new_run, room, costs, shown):
    """What gpumon costs comes first."""
    head = headed(store_of, new_run)
    told = replace(head, loop="epoch 2 · train · batch 31/200", costs=head.costs if costs else "")
    (line,) = header_lines(told, room, UNICODE)
    assert (" it/s · epoch 2 · train · batch 31/200 " in plain([line])) is shown, plain([line])
    assert ("costs" in plain([line])) is costs
    assert "● live" in plain([line])


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, ""),
        ({"stage": "validate", "batch": 3}, "validate · batch 3"),
        ({"stage": "train", "epoch": 0, "batch": 1_031, "batches": 2_000}, "epoch 0 · train · batch 1,031/2,000"),
    ],
)
def test_of_where_the_loop_is_the_header_says_what_is_known(store_of, new_run, fields, text):
    run = new_run().usual(30)
    run.say(wire.Progress(29, run.t_ns, "lightning", **fields))
    assert heading(view_of(store_of(run))).loop == text
    run.goodbye("finished", 29, "optimizer")
    assert heading(view_of(store_of(run))).loop == ""


def test_a_cost_that_is_not_known_is_not_in_the_header(store_of, new_run):
    (line,) = header_lines(replace(headed(store_of, new_run), costs=""), 120, UNICODE)
    assert plain([line]).endswith("● live  torch 2.15.0 · NVIDIA H200")
    assert not heading(view_of(store_of(new_run().usual(30)))).costs


def test_the_header_keeps_name_and_state_at_any_width_with_a_cost(store_of, new_run):
    head = headed(store_of, new_run)
    for each in (head, replace(head, torch=None), replace(head, device=None), replace(head, torch=None, device=None)):
        for room in range(18, 140):
            (line, *_) = header_lines(each, room, UNICODE)
            assert width(line) <= room
            assert "live" in plain([line])
            assert "train" in plain([line])
            assert ("costs 0.4 %" in plain([line])) is (room >= 74), room


def test_neighbours_that_look_the_same_are_written_together() -> None:
    """Each segment costs the terminal some 40 bytes of colours."""
    dim, bold, line = Style(color="white", bgcolor="black"), Style(bold=True, bgcolor="black"), Style(underline=True)
    red = Style(bgcolor="red")
    assert joined([("a", dim), ("b", dim), ("", bold), ("  ", bold), ("c", bold)]) == [
        Segment("ab  ", dim), Segment("c", bold)
    ]  # fmt: skip
    assert joined([(" ", bold), ("a", dim)]) == [Segment(" a", dim)]
    for style in (red, line):  # there a space is seen
        assert joined([("a", dim), (" ", style)]) == [Segment("a", dim), Segment(" ", style)]
        assert joined([(" ", style), ("a", dim)]) == [Segment(" ", style), Segment("a", dim)]
    assert joined([("a", line), (" ", dim)]) == [Segment("a", line), Segment(" ", dim)]
