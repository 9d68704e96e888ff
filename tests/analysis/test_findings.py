"""Findings: each opens on its own evidence, goes when it is gone, and none opens on a healthy run."""

from __future__ import annotations

import random

import pytest
from looked import codes, history, only
from msgspec.structs import replace
from synthetic import GIB, MIB, Run

from gpumon.analysis import Reporter
from gpumon.analysis.findings import RULES
from gpumon.analysis.types import SEVERITIES, Finding
from gpumon.session.store import SessionStore
from gpumon_agent import wire

DDP = wire.Parallel("ddp", 2, (60 * MIB, 40 * MIB), True, False)


@pytest.mark.parametrize("seed", range(3))
def test_a_healthy_run_has_no_findings(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.randint(64, 512) for _ in range(400)]
    run = Run(activations=lambda step: 2 * MIB * sizes[step], input_bytes=lambda step: 512 * sizes[step])
    assert all(not found for found in history(run, steps=400))


def test_a_leak_that_will_not_fit_is_critical_well_ahead_and_names_its_rate() -> None:
    run = Run(kept=lambda step: step * 4 * MIB, total=3 * GIB)
    fails_at = next(step for step in range(1000) if run.peak(step) > run.total - run.context)
    said = history(run, steps=fails_at)
    first = next(step for step, found in enumerate(said) if "oom-ahead" in codes(found))
    assert first <= fails_at - 20
    finding = only(said[-1], "oom-ahead")
    assert finding.severity == "critical"
    assert finding.bytes_per_step == pytest.approx(4 * MIB, rel=0.1)


def test_how_much_a_batch_is_too_large_by_is_what_the_failed_allocation_told_once_it_has() -> None:
    """The agent that nobody told of the device holds a batch against its total, what the context takes included."""
    run, store, reporter = Run(), SessionStore(), Reporter()
    for received in run.stream(8, host_every=0):
        store.apply(received)
    said = wire.Outlook(8, 0, run.time_ns(8) - 5000, 6 * GIB, 6 * GIB, 6 * GIB, "backward", wire.OOM_AHEAD, -2 * GIB)
    failed = wire.Oom(8, "forward", 0, run.time_ns(8), GIB, total=4 * GIB, free=GIB, reserved=2 * GIB)

    def finding() -> Finding:
        return only(reporter.report(store.frame(0))[0].findings, "oom-ahead")

    store.apply(run.received(said, 8))
    assert finding().bytes == -2 * GIB
    assert finding().title.startswith("step 8 needs 6.00 GiB in backward")
    store.apply(run.received(replace(said, input_shapes=((8, 900),)), 8))
    assert finding().title.startswith("step 8 with its batch of 8×900 needs 6.00 GiB in backward")
    store.apply(run.received(failed, 8))
    assert finding().bytes == -3 * GIB
    assert "3.00 GiB too much" in finding().title
    store.apply(run.received(replace(said, headroom=-4 * GIB), 8))  # it knew of what cannot be used, too
    assert finding().bytes == -4 * GIB


def test_a_peak_close_to_the_device_s_total_is_near_capacity() -> None:
    run = Run(activations=lambda step: 3 * GIB + 80 * MIB, total=4 * GIB)
    finding = only(history(run, steps=20)[-1], "near-capacity")
    assert finding.bytes == run.total - run.context - run.peak(19)
    assert finding.severity == "warning"


def test_near_capacity_goes_when_the_batch_shrinks() -> None:
    run = Run(activations=lambda step: 3 * GIB + 80 * MIB if step < 30 else GIB, total=4 * GIB)
    said = history(run, steps=60)
    assert codes(said[29]) == {"near-capacity"}
    assert codes(said[-1]) == set()
    assert codes(said[-1], "gone") == {"near-capacity"}


