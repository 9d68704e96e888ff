"""Where the phases' events come from: the few places in torch that are hooked or wrapped, and how each is undone.

Every hook asks `torch.compiler.is_compiling()` first: under a compiler that call is a constant, so what it traces is
`return None` and neither graphs nor guards change.
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch.nn import Module
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils import checkpoint
from torch.utils.hooks import RemovableHandle

from gpumon_agent.forecast.outlook import Outlooks
from gpumon_agent.guard import Guard, leave_no_frame
from gpumon_agent.ledger.inventory import INPUT_DEPTH_MAX, tensors_in
from gpumon_agent.steps.cuda_graphs import Graphs
from gpumon_agent.steps.phases import Inputs, Phases

# `-1` outside any engine call; the engine's own threads run hooks and recomputed forwards under the call's id
_graph_task: Callable[[], int] = torch._C._current_graph_task_id
_is_compiling = torch.compiler.is_compiling
_KEY = -0x6D6F6E  # torch's hook ids count up from 0
_HOOKED = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_always_called")
_STEP_CODE = Optimizer.profile_hook_step(lambda: None).__code__  # of the frame around every optimizer's step
_COMPILED = "OptimizedModule"
_WRAPPERS = (_COMPILED, "DistributedDataParallel", "FullyShardedDataParallel", "DataParallel", "DeepSpeedEngine")


class Graph(Protocol):
    """Who looks at what autograd recorded, at the two moments when it is whole."""

    def forward_ends(self, output: object) -> None: ...

    def backward_begins(self, roots: Any) -> None: ...

    def backward_returns(self, gradients: Any) -> None: ...


class _Hooks(OrderedDict[int, Any]):
    """A module's hook dict with ours in it. Pickles and copies are the plain dict without ours, and so are its values:

    a call goes through the items; the values are for those who look at hooks: torch.jit.script compiles them,
    torch.ao.quantization hands them on.
    """

    def values(self) -> Any:
        return self.plain().values()

    def plain(self) -> OrderedDict[int, Any]:
        return OrderedDict((key, hook) for key, hook in self.items() if key != _KEY)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)

    def copy(self) -> Any:
        return self.plain()

    __copy__ = copy


class Hooks:
    """Everything the agent has put into torch. `remove()` takes all of it out again."""

    def __init__(
        self,
        phases: Phases,
        guard: Guard,
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
        self._rooted = rooted  # told of every module that becomes a root
        self._entered = guard.protect("devices", entered)  # called before a root's first forward
        self._roots: dict[int, _Root] = {}
        self._restore: list[Callable[[], None]] = []
        self._inputs = inputs
        self._forward_made = guard.protect("activations", graph.forward_ends)
        self._backward_returns = guard.protect("activations", graph.backward_returns)
        self._backward_takes = guard.protect("activations", graph.backward_begins)
        self._graphs = Graphs(self, phases, guard, notice)
        self._install()

    def remove(self) -> None:
        self.fires = False
        for root in list(self._roots.values()):
            root.remove()
        self._roots.clear()
        for restore in reversed(self._restore):
            restore()
        self._restore.clear()

    def mute(self) -> None:
        """In a forked child: every hook stays where it is and does nothing."""
        self.fires = False

    def step_aside(self) -> Callable[[], None]:
        """No hook fires, and the roots have none, until what is returned is called."""
        fired, self.fires = self.fires, False
        roots = list(self._roots.values())
        for root in roots:
            root.remove()

        def come_back() -> None:
            for root in roots:
                root.attach()
            self.fires = fired

        return come_back

    def _install(self) -> None:
        protect = self._guard.protect
        for handle in (
            register_optimizer_step_pre_hook(self._step_hook(protect("optimizer", self._step_begins))),
            register_optimizer_step_post_hook(self._step_hook(protect("optimizer", self._step_ends))),
            register_module_module_registration_hook(self._registration_hook(protect("wrapper", self._registered))),
        ):
            self._restore.append(handle.remove)
        engine = torch.autograd.graph._engine_run_backward
        wrapped = self._around_engine(engine)
        for module in (torch.autograd, torch.autograd.graph):
            self._replace(module, "_engine_run_backward", wrapped)
        self._replace(torch.Tensor, "backward", self._around_backward(torch.Tensor.backward))
        scaler = torch.amp.GradScaler
        self._replace(scaler, "step", self._around_scaler(scaler.step))
        self._replace(Module, "compile", self._around_compile(Module.compile))
        self._mark_recomputation()
        self._graphs.install(self._replace)

    def _replace(self, owner: Any, name: str, new: Any) -> None:
        old = owner.__dict__[name]
        setattr(owner, name, new)

        def restore() -> None:
            if owner.__dict__.get(name) is new:  # somebody wrapped it after us: ours stays inside and does nothing
                setattr(owner, name, old)

        self._restore.append(restore)

    # ----------------------------------------------------------------------------------------------------------- engine

    def _around_engine(self, original: Callable[..., Any]) -> Callable[..., Any]:
        begins = self._guard.protect("backward", self._phases.engine_begins)
        ends = self._guard.protect("backward", self._phases.engine_ends)
        takes, returns = self._backward_takes, self._backward_returns
        phases = self._phases

        @functools.wraps(original)
        def _engine_run_backward(*args: Any, **kwargs: Any) -> Any:
            if _is_compiling() or not self.fires or _graph_task() != -1:
                return original(*args, **kwargs)
            if not begins(functools.partial(takes, args[0]) if phases.sampled else None):
                return original(*args, **kwargs)
            try:
                result = original(*args, **kwargs)
            except BaseException as error:
                ends(aborted=True)
                leave_no_frame(error)
                raise
            if result:
                returns(result)
            ends(aborted=False)
            return result

        return _engine_run_backward

    def _around_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        begins = self._guard.protect("backward", self._phases.backward_begins)
        returns = self._guard.protect("backward", self._phases.backward_returns)

        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            if _is_compiling() or not self.fires or _graph_task() != -1:
                return original(*args, **kwargs)
            begins()
            try:
                return original(*args, **kwargs)
            except BaseException as error:
                leave_no_frame(error)
                raise
            finally:
                returns()

        return backward

    def _mark_recomputation(self) -> None:
        """Both kinds of activation checkpointing pass through here when, and only when, they run a forward again."""
        recomputes = self._guard.protect("checkpoint", self._phases.recomputes)
        kinds = [(checkpoint.CheckpointFunction, "backward")]
        if hasattr(checkpoint, "_recomputation_hook"):
            kinds.append((checkpoint._recomputation_hook, "__init__"))
        for owner, name in kinds:
            kept = owner.__dict__[name]
            original = kept.__func__ if isinstance(kept, staticmethod) else kept

            wrapper: Any = self._around_recomputation(original, recomputes)
            self._replace(owner, name, staticmethod(wrapper) if isinstance(kept, staticmethod) else wrapper)

    def _around_recomputation(self, original: Callable[..., Any], recomputes: Callable[[], None]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not _is_compiling() and self.fires:
                recomputes()
            try:
                return original(*args, **kwargs)
            except BaseException as error:
                leave_no_frame(error)
                raise

        return wrapper

    # ------------------------------------------------------------------------------------------------------- optimizers

    def _step_hook(self, act: Callable[[Any], None]) -> Callable[..., None]:
        def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
            if _is_compiling():
                return
            if self.fires:
                act(optimizer)

        return hook

    def _step_begins(self, optimizer: Any) -> None:
        if self._phases.in_optimizer:
            self._phases.optimizers_left(_steps_running() - 1)
        self._phases.optimizer_begins(optimizer)

    def _step_ends(self, optimizer: Any) -> None:
        self._phases.optimizer_ends(optimizer, in_engine=_graph_task() != -1)
        self._graphs.optimizer_stepped()

    def _around_scaler(self, original: Callable[..., Any]) -> Callable[..., Any]:
        phases = self._phases
        skipped = self._guard.protect("scaler", phases.optimizer_skipped)
        seen = [0]

        def count(*_: Any) -> None:
            seen[0] += 1

        handle = register_optimizer_step_post_hook(count)
        self._restore.append(handle.remove)

        @functools.wraps(original)
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            before = seen[0]
            try:
                result = original(scaler, optimizer, *args, **kwargs)
            except BaseException as error:
                leave_no_frame(error)
                raise
            if self.fires and seen[0] == before and isinstance(optimizer, Optimizer):
                skipped(optimizer)
            return result

        return step

    # ------------------------------------------------------------------------------------------------------------ roots

    def watch(self, module: Module) -> None:
        """From here on `module`'s forward is a phase. Of a compiled module, the call into the compiled code."""
        key = id(module)
        root = self._roots.get(key)
        if root is None:
            root = self._roots[key] = _Root(self, module)
        root.attach()
        self._rooted(module)

    def release(self, module: Module) -> None:
        """`module`'s forward is no phase any more."""
        root = self._roots.get(id(module))
        if root is not None and root.holds(module):
            del self._roots[id(module)]
            root.remove()

    def entered(self, module: Module) -> bool:
        """Whether a forward of `module` has begun since it is watched."""
        root = self._roots.get(id(module))
        return root is not None and root.holds(module) and root.entered

    def _registration_hook(self, act: Callable[[Module, Module], None]) -> Callable[..., None]:
        def hook(parent: Module, name: str, child: Module) -> None:
            if self.fires and child is not None and id(child) in self._roots:
                act(parent, child)

        return hook

    def _registered(self, parent: Module, child: Module) -> None:
        """A root gets wrapped: the wrapper's forward is the whole. Inside a compiled one nothing may stay hooked."""
        kind = type(parent).__name__
        if kind not in _WRAPPERS or not self._roots[id(child)].holds(child):
            return
        if kind == _COMPILED:
            for module in child.modules():
                root = self._roots.pop(id(module), None)
                if root is not None:
                    root.remove()
        self.watch(parent)

    def _around_compile(self, original: Callable[..., Any]) -> Callable[..., Any]:
        compiled = self._guard.protect("compile", self._compiled)

        @functools.wraps(original)
        def compile(module: Module, *args: Any, **kwargs: Any) -> Any:
            try:
                result = original(module, *args, **kwargs)
            except BaseException as error:
                leave_no_frame(error)
                raise
            if self.fires:
                compiled(module)
            return result

        return compile

    def _compiled(self, module: Module) -> None:
        root = self._roots.get(id(module))
        if root is not None and root.holds(module):
            root.remove()
            root.attach()


