"""Finds the root model and its optimizers automatically: an optimizer's parameters lead to the model.

Modules are recorded by weak reference when they register a child or a parameter: at construction, never in a step.
Copied and unpickled modules register nothing: `gc.get_objects()` is searched for them at the first optimizer, and at
any optimizer with parameters that no recorded module owns. When an optimizer has been constructed, the *tops* (modules
without a parent) that own its parameters are adopted, before the first forward. Teachers and losses own none of them
and are ignored. Modules that may run an evaluation are reported too: a trained model without its wrapper (such as
DistributedDataParallel), and a copy (EMA, target network, reference model) that exists when the optimizer is built or
first steps, or that later becomes a module's child.

Training does not always call the top: it may be a container without a forward, a LightningModule, or a GAN in one
module. So modules below it that own the same parameters are *entries* too, and so is a module that later takes an
entry as its child; of nested forwards only the outermost is a phase. At the optimizer's first steps unused entries are
released; if no forward was seen at all, the search goes one level down.

Cost: 1 µs per registration; per optimizer one pass over the parameters of the tops; 20 ms per search of 700,000
objects.
Known limitation: parameters used outside of any module's forward give no forward phase (it is then inferred).
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch.nn import Module
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gpumon_agent.guard import guard
from gpumon_agent.hooks.wrappers import is_wrapper, unwrapped
from gpumon_agent.patching import Patches, hook
from gpumon_agent.registry import REGISTRY

_SIBLINGS_MAX = 4
_LEVELS_MAX = 6
_FORWARD_MISSING = Module.forward
_TRACERS = ("torch._dynamo.", "torch._export.", "torch.export._", "torch.onnx.")


class Watcher(Protocol):
    """Callbacks of the search."""

    def adopt(self, model: Module, optimizer: Optimizer) -> None:
        """`optimizer` updates parameters of `model`, which has no parent module."""

    def enter(self, module: Module) -> None:
        """Training may call `module` directly."""

    def let_go(self, module: Module) -> None:
        """Training does not call `module` directly."""

    def entered(self, module: Module) -> bool:
        """Whether a forward of `module` was seen."""

    def evaluates(self, module: Module) -> None:
        """`module` is inside a trained wrapper, or is a trained model's copy: its own forward may be an evaluation."""

    def homeless(self, optimizer: Optimizer) -> None:
        """`optimizer` updates parameters that no known module owns."""


class _Search:
    """The entries of one top for one optimizer, until its first steps show which of them are used."""

    def __init__(self, top: Module, parameters: set[int]) -> None:
        self.parameters = parameters
        self.levels = 0
        self.entries = [weakref.ref(top)]
        self.frontier = [weakref.ref(top)]  # the lowest entries: the search continues below them

    def descend(self, enter: Callable[[Module], None]) -> bool:
        """Goes one level down: children that own some of the parameters become entries. False: none were added."""
        below = [
            child
            for module in _alive(self.frontier)
            if not _is_compiled(module)
            for child in module._modules.values()
            if child is not None and _owns(child, self.parameters)
        ]
        self.levels += 1
        if not below or self.levels > _LEVELS_MAX:
            return False
        # Several children count as models (an actor and a critic) only below a container, if they are few and have
        # children. Otherwise they are layers, called by another method (`model.encode()`): that forward is inferred.
        if len(below) > 1 and not (
            _is_never_called(_alive(self.frontier))
            and len(below) <= _SIBLINGS_MAX
            and all(module._modules for module in below)
        ):
            return False
        self.frontier = [weakref.ref(module) for module in below]
        self.entries += self.frontier
        for module in below:
            enter(module)
        return True


