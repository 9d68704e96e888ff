"""How many bytes one tensor's autograd graph keeps alive. The walk is bounded in time.

A graph too long for one walk is measured several times, a step apart. Results are cached by autograd's sequence number
(`_sequence_nr`), so each walk gets further back than the last.

Source: graph.py and saving.py, without the part that needs modules. Cost: 3 µs per node, five times as much with cold
caches after a training step.
Known limitations. If time runs out, the result is a lower bound. Sequence numbers are per thread: with forwards in
several threads, nodes may be confused.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any, NamedTuple

from torch import Tensor

from gpumon_agent.attribution.saving import READABLE, NodeReader, fields
from gpumon_agent.storages import has_storage, storages
from gpumon_agent.thread_clock import ThreadClock
from gpumon_agent.units import rounded


class Retained(NamedTuple):
    bytes: int
    cut: bool  # the time ran out
    nodes: frozenset[Any]  # seen or queued; strong references: for the current slice only


class Looks:
    """Results of earlier walks of one variable's graph. Holds only ids, so keeps nothing alive."""

    def __init__(self) -> None:
        self.read: dict[int, dict[int, int]] = {}
        """sequence number of a node → its saved storages: identity → bytes"""
        self.newest = self.before = -1
        """sequence number of the root node, now and at the previous walk"""
        self.count = 0


def retained(tensor: Any, claimed: Container[int], budget_ns: int, looks: Looks | None = None) -> Retained | None:
    """Bytes of the storages saved by `tensor`'s graph, except its own and those in `claimed`."""
    root = tensor.grad_fn
    if root is None or not READABLE:
        return None
    if looks is not None:
        looks.before, looks.newest = looks.newest, root._sequence_nr()
    saved, seen, cut = _saved(root, ThreadClock(budget_ns), None if looks is None else looks.read)
    own = {identity for identity, _, _ in storages(tensor)}
    others = (nbytes for identity, nbytes in saved.items() if identity not in own and identity not in claimed)
    total = sum(map(rounded, others))
    return Retained(total, cut, frozenset(seen))


def saved(tensor: Tensor, budget_ns: int) -> dict[int, int]:
    """The storages saved by `tensor`'s graph: identity → bytes. Some of them, if the time runs out."""
    root = tensor.grad_fn
    return {} if root is None or not READABLE else _saved(root, ThreadClock(budget_ns), None)[0]


def _saved(
    root: Any, clock: ThreadClock, read: dict[int, dict[int, int]] | None
) -> tuple[dict[int, int], set[Any], bool]:
    """(identity → bytes of saved storages, nodes seen, whether the time ran out). `read`: as `Looks.read`, updated."""
    reader = NodeReader()
    known = {} if read is None else read
    saved: dict[int, int] = {}
    waiting, seen = [root], {root}
    cut = False
    while waiting and not cut:
        node = waiting.pop()
        number = node._sequence_nr()
        kept = known.get(number)
        if kept is None:
            kept = _kept(node, reader)
            if read is not None and kept:
                known[number] = kept
        saved.update(kept)
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                waiting.append(below)
        cut = clock.over()
    return saved, seen, cut


def _kept(node: Any, reader: NodeReader) -> dict[int, int]:
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
    """Whether `tensor`'s graph contains a node with a sequence number ≤ `number`; False if the time runs out."""
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