class _Root:
    """One watched model and what was put into it."""

    def __init__(self, hooks: Hooks, module: Module) -> None:
        self._hooks = hooks
        self._key = key = id(module)
        roots = hooks._roots
        self._module = weakref.ref(module, lambda _: roots.pop(key, None) and None)
        self.entered = False
        self._raising = 0  # id of the exception that was being handled as the forward began
        self._undo: list[Callable[[], None]] = []
        self._begins = hooks._guard.protect("forward", self._forward_begins)
        self._ends = hooks._guard.protect("forward", self._forward_ends)

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

        def pre_hook(module: Module, args: Any, kwargs: Any) -> None:
            if _is_compiling():
                return
            if held() is module:  # DataParallel's replicas and shallow copies carry the same dict
                begins(module, args, kwargs)
                if outlooks.waiting is not None:
                    outlooks.tell()

        def post_hook(module: Module, args: Any, output: Any) -> None:
            if _is_compiling():
                return
            if held() is module:
                ends(output)

        ours: dict[str, Any] = dict.fromkeys(_HOOKED, True)
        ours["_forward_pre_hooks"], ours["_forward_hooks"] = pre_hook, post_hook
        for name in _HOOKED:
            plain = module.__dict__[name]
            hooked = _Hooks(plain)
            hooked[_KEY] = ours[name]
            if name == "_forward_pre_hooks":
                hooked.move_to_end(_KEY, last=False)
            _swap(module, name, plain, hooked)
            self._undo.append(functools.partial(self._unhook, name, plain))

    def _unhook(self, name: str, plain: OrderedDict[int, Any]) -> None:
        module = self._module()
        if module is None:
            return
        hooked = module.__dict__.get(name)
        if isinstance(hooked, _Hooks):
            plain.clear()
            plain.update(hooked.plain())
            del hooked[_KEY]  # a shallow copy of the module may share it
            _swap(module, name, hooked, plain)

    def _wrap_compiled(self, module: Module) -> None:
        held, begins, ends, outlooks = self._module, self._begins, self._ends, self._hooks._outlooks
        inner = module.__dict__["_compiled_call_impl"]

        @functools.wraps(inner)
        def compiled_call(*args: Any, **kwargs: Any) -> Any:
            if _is_compiling():
                return inner(*args, **kwargs)
            module = held()
            if module is None:
                return inner(*args, **kwargs)
            begins(module, args, kwargs)
            try:
                if outlooks.waiting is not None:
                    outlooks.tell()
                result = inner(*args, **kwargs)
            except BaseException as error:
                ends(None, True)
                leave_no_frame(error)
                raise
            ends(result, False)
            return result

        module.__dict__["_compiled_call_impl"] = compiled_call

        def undo() -> None:
            module = held()
            if module is not None and module.__dict__.get("_compiled_call_impl") is compiled_call:
                module.__dict__["_compiled_call_impl"] = inner

        self._undo.append(undo)

    def _forward_begins(self, module: Module, args: Any, kwargs: Any) -> None:
        hooks = self._hooks
        if not hooks.fires:
            return
        if _graph_task() != -1:
            hooks._phases.recomputes()
            return
        if not self.entered:
            self.entered = True
            hooks._entered(module)
        phases = hooks._phases
        if phases.in_optimizer:
            phases.optimizers_left(_steps_running())
        self._raising = id(sys.exc_info()[1])
        phases.forward_begins(
            self._key,
            evaluates=not (module.training and torch.is_grad_enabled()),
            inputs=functools.partial(hooks._inputs, args, kwargs),
        )

    def _forward_ends(self, output: Any, aborted: bool | None = None) -> None:
        hooks = self._hooks
        if not hooks.fires or _graph_task() != -1:
            return
        if aborted is None:  # an always-called hook learns of an exception only by asking the interpreter
            aborted = id(sys.exc_info()[1]) != self._raising
        phases = hooks._phases
        gradients = torch.is_grad_enabled()
        module = self._module()
        evaluated = gradients and module is not None and not module.training
        phases.forward_ends(
            self._key,
            gradients=gradients,
            aborted=aborted,
            recorded=evaluated and any(each.grad_fn is not None for each in tensors_in(output, INPUT_DEPTH_MAX)),
            look=functools.partial(hooks._forward_made, output) if phases.sampled else None,
        )


def _steps_running() -> int:
    """How many `optimizer.step` frames are on this thread's stack: after an exception fewer than were entered."""
    return sum(frame is not None and frame.f_code is _STEP_CODE for frame in _stack())


def _stack() -> Iterator[Any]:
    frame = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back  # type: ignore[assignment]


def _swap(module: Module, name: str, old: OrderedDict[int, Any], new: OrderedDict[int, Any]) -> None:
    """Puts `new` in `old`'s place, for the handles too that would remove a hook from `old`.

    A handle knows its dict by weak reference, and a dict knows only those references, not who has them: where hooks
    were registered before (rarely, on a root), the handles are found among the collector's objects, once.
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
