"""How many bytes one tensor's graph keeps for a backward that may never come: a walk that ends soon, or gives up.

Source: graph.py and saving.py, of which this is the part that needs no modules. Cost: 3 µs a node.
Known limitations. Of a graph of more nodes than the time allows it is what was seen until then: at least so much.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpumon_agent.leaks.clock import Clock
from gpumon_agent.ledger.saving import READABLE, Reader, fields
from gpumon_agent.ledger.storages import storages

BLOCK_BYTES = 512  # what the allocator gives for one byte


class Retained(NamedTuple):
    """What a graph keeps."""

    bytes: int
    cut: bool  # there was no time to see all of it
    nodes: frozenset[Any]  # of it, that were seen: for the slice only


def retained(tensor: Any, claimed: Container[int], budget_ns: int) -> Retained | None:
    """The storages that `tensor`'s graph has saved, its own and those in `claimed` left out."""
    root = tensor.grad_fn
    if root is None or not READABLE:
        return None
    clock = Clock(budget_ns)
    reader = Reader()
    saved: dict[int, int] = {}
    own = {identity for identity, _, _ in storages(tensor)}
    waiting, seen = [root], {root}
    cut = False
    while waiting and not cut:
        node = waiting.pop()
        kind: Any = type(node)
        for name in fields(kind):
            for each in reader.read(node, name):
                if type(each) is Tensor and each.layout is torch.strided and not each.is_meta:  # nearly always
                    storage = each.untyped_storage()
                    saved[storage._cdata] = storage.nbytes()
                else:
                    saved.update((identity, nbytes) for identity, nbytes, _ in storages(each))
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                waiting.append(below)
        cut = clock.over()
    others = (nbytes for identity, nbytes in saved.items() if identity not in own and identity not in claimed)
    kept = sum(-(-nbytes // BLOCK_BYTES) * BLOCK_BYTES for nbytes in others)
    return Retained(kept, cut, frozenset(seen))
