"""Each rule's thresholds, from both sides of each, and how many looks it takes to open and to be gone.

A look is written by hand here, figure by figure. No run is simulated, and no forecast is learnt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace
from msgspec.structs import replace as restruct
from synthetic import GIB, MIB, Run, rank_of

from gpumon.analysis.batches import Outlier
from gpumon.analysis.findings import CATALOGUE, Evidence, Look
from gpumon.analysis.history import PhasePeak, StepPeaks
from gpumon.analysis.leak_identity import Leak
from gpumon.analysis.pages import page
from gpumon.analysis.persistent_conditions import Fragmented, PersistentConditions
from gpumon.analysis.tracker import Tracker
from gpumon.analysis.types import BATCH, KEPT, Forecast, Growth
from gpumon.session.frame import StepRecord
from gpumon_agent import wire

RANK = rank_of(Run(), 3)
RECORD = RANK.steps[-1]  # step 2
FIND = {rule.code: find for rule, find in CATALOGUE}
READING = wire.DeviceReading("GPU-1", total=40 * GIB)


def at_step(step: int) -> StepRecord:
    return StepRecord(step, RECORD.closed, RECORD.phases)


def look(**more: Any) -> Look:
    fields: dict[str, Any] = {
        "rank": RANK, "device": 0, "record": RECORD, "figures": None, "forecast": None, "lines": None, "reading": None,
        "capacity": 1000 * MIB,
    }  # fmt: skip
    return Look(**(fields | more))


def forecast(**more: Any) -> Look:
    """Of a job that has 400 of 1,000 MiB left, after 100 steps."""
    fields: dict[str, Any] = {
        "next_peak": 600 * MIB, "low": 590 * MIB, "high": 610 * MIB, "phase": "backward", "headroom": 400 * MIB,
        "p_oom": 0.0, "steps_to_oom": None, "max_batch_factor": None, "learnt_from": 100, "highest": 500 * MIB,
    }  # fmt: skip
    return look(forecast=Forecast(**(fields | more)))


def leaking(steps: int, to_oom: int) -> Look:
    """An allocation that nobody was found to hold grows since step 2, by a MiB in each of so many steps."""
    growth = Growth("allocated", True, 2, MIB, MIB, MIB, steps * MIB)
    ahead = forecast(steps_to_oom=to_oom).forecast
    return look(leak=Leak(growth, 2, MIB, ()), growth=(growth,), forecast=ahead, record=at_step(2 + steps))


def host(so_far: int, room: int = 10_000) -> Look:
    """Resident memory grows by a MiB a step; the machine has room for so many steps."""
    growth = Growth("rss", True, 2, MIB, MIB, MIB, so_far)
    machine = wire.Host("box", 0, memory_available=room * MIB)
    return look(host_growth=(growth,), rank=replace(RANK, host=machine))


def peak(optimizer: int, others: int) -> Look:
    """Of AdamW's foreach step, and of all else."""
    phases = (PhasePeak("backward", others), PhasePeak("optimizer", optimizer))
    end = optimizer - 400 * MIB
    figures = StepPeaks(2, 0, end, phases, optimizer, "optimizer", None, (), False, None, None, 0, None)
    return look(figures=figures)


def peaking(above: int, usual: int) -> Look:
    return look(typical_peak=usual + above, usually_above=usual + above, peers_peaks=(usual, usual, usual))


def processes(*held: wire.DeviceProcess, **more: Any) -> Look:
    ours = wire.DeviceProcess(4000, GIB, "python")
    return look(reading=restruct(READING, processes=(ours, *held)), our_pids={4000}, **more)


def loaded(alive: int, of: int = 0, used: int = 10, looked: int = 20, *, foreign: bool = False) -> Look:
    left = wire.Checkpoint(
        0, 0, 1, 0, "torch.load", loaded=of, alive=alive, used_step=used, looked_step=looked, foreign=foreign
    )
    return look(rank=replace(RANK, checkpoints=(left,)))


def outlier(peak: int = 500 * MIB, ago: int = 0) -> Look:
    found = Outlier(10, (), 3.0, 0.99, peak, 0.99, 300 * MIB)
    return look(outlier=found, record=at_step(10 + ago))


def standing(figures: StepPeaks | None = None, **states: Any) -> Look:
    kept = PersistentConditions()
    for name, value in states.items():
        setattr(kept, name, value)
    return look(standing=kept, figures=figures)


def fragmented(reserved: int, highest: int) -> Look:
    return standing(fragmented=Fragmented(1, reserved, highest))


