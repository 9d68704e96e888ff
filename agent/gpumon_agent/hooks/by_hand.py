"""Finds models that no optimizer leads to, at the first backwards of a run.

Either the script updates parameters itself (`p.data.add_(p.grad)`): then they have gradients. Or it uses
torch.func.functional_call with other parameters: then the module's own never get gradients, and an optimizer over the
others leads to no module. In that case we hook all top-level modules for the next few backwards, adopt those called
through functional_call, and release the others.

Known limitation: a submodule passed to functional_call is not found.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch.nn import Module

from gpumon_agent.hooks import model_discovery
from gpumon_agent.hooks.phases import Phases
from gpumon_agent.hooks.torch_hooks import Hooks

_BACKWARDS = 3  # without an optimizer, which may be built late; and as many again to see which modules are called
_TRIED_MAX = 64  # newest modules


class ByHand:
    """`watched`: whether any model is watched. `adopt` is called with each model found and the known optimizers."""

    def __init__(
        self,
        hooks: Hooks,
        phases: Phases,
        *,
        watched: Callable[[], bool],
        adopt: Callable[[Module, list[Any]], None],
        notice: Callable[[str], None],
    ) -> None:
        self._hooks = hooks
        self._phases = phases
        self._watched = watched
        self._adopt = adopt
        self._notice = notice
        self._backwards = 0
        self._tried: list[weakref.ref[Module]] = []
        self._until = 0  # number of the backward at which the search ends

    def backward_ended(self) -> None:
        self._backwards += 1
        waits = not self._phases.optimizers and not self._phases.marked
        if waits and self._backwards < _BACKWARDS:
            return
        if not self._until and not self._watched():
            self._adopt_what_has_gradients()
            if not self._watched():
                self._try_what_may_be_called()
                return
        found = [module for module in self._each() if self._hooks.functional(module)]
        if self._tried and not found and self._backwards < self._until:
            return
        self._hooks.backward_ended = None
        for module in self._each():
            if module not in found:
                self._hooks.release(module)
        for module in found:
            self._adopt(module, self._phases.optimizers)
        if waits:
            self._notice(
                "parameters are updated without an optimizer, so no steps are counted: call gpumon_agent.step() after "
                "each update"
            )

    def _adopt_what_has_gradients(self) -> None:
        for module in model_discovery.tops() or ():
            if any(parameter.grad is not None for parameter in module.parameters()):
                self._adopt(module, [])

    def _try_what_may_be_called(self) -> None:
        tops = [top for top in model_discovery.tops() or () if next(top.parameters(), None) is not None]
        self._tried = [weakref.ref(top) for top in tops[-_TRIED_MAX:]]
        self._until = self._backwards + _BACKWARDS
        for module in self._each():
            self._hooks.watch(module)

    def _each(self) -> Iterator[Module]:
        return (module for reference in self._tried if (module := reference()) is not None)
