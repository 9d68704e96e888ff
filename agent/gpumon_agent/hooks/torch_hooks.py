"""Hooks and wraps the few places in torch where phases begin and end. Long: hooks are removed in the same file.

Every hook checks `torch.compiler.is_compiling()` first (patching.hook). A compiler treats that as a constant and traces
only `return None`, so graphs and guards do not change.
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from time import monotonic_ns
from types import CodeType
from typing import Any, Protocol

import torch
from torch.nn import Module
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.utils import stateless
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils import checkpoint
from torch.utils.hooks import RemovableHandle

from gpumon_agent import frames, patching
from gpumon_agent.governor import Governor
from gpumon_agent.guard import Guard, guard, leave_no_frame, pass_on, tries_at_once
from gpumon_agent.hooks import model_discovery
from gpumon_agent.hooks.backward_roots import leads_to
from gpumon_agent.hooks.cuda_graphs import MAKES_GRAPHS, Graphs
from gpumon_agent.hooks.native_hooks import CALL, EVERY_MODULES
from gpumon_agent.hooks.phases import Inputs, Phases
from gpumon_agent.hooks.tracebacks import as_without_hooks
from gpumon_agent.patching import Patches, around
from gpumon_agent.quiet_mark import IN_BACKWARD, IN_FORWARD, IN_OPTIMIZER, QuietMark
from gpumon_agent.shape_model.outlook import Outlooks
from gpumon_agent.storages import tensors_in

# -1 outside of engine calls. The engine's threads run hooks and recomputed forwards under the call's id.
_graph_task: Callable[[], int] = torch._C._current_graph_task_id
_records_graph: Callable[[], bool] = torch.is_grad_enabled
_is_compiling = torch.compiler.is_compiling
_dynamo = torch.compiler.is_dynamo_compiling  # the same for torch.compile, in a third of the time
_has_function_mode: Callable[[], bool] = torch._C._is_torch_function_mode_enabled
_is_tracing: Callable[[], bool] = torch._C._is_tracing  # torch.jit.trace
_KEY = -0x6D6F6E  # an identifier: any number below 0 would do, as torch's hook ids count up from there
_HOOKED = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_always_called")
_CALLS = ("_call_impl", "inner")  # Module's; the second is nested in the first
_read_call = frames.call_reader(CALL)
_swap_compiler = patching.frame_compiler()
_CALLED = "called_always_called_hooks"  # a local variable of them
_MADE_LATE = _CALLED in Module._call_impl.__code__.co_varnames  # else it is set before the call's `try`
_STEP_CODE = Optimizer.profile_hook_step(lambda: None).__code__  # of the frame around every optimizer step
_COMPILED = "OptimizedModule"
_Tensor = torch.Tensor
_PLAIN = (bool, int, float, str)  # arguments of a forward that do not change its memory by much
_DEPTH = 10  # frames between one of our hooks and the caller of the module or engine
_REENTRANT = checkpoint.CheckpointFunction.backward.__code__
_FUNCTIONAL = stateless._functional_call.__code__
_WRAPPERS = (_COMPILED, "DistributedDataParallel", "FullyShardedDataParallel", "DataParallel", "DeepSpeedEngine")


class Graph(Protocol):
    """Reads the autograd graph as the forward ends and as the backward begins."""

    def forward_ends(self, output: object, model: Module | None) -> None: ...

    def backward_begins(self, roots: Any) -> None: ...

    def backward_returns(self, gradients: Any) -> None: ...

    @property
    def recomputes(self) -> bool:
        """Whether the last graph read recomputes parts of the forward."""


class _Hooks(OrderedDict[int, Any]):
    """A module's hook dict that contains our hook, but shows it only to `Module._call_impl` (`bool()` and `items()`).

    All other code sees the dict without it: `len` (TransformerEncoderLayer's fused path and make_graphed_callables
    check for 0), iteration, comparison, pickles, copies, and the values that torch.jit.script compiles and
    torch.ao.quantization copies. While a compiler traces, `items()` is complete: our hooks trace to nothing.
    """

    def plain(self) -> OrderedDict[int, Any]:
        return OrderedDict((key, hook) for key, hook in OrderedDict.items(self) if key != _KEY)

    mark: QuietMark | None = None  # torch may leave out our hook while it is idle
    bound: object = None  # QuietMark.ask
    users = 0  # user's hooks. An attribute: before torch 2.7 the compiler cannot trace `len` of a dict subclass

    def __setitem__(self, key: int, hook: Any) -> None:
        OrderedDict.__setitem__(self, key, hook)
        self.users = OrderedDict.__len__(self) - (_KEY in self)

    def __delitem__(self, key: int) -> None:
        OrderedDict.__delitem__(self, key)
        self.users = OrderedDict.__len__(self) - (_KEY in self)

    def __len__(self) -> int:
        return self.users

    @tries_at_once
    def asks(self) -> bool:
        try:
            if self.users > 0:
                return True
            if _dynamo():
                return False
            mark = self.mark
            if mark is not None and mark.idle:
                return False
            if _is_compiling() or _KEY not in self:
                return False
            return sys._getframe(1).f_code.co_name in _CALLS
        except BaseException as error:
            leave_no_frame(error, called_nothing=True)  # from a signal handler, as in `items`
            raise

    __bool__ = asks  # or compiled: QuietMark.kind_of_hooks

    @tries_at_once
    def items(self) -> Any:
        try:
            ours = _is_compiling() or (sys._getframe(1).f_code.co_name in _CALLS and not (_MADE_LATE and _would_fail()))
            return OrderedDict.items(self) if ours else self.plain().items()
        except BaseException as error:
            leave_no_frame(error, called_nothing=True)
            raise

    def values(self) -> Any:
        return self.plain().values()

    def keys(self) -> Any:
        return self.plain().keys()

    def __iter__(self) -> Iterator[int]:
        return iter(self.plain())

    def __reversed__(self) -> Any:
        return reversed(self.plain())

    def __eq__(self, other: object) -> bool:
        return self.plain() == (other.plain() if isinstance(other, _Hooks) else other)

    def __ne__(self, other: object) -> bool:  # OrderedDict defines its own
        return not self == other

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self.plain())

    def __reduce_ex__(self, protocol: Any) -> Any:
        model_discovery.copied()
        return self.plain().__reduce_ex__(protocol)

    def copy(self) -> Any:
        return self.plain()

    __copy__ = copy

    def clear(self) -> None:
        for key in self.plain():
            del self[key]

    def popitem(self, last: bool = True) -> tuple[int, Any]:
        key, _ = self.plain().popitem(last)
        return key, self.pop(key)


class _EntryHooks(_Hooks):
    """A root's `_forward_pre_hooks`: while a step is idle, torch calls `forward` at once if nothing is new about it."""

    root: _Root | None = None

    @tries_at_once
    def asks(self) -> bool:
        """In one function: the caches are cold here, where each call costs a microsecond.

        Reads a tensor without the guard's protection, so it leaves all but plain calls to the hook.
        """
        try:
            if self.users > 0:
                return True
            if _dynamo():
                return False
            frame = sys._getframe(1)
            root = self.root
            mark = self.mark
            if (
                root is None
                or mark is None
                or not mark.idle
                or frame.f_code is not CALL
                or _read_call is None
                or _is_tracing()
                or _has_function_mode()
                or any(EVERY_MODULES)
            ):
                return not _is_compiling() and _KEY in self and frame.f_code.co_name in _CALLS
            compiles = _swap_compiler(None)
            if compiles is not None:
                _swap_compiler(compiles)
                return True
            return not root.passes(*_read_call(frame))
        except BaseException as error:
            if guard.takes("forward", error):
                self.root = None
                return True
            leave_no_frame(error, called_nothing=True)
            raise

    __bool__ = asks


