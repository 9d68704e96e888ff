"""The estimate: exact where the description says all, learnt where it cannot, and never following the run."""

from __future__ import annotations

import msgspec
import pytest
from synthetic import GIB, MIB, Run, frame_of

from gpumon.analysis import Breakdown, Estimate, Reporter, report
from gpumon.analysis.estimate.closed_form import Owned, calibrated
from gpumon_agent import wire
from gpumon_agent.wire.thinning import KINDS_MAX


def estimate_after(run: Run, steps: int) -> Estimate:
    found = Reporter().report(frame_of(run, steps))[0].devices[0].estimate
    assert found is not None
    return found


@pytest.mark.parametrize("activations", [10 * MIB, 3 * GIB])
@pytest.mark.parametrize("fused", [False, True])
def test_a_steady_run_is_estimated_to_half_a_percent_from_the_third_iteration(activations: int, fused: bool) -> None:
    run = Run(activations=lambda step: activations, fused=fused, foreach=not fused)
    for steps in (2, 3, 30):
        found = estimate_after(run, steps)
        assert found.peak == pytest.approx(run.peak(10), rel=0.005)
        assert found.lines.allocated == pytest.approx(run.end(10), rel=0.005)


def test_after_one_iteration_the_optimizer_state_is_in_it_already() -> None:
    run = Run(activations=lambda step: 3 * GIB)
    assert estimate_after(run, 1).peak == pytest.approx(run.peak(10), rel=0.01)


def test_owners_are_exact_and_say_so() -> None:
    found = estimate_after(Run(buffers=7 * MIB), 4)
    assert (found.lines.weights, found.lines.buffers) == (100 * MIB, 7 * MIB)
    assert (found.lines.gradients, found.lines.optimizer) == (100 * MIB, 200 * MIB)
    sources = dict(found.sources)
    assert sources["weights"] == sources["optimizer"] == "exact"
    assert sources["activations"] == "learnt"


def test_an_optimizer_that_takes_more_than_its_formula_is_believed() -> None:
    class Copying(Run):
        """DeepSpeed's: the optimizer inside it steps between copies to another precision."""

        temporaries = 170 * MIB

    found = estimate_after(Copying(), 4)
    assert found.peak == pytest.approx(Copying().peak(10), rel=0.005)
    assert (found.lines.temporaries, dict(found.sources)["temporaries"]) == (170 * MIB, "learnt")


def test_gradients_that_are_bucket_views_are_counted_once() -> None:
    view = wire.Parallel("ddp", 2, (60 * MIB, 40 * MIB), True, True)
    found = estimate_after(Run(parallel=view), 4)
    assert (found.lines.buckets, found.lines.gradients) == (100 * MIB, 0)


def test_a_leak_does_not_raise_the_estimate() -> None:
    early = estimate_after(Run(kept=lambda step: step * MIB), 3)
    late = estimate_after(Run(kept=lambda step: step * MIB), 200)
    assert early.peak == late.peak


def test_without_a_model_there_is_no_estimate() -> None:
    from synthetic import apply

    run = Run()
    events = [r for r in run.stream(3) if not isinstance(r.event, (wire.Model, wire.Module))]
    assert report(apply(events).frame(0))[0].devices[0].estimate is None


def test_batches_of_two_sizes_tell_a_third() -> None:
    sizes = (64, 64, 128, 256)
    run = Run(
        input_bytes=lambda step: sizes[min(step, 3)] * 1024,
        activations=lambda step: 50 * MIB + sizes[min(step, 3)] * 8 * MIB,
    )
    reports = Reporter().report(frame_of(run, 4))
    assert reports[0].devices[0].estimate.peak == pytest.approx(run.peak(3), rel=0.005)


def test_gradients_that_are_fewer_than_the_parameters_are_taken_as_measured() -> None:
    owners = Owned(100 * MIB, 0, 100 * MIB, 0, 0, 0, "exact", "exact")
    sparse = calibrated(owners, Breakdown(gradients=MIB))
    assert (sparse.gradients, sparse.gradients_source) == (MIB, "measured")
    assert calibrated(owners, Breakdown(gradients=100 * MIB)) is calibrated(owners, None) is owners


def test_state_that_exists_counts_and_not_what_a_formula_expects() -> None:
    """Parameters that never get a gradient get no state: a frozen backbone, an unused head."""
    owners = Owned(100 * MIB, 0, 100 * MIB, 200 * MIB, 0, 100 * MIB, "exact", "exact")
    known = calibrated(owners, Breakdown(gradients=40 * MIB, optimizer=80 * MIB))
    assert (known.gradients, known.optimizer, known.temporaries) == (40 * MIB, 80 * MIB, 40 * MIB)
    assert (known.gradients_source, known.state_source) == ("measured", "measured")
    assert calibrated(owners, Breakdown(gradients=100 * MIB, optimizer=0)) is owners  # the first step was skipped
    assert calibrated(owners, Breakdown(gradients=100 * MIB, optimizer=200 * MIB + 800)) is owners  # step counters
    assert calibrated(owners, Breakdown(gradients=100 * MIB, optimizer=round(200.3 * MIB))).state_source == "measured"


