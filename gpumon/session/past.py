"""A rank as it was at a past step: what was known then, and nothing newer. No copies: a step is cut in microseconds.

What is kept only as the newest (layers, blocks, a forecast from a batch's shape, checkpoints, where the
library's loop is) is left out if it is
newer than the step. The machine's readings are kept for ten minutes, and heartbeats as `wire.thinning` keeps them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from gpumon.session.frame import RankFrame, StepRecord
from gpumon.session.steps import Steps


def at_step(rank: RankFrame, step: int) -> RankFrame:
    """The rank when `step` closed. In a step in which memory ran out: then."""
    steps, older = _until(rank.steps, step), _until(rank.older, step)
    oom = rank.oom if rank.oom is not None and rank.oom.step <= step else None
    closed = steps[-1].closed if steps else None
    t_ns = closed.t_ns if closed is not None else rank.hello.clock.monotonic_ns
    if oom is not None and oom.step == step:
        t_ns = max(t_ns, oom.t_ns)
    unix_ns = rank.unix_ns(t_ns)
    samples = rank.host_samples[: bisect_right(rank.host_samples, unix_ns, key=lambda sample: sample.unix_ns)]
    beats = rank.heartbeats[: bisect_right(rank.heartbeats, t_ns, key=lambda beat: beat.t_ns)]
    censuses = tuple([each for each in rank.censuses if each.step <= step])
    thinned = rank.thinned
    return replace(
        rank,
        steps=steps,
        open_step=None,
        heartbeat=beats[-1] if beats else None,
        heartbeats=beats,
        heard_unix_ns=unix_ns,
        status="live",
        oom=oom,
        notices=tuple([each for each in rank.notices if each.t_ns <= t_ns]),
        goodbye=None,
        host=samples[-1].host if samples else None,
        host_unix_ns=samples[-1].unix_ns if samples else None,
        host_samples=samples,
        layers=tuple([each for each in rank.layers if each.step <= step]),
        outlooks=tuple([each for each in rank.outlooks if each.step <= step]),
        census=censuses[-1] if censuses else None,
        censuses=censuses,
        checkpoints=tuple([each for each in rank.checkpoints if max(each.step, each.looked_step) <= step]),
        segments=tuple([each for each in rank.segments if each.step <= step]),
        snapshot=rank.snapshot if rank.snapshot is not None and rank.snapshot.step <= step else None,
        progress=rank.progress if rank.progress is not None and rank.progress.t_ns <= t_ns else None,
        older=older,
        thinned=msgspec.structs.replace(thinned, newest=min(thinned.newest, step)) if thinned is not None else None,
    )


def _until(steps: Sequence[StepRecord], step: int) -> Sequence[StepRecord]:
    return steps.until(step) if isinstance(steps, Steps) else [e for e in steps if e.step <= step]