def _would_fail() -> bool:
    """Whether an always-called hook would make `_call_impl` lose the user's exception.

    In torch 2.4 it fails itself if a signal handler raises before it has created `called_always_called_hooks`.
    """
    return sys.exc_info()[1] is not None and _CALLED not in frames.variables(sys._getframe(2))


class Hooks:
    """All hooks and wrappers of phases; `remove()` undoes them."""

    def __init__(
        self,
        phases: Phases,
        guard: Guard,
        governor: Governor,
        *,
        inputs: Callable[..., Inputs],
        rooted: Callable[[Module], None],
        entered: Callable[[Module], None],
        graph: Graph,
        notice: Callable[[str], None],
        outlooks: Outlooks,
    ) -> None:
        self.fires = True
        self._outlooks = outlooks
        self._phases = phases
        self._guard = guard
        self._governor = governor
        self._rooted = rooted  # called with every new root
        self._entered = guard.protect("devices", entered)  # called before a root's first forward
        self._roots: dict[int, _Root] = {}
        self._patches = Patches()
        self._handles: list[RemovableHandle] = []
        self._inputs = inputs
        self._graph = graph
        self._forward_made = guard.protect("activations", graph.forward_ends)
        self._backward_returns = guard.protect("activations", graph.backward_returns)
        self._backward_takes = guard.protect("activations", graph.backward_begins)
        self._stepped = 0  # completed optimizer steps
        self.backward_ended: Callable[[], object] | None = None  # called after each backward
        self._graphs = Graphs(lambda: self.fires, phases, guard, notice)
        self._install()

    def remove(self) -> None:
        self.mute()
        for root in list(self._roots.values()):
            root.remove()
        self._roots.clear()
        self._patches.restore()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def mute(self) -> None:
        """In a forked child: hooks stay in place and do nothing."""
        self.fires = False
        self._phases.forget_notes()

    def _install(self) -> None:
        protect, observe = self._guard.protect, self._patches.observe
        begins, ends = self._step_hooks()
        self._handles += [
            register_optimizer_step_pre_hook(begins),
            register_optimizer_step_post_hook(ends),
            register_module_module_registration_hook(self._registration_hook(protect("wrapper", self._registered))),
        ]
        observe(
            torch.autograd,
            "_engine_run_backward",
            protect("backward", self._engine_begins),
            protect("backward", self._engine_ends),
            idle=self._phases.quiet_mark.enters(IN_BACKWARD),
            noted=self._phases.quiet_mark.leaves(),
        )
        observe(torch.amp.GradScaler, "step", self._scaler_begins, protect("scaler", self._scaler_ends))
        compiled = protect("compile", self._compiled)
        observe(
            Module,
            "compile",
            lambda module, *_, **__: module if self.fires else None,
            lambda module, _, error: None if error is not None else compiled(module),
        )
        self._handles += self._graphs.install(self._patches)

    # ----------------------------------------------------------------------------------------------------------- engine

    def _engine_begins(self, roots: Any, gradients: Any = (), *_: Any, **__: Any) -> bool | None:
        if not self.fires:
            return None
        phases = self._phases
        began = monotonic_ns()
        if _graph_task() != -1:  # a nested engine call
            if _is_below(_REENTRANT):
                phases.recomputes()
            return None
        if _is_below(MAKES_GRAPHS):
            return None
        look = functools.partial(self._backward_takes, (*roots, *gradients)) if phases.sampled else None
        begins = phases.engine_begins(look, functools.partial(self._needed_a_model, roots)) or None
        self._governor.spent_ns += monotonic_ns() - began
        return begins

    def _needed_a_model(self, roots: Any) -> bool:
        """Whether this graph contains a parameter of a watched model. True too if no such parameters are known."""
        modules = [module for root in self._roots.values() if (module := root.module()) is not None]
        parameters = {id(parameter) for module in modules for parameter in module.parameters()}
        return not parameters or leads_to(roots, parameters)

    def _engine_ends(self, _: Any, gradients: Any, error: BaseException | None) -> None:
        began = monotonic_ns()
        if gradients:
            self._backward_returns(gradients)
        if self._graph.recomputes:
            self._phases.recomputes()
        self._phases.engine_ends(aborted=error is not None)
        self._governor.spent_ns += monotonic_ns() - began
        if self.backward_ended is not None:
            self.backward_ended()

    # ------------------------------------------------------------------------------------------------------- optimizers

    def _step_hooks(self) -> tuple[Callable[..., None], Callable[..., None]]:
        """Before and after `optimizer.step`."""
        protect, mark = self._guard.protect, self._phases.quiet_mark
        begins, ends = protect("optimizer", self._step_begins), protect("optimizer", self._step_ends)
        due = protect("optimizer", self._phases.do_quietly)
        return (
            patching.hook(lambda optimizer, *_: begins(optimizer), mark.begins(IN_OPTIMIZER)),
            patching.hook(lambda optimizer, *_: ends(optimizer), mark.closes(), due),
        )

    def _step_begins(self, optimizer: Any) -> None:
        if not self.fires or _loads_state():
            return
        began = monotonic_ns()
        self._phases.stir()
        in_engine = _graph_task() != -1
        if self._phases.in_optimizer(in_engine=in_engine):
            self._phases.optimizers_left(_steps_running() - 1, in_engine=in_engine)
        self._phases.optimizer_begins(optimizer, in_engine=in_engine)
        self._governor.spent_ns += monotonic_ns() - began

    def _step_ends(self, optimizer: Any) -> None:
        if not self.fires or _loads_state():
            return
        self._stepped += 1
        began = monotonic_ns()
        self._phases.optimizer_ends(optimizer, in_engine=_graph_task() != -1)
        self._governor.spent_in_closing(monotonic_ns() - began)
        self._graphs.optimizer_stepped()

    def _scaler_begins(self, _: Any, optimizer: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any] | None:
        return (optimizer, self._steps_done()) if self.fires and isinstance(optimizer, Optimizer) else None

    def _scaler_ends(self, began: tuple[Any, Any], _: Any, error: BaseException | None) -> None:
        optimizer, done = began
        if error is None and done == self._steps_done():
            self._phases.optimizer_skipped(optimizer)

    def _steps_done(self) -> tuple[int, int]:
        """Differs after each step of an optimizer: those of idle steps only change the mark."""
        return self._stepped, self._phases.quiet_mark.step

    # ------------------------------------------------------------------------------------------------------------ roots

    def watch(self, module: Module, *, evaluated: bool = False) -> None:
        """From here on `module`'s forward is a phase; for a compiled module, the call of the compiled code.

        `evaluated`: training does not call it, so only forwards in eval mode without a graph are phases.
        """
        key = id(module)
        root = self._roots.get(key)
        if root is None:
            root = self._roots[key] = _Root(self, module)
            root.evaluated = evaluated
        root.evaluated = root.evaluated and evaluated
        root.attach()
        self._rooted(module)

    def release(self, module: Module) -> None:
        root = self._roots.get(id(module))
        if root is not None and root.holds(module):
            del self._roots[id(module)]
            root.remove()

    def entered(self, module: Module) -> bool:
        """Whether a watched `module`'s forward has begun at least once."""
        root = self._roots.get(id(module))
        return root is not None and root.holds(module) and root.entered

    def functional(self, module: Module) -> bool:
        """Whether its first forward was called by torch.func.functional_call."""
        root = self._roots.get(id(module))
        return root is not None and root.holds(module) and root.functional

    def _registration_hook(self, act: Callable[[Module, Module], None]) -> Callable[..., None]:
        def hook(parent: Module, name: str, child: Module) -> None:
            if self.fires and child is not None and id(child) in self._roots:
                act(parent, child)

        return hook

    def _registered(self, parent: Module, child: Module) -> None:
        """A root was wrapped: watch the wrapper. Inside a compiled wrapper, remove all hooks."""
        kind, inner = type(parent).__name__, self._roots[id(child)]
        if kind not in _WRAPPERS or not inner.holds(child):
            return
        if kind == _COMPILED:
            for module in child.modules():
                root = self._roots.pop(id(module), None)
                if root is not None:
                    root.remove()
        self.watch(parent, evaluated=inner.evaluated)

    def _compiled(self, module: Module) -> None:
        root = self._roots.get(id(module))
        if root is not None and root.holds(module):
            root.remove()
            root.attach()


