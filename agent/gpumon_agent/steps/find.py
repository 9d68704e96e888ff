"""Finds the root model and its optimizers with no help from the user: an optimizer's parameters lead to them.

Modules are noted, weakly, where they are built (registration of a child or of a parameter, `__setstate__` for copies
and unpickled ones): at construction, never at a step. When an optimizer has been constructed, the *tops* among the
noted modules (those that are no other's child) which own its parameters are adopted, before the first forward.
Teachers, EMA copies and losses own none of them and are left alone.

The top is not always what training calls: containers without a forward, Lightning's modules, a GAN in one module.
So the modules below that own the same parameters are *entries* too, and so is a module that later takes an adopted
one as its child; of nested forwards only the outermost is a phase. At the optimizer's first steps the entries that
proved needless are let go, and where no forward was seen at all the search goes one level down, to a child that owns
everything sought.

Cost: 1 µs per registration; per optimizer one pass over the parameters of the noted tops; nothing after that.
Known limitations: parameters used without any module's forward show none (the phases then infer it); a model that was
built before `install` is known only if something is registered in it afterwards.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch.nn import Module
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim import Optimizer

from gpumon_agent.guard import Guard, leave_no_frame
from gpumon_agent.steps.wrappers import is_wrapper

_SIBLINGS_MAX = 4
_LEVELS_MAX = 6
_FORWARD_MISSING = Module.forward
_installed: weakref.WeakSet[Finder] = weakref.WeakSet()


class Watcher(Protocol):
    """What the search tells of its findings, and asks."""

    def adopt(self, model: Module, optimizer: Optimizer) -> None:
        """`optimizer` updates parameters of `model`, which is no other module's child."""

    def enter(self, module: Module) -> None:
        """The training may begin its forward at `module`, too."""

    def let_go(self, module: Module) -> None:
        """It does not."""

    def entered(self, module: Module) -> bool:
        """Whether a forward of `module` was seen."""

    def homeless(self, optimizer: Optimizer) -> None:
        """`optimizer` updates parameters that no known module owns."""