def gradients(held: int, peak_of: int) -> Look:
    return standing(peak(peak_of, 0).figures, gradients=held)


def described(**more: Any) -> Look:
    return look(rank=rank_of(Run(**more), 3))


def ddp(bytes_: int) -> Look:
    return described(parallel=wire.Parallel("ddp", 2, (bytes_,), True, False))


def retried(times: int) -> Look:
    phase = restruct(RECORD.phases[-1], retries=times)
    return look(record=StepRecord(2, RECORD.closed, (phase,)), retries_before=0)


THRESHOLDS: list[tuple[str, Callable[[], Look], Callable[[], Look]]] = [
    ("near-capacity", lambda: forecast(headroom=49 * MIB), lambda: forecast(headroom=51 * MIB)),
    ("near-capacity", lambda: forecast(headroom=0, learnt_from=5), lambda: forecast(headroom=0, learnt_from=4)),
    ("oom-ahead", lambda: forecast(p_oom=0.21), lambda: forecast(p_oom=0.19)),
    ("oom-ahead", lambda: forecast(p_oom=1.0, learnt_from=3), lambda: forecast(p_oom=1.0, learnt_from=2)),
    (  # a peak 1 % above one that there was room for is the same, rounded
        "oom-ahead",
        lambda: forecast(p_oom=1.0, next_peak=1011 * MIB, highest=1000 * MIB),
        lambda: forecast(p_oom=1.0, next_peak=1009 * MIB, highest=1000 * MIB),
    ),
    (
        "oom-ahead",
        lambda: forecast(growth=KEPT, steps_to_oom=500, bytes_per_step=MIB),
        lambda: forecast(growth=KEPT, steps_to_oom=501, bytes_per_step=MIB),
    ),
    (  # batches that get longer seldom do so for long
        "oom-ahead",
        lambda: forecast(growth=BATCH, steps_to_oom=20, bytes_per_step=MIB),
        lambda: forecast(growth=BATCH, steps_to_oom=21, bytes_per_step=MIB),
    ),
    ("bucket-copy", lambda: ddp(MIB), lambda: ddp(MIB - 1)),
    ("dominant-embedding", lambda: described(embedding_bytes=51 * MIB), lambda: described(embedding_bytes=49 * MIB)),
    (
        "dominant-embedding",
        lambda: described(weights=10 * MIB, embedding_bytes=8 * MIB),
        lambda: described(weights=10 * MIB, embedding_bytes=8 * MIB - 4),
    ),
    ("foreach-peak", lambda: peak(500 * MIB, 436 * MIB), lambda: peak(500 * MIB, 437 * MIB)),
    ("foreach-peak", lambda: peak(4000 * MIB, 3800 * MIB), lambda: peak(4000 * MIB, 3801 * MIB)),
    ("rank-skew", lambda: peaking(101 * MIB, 1000 * MIB), lambda: peaking(99 * MIB, 1000 * MIB)),
    ("rank-skew", lambda: peaking(64 * MIB, 100 * MIB), lambda: peaking(63 * MIB, 100 * MIB)),
    (
        "other-process",
        lambda: processes(wire.DeviceProcess(99, 64 * MIB, "game")),
        lambda: processes(wire.DeviceProcess(99, 63 * MIB, "game")),
    ),
    ("tensor-leak", lambda: leaking(45, 10_000), lambda: leaking(44, 10_000)),
    ("retained-checkpoint", lambda: loaded(5 * MIB, of=50 * MIB), lambda: loaded(5 * MIB - 1, of=50 * MIB)),
    ("retained-checkpoint", lambda: loaded(4096), lambda: loaded(4095)),
    ("retained-checkpoint", lambda: loaded(MIB, looked=12), lambda: loaded(MIB, looked=11)),
    (
        "checkpoint-device",
        lambda: loaded(0, of=4096, foreign=True),
        lambda: loaded(0, of=4095, foreign=True),
    ),
    ("outlier-batch", lambda: outlier(ago=200), lambda: outlier(ago=201)),
    ("fragmentation", lambda: fragmented(1000 * MIB, 600 * MIB), lambda: fragmented(1000 * MIB, 601 * MIB)),
    ("fragmentation", lambda: fragmented(200 * MIB, 72 * MIB), lambda: fragmented(200 * MIB, 73 * MIB)),
    ("zeroed-gradients", lambda: gradients(MIB, 2 * MIB), lambda: gradients(MIB - 1, 2 * MIB)),
    ("zeroed-gradients", lambda: gradients(20 * MIB, 1000 * MIB), lambda: gradients(20 * MIB - 1, 1000 * MIB)),
    ("host-leak", lambda: host(64 * MIB), lambda: host(64 * MIB - 1)),
]


