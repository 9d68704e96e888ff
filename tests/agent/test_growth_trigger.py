"""When growth is suspected, and how seldom where there is none."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from gpumon_agent.leaks.growth_trigger import GrowthTrigger

BLOCK = 512
MIB = 1 << 20


def suspected(figures: list[tuple[int, int]]) -> list[int]:
    """The steps at which a census would begin."""
    suspicion = GrowthTrigger()
    return [at for at, each in enumerate(figures) if suspicion.step_closed(at, ((0, *each),))]


def test_one_block_a_step_within_twenty_steps() -> None:
    assert suspected([(100 * MIB + BLOCK * at, 900 + at) for at in range(50)])[0] <= 20


def test_one_block_a_step_under_noise_of_the_batch() -> None:
    for seed in range(20):
        noise = random.Random(seed)
        figures = [(int(100 * MIB * noise.uniform(0.8, 1.2)) + BLOCK * at, 900 + at) for at in range(200)]
        assert suspected(figures)[0] <= 20


def test_a_tensor_that_grows_under_noise() -> None:
    for seed in range(20):
        noise = random.Random(seed)
        figures = [(int(100 * MIB + MIB * noise.uniform(-1, 1)) + MIB // 4 * at, 900) for at in range(200)]
        assert suspected(figures)[0] <= 150


@pytest.mark.parametrize(("every", "within"), [(10, 400), (100, 1_100), (500, 4_200)])
def test_a_block_every_so_many_steps(every: int, within: int) -> None:
    """The slower a leak, the later it is found; one block in 500 steps still is in a run of a few hours."""
    assert suspected([(100 * MIB, 900 + at // every) for at in range(within + 1)])


def test_while_growth_goes_on_censuses_become_rare() -> None:
    found = suspected([(MIB * at, 900 + at) for at in range(4_000)])
    apart = [b - a for a, b in pairwise(found)]
    assert apart == [16 * 2**at for at in range(len(apart))]
    assert len(found) <= 9


def test_they_never_become_rarer_than_every_8_192_steps() -> None:
    found = suspected([(MIB * at, 900 + at) for at in range(30_000)])
    assert [b - a for a, b in pairwise(found)][-2:] == [8_192, 8_192]


@pytest.mark.parametrize(("quiet", "pause"), [(2_000, 512), (2_200, 256)])
def test_2_048_steps_without_growth_halve_the_pause_of_the_next(quiet: int, pause: int) -> None:
    """A second leak is looked at twice soon, although the first one was looked at often."""
    before = [(MIB * at, 900 + at) for at in range(200)]  # censuses with pauses of 16, 32, 64, 128 and 256 steps
    after = [(MIB * (200 + at), 1_100 + at) for at in range(600)]
    found = [at for at in suspected(before + [before[-1]] * quiet + after) if at >= 200 + quiet]
    assert found[1] - found[0] == pause


def test_blocks_are_counted_from_step_2_on_when_optimizer_state_and_buckets_are_there() -> None:
    trigger = GrowthTrigger()
    for step in range(6):
        trigger.step_closed(step, ((0, 100 * MIB, 900 + step),))
    assert trigger.blocks_at_first() == {0: 902}


def test_clean_runs_are_hardly_ever_suspected() -> None:
    noise = random.Random(1)
    lengths = [(int(100 * MIB * noise.uniform(0.8, 1.2)), 900 + noise.randint(0, 3)) for _ in range(20_000)]
    warm_up = [(50 * MIB, 400), (90 * MIB, 800), (110 * MIB, 910), (100 * MIB, 900)] + [(100 * MIB, 900)] * 1_000
    evaluation = [(100 * MIB + (30 * MIB if at % 50 == 0 else 0), 900 + (at % 50 == 0)) for at in range(5_000)]
    accumulated = [(100 * MIB + MIB * (at % 4), 900 + at % 4) for at in range(5_000)]
    ema = [(100 * MIB if at < 100 else 150 * MIB, 900 if at < 100 else 1_200) for at in range(5_000)]
    assert len(suspected(lengths)) <= 2
    for clean in (warm_up, evaluation, accumulated, ema):
        assert suspected(clean) == []