@pytest.mark.parametrize("activations", [30, 300, 3000])
def test_a_smaller_last_batch_is_estimated_by_its_size(activations: int) -> None:
    """MiB of a full batch. The last one of an epoch has a quarter of it."""

    def size(step: int) -> int:
        return 16 if step % 10 == 9 else 64

    run = Run(input_bytes=lambda step: size(step) * 1024, activations=lambda step: activations * size(step) * MIB // 64)
    for steps in (10, 20):
        found = estimate_after(run, steps)
        assert found.peak == pytest.approx(run.peak(steps - 1), rel=0.02)
    assert estimate_after(run, 19).peak == pytest.approx(run.peak(18), rel=0.005)


def test_of_several_batches_in_a_step_the_largest_makes_the_peak() -> None:
    def lengths(step: int) -> tuple[int, int]:
        return 80 + 10 * (step % 3), 10 + 30 * (step % 2)

    class Accumulating(Run):
        def step_events(self, step: int) -> list[wire.Event]:
            events: list[wire.Event] = []
            for event in super().step_events(step):
                if isinstance(event, wire.Phase) and event.phase == "optimizer":
                    both = [each for each in events if isinstance(each, wire.Phase) and each.phase != "between"]
                    events += [msgspec.structs.replace(each, index=1) for each in both]
                if isinstance(event, wire.Step):
                    shapes = tuple((8, length) for length in lengths(step))
                    size = 64 * sum(lengths(step))
                    event = msgspec.structs.replace(event, input_bytes=size, input_shapes=shapes, phases=6)
                events.append(event)
            return events

    run = Accumulating(activations=lambda step: max(lengths(step)) * 10 * MIB)
    for steps in (6, 7, 8, 9):
        assert estimate_after(run, steps).peak == pytest.approx(run.peak(steps - 1), rel=0.005)


def test_steps_that_take_turns_are_estimated_each_by_its_kind() -> None:
    """As of a discriminator and a generator, of which one sees a batch once and the other twice."""
    run = Run(
        activations=lambda step: (900 if step % 2 else 300) * MIB,
        inputs=lambda step: 2 if step % 2 else 1,
    )
    for steps in (9, 10, 11, 12):
        assert estimate_after(run, steps).peak == pytest.approx(run.peak(steps - 1), rel=0.005)


def test_steps_with_the_same_inputs_are_told_apart_by_the_optimizer_that_stepped() -> None:
    run = Run(activations=lambda step: (900 if step % 2 else 300) * MIB, optimizers=lambda step: (step % 2,))
    for steps in (9, 10, 11, 12):
        assert estimate_after(run, steps).peak == pytest.approx(run.peak(steps - 1), rel=0.005)


def test_a_step_without_a_forward_is_estimated_as_such() -> None:
    """As that of the temperature of soft actor-critic."""
    run = Run(
        activations=lambda step: 2 * MIB if step % 3 == 2 else 900 * MIB,
        forwards=lambda step: step % 3 != 2,
        optimizers=lambda step: (step % 3 == 2,),
        weights=40 * MIB,
        foreach=False,
    )
    for steps in range(10, 16):
        assert estimate_after(run, steps).peak == pytest.approx(run.peak(steps - 1), rel=0.005)


@pytest.mark.parametrize("several", [False, True])
def test_of_several_optimizers_what_the_one_takes_that_stepped_is_learnt(several: bool) -> None:
    found = estimate_after(Run(several=several), 4)
    assert dict(found.sources)["temporaries"] == ("learnt" if several else "exact")


def test_what_a_step_finds_of_an_earlier_one_s_graph_follows_the_batch() -> None:
    """As a generator's step finds what the discriminator's has made; the last batch of an epoch is a smaller one."""

    def size(step: int) -> int:
        return 16 if step % 10 == 9 else 64

    run = Run(input_bytes=lambda step: size(step) * 1024, kept=lambda step: 10 * size(step) * MIB)
    for steps in (10, 12):
        found = dict(estimate_after(run, steps).phases)
        for phase in ("forward", "backward", "optimizer"):
            assert found[phase] == pytest.approx(run.peaks(steps - 1)[phase], rel=0.005)


def test_of_more_kinds_than_are_kept_the_first_stands_for_the_rest() -> None:
    run = Run(inputs=lambda step: 1 + step % (2 * KINDS_MAX))
    for steps in range(1, 4 * KINDS_MAX, 5):
        assert estimate_after(run, steps).peak == pytest.approx(run.peak(10), rel=0.01)