@pytest.mark.parametrize(("code", "above", "below"), THRESHOLDS)
def test_it_holds_above_its_threshold_and_not_below(
    code: str, above: Callable[[], Look], below: Callable[[], Look]
) -> None:
    assert FIND[code](above())
    assert not FIND[code](below())


@pytest.mark.parametrize(
    ("code", "near", "far", "severity"),
    [
        ("tensor-leak", lambda: leaking(60, 500), lambda: leaking(60, 501), "critical"),
        ("host-leak", lambda: host(64 * MIB, 500), lambda: host(64 * MIB, 501), "critical"),
        ("outlier-batch", lambda: outlier(800 * MIB), lambda: outlier(799 * MIB), "warning"),
    ],
)
def test_it_is_more_severe_where_memory_is_nearly_full(
    code: str, near: Callable[[], Look], far: Callable[[], Look], severity: str
) -> None:
    for made, expected in ((near, severity), (far, None)):
        found = FIND[code](made())
        (evidence,) = found if isinstance(found, tuple) else (found,)
        assert evidence is not None
        assert evidence.severity == expected


@pytest.mark.parametrize(
    ("code", "holds", "opens", "closes"),
    [
        ("near-capacity", lambda: forecast(headroom=0), 5, 10),  # a peak's forecast wavers with its batch
        ("oom-ahead", lambda: forecast(p_oom=1.0), 2, 10),
        ("allocator-retries", lambda: retried(1), 1, 200),  # a retry is seldom alone, and its reader should see it
        ("foreach-peak", lambda: peak(500 * MIB, 300 * MIB), 5, 10),
        ("rank-skew", lambda: peaking(500 * MIB, 500 * MIB), 10, 20),  # medians of few peaks differ by chance
        ("stray-context", lambda: processes(wire.DeviceProcess(71, MIB), elsewhere={71: "rank 1"}), 3, 3),
        ("other-process", lambda: processes(wire.DeviceProcess(99, GIB)), 3, 3),  # one that ends is nobody's concern
        ("fragmentation", lambda: fragmented(1000 * MIB, 100 * MIB), 6, 1),
        ("zeroed-gradients", lambda: gradients(100 * MIB, 1000 * MIB), 3, 3),
        ("host-leak", lambda: host(64 * MIB), 1, 1),  # growth was confirmed by gpumon.analysis.growth
        ("outlier-batch", outlier, 1, 1),
    ],
)
def test_how_many_looks_it_takes(code: str, holds: Callable[[], Look], opens: int, closes: int) -> None:
    tracker = Tracker()

    def looks(made: Look, until: str) -> int:
        for count in range(1, 300):
            tracker.look(made)
            if (until == "open") == any(f.code == code and f.state == "open" for f in tracker.findings()):
                return count
        raise AssertionError("never")

    assert (looks(holds(), "open"), looks(look(), "gone")) == (opens, closes)


@pytest.mark.parametrize(
    ("labels", "named"),
    [
        (["rank 1"], "rank 1 (pid 70) holds a CUDA context (1.00 MiB) on "),
        (["rank 1", "rank 2"], "ranks 1, 2 hold a CUDA context (2.00 MiB in all) on "),
        (["rank 1", "pid 71"], "rank 1 (pid 70), pid 71 hold a CUDA context (2.00 MiB in all) on "),
        ([f"rank {n}" for n in range(1, 12)], "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 3 more hold a CUDA context"),
    ],
)
def test_who_holds_a_stray_context(labels: list[str], named: str) -> None:
    strays = [wire.DeviceProcess(70 + n, MIB) for n in range(len(labels))]
    found = FIND["stray-context"](processes(*strays, elsewhere={70 + n: label for n, label in enumerate(labels)}))
    assert isinstance(found, Evidence)
    assert found.title.startswith(named)
    assert found.title.endswith("'s device without training there")


def test_the_newest_32_that_are_gone_stay_listed() -> None:
    tracker, there = Tracker(), processes(wire.DeviceProcess(71, MIB), elsewhere={71: "rank 1"})
    for step in range(100, 140):
        for made in (there, look()):
            for _ in range(3):
                tracker.look(replace(made, record=at_step(step)))
    assert [finding.state for finding in tracker.findings()] == ["gone"] * 32


def test_a_rule_s_page_fits_a_terminal_of_80_columns() -> None:
    widest = max(len(line) for rule, _ in CATALOGUE for line in page(rule).splitlines())
    assert 78 <= widest <= 80