class _Root:
    def __init__(self, hooks: Hooks, module: Module) -> None:
        self._hooks = hooks
        self._phases = hooks._phases
        self._mark = hooks._phases.quiet_mark
        self._key = key = id(module)
        roots = hooks._roots
        self._module = weakref.ref(module, lambda _: roots.pop(key, None) and None)
        self.entered = self.functional = self.evaluated = False
        self._raising = 0  # id of the exception being handled when the forward began
        self._undo: list[Callable[[], None]] = []
        self._entry: _EntryHooks | None = None
        self._begins = hooks._guard.protect("forward", self._forward_begins)
        self._ends = hooks._guard.protect("forward", self._forward_ends)

    def module(self) -> Module | None:
        return self._module()

    def holds(self, module: Module) -> bool:
        return self._module() is module

    def attach(self) -> None:
        module = self._module()
        if module is None or self._undo:
            return
        if module.__dict__.get("_compiled_call_impl") is not None:
            self._wrap_compiled(module)
        elif all(isinstance(module.__dict__.get(name), OrderedDict) for name in _HOOKED):
            self._hook(module)

    def remove(self) -> None:
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    def _hook(self, module: Module) -> None:
        held, begins, ends, outlooks = self._module, self._begins, self._ends, self._hooks._outlooks
        restore = self._hooks._guard.protect("traceback", as_without_hooks)
        mark, passes = self._hooks._phases.quiet_mark, self._hooks._guard.protect("forward", self.passes)

        def pre_hook(module: Module, args: Any, kwargs: Any) -> None:
            # DataParallel's replicas and shallow copies share the dict; torch.jit.trace would record our tensor reads
            if held() is module and not _is_tracing():
                if mark.idle and not mark.notes and passes(module, args, kwargs):
                    return
                begins(module, args, kwargs)
                if outlooks.waiting is not None:
                    outlooks.tell()

        def post_hook(module: Module, args: Any, output: Any) -> None:
            if held() is module and not _is_tracing():
                ends(output)
                if output is None:  # it raised
                    restore(module)

        ours: dict[str, Any] = dict.fromkeys(_HOOKED, True)
        ours["_forward_pre_hooks"], ours["_forward_hooks"] = patching.hook(pre_hook), patching.hook(post_hook)
        for name in _HOOKED:
            plain = module.__dict__[name]
            kind = _EntryHooks if name == "_forward_pre_hooks" else _Hooks
            hooked = mark.kind_of_hooks(kind)(plain)
            hooked[_KEY] = ours[name]
            if name == "_forward_hooks":
                hooked.mark = mark
                mark.ask(hooked, self._module, begins=False)
            if isinstance(hooked, _EntryHooks):
                hooked.mark, hooked.root = mark, self
                hooked.move_to_end(_KEY, last=False)
                self._entry = hooked
                if self.entered:
                    self._pass_natively()
            _swap(module, name, plain, hooked)
            self._undo.append(functools.partial(self._unhook, name, plain))

    def _pass_natively(self) -> None:
        if self._entry is not None:
            self._mark.ask(self._entry, self._module, begins=True)

    def _unhook(self, name: str, plain: OrderedDict[int, Any]) -> None:
        module = self._module()
        if module is None:
            return
        hooked = module.__dict__.get(name)
        if isinstance(hooked, _Hooks):
            plain.clear()
            plain.update(hooked.plain())
            self._mark.ask_no_more(hooked)
            del hooked[_KEY]  # a shallow copy of the module may share it
            _swap(module, name, hooked, plain)

    def _wrap_compiled(self, module: Module) -> None:
        held, begins, ends, outlooks = self._module, self._begins, self._ends, self._hooks._outlooks
        inner = module.__dict__["_compiled_call_impl"]

        def call_begins(*args: Any, **kwargs: Any) -> bool | None:
            module = held()
            if module is None:
                return None
            begins(module, args, kwargs)
            if outlooks.waiting is not None:
                try:
                    outlooks.tell()
                except BaseException:  # a user's listener skips the batch
                    ends(None, True)
                    raise
            return True

        def call_ends(_: bool, result: Any, error: BaseException | None) -> None:
            ends(result, error is not None)

        compiled_call = around(inner, call_begins, call_ends)
        module.__dict__["_compiled_call_impl"] = compiled_call

        def undo() -> None:
            module = held()
            if module is not None and module.__dict__.get("_compiled_call_impl") is compiled_call:
                module.__dict__["_compiled_call_impl"] = inner

        self._undo.append(undo)

    def passes(self, module: Module, args: Any, kwargs: Any) -> bool:
        """A forward begins in an idle step. True: that is all, since nothing about it is new."""
        if self._module() is not module or not self.entered:
            return False
        mark = self._mark
        if _records_graph():
            shapes: list[tuple[int, ...]] = []
            for value in (*args, *kwargs.values()) if kwargs else args:
                if type(value) is _Tensor:
                    try:
                        shapes.append(value.shape)
                    except RuntimeError as error:  # a nested tensor has none
                        pass_on(error)
                        return False
                elif value is not None and type(value) not in _PLAIN:
                    return False
            if not mark.fits(shapes):
                return False
        elif not mark.evaluates:
            return False
        mark.passed += 1
        mark.enter(IN_FORWARD)
        return True

    def _forward_begins(self, module: Module, args: Any, kwargs: Any) -> None:
        hooks = self._hooks
        if not hooks.fires:
            return
        began = monotonic_ns()
        if _graph_task() != -1:
            hooks._phases.recomputes()
            return
        if _is_below(MAKES_GRAPHS) or (self.evaluated and (module.training or torch.is_grad_enabled())):
            return
        if not self.entered:
            self.entered = True
            self._pass_natively()
            self.functional = _is_below(_FUNCTIONAL)
            hooks._entered(module)
        phases = hooks._phases
        if phases.in_optimizer():
            phases.optimizers_left(_steps_running())
        self._raising = id(sys.exc_info()[1])
        phases.forward_begins(
            self._key,
            gradients=torch.is_grad_enabled(),
            trains=module.training,
            inputs=functools.partial(hooks._inputs, args, kwargs),
            called=functools.partial(_called, module),
        )
        hooks._governor.spent_ns += monotonic_ns() - began

    def _forward_ends(self, output: Any, aborted: bool | None = None) -> None:
        hooks = self._hooks
        if not hooks.fires or _graph_task() != -1:
            return
        began = monotonic_ns()
        if aborted is None:  # an always-called hook can detect an exception only through sys.exc_info
            aborted = id(sys.exc_info()[1]) != self._raising
        phases = hooks._phases
        gradients = torch.is_grad_enabled()
        module = self._module()
        graph = None
        if gradients and module is not None and not module.training:
            made = (each for each in tensors_in(output) if each.grad_fn is not None)
            graph = next(map(weakref.ref, made), None)
        phases.forward_ends(
            self._key,
            gradients=gradients,
            aborted=aborted,
            output=graph,
            look=functools.partial(hooks._forward_made, output, module) if phases.sampled else None,
        )
        hooks._governor.spent_ns += monotonic_ns() - began


