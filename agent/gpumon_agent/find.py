"""Finds the root model and its optimizers with no help from the user: an optimizer's parameters lead to them.

Modules are noted, weakly, where they are built (registration of a child or of a parameter, `__setstate__` for copies
and unpickled ones): construction only, nothing per step. When an optimizer has been constructed, the *tops* among the
noted modules (those that are no other's child) which own its parameters are adopted, before the first forward.
Teachers, EMA copies and losses without trained parameters own none of them and are left alone.

Cost: 0.5 µs per registration; once per optimizer, one pass over the parameters of the noted tops.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch.nn import Module
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim import Optimizer

Adopt = Callable[[Module, Optimizer], object]


class Finder:
    """What `install` put in place; `uninstall()` takes all of it out again."""

    def __init__(self, adopt: Adopt) -> None:
        self._adopt = adopt
        self._noted: weakref.WeakValueDictionary[int, Module] = weakref.WeakValueDictionary()
        self._handles = [
            register_module_module_registration_hook(self._note),
            register_module_parameter_registration_hook(self._note),
        ]
        self._restore: list[Callable[[], None]] = []
        self._wrap(Optimizer, "__init__", self._optimizer_built)
        self._wrap(Module, "__setstate__", lambda module: self._note(module))

    def uninstall(self) -> None:
        for handle in self._handles:
            handle.remove()
        for restore in self._restore:
            restore()
        self._handles.clear()
        self._restore.clear()
        self._noted.clear()

    def _wrap(self, owner: type, name: str, after: Callable[[Any], None]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            after(self)
            return result

        setattr(owner, name, wrapper)

        def restore() -> None:
            if owner.__dict__.get(name) is wrapper:
                setattr(owner, name, original)

        self._restore.append(restore)

    def _note(self, module: Module, *_: object) -> None:
        key = id(module)
        if key not in self._noted:
            self._noted[key] = module

    def _optimizer_built(self, optimizer: Optimizer) -> None:
        owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for top in self._tops():
            if _owns(top, owned):
                self._adopt(top, optimizer)

    def _tops(self) -> Iterator[Module]:
        noted = list(self._noted.values())
        children = {id(child) for module in noted for child in module._modules.values()}
        return (module for module in noted if id(module) not in children)


def install(adopt: Adopt) -> Finder:
    """From here on `adopt(model, optimizer)` is called for every root and optimizer that turn up."""
    return Finder(adopt)


def _owns(module: Module, parameters: set[int]) -> bool:
    return any(id(parameter) in parameters for parameter in module.parameters())
