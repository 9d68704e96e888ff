"""Whether a backward belongs to a watched model: searches its graph from the roots, at most `_LED_MAX` nodes."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import torch
from torch import Tensor

_Leaf: Any = torch._C._functions.AccumulateGrad
_LED_MAX = 1000  # nodes


def leads_to(roots: Iterable[Any], parameters: Container[int]) -> bool:
    """Whether one of `parameters` (ids) is among the first `_LED_MAX` nodes. True too if the graph has more nodes."""
    waiting = [node for root in roots if (node := node_of(root)) is not None]
    seen = set(waiting)
    while waiting and len(seen) < _LED_MAX:
        node = waiting.pop()
        if type(node) is _Leaf and id(node.variable) in parameters:
            return True
        below = {each for each, _ in node.next_functions if each is not None} - seen
        seen |= below
        waiting += below
    return bool(waiting)


def node_of(root: object) -> Any:
    return root.grad_fn if isinstance(root, Tensor) else getattr(root, "node", None)
