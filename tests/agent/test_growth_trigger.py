"""When growth is suspected, and how seldom where there is none."""

from __future__ import annotations

import random
from itertools import pairwise

from gpumon_agent.leaks.growth_trigger import PAUSE_STEPS, GrowthTrigger

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


def test_a_block_every_tenth_step() -> None:
    assert suspected([(100 * MIB, 900 + at // 10) for at in range(1_000)])[0] <= 400


def test_while_growth_goes_on_censuses_become_rare() -> None:
    found = suspected([(MIB * at, 900 + at) for at in range(4_000)])
    apart = [b - a for a, b in pairwise(found)]
    assert apart == [PAUSE_STEPS * 2**at for at in range(len(apart))]
    assert len(found) <= 9


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
