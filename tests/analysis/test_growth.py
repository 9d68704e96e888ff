"""Growth: the smallest leak within the steps that are promised, and silence on everything that is none."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from synthetic import Run, apply

from gpumon.analysis.growth import BLOCKS, BYTES, RESIDENT, SETTLING_STEPS, SLACK, WORKER, Follower, Law
from gpumon.analysis.growth_series import HostGrowth
from gpumon_agent import wire

MIB = 1 << 20
BASE = 1 << 30
Series = Callable[[int], int]


def nothing(step: int) -> int:
    return 0


def follow(value: Series, steps: int, size: Series = nothing, law: Law = BYTES) -> tuple[Follower, list[int]]:
    """The follower after all steps, and those at which it said that something grows."""
    follower, growing = Follower("x", law), []
    for step in range(SETTLING_STEPS, steps):
        follower.observe(step, value(step), size(step))
        if follower.growing:
            growing.append(step)
    return follower, growing


def blocks_of(size: int) -> int:
    return -(-size // 512) * 512


def test_one_block_a_step_within_50_steps_with_rate_interval_and_beginning() -> None:
    follower, growing = follow(lambda step: BASE + 512 * max(0, step - 1000), 1050)
    assert growing[0] < 1050
    found = follower.growth()
    assert (found.per_step, found.low, found.high) == (512, 512, 512)
    assert found.since == 1001
    assert found.so_far is not None
    assert abs(found.so_far - 512 * 49) <= 512 * 5


@pytest.mark.parametrize("usual", [128 * 1024, 32 * MIB])
@pytest.mark.parametrize("seed", range(4))
def test_one_block_a_step_within_200_steps_of_batches_that_differ_by_a_fifth(seed: int, usual: int) -> None:
    """By the count of blocks, which does not follow the batch; by bytes alone where the batch is small."""
    rng = random.Random(seed)
    sizes = [round(usual * rng.uniform(0.8, 1.2)) for _ in range(300)]
    _, by_blocks = follow(lambda step: 700 + step, 200, sizes.__getitem__, BLOCKS)
    assert by_blocks[0] < 50
    if usual < MIB:
        follower, by_bytes = follow(lambda s: BASE + blocks_of(sizes[s]) + 512 * s, 300, sizes.__getitem__)
        assert by_bytes
        found = follower.growth()
        assert found.low is not None
        assert found.high is not None
        assert found.low <= 512 <= found.high
        assert found.high - found.low < 512


@pytest.mark.parametrize("every", [2, 3, 7, 10, 20])
def test_a_tensor_kept_every_so_many_steps(every: int) -> None:
    follower, growing = follow(lambda step: BASE + MIB * (step // every), 200)
    assert growing
    assert follower.growth().per_step == pytest.approx(MIB / every, rel=0.15)


def test_one_tensor_that_is_concatenated_to_grows_in_bytes_alone() -> None:
    rng = random.Random(0)
    sizes = [rng.randint(80, 120) for _ in range(100)]
    assert follow(lambda step: BASE + 256 * sum(sizes[:step]), 50)[1]


def test_it_is_gone_when_it_stops_and_when_it_is_let_go() -> None:
    _, stopped = follow(lambda step: BASE + 512 * min(step, 100), 200)
    _, let_go = follow(lambda step: BASE + (512 * step if step < 100 else 0), 200)
    assert 95 < stopped[-1] < 120
    assert 95 < let_go[-1] < 110


def _clean(seed: int) -> dict[str, tuple[Series, Series]]:
    rng = random.Random(seed)
    sizes = [rng.randint(64, 512) for _ in range(3000)]
    noise = [blocks_of(rng.randint(0, 8 * MIB)) for _ in range(3000)]
    masks = [len(set(sizes[:step])) for step in range(600)]
    return {
        "flat": (lambda step: BASE, nothing),
        "random batches": (lambda step: BASE + blocks_of(sizes[step] * 4096), lambda step: sizes[step] * 512),
        "noise of no batch": (lambda step: BASE + noise[step], nothing),
        "optimizer state late": (lambda step: BASE + (step > 40) * 200 * MIB, nothing),
        "ema, then a workspace": (lambda step: BASE + (step > 20) * 100 * MIB + (step > 33) * 8 * MIB, nothing),
        "a buffer that fills": (lambda step: BASE + 4096 * min(step, 24), nothing),
        "settles in": (lambda step: BASE + round(64 * MIB * (1 - 0.95**step)), nothing),
        "evaluated every 20": (lambda step: BASE + (step % 20 == 0) * 50 * MIB, nothing),
        "curriculum": (lambda step: BASE + 4096 * (64 + step // 8), lambda step: 512 * (64 + step // 8)),
        "sorted by length": (lambda step: BASE + 4096 * (step % 200), lambda step: 64 * (step % 200)),
        "emptied each epoch": (lambda step: BASE + 512 * (step % 25), nothing),
        "masks by length": (lambda step: BASE + 4096 * masks[min(step, 599)], nothing),
        "freed little by little": (lambda step: BASE - 512 * step, nothing),
    }


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", list(_clean(0)))
def test_what_is_no_leak_does_not_grow(name: str, seed: int) -> None:
    value, size = _clean(seed)[name]
    if name == "masks by length":  # slows down, but is a cache that grows while lengths are new
        assert not follow(value, 3000, size)[0].growing
        return
    assert follow(value, 3000, size)[1] == []


def test_a_list_emptied_each_long_epoch_is_told_once_at_most() -> None:
    growing = follow(lambda step: BASE + 512 * (step % 300), 3000)[1]
    assert all(step < 320 for step in growing)


def test_what_a_list_held_1_000_steps_ago_is_a_ceiling_no_more() -> None:
    growing = follow(lambda step: BASE + 512 * (step % 1500), 3000)[1]
    assert not any(1520 <= step < 2500 for step in growing)  # it was that high before
    assert all(step in growing for step in range(2520, 3000))


@pytest.mark.parametrize(
    ("law", "steps", "least"),
    [
        (BYTES, 33, 4096 / 25),  # over six parts of five steps; less is a few tensors' rounding
        (SLACK, 33, 32 * MIB / 25),  # a segment of the allocator is 20 MiB
        (RESIDENT, 22, 24 * MIB / 15),  # by readings, three a part
        (WORKER, 22, 48 * MIB / 15),
    ],
)
def test_from_how_many_bytes_a_growth_counts(law: Law, steps: int, least: float) -> None:
    assert follow(lambda step: BASE + round(1.05 * least) * step, steps, law=law)[1]
    assert not follow(lambda step: BASE + round(0.95 * least) * step, steps, law=law)[1]


def test_a_slope_is_fitted_anew_every_40_steps_to_the_newest_240() -> None:
    follower, slopes = Follower("x", BYTES), {}
    noise = random.Random(3)
    for step in range(1, 701):
        follower.observe(step, BASE + 4096 * step + 8192 * max(0, step - 400) + noise.randrange(512))
        slopes[step] = follower.growth().per_step
    assert [step for step in range(100, 401) if slopes[step] != slopes[step - 1]] == list(range(120, 401, 40))
    assert slopes[520] == pytest.approx(8192, rel=0.1)  # half of them before it became three times as fast
    assert slopes[640] == pytest.approx(3 * 4096, rel=0.01)


@pytest.mark.parametrize(("share", "stops"), [(0.15, True), (0.25, False)])
def test_a_growth_that_slows_to_a_fifth_has_settled(share: float, stops: bool) -> None:
    _, growing = follow(lambda step: BASE + MIB * min(step, 100) + round(share * MIB) * max(0, step - 100), 130)
    assert (len(growing) < 130 - growing[0]) == stops  # what goes on is found anew, at its new rate


def test_batches_that_get_longer_beside_a_fifth_of_noise_explain_what_follows_their_mean() -> None:
    rng = random.Random(0)
    sizes = [512 * round(500 + 6 * step + rng.uniform(-100, 100)) for step in range(100)]
    assert not follow(lambda step: 4096 * (500 + 6 * step), 100, sizes.__getitem__)[1]
    assert follow(lambda step: 4096 * (500 + 6 * step), 100)[1]


def test_what_owners_of_the_ledger_take_is_no_leak() -> None:
    def owned_since(step: int) -> int:
        return 4096 * (60 - step)

    follower = Follower("allocated", BYTES, owned_since)
    for step in range(2, 60):
        follower.observe(step, BASE + 4096 * step)
        assert not follower.growing


def test_host_memory_by_readings_a_few_steps_apart() -> None:
    follower = Follower("rss", RESIDENT)
    for reading in range(30):
        follower.observe(7 * reading, BASE + 14 * MIB * reading)
    found = follower.growth()
    assert found.growing
    assert found.per_step == 2 * MIB
    assert not follow(lambda reading: BASE + MIB * min(reading, 20), 100, law=RESIDENT)[1]
    assert not follow(lambda reading: BASE + 20 * MIB * min(reading, 3), 100, law=SLACK)[1]


def test_a_worker_is_followed_from_its_31st_reading_on() -> None:
    """Its first images, its full queue and its imports are no leak; one that goes on is told in half a minute more."""
    run, host, growing = Run(), HostGrowth(), []
    store = apply(run.stream(4))
    for second in range(100):
        sizes = min(second, 30), second
        children = tuple(wire.ChildProcess(70 + at, "python", BASE + 20 * MIB * n) for at, n in enumerate(sizes))
        event = wire.Host("box", second, processes=(wire.ProcessReading(run.pid, BASE, children=children),))
        apply([wire.Received("host:box", run.unix_ns(second), event), *run.step(4 + second)], store=store)
        host.observe(store.frame(run.unix_ns(second)).ranks[0])
        growing += [(second, each.figure) for each in host.growth() if each.growing]
    assert {figure for _, figure in growing} == {"worker 71"}
    assert 30 < growing[0][0] < 60


def test_the_points_for_a_plot_are_few_and_span_the_run() -> None:
    follower, _ = follow(lambda step: BASE + step, 10_000)
    points = follower.growth().points
    assert 40 <= len(points) <= 120
    assert points[0][0] < 300
    assert points[-1][0] > 9_700
    assert points == tuple(sorted(points))