def test_retries_are_told_and_the_remedy_knows_the_settings() -> None:
    plain = Run(retries=lambda step: 0 if step < 10 else 3)
    expandable = Run(
        retries=lambda step: 0 if step < 10 else 3, settings={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    )
    said = history(plain, steps=12)
    assert codes(said[9]) == set()
    finding = only(said[10], "allocator-retries")
    assert "3 times" in finding.title
    assert "expandable_segments" in finding.remedy
    assert "expandable_segments" not in only(history(expandable, steps=12)[-1], "allocator-retries").remedy


def test_retries_from_before_the_viewer_came_are_not_news() -> None:
    assert all("allocator-retries" not in codes(found) for found in history(Run(retries=lambda step: 7), steps=10))


def test_ddp_s_second_copy_of_the_gradients() -> None:
    finding = only(history(Run(parallel=DDP, buckets=100 * MIB), steps=3)[-1], "bucket-copy")
    assert (finding.bytes, finding.severity) == (100 * MIB, "info")
    view = wire.Parallel("ddp", 2, (60 * MIB, 40 * MIB), True, True)
    assert "bucket-copy" not in codes(history(Run(parallel=view), steps=3)[-1])


def test_an_embedding_that_owns_most_parameters() -> None:
    finding = only(history(Run(embedding_bytes=80 * MIB), steps=3)[-1], "dominant-embedding")
    assert finding.severity == "info"
    assert finding.title.startswith("words holds 80 %")
    assert "dominant-embedding" not in codes(history(Run(embedding_bytes=40 * MIB), steps=3)[-1])


def test_a_foreach_step_that_makes_the_peak() -> None:
    run = Run(activations=lambda step: 10 * MIB)
    finding = only(history(run, steps=20)[-1], "foreach-peak")
    assert finding.severity == "info"
    assert finding.bytes == run.peak(19) - run.end(19)
    assert "fused=True" in finding.remedy
    fused = Run(activations=lambda step: 10 * MIB, fused=True, foreach=False)
    assert "foreach-peak" not in codes(history(fused, steps=20)[-1])


def test_one_rank_that_peaks_above_the_others() -> None:
    def rank(number: int, activations: int) -> Run:
        return Run(
            rank=number, world_size=4, run_id="job", nonce=f"n{number}", pid=100 + number,
            activations=lambda step: activations,
        )  # fmt: skip

    high = rank(0, 900 * MIB)
    said = history(high, *(rank(n, 300 * MIB) for n in (1, 2, 3)), steps=60)
    finding = only(said[-1], "rank-skew")
    assert finding.bytes == 600 * MIB
    even = history(rank(0, 300 * MIB), *(rank(n, 300 * MIB) for n in (1, 2, 3)), steps=60)
    assert "rank-skew" not in codes(even[-1])


@pytest.mark.parametrize("seed", range(4))
def test_ranks_whose_batches_differ_by_chance_are_not_skewed(seed: int) -> None:
    rng = random.Random(seed)

    def rank(number: int) -> Run:
        sizes = [rng.randint(64, 512) for _ in range(150)]
        return Run(
            rank=number, world_size=4, run_id="job", nonce=f"n{number}", pid=100 + number,
            activations=lambda step: 4 * MIB * sizes[step],
        )  # fmt: skip

    said = history(*(rank(n) for n in range(4)), steps=150)
    assert all("rank-skew" not in codes(found) for found in said)


def test_somebody_else_on_the_device() -> None:
    finding = only(history(Run(others=2 * GIB), steps=10)[-1], "other-process")
    assert finding.bytes == 2 * GIB
    assert "game 99" in finding.title
    assert "other-process" not in codes(history(Run(others=10 * MIB), steps=10)[-1])


def test_time_without_training_opens_and_closes_nothing() -> None:
    run, store, reporter = Run(others=2 * GIB), SessionStore(), Reporter()
    for received in run.stream(2, host_every=1):
        store.apply(received)
    for k in range(10):
        store.apply(run.host(k))
        assert reporter.report(store.frame(0))[0].findings == ()


def test_a_part_that_the_agent_switched_off_is_a_finding_before_any_step_closes() -> None:
    run, store, reporter = Run(), SessionStore(), Reporter()
    off = wire.PartOff("optimizer", "KeyError: 7", "hooks/phases.py:12", 3)
    store.apply(run.received(run.hello(), 0))
    store.apply(run.received(wire.Heartbeat(1, 0, "forward", 0, off=(off,)), 0))
    finding = only(reporter.report(store.frame(0))[0].findings, "agent-part-off")
    assert (finding.severity, finding.subject, finding.where) == ("warning", "optimizer", "hooks/phases.py:12")
    assert "no optimizer phase is seen" in finding.title
    assert "KeyError: 7 (hooks/phases.py:12)" in finding.remedy


def test_the_catalogue_is_sound() -> None:
    found = [rule.code for rule in RULES]
    assert len(set(found)) == len(found)
    assert all(rule.severity in SEVERITIES and rule.opens_after >= 1 and rule.closes_after >= 1 for rule in RULES)
