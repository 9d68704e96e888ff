"""The ledger adds up, exactly, and says nothing it does not know."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from synthetic import GIB, MIB, Run, apply, rank_of

from gpumon.analysis import Breakdown, ledger, report, units
from gpumon.analysis.types import OWNERS
from gpumon_agent import wire


def accounted(lines: Breakdown) -> int:
    """Everything between nothing and `reserved`."""
    named = (*OWNERS, "unexplained", "unattributed", "rounding", "slack")
    return sum(getattr(lines, name) or 0 for name in named)


amounts = st.one_of(st.none(), st.integers(0, 1 << 40))


@given(
    owners=st.lists(amounts, min_size=len(OWNERS), max_size=len(OWNERS)),
    lasting=st.lists(amounts, min_size=len(OWNERS), max_size=len(OWNERS)),
    figures=st.tuples(st.integers(0, 1 << 42), st.integers(0, 1 << 30), st.integers(0, 1 << 40)),
    tells_requested=st.booleans(),
    sampled=st.booleans(),
)
def test_lines_sum_to_reserved_whatever_was_read(
    owners: list[int | None],
    lasting: list[int | None],
    figures: tuple[int, int, int],
    tells_requested: bool,
    sampled: bool,
) -> None:
    requested, rounding, slack = figures
    allocated, reserved = requested + rounding, requested + rounding + slack
    told = requested if tells_requested else None
    phase = wire.Phase(5, "optimizer", 0, 0, 9, 1, allocated, allocated, reserved, reserved, requested=told)

    def read(amounts: list[int | None]) -> wire.Ledger:
        return wire.Ledger(5, "optimizer", 0, 0, allocated, told, reserved, **dict(zip(OWNERS, amounts, strict=True)))

    lines = ledger.lines(phase, read(owners) if sampled else None, read(lasting))
    assert lines is not None
    assert accounted(lines) == reserved == lines.reserved
    assert lines.unexplained is None or lines.unattributed is None


def test_an_allocator_that_does_not_count_what_was_requested_has_no_rounding() -> None:
    phase = wire.Phase(5, "optimizer", 0, 0, 9, 1, 900, 900, 1000, 1000, requested=0)  # cudaMallocAsync says 0
    lines = ledger.lines(phase, wire.Ledger(5, "optimizer", 0, 0, 900, None, 1000, weights=700, activations=0))
    assert lines is not None
    assert (lines.rounding, lines.unexplained, lines.slack) == (None, 200, 100)


@given(
    owners=st.lists(amounts, min_size=len(OWNERS), max_size=len(OWNERS)),
    requested=st.integers(0, 1 << 42),
    rounding=st.integers(0, 1 << 30),
)
def test_a_peak_sums_to_allocated(owners: list[int | None], requested: int, rounding: int) -> None:
    named = dict(zip(OWNERS, owners, strict=True))
    composition = wire.Ledger(5, "backward", 0, 0, requested + rounding, requested, None, **named, peak=True)
    lines = ledger.peak_lines(composition)
    assert accounted(lines) == lines.allocated == requested + rounding
    assert lines.slack is lines.reserved is lines.free is None


def test_on_a_sampled_step_every_owner_and_nothing_unexplained() -> None:
    lines = report(apply(Run().stream(4)).frame(0))[0].devices[0].ledger
    assert lines is not None
    assert (lines.weights, lines.gradients, lines.optimizer) == (100 * MIB, 100 * MIB, 200 * MIB)
    assert (lines.unexplained, lines.unattributed, lines.activations) == (0, None, 0)


def test_on_an_unsampled_step_lasting_owners_stay_and_the_rest_is_unattributed() -> None:
    run = Run(sampled_every=10, kept=lambda step: 5 * MIB * step)
    lines = report(apply(run.stream(14)).frame(0))[0].devices[0].ledger
    assert lines is not None
    assert (lines.weights, lines.optimizer) == (100 * MIB, 200 * MIB)
    assert (lines.activations, lines.unexplained, lines.inputs) == (None, None, None)
    assert lines.unattributed == run.kept(13) + run.input_bytes(13)


def test_owners_that_no_longer_fit_are_not_carried_over() -> None:
    run = Run()
    last = next(e for e in run.step_events(3) if isinstance(e, wire.Ledger))
    phase = wire.Phase(9, "optimizer", 0, 0, 9, 1, 50 * MIB, 50 * MIB, 60 * MIB, 60 * MIB, requested=40 * MIB)
    lines = ledger.lines(phase, None, last)
    assert lines is not None
    assert (lines.weights, lines.unattributed) == (None, 40 * MIB)


def test_where_nothing_is_known_there_is_no_ledger() -> None:
    assert ledger.lines(wire.Phase(0, "optimizer", 0, 0, 9, 1), None) is None


def test_the_driver_s_lines_sum_to_its_total() -> None:
    run = Run(others=3 * GIB)
    found = report(apply(run.stream(8, host_every=3)).frame(0))[0].devices[0]
    lines = found.ledger
    assert lines is not None
    assert lines.reserved is not None
    assert (lines.context, lines.other_processes, lines.total) == (run.context, 3 * GIB, run.total)
    assert lines.reserved + (lines.context or 0) + (lines.other_processes or 0) + (lines.free or 0) == run.total
    assert found.ledger_age_s == pytest.approx(0.05 + 0.05 * 3 / 16, abs=1e-6)


def test_a_reading_while_reserved_moved_is_not_believed() -> None:
    run = Run(activations=lambda step: 300 * MIB + step * 10 * MIB)
    rank = rank_of(run, 8, host_every=1)
    assert ledger.driver_lines(rank, 0) is not None  # within a step nothing moved
    (device,) = run.host(3).event.devices
    across = replace(device, began_ns=run.time_ns(2) - 1, ended_ns=run.time_ns(3) - 1)
    host = wire.Received("host:box", run.unix_ns(3), wire.Host("box", run.time_ns(3), "580", (across,)))
    assert ledger.driver_lines(apply(run.stream(8), [host]).frame(0).ranks[0], 0) is None


@pytest.mark.parametrize(("since", "found"), [(15, True), (16, False)])
def test_of_16_readings_one_has_to_be_steady(since: int, found: bool) -> None:
    run = Run(activations=lambda step: 300 * MIB + step * 10 * MIB)
    stream = [*run.stream(30), run.host(3)]
    for step in range(4, 4 + since):
        (device,) = run.host(step).event.devices
        across = replace(device, began_ns=run.time_ns(step - 1) - 1, ended_ns=run.time_ns(step) - 1)
        stream.append(wire.Received("host:box", run.unix_ns(step), wire.Host("box", step, "580", (across,))))
    assert (ledger.driver_lines(apply(stream).frame(0).ranks[0], 0) is not None) is found


@pytest.mark.parametrize(("late", "at"), [(30, 40), (60, 70)])
def test_a_reading_that_comes_three_seconds_late_was_read_by_another_clock(late: int, at: int) -> None:
    """Its own times do for 1.5 seconds. With a namespace of its own the reader's clock says anything."""
    run = Run(activations=lambda step: 300 * MIB + step * 10 * MIB)
    read, came = run.host(70 - late).event, run.host(70).unix_ns
    rank = apply(run.stream(80), [wire.Received("host:box", came, read)]).frame(0).ranks[0]
    lines = ledger.driver_lines(rank, 0)
    assert lines is not None
    assert lines.reserved == run.reserved(at)


