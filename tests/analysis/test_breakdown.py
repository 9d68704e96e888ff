"""One breakdown of bytes: a leaking run on the virtual GPU, its rows summed and its leak named on every outlet."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import virtual
from msgspec.structs import replace
from synthetic import Run, frame_of
from told import told

from gpumon.analysis import Reporter, comparison, ledger
from gpumon.analysis.comparison import Compared
from gpumon.analysis.types import DRIVER, OWNERS, REST, Breakdown, GrownByHolder
from gpumon.export.objects import Objects
from gpumon.session.store import SessionStore
from gpumon.tui.styles import UNICODE
from gpumon.tui.text_layout import plain
from gpumon.tui.view import choose
from gpumon.tui.widgets.device_bar import bars, device_lines, parts, word_of
from gpumon.tui.widgets.estimate_table import summed
from gpumon_agent import wire

SCENARIOS = Path(__file__).parent.parent / "scenarios"
CACHE = wire.Holder("cache[*] in main()", "local", "train.py:9", 12)
STEP_BYTES = 32 << 10  # what tensor_leak.py keeps
STEPS = 200  # a census takes ten to forty of them


@pytest.fixture(scope="module")
def messages(forks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("breakdown")
    gpu = SimpleNamespace(environment=virtual.environment(forks.python), forks=forks)
    return list(told(gpu, folder, SCENARIOS / "tensor_leak.py", "--steps", str(STEPS), "--holder", "attribute"))


def adds_up(lines: Breakdown | dict[str, int | None] | None) -> bool:
    """allocated = owners + what is left over + rounding; reserved = allocated + slack."""
    if lines is None:
        return True
    known = lines if isinstance(lines, dict) else {name: getattr(lines, name) for name in Breakdown.__slots__}
    inner = sum(known[name] or 0 for name in (*OWNERS, *REST) if name != "slack")
    fits = known["allocated"] is None or inner == known["allocated"]
    return fits and (known["slack"] is None or known["allocated"] + known["slack"] == known["reserved"])


def test_every_tables_rows_add_up_to_its_total(messages):
    objects = Objects()
    seen = 0
    for received in messages:
        for stated in objects.take(received):
            if stated.kind != "step":
                continue
            said = stated.object
            tables = [said["ledger"], *(phase.get("ledger") for phase in said["phases"])]
            if said["ledger_peak"] is not None:
                tables.append(said["ledger_peak"])
            for table in tables:
                assert adds_up(table), (said["step"], table)
                seen += table is not None
    assert seen > STEPS


def test_the_screens_rows_add_up_to_their_totals(messages):
    store, reporter = SessionStore(), Reporter()
    for received in messages:
        store.apply(received)
    frame = store.frame(0)
    view = choose(frame, reporter.report(frame), None, None)
    shown = bars(view)
    assert sum(value for name, value in parts(shown.now, None) if name not in DRIVER) == shown.now.reserved
    found = comparison.compare(view.device, view.rank.steps[-1])
    assert sum(row.measured or 0 for row in found.owners) == found.allocated.measured


def test_a_leak_is_named_with_one_figure_on_every_outlet(messages):
    store, reporter, objects = SessionStore(), Reporter(), Objects()
    step = None
    for received in messages:
        store.apply(received)
        step = next((each.object for each in objects.take(received) if each.kind == "step"), step)
    frame = store.frame(0)
    view = choose(frame, reporter.report(frame), None, None)
    device = view.device
    kept = STEP_BYTES * STEPS
    assert 0.9 * kept < device.ledger.variables <= kept
    left = (device.ledger.unexplained or 0) + (device.ledger.unattributed or 0) + (device.ledger.activations or 0)
    assert left < 0.1 * kept + (1 << 16)
    assert step["ledger"]["variables"] == device.ledger.variables
    assert [each["name"] for each in step["held_by"]][:1] == [device.held.by[0].text]
    assert "values" in bars(view).holders[0]
    newest = next(finding for finding in view.report.findings if finding.code == "tensor-leak")
    assert newest.holder == device.held.by[0].text


def held(nbytes: int, counted: int, since: int = 0) -> GrownByHolder:
    return GrownByHolder(since, ((CACHE, nbytes, counted, counted),))


def test_what_is_held_grows_with_the_steps():
    assert [held(1000, 9).at(step) for step in (-1, 0, 9, 19)] == [0, 100, 1000, 2000]


def test_a_census_that_came_by_too_early_to_count_them_all_means_all_that_has_grown():
    parts = ((CACHE, 900, 9, 9),)
    assert GrownByHolder(0, parts, per_step=100.0).at(9) == 1000
    assert GrownByHolder(0, parts, per_step=130.0).at(9) == 900  # something else grows too
    assert GrownByHolder(0, parts, per_step=80.0).at(9) == 900


def test_a_census_of_many_steps_is_judged_by_the_step_it_began_at():
    """As on a busy machine: 900 bytes were there when it began, 1,800 when it ended."""
    parts = ((CACHE, 1000, 8, 17),)
    assert GrownByHolder(0, parts, per_step=100.0).at(17) == 1800
    assert GrownByHolder(0, parts, per_step=160.0).at(17) == 1000


def test_no_more_is_named_than_has_no_owner():
    lines = Breakdown(weights=50, unexplained=40, rounding=10, allocated=100)
    named = ledger.with_held(lines, held(30, 9), 9)
    assert (named.variables, named.unexplained) == (30, 10)
    assert ledger.with_held(lines, held(3000, 9), 9) == replace(lines, variables=40, unexplained=0)
    assert ledger.with_held(replace(lines, unexplained=-5), held(30, 9), 9).unexplained == -5
    assert ledger.with_held(lines, None, 9) is lines


def test_an_output_that_is_kept_is_no_activation_any_more():
    lines = Breakdown(activations=60, unexplained=10, allocated=70)
    assert ledger.with_held(lines, held(30, 9), 9) == replace(lines, activations=40, unexplained=0, variables=30)


def test_what_the_ledger_has_seen_of_the_same_variable_is_not_counted_twice():
    lines = Breakdown(variables=20, unexplained=40, allocated=60)
    seen = wire.Holder("cache in main()", "local", "train.py:9", 3)
    other = wire.Holder("batch in main()", "local", "train.py:12", 1)
    assert ledger.with_held(lines, held(30, 9), 9, (seen,)) == replace(lines, variables=30, unexplained=30)
    assert ledger.with_held(lines, held(30, 9), 9, (other,)) == replace(lines, variables=50, unexplained=10)


def test_an_out_of_memory_has_the_same_line():
    event = wire.Oom(10, "forward", 0, 0, 64, 1000, 0, 900, 1000)
    lines = ledger.at_failure(event, {"weights": 300, "gradients": 100}, None, held(500, 9))
    assert (lines.weights, lines.gradients, lines.variables, lines.unattributed) == (300, None, 500, 100)
    assert adds_up(lines)


def test_the_compact_table_adds_up_however_few_rows_it_has():
    rows = (
        Compared("weights", 100, 100, "exact"), Compared("gradients", 90, 90, "exact"),
        Compared("optimizer", 200, 210, "exact"), Compared("variables", None, 500, "measured"),
        Compared("rounding", None, 12, "measured"),
    )  # fmt: skip
    total, adds = Compared("allocated", 400, 912, "exact"), Compared("step_adds", 50, 60, "learnt")
    found = comparison.EstimateCheck(
        7, 7, rows, total, (adds,), (), Compared("peak", 450, 961, ""), "forward", "forward"
    )
    for most in range(5, 12):
        shown = summed(found, most)
        at = shown.index(total)
        assert len(shown) <= most
        if at:
            assert sum(row.measured or 0 for row in shown[:at]) == 912
            assert sum(row.estimate or 0 for row in shown[:at]) == 400
        assert shown[-1].line == "peak"
        assert ("step_adds" in [row.line for row in shown]) == (most >= 8)
    lines = [row.line for row in summed(found, 12)]
    assert "variables" in lines
    assert "rounding" not in lines  # 12 of 912 is less than a fiftieth


@pytest.mark.parametrize(
    ("estimated", "more", "off"), [(10.0, 0.9, False), (10.0, 1.5, True), (1000.0, 19.0, False), (1000.0, 21.0, True)]
)
def test_an_estimate_is_off_by_more_than_a_mib_and_two_percent(estimated: float, more: float, off: bool) -> None:
    assert Compared("weights", round(estimated * (1 << 20)), round((estimated + more) * (1 << 20)), "exact").off is off


def test_the_highest_peak_so_far_stays(messages):
    highest, peaks = None, []
    objects = Objects()
    for received in messages:
        for stated in objects.take(received):
            if stated.kind == "step":
                read = [p["allocated_peak"] for p in stated.object["phases"] if p["allocated_peak"] is not None]
                peaks.append((max(read, default=0), -stated.object["step"]))
                most, step = max(peaks)
                assert stated.object["highest"] == {"step": -step, "allocated": most}
                highest = stated.object["highest"]
    assert highest is not None


def test_the_bar_states_the_highest_peak_beside_the_steps():
    frame = frame_of(Run(activations=lambda step: (600 if step == 3 else 300) << 20), 20)
    view = choose(frame, Reporter().report(frame), None, None)
    text = plain(device_lines(bars(view), 120, 8, UNICODE, ""))
    assert "┊ highest " in text
    assert "MiB, step 3" in text


def test_the_bar_says_leak_and_not_fits_beside_a_leak(messages):
    store, reporter = SessionStore(), Reporter()
    for received in messages:
        store.apply(received)
    frame = store.frame(0)
    reports = reporter.report(frame)
    device = reports[0].devices[0]
    forecast = msgspec.structs.replace(device.forecast, verdict=wire.FITS)
    device = msgspec.structs.replace(device, forecast=forecast)
    leaking = msgspec.structs.replace(reports[0], devices=(device,))
    frame = replace(frame, ranks=tuple(replace(rank, goodbye=None, status="live") for rank in frame.ranks))
    assert word_of(choose(frame, (leaking,), None, None)) == "leak"
    steady = msgspec.structs.replace(leaking, findings=())
    assert word_of(choose(frame, (steady,), None, None)) == wire.FITS
