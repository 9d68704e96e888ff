"""Finds the models of which no optimizer tells, at the first backwards of a run.

Their parameters are updated by hand, as `p.data.add_(p.grad)` does: then they have gradients. Or the model is called
with parameters that are not its own, by torch.func.functional_call: then its own never have any, with torch.func.grad
no tensor has, and an optimizer over those that it is given leads to no module. So the modules that are no other's
child are hooked, and those that are called so in the next few backwards are adopted; the others are let go.

Known limitation: the part of a larger module, if functional_call is given that part, is not found.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch.nn import Module

from gpumon_agent.hooks import model_discovery
from gpumon_agent.hooks.phases import Phases
from gpumon_agent.hooks.torch_hooks import Hooks

_BACKWARDS = 3  # without an optimizer; one may come before it is built. And so many to see what is called
_TRIED_MAX = 64  # the newest


class ByHand:
    """`watched` says whether a model is; `adopt` is told of each that is found, with the optimizers that step."""

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
        self._until = 0  # so many backwards

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
                "parameters are updated without an optimizer, so no step is counted: call gpumon_agent.step() after "
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
