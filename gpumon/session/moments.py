"""The moments of a run that one may want to see: their kinds, and those of a rank's kept steps."""

from __future__ import annotations

from typing import NamedTuple

from gpumon.session.frame import RankFrame

KINDS = OOM, CHECKPOINT, SHAPE, GROWTH, LEAK = "out of memory", "checkpoint", "new shape", "growth", "leak found"
"""New ones go last, for a recorded block's flags count them."""

MOMENTS_MAX = 64
"""Of each kind but out of memory: with batches of many lengths each step may have a new shape."""


class Happened(NamedTuple):
    """Something happened: at this step at the latest."""

    kind: str
    step: int
    unix_ns: int


def moments(rank: RankFrame) -> list[Happened]:
    """Those that the messages of one rank say, in order of their steps. One pass over its steps."""
    found: list[Happened] = []
    shapes: set[object] = set()
    for record in rank.steps:
        closed = record.closed
        if closed is not None and closed.input_shapes not in shapes and len(shapes) <= MOMENTS_MAX:
            if shapes:
                found.append(Happened(SHAPE, record.step, rank.unix_ns(closed.t_ns)))
            shapes.add(closed.input_shapes)
    loads = {each.number: each for each in rank.checkpoints}
    found += [Happened(CHECKPOINT, each.step, rank.unix_ns(each.t_ns)) for each in loads.values()]
    found += [Happened(GROWTH, each.step, rank.unix_ns(each.t_ns)) for each in rank.censuses if each.reason == "growth"]
    if rank.oom is not None:
        found.append(Happened(OOM, rank.oom.step, rank.unix_ns(rank.oom.t_ns)))
    return sorted(found, key=lambda each: (each.step, each.unix_ns))
