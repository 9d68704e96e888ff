"""The Estimate screen: lines and phases beside what was measured, chosen, explained, and said in words."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from pictured import text_of

from gpumon.analysis import Reporter
from gpumon.analysis.comparison import HELD, Compared, EstimateCheck, compare, remarks
from gpumon.analysis.reports import DeviceReport
from gpumon.analysis.types import Breakdown, Estimate, Peak
from gpumon.session.store import SessionStore
from gpumon.tui.glossary import TERMS
from gpumon.tui.styles import ASCII, UNICODE
from gpumon.tui.text_layout import plain, width
from gpumon.tui.view import choose, uncounted
from gpumon.tui.widgets.device_bar import LABELS, ORDER
from gpumon.tui.widgets.estimate_page import EstimatePage, estimated, explanation, owners_of, page_lines
from gpumon.tui.widgets.estimate_table import Comparisons, estimate_lines, label, summed, sums
from gpumon.tui.widgets.forecast_panel import ForecastPanel
from gpumon_agent import wire

GIB = 1 << 30
MIB = 1 << 20


def view_of(store):
    frame = store.frame(1_790_000_000_000_000_000 + 10**12)
    return choose(frame, Reporter().report(frame), None, None)


def view_of_(run):
    store = SessionStore()
    for received in run.events:
        store.apply(received)
    return view_of(store)


def report(estimate: Estimate, ledger: Breakdown, peak: int, phase: str = "backward") -> DeviceReport:
    return DeviceReport(0, ledger, None, Peak(9, phase, 0, peak), estimate, None, 40 * GIB, None)


def test_every_phase_is_beside_its_estimate(store_of, new_run):
    found = estimated(view_of(store_of(new_run().usual(20)))).found
    assert [row.line for row in found.phases] == ["between", "forward", "backward", "optimizer"]
    assert [row.off for row in found.phases[:3]] == [False] * 3
    assert [row.source for row in found.phases] == ["measured", "exact+learnt", "exact+learnt", "exact"]
    assert found.peak_phase == "backward"


def test_what_was_only_read_has_no_estimate():
    estimate = Estimate(
        Breakdown(weights=GIB, workspaces=5), None, None, (("weights", "exact"), ("workspaces", "measured"))
    )
    found = compare(report(estimate, Breakdown(weights=GIB, workspaces=5), GIB), None)
    assert found.owners == (Compared("weights", GIB, GIB, "exact"), Compared("workspaces", None, 5, "measured"))


def test_a_peak_off_its_estimate_names_the_lines_that_make_it():
    sources = (("weights", "exact"), ("gradients", "exact"))
    estimate = Estimate(Breakdown(weights=GIB, gradients=GIB), 4 * GIB, "forward", sources)
    device = report(estimate, Breakdown(weights=GIB, gradients=3 * GIB, allocated=4 * GIB, unexplained=0), 6 * GIB)
    said = remarks(compare(device, None), device)
    assert said[0] == (
        "The step peaks 2.00 GiB above the estimate, in backward and not in forward: gradients +2.00 GiB."
    )
    assert said[1] == "Every byte that is allocated as the step ends has an owner."


def test_activations_that_outlive_their_step_stand_among_its_owners_beside_what_was_held_at_first():
    lines = Breakdown(weights=GIB, activations=GIB, allocated=GIB + 32 * MIB)
    estimate = Estimate(lines, 2 * GIB, "forward", (("weights", "exact"), ("activations", "learnt")), (("forward", 2),))
    device = report(estimate, Breakdown(weights=GIB, activations=3 * GIB, allocated=4 * GIB), 5 * GIB)
    found = compare(device, None)
    assert Compared(HELD, 32 * MIB, 3 * GIB, "learnt") in found.owners
    assert "activations kept after the step +2.97 GiB" in remarks(found, device)[0]


def test_a_step_at_its_estimate_says_so(store_of, new_run):
    view = view_of(store_of(new_run().usual(20)))
    assert estimated(view).remarks[0].startswith("The step peaks where the estimate has it: 61.")


def test_figures_are_those_of_the_newest_step_that_was_read(store_of, new_run):
    run = new_run().usual(20)
    run.say(wire.Phase(12_432, "forward", 0, 0, run.t_ns, 1), numbered=True)
    run.say(wire.Step(12_432, run.t_ns, 1, phases=1), numbered=True)
    found = estimated(view_of(store_of(run))).found
    assert found.step == 12_431
    assert all(row.measured is not None for row in (*found.added, *found.phases))


def test_owners_are_those_of_the_newest_step_that_was_sampled_and_their_step_is_told(store_of, new_run):
    shown = estimated(view_of(store_of(new_run().usual(20).step(12_432, sampled=False))))
    assert (shown.found.step, shown.found.read_step) == (12_432, 12_431)
    assert "unexplained" in [row.line for row in shown.found.owners]
    assert "step 12,432, owners of step 12,431" in plain(page_lines(shown, 0, 120, UNICODE)[0])


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII], ids=["unicode", "ascii"])
def test_the_page_keeps_its_width(store_of, new_run, glyphs):
    shown = estimated(view_of(store_of(new_run().usual(20))))
    for room in (20, 40, 80, 120, 200):
        lines, at = page_lines(shown, 3, room, glyphs)
        assert all(width(line) <= room for line in lines)
        assert glyphs.now in plain(lines[at[3] : at[3] + 1])


def test_47_cells_have_room_for_estimate_measured_and_difference(store_of, new_run) -> None:
    """Half of a divided terminal."""
    shown = plain(page_lines(estimated(view_of(store_of(new_run().usual(20)))), 0, 47, UNICODE)[0])
    assert any(line.split()[-3:] == ["estimate", "measured", "diff"] for line in shown.splitlines())


def test_every_line_of_the_ledger_has_its_word_in_the_glossary():
    assert {LABELS.get(line, line) for line in (*ORDER, "allocated", HELD)} <= set(TERMS)


OWNERS = tuple(
    Compared(line, estimate, measured, "exact" if estimate else "measured")
    for line, estimate, measured in (
        ("weights", 800, 800), ("buffers", 3, 3), ("gradients", 790, 790), ("optimizer", 1600, 1605),
        ("inputs", None, 70), ("unexplained", None, 400), ("rounding", None, 20),
    )
)  # fmt: skip
TOTAL = Compared("allocated", 3193 + 90, 3688, "exact+learnt")
ADDED = (Compared("step_adds", 900, 900, "learnt"), Compared("update_adds", 100, 100, "exact"))
CHECK = EstimateCheck(9, 9, OWNERS, TOTAL, ADDED, (), Compared("peak", 4000, 4400, "exact"), "forward", "forward")


@pytest.mark.parametrize("most", range(13))
def test_rows_add_up_to_their_total_in_any_height(most: int) -> None:
    for check in (CHECK, replace(CHECK, allocated=None)):
        rows = summed(check, most)
        assert len(rows) <= most
        names = [row.line for row in rows]
        assert ("allocated" in names) is (most > 1)
        if most > 1:
            *above, total = rows[: names.index("allocated") + 1]
            if above:
                assert sum(row.measured or 0 for row in above) == total.measured
                assert sum(row.estimate or 0 for row in above) == total.estimate
            assert (total.measured, total.estimate) == ((3688, 3283) if check is CHECK else (3688, 3193))
        assert ("step_adds" in names) is (most >= 8)
    assert [row.line for row in summed(CHECK, 5)] == ["weights", "optimizer", "other", "allocated", "peak"]
    assert [row.line for row in summed(CHECK, 2)] == ["allocated", "peak"]


def test_the_page_s_rows_add_up_although_some_have_no_estimate() -> None:
    *above, total = owners_of(CHECK)
    assert above[-1] == Compared("other", 90, None, "measured")
    assert sum(row.estimate or 0 for row in above) == total.estimate
    assert sum(row.measured or 0 for row in above) == total.measured
    assert "lack of allocated" in explanation(above[-1])[0]
    assert owners_of(replace(CHECK, owners=OWNERS[:4], allocated=Compared("allocated", 3193, 3198, ""))) == [
        *OWNERS[:4], Compared("allocated", 3193, 3198, ""),
    ]  # fmt: skip
    assert owners_of(replace(CHECK, allocated=None)) == list(OWNERS)


def test_the_panel_s_sum_is_explained_to_the_byte(new_run, store_of) -> None:
    said = sums(CHECK)
    assert said[0].startswith("allocated 3,688 B = weights 800 + buffers 3 + gradients 790 + optimizer 1,605")
    assert said[-1] == "peak 4,400 B: 712 B above that, while the step ran"
    found = estimated(view_of(store_of(new_run().usual(20)))).found
    text = plain(estimate_lines(Comparisons(found, False), 60, 6, ASCII, "strong"))
    assert " = allocated" in text


async def test_the_chosen_line_is_explained_to_the_byte(app_of, new_run, settled) -> None:
    app = app_of(new_run().usual(20))
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        await pilot.press("5")
        await settled(pilot)
        await pilot.press("down", "e")
        await settled(pilot)
        w = round(12.1 * GIB)
        assert f"gradients: estimate {w:,} B, measured {w:,} B" in text_of(app)
        assert "exact: in closed form" in text_of(app)


async def test_on_a_small_screen_the_last_line_brings_the_words_with_it(app_of, new_run, settled) -> None:
    app = app_of(new_run().usual(20))
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        await pilot.press("5")
        await settled(pilot)
        assert "The step peaks where" not in text_of(app)
        assert "more lines (arrows, page keys)" in text_of(app)
        await pilot.press("end")
        await settled(pilot)
        assert "measured: read, not derived" in text_of(app)
        assert "more lines" not in text_of(app)
        await pilot.press("home")
        assert app.screen.query_one(EstimatePage)._at == 0


@pytest.mark.parametrize(
    ("kind", "why"), [("cpu", "start with --track-cpu"), ("mps", "Apple's GPUs"), ("xpu", "no peaks on this device")]
)
async def test_on_a_device_that_is_not_counted_it_says_so(app_of, new_run, settled, kind: str, why: str) -> None:
    run = new_run().hello(backend=kind, devices=(wire.Device(0, None, kind, None, kind),)).modules().layers(5)
    for step in range(5, 8):
        for phase in ("forward", "backward", "optimizer"):
            run.t_ns += 10**8
            run.say(wire.Phase(step, phase, 0, 0, run.t_ns, 10**8, rss=GIB), numbered=True)
        run.say(wire.Step(step, run.t_ns, 3 * 10**8, phases=3), numbered=True)
    app = app_of(run.synced())
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        assert app.screen.query_one(ForecastPanel).pick(app.view).uncounted.endswith(why)
        await pilot.press("3")
        await settled(pilot)
        assert f"as the step ended. No peak: {uncounted(app.view)}." in " ".join(text_of(app).split())
        counted = estimated(view_of_(new_run().usual(20)))
        assert counted.uncounted == ""
        without = replace(counted, forecast=None, uncounted=uncounted(app.view))
        assert uncounted(app.view) in plain(page_lines(without, 0, 120, UNICODE)[0])
        assert "known after the first steps" not in plain(page_lines(without, 0, 120, UNICODE)[0])


async def test_before_a_model_is_known_it_says_what_is_missing(app_of, new_run, settled) -> None:
    app = app_of(new_run().hello().steps(0, 3).synced())
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        await pilot.press("5")
        await settled(pilot)
        assert "known once a model is described" in text_of(app)
        await pilot.press("down", "end", "e")


def test_a_label_that_does_not_fit_is_a_shorter_word_and_not_cut() -> None:
    assert label("held", 19) == "kept after the step"
    assert label("held", 18) == "kept"
    assert label("weights", 11) == "weights"