def test_a_reading_with_a_higher_peak_of_reserved_around_it_is_not_believed() -> None:
    run = Run()
    events = []
    for received in run.stream(4, host_every=3):
        event = received.event
        if isinstance(event, wire.Phase) and event.step == 3 and event.phase == "backward":
            higher = replace(event, reserved_peak=(event.reserved_peak or 0) + 2 * MIB)
            received = wire.Received(received.source, received.unix_ns, higher, received.seq)
        events.append(received)
    rank = apply(events).frame(0).ranks[0]
    found = ledger.driver_lines(rank, 0)
    assert found is not None
    assert found.unix_ns < run.unix_ns(1)  # an older reading has to do


def test_a_device_is_matched_by_uuid_only() -> None:
    run = Run()
    assert ledger.reading_of(run.host(0).event, "GPU-2") is None
    assert ledger.reading_of(run.host(0).event, None) is None


def test_the_peak_names_its_phase() -> None:
    run = Run()
    peak = report(apply(run.stream(5)).frame(0))[0].devices[0].peak
    assert peak is not None
    assert (peak.step, peak.phase, peak.allocated) == (4, "backward", run.peak(4))


def test_of_fast_runs_the_newest_read_ledger_is_offered_with_its_step() -> None:
    run = Run(sampled_every=7)
    (device,) = report(apply(run.stream(12)).frame(0))[0].devices
    assert device.ledger is not None
    assert device.ledger.gradients is not None  # carried, and the rest told as one
    assert device.ledger.unexplained is None
    assert device.read is not None
    assert (device.read.step, device.read.lines.activations, device.read.lines.unattributed) == (7, 0, None)
    assert device.read.lines.gradients == run.weights


def test_a_composed_peak_stays_until_the_next_and_is_told_in_one_line() -> None:
    run = Run()
    events = list(run.stream(3))
    peak = run.peaks(1)["backward"]
    composed = wire.Ledger(
        1, "backward", 0, 0, peak, peak - run.rounding, None, run.weights, 0, 0, run.state, 0, run.input_bytes(1),
        activations=300 * MIB, temporaries=24 * MIB, peak=True, module="blocks.3",
    )  # fmt: skip
    at = next(i for i, r in enumerate(events) if isinstance(r.event, wire.Step) and r.event.step == 1)
    events.insert(at, wire.Received(run.nonce, events[at].unix_ns, composed))
    (device,) = report(apply(events).frame(0))[0].devices
    assert device.peak is not None
    assert device.peak.lines is None  # the newest step's was not
    assert device.composed is not None
    assert device.composed.step == 1
    assert ledger.peak_text(device.composed) == (
        "625.1 MiB in backward of step 1, in blocks.3: activations 300.0 MiB, optimizer 200.0 MiB, weights 100.0 MiB, "
        "temporaries 24.0 MiB, unexplained 1.00 MiB, inputs 64.0 KiB, rounding 1,000 B"
    )


def test_a_step_that_was_read_once_does_not_say_in_which_phase_it_peaked() -> None:
    """The allocator's peak is reset when it is read: the last window's is then the whole step's."""
    run = Run()
    store = apply(run.picture())
    for received in (*run.step(1), *run.step(2)):
        event = received.event
        if isinstance(event, wire.Phase) and event.step == 2:
            last = event.phase == "optimizer"
            blank = dict.fromkeys(("allocated", "allocated_peak", "reserved", "reserved_peak"))
            event = replace(event, flags=wire.BOUND, **({"allocated_peak": run.peak(2)} if last else blank))
        store.apply(msgspec.structs.replace(received, event=event))
    whole, once = store.frame(0).ranks[0].steps
    peaks = ledger.peak(whole, 0), ledger.peak(once, 0)
    assert [peak and peak.phase for peak in peaks] == ["backward", None]
    assert [peak and peak.allocated for peak in peaks] == [run.peak(1), run.peak(2)]
    assert peaks[1] is not None
    assert ledger.peak_text(peaks[1]).startswith(f"{units.size(run.peak(2))} in step 2")
