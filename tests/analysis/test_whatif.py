"""From which steps a change's peak is told, and how much of the activations may stand still."""

from __future__ import annotations

import pytest
from synthetic import MIB, Run, rank_of

from gpumon.analysis import Reporter
from gpumon.analysis.changes import SHORT, USUAL, Change, Span
from gpumon.analysis.whatif import answer
from gpumon_agent.shape_model.model import ShapeModel


def peak(run: Run, steps: int, change: Change | None = None) -> Span:
    """Of a model with which nothing was learnt yet."""
    rank = rank_of(run, steps)
    (said,) = answer(rank, Reporter().rank(rank).devices[0], ShapeModel(), (change or Change(),))
    assert said.peak is not None, said.why_not
    return said.peak


@pytest.mark.parametrize(("steps", "high"), [(266, True), (267, False)])
def test_the_highest_of_the_newest_256_steps_counts(steps: int, high: bool) -> None:
    run = Run(activations=lambda step: (900 if step == 10 else 600) * MIB)
    assert (peak(run, steps).expected == run.peak(10)) == high


@pytest.mark.parametrize(("step", "counts"), [(0, False), (1, False), (2, True)])
def test_the_first_two_steps_do_not_count(step: int, counts: bool) -> None:
    """They make optimizer state and new buckets."""
    run = Run(activations=lambda at: (900 if at == step else 600) * MIB)
    assert (peak(run, 8).expected == run.peak(step)) == counts


@pytest.mark.parametrize("early", [100, 5_000])
def test_of_steps_that_all_differ_the_highest_counts(early: int) -> None:
    run = Run(activations=lambda at: (300 + at * 7919 % 37 * 20 if at > 1 else early) * MIB)
    assert peak(run, 40).expected == max(run.peak(step) for step in range(2, 40))


@pytest.mark.parametrize(("steps", "told"), [(2, False), (3, True)])
def test_a_run_is_told_what_changes_would_do_once_a_step_counts(steps: int, told: bool) -> None:
    assert bool(Reporter().rank(rank_of(Run(), steps)).devices[0].whatif) == told


def test_of_batches_that_were_all_alike_a_fifth_of_the_activations_may_stand_still() -> None:
    """A workspace, or what does not follow the batch: of half of the batch 0.5 to 0.6 of them are left."""
    run = Run(weights=MIB, activations=lambda step: 1000 * MIB)
    half = peak(run, 8, Change(batch=0.5))
    assert half.high - half.low == pytest.approx(100 * MIB, abs=2 * MIB)


def test_what_is_asked_of_every_run() -> None:
    asked = [(c.batch, c.sequence, c.accumulate, c.zero) for c in USUAL]
    usual = (1, 1, 1, 0)
    assert asked == [
        usual, (2, 1, 1, 0), (0.5, 1, 1, 0), (1, 2, 1, 0), (1, 1, 2, 0),
        *[usual] * 4, (1, 1, 1, 1), (1, 1, 1, 2), (1, 1, 1, 3),
    ]  # fmt: skip
    assert len(SHORT) == 6