class Finder:
    """The search's hooks and patches; `stop()` removes them."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._noted: weakref.WeakValueDictionary[int, Module] = weakref.WeakValueDictionary()
        self._entries: weakref.WeakValueDictionary[int, Module] = weakref.WeakValueDictionary()
        self._trained: list[weakref.ref[Module]] = []  # without their wrappers
        self._looked = False  # whether copied and unpickled modules were searched
        self._handles: list[Any] = [
            register_module_module_registration_hook(guard.protect("find", self._child_registered)),
            register_module_parameter_registration_hook(guard.protect("find", self._note)),
        ]
        built = self._built = guard.protect("find", self._optimizer_built)
        self._patches = Patches()
        self._patches.observe(
            Optimizer,
            "__init__",
            lambda optimizer, *_, **__: optimizer,
            lambda optimizer, _, error: None if error is not None else built(optimizer),
        )
        # until their first steps; one global hook, since an optimizer's own hook cannot be removed while it runs
        self._searches: weakref.WeakKeyDictionary[Optimizer, list[_Search]] = weakref.WeakKeyDictionary()
        self._handles.append(register_optimizer_step_pre_hook(hook(guard.protect("find", self._first_steps))))

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._patches.restore()
        self._searches.clear()
        self._noted.clear()
        self._entries.clear()
        if self in REGISTRY.finders:
            REGISTRY.finders.remove(self)

    # --------------------------------------------------------------------------------------------------- construction

    def _note(self, module: Module, *_: object) -> None:
        key = id(module)
        if key not in self._noted:
            self._noted[key] = module

    def _look(self) -> None:
        """Records all modules. Checks `type(each)`: `isinstance` may run the user's code through `__class__`."""
        self._looked = True
        for each in gc.get_objects():
            if issubclass(type(each), Module) and not _is_torchs_own(each):
                self._note(each)

    def look_again(self) -> None:
        """A module is copied or pickled: the next `tops` searches for the copy."""
        self._looked = False

    def _child_registered(self, parent: Module, name: str, child: Module | None) -> None:
        if _is_torchs_own(parent):
            return
        self._note(parent)
        if child is None:
            return
        if self._entries.get(id(child)) is child:
            self._enter(parent)  # a wrapper, or a larger whole
        elif self._trained:
            self._copied(child, self._trained)

    def _enter(self, module: Module) -> None:
        if self._entries.get(id(module)) is not module:
            self._entries[id(module)] = module
            self._watcher.enter(module)

    # ---------------------------------------------------------------------------------------------------- optimizers

    def _optimizer_built(self, optimizer: Optimizer) -> None:
        parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        tops = self._owners(parameters)
        if not parameters.issubset({id(parameter) for top in tops for parameter in top.parameters()}):
            self._looked = False
            tops = self._owners(parameters)
        if not tops:
            self._watcher.homeless(optimizer)
            return
        searches = self._searches[optimizer] = [self._begin(top, parameters, optimizer) for top in tops]
        self._look_for_copies([each for search in searches for each in search.entries])

    def meet_optimizers(self) -> None:
        """Takes the optimizers that exist as if each had just been built: for a process that trains already.

        One without its own groups is a wrapper (Accelerate's), whose inner one is met too.
        """
        for each in gc.get_objects():
            if issubclass(type(each), Optimizer) and "param_groups" in each.__dict__:
                self._built(each)

    def _begin(self, top: Module, parameters: set[int], optimizer: Optimizer) -> _Search:
        search = _Search(top, parameters)
        self._entries[id(top)] = top
        self._watcher.adopt(top, optimizer)
        while _is_never_called(_alive(search.frontier)) or _leads_to_one(search):
            if not search.descend(self._enter):
                break
        return search

    def _owners(self, parameters: set[int]) -> list[Module]:
        return [top for top in self.tops() if _owns(top, parameters)]

    def tops(self) -> Iterator[Module]:
        """The recorded modules without a parent."""
        if not self._looked:
            self._look()
        noted = list(self._noted.values())
        children = {id(child) for module in noted for child in module._modules.values()}
        return (module for module in noted if id(module) not in children)

    def _first_steps(self, optimizer: Optimizer, *_: object) -> None:
        """Runs before an optimizer's first steps, after all forwards they need. Releases entries that were not called,
        or only inside another entry; if none was called, goes one level down and waits for the next step."""
        searches = self._searches.get(optimizer)
        if searches is None:
            return
        entered = self._watcher.entered
        for search in searches.copy():
            used = [module for module in _alive(search.entries) if entered(module)]
            if not used and search.descend(self._enter):
                continue
            searches.remove(search)
            entries = list(_alive(search.entries))[1:]
            below = (each for module in used for each in module.modules() if each is not module) if entries else ()
            inside = {id(each) for each in below}
            for module in entries:
                if id(module) in inside or module not in used:
                    self._entries.pop(id(module), None)
                    self._watcher.let_go(module)
            self._trained += [weakref.ref(unwrapped(module)) for module in used]
            for module in used:
                for each in _called_beside(module):
                    self._watcher.evaluates(each)
        if not searches:
            del self._searches[optimizer]
            self._look_for_copies(self._trained)

    def _look_for_copies(self, of: list[weakref.ref[Module]]) -> None:
        for top in self.tops():
            for each in (top, *top._modules.values()):
                if each is not None:
                    self._copied(each, of)

    def _copied(self, module: Module, of: list[weakref.ref[Module]]) -> None:
        if id(module) not in self._entries and any(_is_copy(module, unwrapped(each)) for each in _alive(of)):
            self._watcher.evaluates(module)