class _Search:
    """The entries into one top for one optimizer, until its first steps have told which of them are used."""

    def __init__(self, top: Module, parameters: set[int]) -> None:
        self.parameters = parameters
        self.levels = 0
        self.entries = [weakref.ref(top)]
        self.frontier = [weakref.ref(top)]  # the lowest entries: below them the search goes on

    def descend(self, enter: Callable[[Module], None]) -> bool:
        """One level down: every child that owns some of the parameters is an entry. Whether there was any."""
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
        # several are models of their own (an actor and a critic) only below a container, if they are few and have
        # parts; what another method of a model (`model.encode()`) calls one by one are its layers: that forward is
        # better inferred than cut to pieces
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
    """What `install` put in place; `uninstall()` takes all of it out again."""

    def __init__(self, watcher: Watcher) -> None:
        guard = Guard(lambda text: None)
        self._watcher = watcher
        self._noted: weakref.WeakValueDictionary[int, Module] = weakref.WeakValueDictionary()
        self._entries: weakref.WeakValueDictionary[int, Module] = weakref.WeakValueDictionary()
        self._restore: list[Callable[[], None]] = [
            register_module_module_registration_hook(guard.protect("find", self._child_registered)).remove,
            register_module_parameter_registration_hook(guard.protect("find", self._note)).remove,
        ]
        self._wrap(Optimizer, "__init__", guard.protect("find", self._optimizer_built))
        self._wrap(Module, "__setstate__", guard.protect("find", self._note))
        self._verify: Callable[..., object] = guard.protect("find", self._first_steps)

    def uninstall(self) -> None:
        self._verify = lambda *_: None  # optimizers that wait for their first step call it once more
        for restore in self._restore:
            restore()
        self._restore.clear()
        self._noted.clear()
        self._entries.clear()
        _installed.discard(self)

    def _wrap(self, owner: type, name: str, after: Callable[[Any], object]) -> None:
        original = owner.__dict__[name]

        @functools.wraps(original)
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
            try:
                original(self, *args, **kwargs)
            except BaseException as error:
                leave_no_frame(error)
                raise
            after(self)

        def restore() -> None:
            if owner.__dict__.get(name) is wrapper:
                setattr(owner, name, original)

        setattr(owner, name, wrapper)
        self._restore.append(restore)

    # --------------------------------------------------------------------------------------------------- construction

    def _note(self, module: Module, *_: object) -> None:
        key = id(module)
        if key not in self._noted:
            self._noted[key] = module

    def _child_registered(self, parent: Module, name: str, child: Module | None) -> None:
        self._note(parent)
        if child is not None and self._entries.get(id(child)) is child:
            self._enter(parent)  # a wrapper, or a larger whole

    def _enter(self, module: Module) -> None:
        if self._entries.get(id(module)) is not module:
            self._entries[id(module)] = module
            self._watcher.enter(module)

    # ---------------------------------------------------------------------------------------------------- optimizers

    def _optimizer_built(self, optimizer: Optimizer) -> None:
        parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        tops = [top for top in self.tops() if _owns(top, parameters)]
        if not tops:
            self._watcher.homeless(optimizer)
            return
        searches = [self._begin(top, parameters, optimizer) for top in tops]
        handles: list[Any] = []
        handles.append(optimizer.register_step_pre_hook(lambda *_: self._verify(searches, handles)))

    def _begin(self, top: Module, parameters: set[int], optimizer: Optimizer) -> _Search:
        search = _Search(top, parameters)
        self._entries[id(top)] = top
        self._watcher.adopt(top, optimizer)
        while _is_never_called(_alive(search.frontier)) or _leads_to_one(search):
            if not search.descend(self._enter):
                break
        return search

    def tops(self) -> Iterator[Module]:
        """The noted modules that are no other's child."""
        noted = list(self._noted.values())
        children = {id(child) for module in noted for child in module._modules.values()}
        return (module for module in noted if id(module) not in children)

    def _first_steps(self, searches: list[_Search], handles: list[Any]) -> None:
        """Before the optimizer's first step: every forward it needs has been. Lets go of entries that saw none, or
        saw theirs inside another's; where there was none at all, the next step looks again, one level further down."""
        import torch

        if torch.compiler.is_compiling():
            return
        entered = self._watcher.entered
        for search in searches.copy():
            used = [module for module in _alive(search.entries) if entered(module)]
            if not used and search.descend(self._enter):
                continue
            searches.remove(search)
            inside = {id(below) for module in used for below in module.modules() if below is not module}
            for module in list(_alive(search.entries))[1:]:
                if id(module) in inside or module not in used:
                    self._entries.pop(id(module), None)
                    self._watcher.let_go(module)
        if not searches:
            handles.pop().remove()


def install(watcher: Watcher) -> Finder:
    """From here on `watcher` is told of every root and optimizer that turn up."""
    finder = Finder(watcher)
    _installed.add(finder)
    return finder


def tops() -> list[Module] | None:
    """The modules of this process that are no other's child, as far as they were seen built. None: nobody looks."""
    return [top for finder in _installed for top in finder.tops()] if _installed else None


def _alive(references: list[weakref.ref[Module]]) -> Iterator[Module]:
    return (module for reference in references if (module := reference()) is not None)


def _owns(module: Module, parameters: set[int]) -> bool:
    return any(id(parameter) in parameters for parameter in module.parameters())


def _is_never_called(modules: Iterator[Module]) -> bool:
    """Containers whose class has no forward, and Lightning's modules, of which a trainer calls `training_step`."""
    return any(type(m).forward is _FORWARD_MISSING or hasattr(type(m), "training_step") for m in modules)


def _leads_to_one(search: _Search) -> bool:
    """Everything sought lies in one child: that child may be what training calls (of a GAN in one module, one part)."""
    frontier = list(_alive(search.frontier))
    if len(frontier) != 1 or search.levels >= 2 or _is_compiled(frontier[0]) or is_wrapper(frontier[0]):
        return False
    if any(id(parameter) in search.parameters for parameter in frontier[0]._parameters.values()):
        return False
    return sum(_owns(child, search.parameters) for child in frontier[0]._modules.values() if child is not None) == 1


def _is_compiled(module: Module) -> bool:
    """Nothing may be hooked inside what torch.compile traces."""
    return type(module).__name__ == "OptimizedModule" or module.__dict__.get("_compiled_call_impl") is not None
