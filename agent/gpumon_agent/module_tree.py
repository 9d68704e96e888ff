"""The modules of a model in the order of `named_modules`, read in slices over several steps. Keeps none alive."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator

from torch.nn import Module

MODULE_AS_TENSORS = 8  # reading a module takes as long as reading this many tensors
SEARCHED_EVERY = 64
"""Every so many sampled steps models are searched again: they may have gained modules, and the script models."""


def tree(roots: Iterable[Module]) -> Iterator[tuple[str, weakref.ref[Module]]]:
    """Each module once, with its path. Changes of the model meanwhile are followed as far as possible."""
    waiting = [("", weakref.ref(root)) for root in roots]
    waiting.reverse()
    seen: set[int] = set()
    while waiting:
        path, reference = waiting.pop()
        module = reference()
        if module is None or id(module) in seen:
            continue
        seen.add(id(module))
        below = [
            (f"{path}.{name}" if path else name, weakref.ref(child))
            for name, child in module._modules.items()
            if child is not None
        ]
        waiting += reversed(below)
        del module, below
        yield path, reference


def parameter_names(module: Module | None) -> list[str]:
    """Names, for direct lookup of each parameter; a list of parameters would keep them alive."""
    return [] if module is None else list(module._parameters)


def buffer_names(module: Module | None) -> list[str]:
    return [] if module is None else list(module._buffers)
