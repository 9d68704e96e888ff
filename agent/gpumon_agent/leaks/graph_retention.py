"""How many bytes one tensor's autograd graph keeps alive. The walk is bounded in time, and may give up.

A graph that takes longer than there is time for at once is looked at several times, a step apart: what was read of it
is known by the numbers that autograd gives its nodes, so that each look goes further back than the one before.

Source: graph.py and saving.py, of which this is the part that needs no modules. Cost: 3 µs a node, five times as much
where a training step has just been through the processor's caches.
Known limitations. Of a graph of more nodes than the time allows it is what was seen until then: at least so much.
Nodes' numbers are a thread's own: of forwards in several threads some may be taken for others.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any, NamedTuple

from torch import Tensor

from gpumon_agent.attribution.saving import READABLE, Reader, fields
from gpumon_agent.storages import has_storage, storages
from gpumon_agent.thread_clock import ThreadClock

BLOCK_BYTES = 512  # what the allocator gives for one byte


class Retained(NamedTuple):
    """What a graph keeps."""

    bytes: int
    cut: bool  # there was no time to see all of it
    nodes: frozenset[Any]  # of it, that were seen: for the slice only


class Looks:
    """What earlier looks at one variable's graph have read. Ids only: it keeps nothing alive."""

    def __init__(self) -> None:
        self.read: dict[int, dict[int, int]] = {}
        """a node's number → what it saves: identity → bytes"""
        self.newest = self.before = -1
        """number of the newest node, and at the look before"""
        self.count = 0


def retained(tensor: Any, claimed: Container[int], budget_ns: int, looks: Looks | None = None) -> Retained | None:
    """The storages that `tensor`'s graph has saved, its own and those in `claimed` left out."""
    root = tensor.grad_fn
    if root is None or not READABLE:
        return None
    clock = ThreadClock(budget_ns)
    reader = Reader()
    if looks is not None:
        looks.before, looks.newest = looks.newest, root._sequence_nr()
    known = {} if looks is None else looks.read
    saved: dict[int, int] = {}
    own = {identity for identity, _, _ in storages(tensor)}
    waiting, seen = [root], {root}
    cut = False
    while waiting and not cut:
        node = waiting.pop()
        number = node._sequence_nr()
        kept = known.get(number)
        if kept is None:
            kept = _kept(node, reader)
            if looks is not None and kept:
                known[number] = kept
        saved.update(kept)
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                waiting.append(below)
        cut = clock.over()
    others = (nbytes for identity, nbytes in saved.items() if identity not in own and identity not in claimed)
    total = sum(-(-nbytes // BLOCK_BYTES) * BLOCK_BYTES for nbytes in others)
    return Retained(total, cut, frozenset(seen))


def _kept(node: Any, reader: Reader) -> dict[int, int]:
    kept: dict[int, int] = {}
    kind: Any = type(node)
    for name in fields(kind):
        for each in reader.read(node, name):
            if type(each) is Tensor and has_storage(each) and not each.is_meta:  # nearly always
                storage = each.untyped_storage()
                kept[storage._cdata] = storage.nbytes()
            else:
                kept.update((identity, nbytes) for identity, nbytes, _ in storages(each))
    return kept


def reaches(tensor: Tensor, number: int, budget_ns: int) -> bool:
    """Whether `tensor`'s graph leads to nodes no newer than `number`, as far as there is time to see."""
    clock = ThreadClock(budget_ns)
    waiting = [tensor.grad_fn]
    seen = set(waiting)
    while waiting:
        node: Any = waiting.pop()
        if node._sequence_nr() <= number:
            return True
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                waiting.append(below)
        if clock.over():
            return False
    return False
