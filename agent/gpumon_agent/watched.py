"""A watched model with its optimizers, and its last description for viewers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from gpumon_agent import wire

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer


class Watched:
    """One model, held weakly, and its last description."""

    def __init__(self, index: int, model: Module, own: Module, name: str, found: bool) -> None:
        self.index = index
        self.name = name
        self.found = found
        self.described: list[wire.Event] = []
        self.model = weakref.ref(model)
        self._own = weakref.ref(own)  # inside every wrapper, and outlives discarded ones
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._revision = 0

    @property
    def whole(self) -> wire.Model | None:
        """The Model message of the newest description."""
        return next((each for each in self.described if isinstance(each, wire.Model)), None)

    def covers(self, model: Module) -> bool:
        return model in (self.model(), self._own())

    def add(self, optimizers: list[Any]) -> None:
        known = [ref() for ref in self._optimizers]
        self._optimizers += [weakref.ref(each) for each in optimizers if all(each is not k for k in known)]

    def wrapped_by(self, wrapper: Module, unwrapped: Any) -> bool:
        inner = self.model()
        if inner is None:  # not by truth value: a compiled model calls the user's __len__
            inner = self._own()
        if inner is None or wrapper is inner or unwrapped(wrapper) is not unwrapped(inner):
            return False
        self.model = weakref.ref(wrapper)
        return True

    def describe(self, describe: Any, over: Callable[[], bool]) -> Iterator[bool]:
        """Yields when the time is over, and when it is complete."""
        model = self.model()
        if model is None:
            return
        optimizers = [each for ref in self._optimizers if (each := ref()) is not None]
        parts = describe.parts(
            model, optimizers, index=self.index, revision=self._revision, name=self.name, found=self.found, over=over
        )
        del model, optimizers
        for described in parts:
            if described is not None:
                whole, modules = described
                self.described = [whole, *modules]
                self._revision += 1
            yield True


def innermost(optimizer: Any) -> Any:
    """The optimizer inside accelerate's wrapper and similar ones."""
    for _ in range(4):
        if hasattr(optimizer, "_optimizer_step_pre_hooks"):
            break
        inner = getattr(optimizer, "optimizer", None)
        if inner is None:
            break
        optimizer = inner
    return optimizer