def install(watcher: Watcher) -> Finder:
    """Starts to report every root model and optimizer to `watcher`."""
    finder = Finder(watcher)
    REGISTRY.finders.append(finder)
    return finder


def tops() -> list[Module] | None:
    """The known modules of this process without a parent. None: no finder is installed."""
    return [top for finder in REGISTRY.finders for top in finder.tops()] if REGISTRY.finders else None


def copied() -> None:
    """Call it when a watched model is copied or pickled."""
    for finder in REGISTRY.finders:
        finder.look_again()


def _is_torchs_own(module: Module) -> bool:
    """Whether torch made this module for a trace. Hooks on it would be traced, and it is never trained."""
    kind = type(module)
    return kind.__module__.startswith(_TRACERS) and kind.__name__ != "OptimizedModule"


def _alive(references: list[weakref.ref[Module]]) -> Iterator[Module]:
    return (module for reference in references if (module := reference()) is not None)


def _owns(module: Module, parameters: set[int]) -> bool:
    return any(id(parameter) in parameters for parameter in module.parameters())


def _is_never_called(modules: Iterator[Module]) -> bool:
    """Whether one is a container without forward, or a LightningModule (the trainer calls `training_step`)."""
    return any(type(m).forward is _FORWARD_MISSING or hasattr(type(m), "training_step") for m in modules)


def _leads_to_one(search: _Search) -> bool:
    """Whether one child owns all parameters: training may call that child (one part of a GAN in one module)."""
    frontier = list(_alive(search.frontier))
    if len(frontier) != 1 or search.levels >= 2 or _is_compiled(frontier[0]) or is_wrapper(frontier[0]):
        return False
    if any(id(parameter) in search.parameters for parameter in frontier[0]._parameters.values()):
        return False
    return sum(_owns(child, search.parameters) for child in frontier[0]._modules.values() if child is not None) == 1


def _called_beside(module: Module) -> Iterator[Module]:
    """Modules that an evaluation may call instead of a wrapper: the inner model and, if that is a container, its
    children. None if any part is compiled."""
    inner = unwrapped(module)
    if inner is module or any(map(_is_compiled, module.modules())):
        return
    yield inner
    if _is_never_called(iter((inner,))):
        yield from (child for child in inner.children() if next(child.parameters(), None) is not None)


def _is_copy(module: Module, of: Module) -> bool:
    if module is of or type(module) is not type(of):
        return False
    mine, theirs = list(module.parameters()), list(of.parameters())
    alike = [each.shape for each in mine] == [each.shape for each in theirs]
    return alike and not any(each is other for each, other in zip(mine, theirs, strict=True))


def _is_compiled(module: Module) -> bool:
    """Whether the module is compiled. Modules inside must not be hooked: torch.compile traces them."""
    return type(module).__name__ == "OptimizedModule" or module.__dict__.get("_compiled_call_impl") is not None
