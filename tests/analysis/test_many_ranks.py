"""Of many ranks those nobody looks at are learnt from some steps; the shown one and those short of room from all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpumon.analysis import Reporter
from gpumon.analysis.rank_state import SPARSELY
from gpumon.analysis.types import Forecast
from gpumon.session.frame import Frame
from gpumon.session.store import SessionStore
from gpumon_agent import wire

MIB = 1 << 20
TOTAL, RESERVED = 4096 * MIB, 3800 * MIB
RANKS = 3
TURN = 40  # steps between two looks


def _hello(rank: int) -> wire.Hello:
    device = wire.Device(0, f"GPU-{rank}", "H200", TOTAL)
    return wire.Hello(
        (1, 0), "", f"r{rank}", "train.py", "box", 100 + rank, 1, "", (), "", wire.Clock(0, 0), "cuda", None, (device,),
        rank=rank, world_size=RANKS, run_id="job",
    )  # fmt: skip


def _step(step: int, peak: int) -> Iterator[wire.Event]:
    for index, (phase, high) in enumerate((("between", 310), ("forward", 400), ("backward", peak), ("optimizer", 350))):
        yield wire.Phase(
            step, phase, 0, 0, step * 1000 + index, 1, 300 * MIB, high * MIB, RESERVED, RESERVED, 300 * MIB, 0,
            300 * MIB, 1, 0, 0,
        )  # fmt: skip
    yield wire.Step(step, step * 1000 + 4, 1000, 1, ((8,),), phases=4)


def _peak(step: int) -> int:
    """Of a middle rank in MiB: some noise, and every 40th step (never among the newest of a turn) a higher one."""
    return 700 + step // TURN if step % TURN == 5 else 500 + step * 7919 % 13


class _Job:
    def __init__(self, peaks: int = 0) -> None:
        """`peaks`: how much higher those of rank 2 are, in MiB."""
        self.store = SessionStore()
        self.more = peaks
        self.step = 0
        for rank in range(RANKS):
            self.store.apply(wire.Received(f"r{rank}", 1, _hello(rank)))
        reading = tuple(wire.DeviceReading(f"GPU-{rank}", total=TOTAL, free=TOTAL - RESERVED) for rank in range(RANKS))
        self.reading = wire.Host("box", 0, devices=reading)

    def turn(self) -> Frame:
        for _ in range(TURN):
            self.step += 1
            if self.step % TURN == 20:
                self.store.apply(wire.Received("host:box", self.step * 1000 + 1, self.reading))
            for rank in range(RANKS):
                for event in _step(self.step, _peak(self.step) + (self.more if rank == 2 else 0)):
                    self.store.apply(wire.Received(f"r{rank}", self.step * 1000, event))
        return self.store.frame(self.step * 1000 + 5)


def _forecast(reporter: Reporter, frame: Frame, source: str, shown: str | None) -> Forecast:
    reports = {report.source: report for report in reporter.report(frame, None, shown)}
    forecast = reports[source].devices[0].forecast
    assert forecast is not None
    return forecast


def test_a_rank_that_nobody_looks_at_is_learnt_from_some_steps_and_wholly_once_it_is_shown() -> None:
    job, some, every = _Job(), Reporter(), Reporter()
    for _ in range(10):
        frame = job.turn()
        sparse, full = (_forecast(reporter, frame, "r1", shown) for reporter, shown in ((some, "r0"), (every, None)))
    assert sparse.learnt_from == TURN + 9 * SPARSELY
    assert full.learnt_from == 10 * TURN
    assert sparse.next_peak == pytest.approx(full.next_peak, rel=0.01)
    assert sparse.highest == 709 * MIB  # a high step among those left out is not forgotten
    assert _forecast(some, frame, "r0", "r0").learnt_from == 10 * TURN

    shown = _forecast(some, frame, "r1", "r1")  # no step came meanwhile
    met = _forecast(Reporter(), frame, "r1", None)
    assert shown == met
    assert shown.learnt_from == 10 * TURN
    frame = job.turn()
    assert _forecast(some, frame, "r1", "r1").learnt_from == 11 * TURN


def test_growth_is_followed_in_every_step() -> None:
    job, some = _Job(), Reporter()
    for _ in range(5):
        frame = job.turn()
        reports = some.report(frame, None, "r0")
    points = {growth.figure: growth.points for growth in reports[1].devices[0].growth}
    assert points["allocated"] == reports[0].devices[0].growth[0].points


@pytest.mark.parametrize(("peaks", "free", "every"), [(2900, 0.2, True), (2400, 0.4, False)])
def test_a_rank_without_room_for_a_quarter_more_is_learnt_from_every_step(peaks: int, free: float, every: bool) -> None:
    job, some = _Job(peaks), Reporter()
    for _ in range(6):
        frame = job.turn()
        near = _forecast(some, frame, "r2", "r0")
    assert near.headroom is not None
    assert near.headroom / near.high == pytest.approx(free, abs=0.05)
    assert (near.learnt_from == 6 * TURN) is every
