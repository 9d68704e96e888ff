"""A rank at a past step: what was known then, and nothing newer."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace
from synthetic import MIB, START_UNIX_NS, STEP_NS, Run

from gpumon.link.recording_index import Marks
from gpumon.session.frame import HostSample, LayersRecord, RankFrame
from gpumon.session.moments import CHECKPOINT, GROWTH, OOM, SHAPE, moments
from gpumon.session.past import at_step
from gpumon.session.store import SessionStore
from gpumon_agent import wire

OOM_STEP = 30


def beside(step: int) -> tuple[wire.Event, ...]:
    t_ns = (step + 1) * STEP_NS
    every: tuple[wire.Event, ...] = (wire.Heartbeat(t_ns, step, "forward", 0, rss=step * MIB, number=step),)
    if step == 10:
        every += (wire.Census(10, t_ns, 0, "growth"), wire.Checkpoint(0, 0, 10, t_ns, "torch.load", looked_step=10))
    if step == 20:
        every += (wire.Census(20, t_ns, 1, "asked"), wire.Checkpoint(1, 0, 12, t_ns, "torch.load", looked_step=20))
    return every + ((wire.Oom(OOM_STEP, "forward", 0, t_ns, 1 << 30),) if step == OOM_STEP else ())


def run_until(steps: int) -> RankFrame:
    store = SessionStore()
    for received in Run(beside=beside, activations=lambda step: (300 + step) * MIB).stream(steps):
        store.apply(received)
    return store.frame(START_UNIX_NS + 10**12).ranks[0]


@pytest.fixture(scope="module")
def whole() -> RankFrame:
    return run_until(40)


@pytest.mark.parametrize("step", [0, 9, 10, 15, 20, 29, 30, 39])
def test_it_is_the_rank_that_a_viewer_of_then_had(whole: RankFrame, step: int) -> None:
    past, then = at_step(whole, step), run_until(step + 1)
    assert tuple(past.steps) == tuple(then.steps)
    assert past.steps[-1] is whole.steps[step]
    assert (past.oom, past.census, past.censuses) == (then.oom, then.census, then.censuses)
    assert past.heartbeat == then.heartbeat
    assert past.open_step is None
    assert past.checkpoints == then.checkpoints
    closed = past.steps[-1].closed
    assert closed is not None
    assert past.heard_unix_ns >= past.unix_ns(closed.t_ns)


def test_where_the_loop_is_is_of_a_past_step_if_it_is_no_newer(whole: RankFrame) -> None:
    closed = whole.steps[20].closed
    assert closed is not None
    told = wire.Progress(21, closed.t_ns + 1, "lightning", "train", 0, 22)
    rank = replace(whole, progress=told)
    assert (at_step(rank, 20).progress, at_step(rank, 21).progress) == (None, told)


def test_the_running_step_is_not_of_a_past_one(whole: RankFrame) -> None:
    assert at_step(replace(whole, open_step=whole.steps[-1]), 39).open_step is None


def test_the_end_of_the_process_is_not_of_a_past_step(whole: RankFrame) -> None:
    ended = replace(whole, status="ended", goodbye=wire.Goodbye("finished", 10**15, 39, "optimizer"))
    assert (at_step(ended, 12).status, at_step(ended, 12).goodbye) == ("live", None)


def test_no_reading_of_the_machine_is_newer_than_the_step(whole: RankFrame) -> None:
    closed = whole.steps[12].closed
    assert closed is not None
    at = whole.unix_ns(closed.t_ns)
    host = wire.Host("node1", 1)
    samples = tuple(HostSample(at + by, host) for by in (-2 * 10**9, -1, 1, 10**9))
    read = replace(whole, host_samples=samples, host=host, host_unix_ns=samples[-1].unix_ns)
    assert at_step(read, 12).host_samples == samples[:2]
    assert at_step(read, 12).host_unix_ns == at - 1
    none = replace(read, host_samples=samples[2:])
    assert (at_step(none, 12).host, at_step(none, 12).host_unix_ns) == (None, None)


def test_what_is_kept_only_as_the_newest_is_left_out_before_it(whole: RankFrame) -> None:
    read = replace(whole, layers=(LayersRecord(0, 0, 25, ()),))
    assert at_step(read, 25).layers == read.layers
    assert at_step(read, 24).layers == ()


def test_a_checkpoint_looked_at_later_is_not_shown_as_it_is_now(whole: RankFrame) -> None:
    assert [each.number for each in at_step(whole, 19).checkpoints] == [0]
    assert [each.number for each in at_step(whole, 20).checkpoints] == [0, 1]


def test_a_cut_takes_no_copy_of_the_steps(whole: RankFrame) -> None:
    past = at_step(whole, 12)
    assert past.steps._records is whole.steps._records  # type: ignore[attr-defined]
    assert len(past.steps) == 13


def test_the_moments_of_a_rank_are_those_that_a_recording_marks() -> None:
    store, marks = SessionStore(), Marks()
    for received in Run(beside=beside).stream(40):
        event = received.event
        if isinstance(event, wire.Step):
            shapes = ((8, 64 if event.step < 5 else 128),)
            event = msgspec.structs.replace(event, input_shapes=shapes)
            received = msgspec.structs.replace(received, event=event)
        store.apply(received)
        marks.take(received)
    found = [(each.kind, each.step, each.unix_ns) for each in moments(store.frame(START_UNIX_NS).ranks[0])]
    marked = {(each.kind, each.step) for each in marks.marks}
    assert {(kind, step) for kind, step, _ in found} == marked == {
        (SHAPE, 5), (GROWTH, 10), (CHECKPOINT, 10), (CHECKPOINT, 12), (OOM, OOM_STEP),
    }  # fmt: skip
    assert found == sorted(found, key=lambda each: (each[1], each[2]))
    assert all(unix_ns == START_UNIX_NS + (step + 1) * STEP_NS for _, step, unix_ns in found if step != 12)