def _called(module: Module) -> str:
    line = frames.users_line()
    return type(module).__name__ + (f", called at {line}" if line else "")


def _steps_running() -> int:
    """Number of `optimizer.step` frames on this thread's stack; after an exception, fewer than were entered."""
    return sum(frame is not None and frame.f_code is _STEP_CODE for frame in _stack())


def _loads_state() -> bool:
    """Whether torch.distributed.checkpoint calls the optimizer with zero gradients, to create its state for loading."""
    module = sys.modules.get("torch.distributed.checkpoint.state_dict")
    initializes = getattr(module, "_init_optim_state", None)
    return initializes is not None and _is_below(initializes.__code__)


def _is_below(code: CodeType) -> bool:
    """Whether a function with this code is among the innermost `_DEPTH` frames."""
    frame = sys._getframe(1)
    for _ in range(_DEPTH):
        if frame.f_code is code:
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


def _stack() -> Iterator[Any]:
    frame = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back  # type: ignore[assignment]


def _swap(module: Module, name: str, old: OrderedDict[int, Any], new: OrderedDict[int, Any]) -> None:
    """Replaces `old` by `new`, also in the handles that would remove a hook from `old`.

    Handles hold weak references to their dict. If there are any (hooks are rarely registered on a root before us), the
    handles are searched once with `gc.get_objects()`.
    """
    module.__dict__[name] = new
    if not weakref.getweakrefs(old):
        return
    replacement = weakref.ref(new)
    for handle in (o for o in gc.get_objects() if type(o) is RemovableHandle):
        if handle.hooks_dict_ref() is old:
            handle.hooks_dict_ref = replacement
        if any(reference() is old for reference in handle.extra_dict_ref):
            handle.extra_dict_ref = tuple(replacement if r() is old else r for r in handle.extra_dict_ref)
