"""The one way to replace something in torch, the standard library or sys, and the one list of what is replaced.

`LIST` says of each replaced attribute why, what a user could notice, and when it is restored. What is not in the list
cannot be replaced. `STAYS` names what is put into torch and sys without replacing anything. `gpumon doctor --replaced`
prints both, and docs/what-is-replaced.md is generated from them. This module imports no torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from gpumon_agent.importlib_bootstrap import After, Before, Compiler, between, uncompiled


class Replaced(NamedTuple):
    """One attribute that the agent replaces."""

    name: str  # as a user would write it: torch.autograd._engine_run_backward
    why: str
    noticed: str  # what a user's program could notice
    restored: str  # when
    where: str = "always"  # in which modes and versions


class Added(NamedTuple):
    """Something that the agent puts into torch or sys beside what is there."""

    name: str
    why: str
    noticed: str
    removed: str


_AT_STOP = "at `gpumon_agent.stop()`, in a forked child that watches for itself, and at exit"
_WHILE_COUNTERS = "after `stop()`, at your next reset of the peaks"
_IDENTITY = "the identity of the function; `__wrapped__` is the original"
_HISTORY = "at `gpumon_agent.stop()`; never, once stacks were kept: live blocks keep theirs"
_RUN = "under `gpumon run`"
LIST: dict[str, Replaced] = {
    each.name: each
    for each in (
        Replaced(
            "torch.autograd._engine_run_backward",
            "The phase `backward` begins and ends with it. Autograd has no hook for either.",
            f"{_IDENTITY}. While it runs, a stack dump (faulthandler, py-spy) shows one more frame. "
            "`torch.Tensor.backward` and `torch.autograd.backward` are untouched.",
            _AT_STOP,
        ),
        Replaced(
            "torch.amp.grad_scaler.GradScaler.step",
            "A step that the scaler skips calls no optimizer, so no optimizer hook shows it.",
            f"{_IDENTITY}.",
            _AT_STOP,
        ),
        Replaced(
            "torch.nn.modules.module.Module.compile",
            "`model.compile()` after `watch(model)`: hooks inside compiled code do not run, so the call into the "
            "compiled code is watched instead.",
            f"{_IDENTITY}. A watched model's own `_compiled_call_impl` is wrapped, too.",
            _AT_STOP,
        ),
        Replaced(
            "torch.nn.modules.module.Module.load_state_dict",
            "Shows that a checkpoint has been used. One that stays in memory after that is the finding "
            "`retained-checkpoint`.",
            f"{_IDENTITY}.",
            _AT_STOP,
        ),
        Replaced(
            "torch.serialization._load",
            "Shows which tensors a checkpoint has. `torch.load` calls it, and is untouched.",
            f"{_IDENTITY}.",
            _AT_STOP,
        ),
        Replaced(
            "safetensors.torch.load_file",
            "As torch.load.",
            f"{_IDENTITY}.",
            _AT_STOP,
            "where safetensors.torch is imported",
        ),
        Replaced(
            "torch._C._cuda_memoryStats",
            "Each phase's peak needs the peak counters reset. This reader gives you the peaks you would have read.",
            f"{_IDENTITY}. A name imported from torch._C before the agent started reads the peak of one phase.",
            _WHILE_COUNTERS,
            "unless GPUMON_PEAKS=bounds",
        ),
        Replaced(
            "torch._C._accelerator_getDeviceStats",
            "As _cuda_memoryStats, for torch.accelerator.",
            f"{_IDENTITY}.",
            _WHILE_COUNTERS,
            "torch 2.9 and newer, unless GPUMON_PEAKS=bounds",
        ),
        Replaced(
            "torch._C._cuda_resetPeakMemoryStats",
            "Your reset must also forget the peaks that the agent keeps for you.",
            f"{_IDENTITY}.",
            _WHILE_COUNTERS,
            "unless GPUMON_PEAKS=bounds",
        ),
        Replaced(
            "torch._C._accelerator_resetPeakStats",
            "As _cuda_resetPeakMemoryStats, for torch.accelerator.",
            f"{_IDENTITY}.",
            _WHILE_COUNTERS,
            "torch 2.9 and newer, unless GPUMON_PEAKS=bounds",
        ),
        Replaced(
            "torch._C._cuda_record_memory_history",
            "The agent switches the allocator's history on for a phase, and for steps in which it looks for a leak. "
            "Your call ends that, and the history is yours alone from then on.",
            f"{_IDENTITY}. Since torch 2.15 `torch.cuda.memory._allocation_traceback` may return the stack of a block "
            "that was made while the agent looked for a leak.",
            _HISTORY,
        ),
        Replaced(
            "torch._C._cuda_record_memory_history_legacy",
            "As _cuda_record_memory_history: `_record_memory_history(True, ...)` calls it.",
            f"{_IDENTITY}.",
            _HISTORY,
        ),
        Replaced(
            "torch._C._cuda_memorySnapshot",
            "Removes the agent's own events and stacks from the snapshots that you read.",
            f"{_IDENTITY}. A name imported from torch._C before the agent started shows them.",
            _HISTORY,
        ),
        Replaced(
            "torch._C._cuda_isHistoryEnabled",
            "False while only the agent records.",
            f"{_IDENTITY}.",
            _HISTORY,
        ),
        Replaced(
            "torch.optim.optimizer.Optimizer.__init__",
            "Finds the model that an unchanged script trains, before its first forward.",
            f"{_IDENTITY}.",
            _AT_STOP,
            _RUN,
        ),
        Replaced(
            "torch.compile",
            "Tracking of CPU bytes ends here: torch.compile cannot work under it.",
            f"{_IDENTITY}.",
            "at the first call of torch.compile, and " + _AT_STOP,
            f"{_RUN} --track-cpu",
        ),
        Replaced(
            "torch.cuda.graphs.CUDAGraph.capture_begin",
            "Shows whether a graph contains an optimizer step: then each replay is a step.",
            f"{_IDENTITY}.",
            _AT_STOP,
            "only where torch has no `register_graph_capture_start_hook`",
        ),
        Replaced(
            "torch.cuda.graphs.CUDAGraph.replay",
            "A replay is a phase of its own, since nothing inside it can be seen.",
            f"{_IDENTITY}.",
            _AT_STOP,
            "only where torch has no `register_graph_replay_start_hook`",
        ),
        Replaced(
            "torch._C._autograd._push_saved_tensors_default_hooks",
            "Before torch 2.9 the agent reads saved tensors by unpacking them, and not once hooks are set that this "
            "would run. "
            "Also shows that a checkpoint runs a part of the forward again.",
            f"{_IDENTITY}.",
            _AT_STOP,
            "before torch 2.9",
        ),
        Replaced(
            "torch._C._autograd.SavedTensor.register_hooks",
            "As _push_saved_tensors_default_hooks.",
            f"{_IDENTITY}.",
            _AT_STOP,
            "before torch 2.9",
        ),
    )
}
"""by name"""


STAYS = (
    Added(
        "Hooks for all optimizers: register_optimizer_step_pre_hook, register_optimizer_step_post_hook",
        "The phase `optimizer` begins and ends with them.",
        "two more entries in torch.optim.optimizer's registries. torch._dynamo's counter of frames is one lower where "
        "an optimizer's step is compiled",
        _AT_STOP,
    ),
    Added(
        "Hooks for all modules: register_module_module_registration_hook, register_module_parameter_registration_hook",
        "A watched model that gets wrapped is followed; under `gpumon run` models are found.",
        "more entries in torch.nn.modules.module's registries; none of them runs in a step",
        _AT_STOP,
    ),
    Added(
        "Hooks for all CUDA graphs: register_graph_capture_start_hook, register_graph_replay_start_hook, "
        "register_graph_replay_end_hook",
        "As CUDAGraph.capture_begin and CUDAGraph.replay above, where torch has them.",
        "three more entries in torch.cuda.graphs' registries",
        _AT_STOP,
    ),
    Added(
        "The four hook dicts of each watched model: _forward_pre_hooks, _forward_pre_hooks_with_kwargs, "
        "_forward_hooks, _forward_hooks_always_called",
        "The phase `forward` begins and ends with them.",
        "their class is a subclass of OrderedDict. Length, items, comparison, copies and pickles are those without "
        "ours. A call of the model has one more frame of torch's own (`inner`): in tracebacks, and for a warning with "
        "a stacklevel above 1 in the model's own forward",
        _AT_STOP,
    ),
    Added(
        "A hook of each watched optimizer: register_load_state_dict_pre_hook",
        "As Module.load_state_dict above.",
        "one more entry in the optimizer's own registry, which is not pickled and not copied",
        _AT_STOP,
    ),
    Added(
        "_compiled_call_impl of a watched model that was compiled by `model.compile()`",
        "As Module.compile above.",
        f"{_IDENTITY}",
        _AT_STOP,
    ),
    Added(
        "An observer of out-of-memory errors: torch._C._cuda_attach_out_of_memory_observer",
        "Reads what was in memory when it ran out.",
        "nothing; torch has no way to take it out again, so after `stop()` it stays and does nothing",
        "never",
    ),
    Added(
        "A dispatch mode",
        "Counts the bytes of CPU tensors, under `gpumon run --track-cpu` only.",
        "steps of small operators take longer; a warning that torch gives in C++ names our line. In torch 2.4 "
        "`tensor.as_subclass(...)` raises under any dispatch mode",
        "at the first call of torch.compile, and " + _AT_STOP,
    ),
    Added(
        "A finder in sys.meta_path, under `gpumon run` only",
        "Starts the agent when `import torch` is complete.",
        "one more entry, the first",
        "never",
    ),
    Added(
        "Functions in atexit and os.register_at_fork",
        "Sends the goodbye to viewers; keeps the agent off in a forked child.",
        "nothing",
        "the one in atexit " + _AT_STOP,
    ),
)
"""what stays beside what is torch's"""


