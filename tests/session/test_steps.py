"""A rank's steps: views of them cost nothing to take, and never change."""

from __future__ import annotations

import random
from weakref import WeakSet

import pytest
from synthetic import Run, rank_of

from gpumon.session.frame import StepRecord
from gpumon.session.steps import PackedSteps, StepRing


class Phases:
    """A step's, whose end can be seen."""


@pytest.mark.parametrize("limit", [1, 5, 40])
def test_a_view_stays_what_it_was_whatever_happens_to_the_ring(limit: int) -> None:
    chance = random.Random(limit)
    ring, expected = StepRing(limit), []
    views = []
    for number in range(400):
        record = StepRecord(number, None, ())
        what = chance.random()
        at = chance.randrange(len(expected)) if expected else 0
        if what < 0.7 or not expected:
            ring.append(record)
            expected.append(record)
        elif what < 0.85:
            ring.put(at, record)
            expected[at] = record
        else:
            ring.insert(at, record)
            expected.insert(at, record)
        del expected[:-limit]
        assert tuple(ring) == tuple(expected)
        if chance.random() < 0.3:
            views.append((ring.view(), tuple(expected)))
    for view, was in views:
        assert view == was
        assert list(reversed(view)) == list(reversed(was))
        assert len(view) == len(was)
        for at in (0, -1, len(was) - 1, -len(was)):
            assert view[at] is was[at]
        for part in (slice(-3, None), slice(None, 2), slice(1, -1), slice(None, None, -2)):
            assert view[part] == was[part]
        for outside in (len(was), -len(was) - 1):
            with pytest.raises(IndexError):
                view[outside]


def test_of_the_forgotten_steps_few_stay() -> None:
    """They cost memory; without any, each new step would copy all kept ones."""
    ring, alive, most = StepRing(80), WeakSet[Phases](), 0
    for number in range(1_000):
        phases = Phases()
        ring.append(StepRecord(number, None, phases))
        alive.add(phases)
        del phases
        most = max(most, len(alive))
    assert most == 80 + 2


def test_packed_steps_are_as_they_were() -> None:
    records = tuple(rank_of(Run(), 40).steps)
    packed = PackedSteps(records)
    assert tuple(packed) == records
    assert len(packed) == 40
    assert packed[-1] == records[-1]
    assert packed[3:5] == records[3:5]
    assert packed == PackedSteps(records) != PackedSteps(records[1:])
    assert not PackedSteps()