class Patches:
    """What one part of the agent has replaced. `restore()` puts all of it back."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def replace(self, owner: Any, name: str, new: Any) -> Callable[[], None]:
        """Put `new` in the place of the attribute `name` of a module or class. The result restores it.

        Where somebody has replaced it after us, restoring leaves it alone: ours stays inside theirs, and must do
        nothing from then on.
        """
        full = full_name(owner, name)
        if full not in LIST:
            raise KeyError(f"{full} is not in patching.LIST")
        old = vars(owner)[name]
        setattr(owner, name, new)

        def restore() -> None:
            if restore in self._undo:
                self._undo.remove(restore)
                if vars(owner).get(name) is new:
                    setattr(owner, name, old)

        self._undo.append(restore)
        return restore

    def observe(self, owner: Any, name: str, before: Before, after: After, **how: Any) -> Callable[[], None]:
        """Call `before` and `after` around each call of a function; see `around`. The result restores it."""
        return self.replace(owner, name, around(vars(owner)[name], before, after, **how))

    def restore(self) -> None:
        """Everything, newest first."""
        for undo in reversed(self._undo.copy()):
            undo()


def around(
    original: Callable[..., Any],
    before: Before,
    after: After,
    *,
    inert: Callable[[], bool] | None = None,
    idle: Callable[[], int] | None = None,
    noted: Callable[[], bool] = bool,
) -> Any:
    """`original`, between two functions of ours, neither of which may raise.

    `before` gets the call's arguments, and what it returns goes to `after` with the result or the exception; None: no
    `after`. The user's exception leaves without a frame of ours, a warning names the user's line. While `inert()`, by
    default while a compiler traces, both are left out. While `idle()`, too; for `noted` see `between`.
    """
    compiler = _compiler()
    never_compiled(idle)
    return between(original, before, after, inert or compiler.traces, compiler, idle, noted)


def hook(
    function: Callable[..., object],
    idle: Callable[[Any], int] | None = None,
    due: Callable[[], object] = int,
) -> Callable[..., None]:
    """`function` as one of torch's hooks, which returns None. While a compiler traces it is left out; see `uncompiled`
    for `idle` and `due`."""
    never_compiled(idle)
    return uncompiled(function, _compiler(), idle, due)


def never_compiled(function: Any) -> None:
    """torch.compile shall not see this function's frames. Without: it counts them, even if it skips them."""
    if isinstance(function, FunctionType):
        _compiler().skip(function.__code__)


def frame_compiler() -> Callable[[Any], Any]:
    """Sets this thread's compiler of frames and returns the previous one; None: none."""
    return _compiler().swap


@functools.cache
def _compiler() -> Compiler:
    import torch

    frames: Any = torch._C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):
        actions = frames._FrameAction
        strategy = frames._FrameExecStrategy(actions.SKIP, actions.DEFAULT)
        skip = functools.partial(_skip, frames.set_code_exec_strategy, strategy)
    else:  # before torch 2.7
        skip = frames.skip_code
    return Compiler(torch.compiler.is_compiling, torch.compiler.is_dynamo_compiling, frames.set_eval_frame, skip)


def _skip(act: Callable[[Any, Any], None], strategy: Any, code: Any) -> None:
    act(code, strategy)


def full_name(owner: Any, name: str) -> str:
    """torch.autograd._engine_run_backward, torch.amp.grad_scaler.GradScaler.step"""
    if isinstance(owner, ModuleType):
        return f"{owner.__name__}.{name}"
    return f"{owner.__module__}.{owner.__qualname__}.{name}"
