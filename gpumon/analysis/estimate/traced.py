"""Traces a module's first iterations without a GPU and replays the allocations. Long: one pass from load to step.

Model. The user's module, loss and optimizer run on the meta device, where tensors have shapes and no bytes, made to
behave as CUDA (estimate.on_meta). torch itself decides when a storage is allocated and freed; temporaries of kernels
are added (estimate.kernels). An iteration is a batch, forward, backward, optimizer, zero_grad; the second one is like
all later ones.

Source. PyTorch's own code, run. Accuracy: benchmarks/estimate-accuracy.md.
Cost. About 0.1 ms per operator: a second or two for a model of 24 layers.

Known limitations. PyTorch's own optimizers, eager mode. Numbers read from the device are zero, shapes that depend on
values empty. Attention is chosen for compute capability 8.0. cuDNN's workspaces and fused recurrent layers are not
modelled. torch 2.4 has no meta kernels for fused attention, 2.8 none for sparse gradients. The load is the module's
tensors in order, without temporaries of the initialisation. The peak of backward was too high if a large parameter is
used twice (a Llama with a tied head under autocast: 7 %).
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import msgspec

from gpumon.analysis.estimate import lbfgs
from gpumon.analysis.estimate.kernels import Hardware, kept, temporaries, uses_cublas, uses_handle
from gpumon.analysis.estimate.model import NotAModel
from gpumon.analysis.estimate.simulator import OutOfMemory, SimulatedAllocator, SimulatedBlock
from gpumon.analysis.estimate.workload import EIGHT_BIT, NO_FOREACH, NONE, OPTIMIZERS, Workload
from gpumon.analysis.types import Breakdown
from gpumon_agent import wire

if TYPE_CHECKING:
    import torch

    from gpumon.analysis.estimate.on_meta import Shapes, StorageMode

ITERATIONS = 2
RANKS_TRACED = (2, 13)
"""The first torch whose code for several ranks runs in a trace."""
WORKSPACES_RETURNED = (2, 15)
"""The first torch that frees cuBLAS's workspace after each product; earlier, each thread kept its own."""


class Untraceable(NotAModel):
    """The reason why this workload cannot be traced, in a sentence."""


class PhaseBytes(msgspec.Struct, frozen=True):
    """One phase of one iteration (0: load). Lines add up to `peak` and `end`, `rounding` included."""

    phase: str
    iteration: int
    peak: int
    end: int
    at_peak: Breakdown
    at_end: Breakdown
    reserved: int  # peak of reserved


class AllocatorRequests(msgspec.Struct):
    """Requests to the allocator in order: (bytes, stream), or the index of the request that is freed."""

    made: list[tuple[int, int] | int] = msgspec.field(default_factory=list)

    def fit(self, budget: int) -> bool:
        """Whether an allocator with `room` bytes can serve all of them."""
        allocator = SimulatedAllocator(budget)
        blocks: dict[int, SimulatedBlock] = {}
        try:
            for index, request in enumerate(self.made):
                if isinstance(request, int):
                    allocator.free(blocks.pop(request))
                else:
                    blocks[index] = allocator.malloc(*request)
        except OutOfMemory:
            return False
        return True


class _Storage(msgspec.Struct, eq=False):
    block: SimulatedBlock
    bytes: int
    line: str
    request: int
    born: int
    died: int = 1 << 62


class AllocationRecorder(msgspec.Struct):
    """Records allocations and frees of storages, and closes phases."""

    allocator: SimulatedAllocator
    hardware: Hardware = msgspec.field(default_factory=Hardware)
    keeps_workspaces: bool = False
    requests: AllocatorRequests = msgspec.field(default_factory=AllocatorRequests)
    phases: list[PhaseBytes] = msgspec.field(default_factory=list)
    iteration: int = 0
    thread: str = ""  # forward and backward run in different threads, each with its cuBLAS handle
    stream: Callable[[], int] = int  # always 0, unless several ranks are traced
    fresh: str = "temporaries"  # the line of new storages, until they are named
    _alive: dict[int, _Storage] = msgspec.field(default_factory=dict)
    _taken: set[_Storage] = msgspec.field(default_factory=set)
    held: bool = False  # phases do not close: LBFGS runs its closure within its step
    _dead: list[_Storage] = msgspec.field(default_factory=list)  # of this phase
    _workspaces: dict[str, _Storage] = msgspec.field(default_factory=dict)
    _clock: int = 0
    _highest: int = 0
    _moment: int = 0

    def born(self, key: int, size: int, gathered: bool = False) -> None:
        if size:
            self._alive[key] = self._take(size, "buckets" if gathered or self.stream() else self.fresh)

    def died(self, key: int) -> None:
        storage = self._alive.pop(key, None)
        if storage is not None:
            self._drop(storage)

    def during(self, name: str, args: Sequence[Any], outputs: Sequence[Any]) -> None:
        asks = uses_handle(name) if self.keeps_workspaces else uses_cublas(name, args)
        if asks and self.thread not in self._workspaces:
            workspace = self._take(self.hardware.cublas_workspace, "workspaces")
            if self.keeps_workspaces:
                self._workspaces[self.thread] = workspace
            else:
                self._drop(workspace)
        sizes = temporaries(name, args, outputs, self.hardware)
        for storage in reversed([self._take(size, "temporaries") for size in sizes if size]):
            self._drop(storage)

    def take(self, size: int, line: str) -> _Storage:
        """Allocates memory that is no tensor of the trace."""
        storage = self._take(size, line)
        self._taken.add(storage)
        return storage

    def drop(self, storage: _Storage) -> None:
        self._taken.remove(storage)
        self._drop(storage)

    def move(self, storage: _Storage, line: str) -> _Storage:
        storage.line = line
        return storage

    def name(self, keys: Iterable[int], line: str) -> None:
        """Assigns these storages to a line."""
        for key in keys:
            if key in self._alive:
                self._alive[key].line = line

    def name_rest(self, line: str) -> None:
        """Assigns live storages without a line of their own to a line."""
        for storage in self._alive.values():
            if storage.line == "temporaries":
                storage.line = line

    def close(self, phase: str) -> None:
        if self.held:
            return
        now = self.allocator.allocated
        peak, moment = (self._highest, self._moment) if self._highest > now else (now, self._clock)
        self.phases.append(
            PhaseBytes(
                phase,
                self.iteration,
                peak,
                now,
                self._lines(moment, peak),
                self._lines(self._clock, now),
                self.allocator.peaks.reserved,
            )
        )
        self._dead.clear()
        self._highest, self._moment = now, self._clock
        self.allocator.reset_peaks()

    def _lines(self, moment: int, allocated: int) -> Breakdown:
        lines: dict[str, int] = {}
        for storage in (*self._alive.values(), *self._taken, *self._dead, *self._workspaces.values()):
            if storage.born <= moment < storage.died:
                lines[storage.line] = lines.get(storage.line, 0) + storage.bytes
        return Breakdown(**lines, rounding=allocated - sum(lines.values()), allocated=allocated)

    def _take(self, size: int, line: str) -> _Storage:
        self._clock += 1
        made, stream = self.requests.made, self.stream()
        storage = _Storage(self.allocator.malloc(size, stream), size, line, len(made), self._clock)
        made.append((size, stream))
        if self.allocator.allocated > self._highest:
            self._highest, self._moment = self.allocator.allocated, self._clock
        return storage

    def _drop(self, storage: _Storage) -> None:
        self._clock += 1
        storage.died = self._clock
        self.allocator.free(storage.block)
        self.requests.made.append(storage.request)
        self._dead.append(storage)


def trace(
    factory: Callable[[], torch.nn.Module],
    batches: Callable[[int], Any],
    work: Workload,
    loss: Callable[[Any], torch.Tensor] | None = None,
    *,
    allocator: SimulatedAllocator | None = None,
    hardware: Hardware | None = None,
    keeps_workspaces: bool | None = None,
    built_on_device: bool = False,
    iterations: int = ITERATIONS,
    requests: AllocatorRequests | None = None,
    shapes: Shapes | None = None,
) -> list[PhaseBytes]:
    """Every phase of the load (iteration 0) and of `iterations` more.

    `factory()` returns the module; `batches(work.batch)`, called for each forward, returns its inputs: a tuple, a dict
    or a tensor. `loss` is called with the output; without it the output's `.loss` is used, or else the sum of its first
    tensor with a gradient. `keeps_workspaces`: None: as this torch does. `built_on_device`: the module's tensors are
    created on the device, not moved there once complete. `requests` is filled; `shapes` may come from an earlier trace.
    Raises Untraceable, simulator.OutOfMemory if the allocator has a capacity, and whatever the user's functions raise.
    """
    _refuse(work)
    import torch

    from gpumon.analysis.estimate import on_meta

    if keeps_workspaces is None:
        keeps_workspaces = on_meta.VERSION < WORKSPACES_RETURNED
    recorder = AllocationRecorder(
        allocator or SimulatedAllocator(), hardware or Hardware(), keeps_workspaces, requests or AllocatorRequests()
    )
    watch = on_meta.StorageMode(recorder.born, recorder.died, recorder.during, kept, shapes)
    with on_meta.as_cuda(), _ranks(work, watch) as recorder.stream:
        with watch if built_on_device else nullcontext():
            module = _prepared(_build(factory), work)
        try:
            with watch:
                _run(_Traced(module, batches, loss, work, recorder, watch), iterations)
        except NotImplementedError as reason:
            first_sentence = str(reason).partition(". ")[0].splitlines()[0]  # the rest lists every kernel
            raise Untraceable(f"an operator has no rule for shapes without data: {first_sentence}") from reason
        except AttributeError as reason:
            if "'torch' has no attribute 'meta'" not in str(reason):
                raise
            sentence = f"torch {torch.__version__} does not checkpoint without a device: a newer torch does"
            raise Untraceable(sentence) from reason
    return recorder.phases


def shares(work: Workload) -> bool:
    """Whether PyTorch's own code for ranks can run in a trace."""
    from gpumon.analysis.estimate.on_meta import VERSION

    return work.zero in (0, 3) and not work.inference and VERSION >= RANKS_TRACED


def _ranks(work: Workload, watch: StorageMode) -> AbstractContextManager[Callable[[], int]]:
    if work.world_size == 1:
        return nullcontext(int)
    from gpumon.analysis.estimate import ranks

    return ranks.among(work, lambda: watch.operator)


def _refuse(work: Workload) -> None:
    if work.world_size > 1 and not shares(work):
        raise Untraceable("a trace is of one rank, of DDP's, or of FSDP's (--zero 3)")
    if work.optimizer.name in EIGHT_BIT:
        raise Untraceable(f"{work.optimizer.name} cannot be traced without a GPU")
    if work.precision.master:
        raise Untraceable("master weights belong to no optimizer of PyTorch's: there is nothing to trace")


def _build(factory: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    """Builds on the meta device; or on the host, if the factory reads values, with tensors replaced afterwards."""
    import torch

    try:
        with torch.device("meta"):
            return factory()
    except (
        RuntimeError,
        TypeError,
    ):  # raised by reading meta values; the user's own errors are raised again
        module = factory()
    replaced: dict[int, torch.Tensor] = {}
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    if id(tensor) not in replaced:
                        empty = torch.empty_like(tensor, device="meta")
                        kept = isinstance(tensor, torch.nn.Parameter)
                        replaced[id(tensor)] = torch.nn.Parameter(empty, tensor.requires_grad) if kept else empty
                    tensors[name] = replaced[id(tensor)]
    return module


def _prepared(module: torch.nn.Module, work: Workload) -> torch.nn.Module:
    """Applies precision, mode and sharding before the module is moved to the device."""
    import torch

    if work.precision.weights == 2:
        kind = torch.bfloat16 if work.precision.name.startswith("bf16") else torch.float16
        module.to(kind)
    module.train(not work.inference)
    if work.checkpointing:
        names = "activation_checkpointing_enable", "gradient_checkpointing_enable"  # transformers' newer name first
        enable = next((getattr(module, name) for name in names if hasattr(module, name)), None)
        if enable is None:
            raise Untraceable("--checkpointing needs a module with gradient_checkpointing_enable()")
        enable()
    if work.world_size > 1 and work.zero:
        from gpumon.analysis.estimate import ranks

        return ranks.sharded(module, work)
    return module


class _Traced(msgspec.Struct):
    module: torch.nn.Module
    batches: Callable[[int], Any]
    loss: Callable[[Any], torch.Tensor] | None
    work: Workload
    recorder: AllocationRecorder
    watch: StorageMode

    def load(self) -> torch.optim.Optimizer | None:
        work = self.work
        for part in _children_first(self.module):
            for tensors, line in ((part._parameters, "weights"), (part._buffers, "buffers")):
                present = [_local(tensor) for tensor in tensors.values() if tensor is not None]
                self.recorder.name([self.watch.see(tensor) for tensor in present], line)
        if work.world_size > 1 and not work.zero:
            from gpumon.analysis.estimate import ranks

            self.module = ranks.in_buckets(self.module, work, self._filling)
        self.recorder.close(wire.LOAD)
        trained = any(parameter.requires_grad for parameter in self.module.parameters())
        if work.inference or work.optimizer.name in (NONE, lbfgs.NAME) or not trained:
            return None
        return _optimizer(self.module, work)

    def _filling(self, buckets: bool) -> None:
        self.recorder.fresh = "buckets" if buckets else "temporaries"

    def inputs(self) -> Any:
        import torch
        from torch.utils._pytree import tree_map

        def moved(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            there = (
                value if value.is_meta else torch.empty_like(value, device="meta", requires_grad=value.requires_grad)
            )
            self.recorder.name([self.watch.see(there)], "inputs")
            return there

        batch = self.batches(self.work.batch)
        return tree_map(moved, dict(batch) if isinstance(batch, Mapping) else batch)

    def forward(self, given: Any) -> Any:
        if isinstance(given, dict):
            return self.module(**given)
        return self.module(*given) if isinstance(given, (tuple, list)) else self.module(given)

    def loss_of(self, output: Any) -> torch.Tensor:
        import torch
        from torch.utils._pytree import tree_leaves

        if self.loss is not None:
            measured = self.loss(output)
            if not isinstance(measured, torch.Tensor):
                raise Untraceable(f"--loss returned a {type(measured).__name__}, and should return a tensor")
            return measured
        own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if own is not None:
            return own
        leaves = list(output.values()) if isinstance(output, Mapping) else tree_leaves(output)
        first = next((leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad), None)
        if first is None:
            raise Untraceable("the output has no loss, and no tensor that reaches a parameter: name a --loss")
        return first.sum()


def _run(run: _Traced, iterations: int) -> None:
    import torch

    recorder, work = run.recorder, run.work
    optimizer = run.load()
    parameters = list(run.module.parameters())
    lowered = {"bf16-autocast": torch.bfloat16, "fp16-autocast": torch.float16}.get(work.precision.name)
    newton = None

    def precision() -> torch.autocast:
        return torch.autocast("cuda", lowered or torch.float16, enabled=lowered is not None)

    def passes() -> list[Any]:
        """Forward and backward of every micro-batch. Returns what lives until the optimizer has stepped."""
        recorder.thread = "forward"
        for _ in range(min(2, work.accumulation)):
            given = output = loss = None
            given = run.inputs()
            recorder.close(wire.BETWEEN)
            if work.inference:
                with torch.no_grad(), precision():
                    output = run.forward(given)
                recorder.name_rest("activations")  # its output, keys and values included
                recorder.close(wire.FORWARD)
                continue
            with precision():
                output = run.forward(given)
                recorder.name_rest("activations")
                recorder.close(wire.FORWARD)
                loss = run.loss_of(output)
            recorder.name_rest("activations")
            recorder.thread = "backward"
            loss.backward()
            recorder.thread = "forward"
            if not work.bucket_views or work.world_size == 1:
                recorder.name([_key(p.grad) for p in parameters if p.grad is not None], "gradients")
            recorder.close(wire.BACKWARD)
        return [given, output, loss]

    def closure() -> None:
        run.module.zero_grad(set_to_none=work.set_to_none)
        passes()

    if work.optimizer.name == lbfgs.NAME and not work.inference:
        trained = [_local(parameter) for parameter in parameters if parameter.requires_grad]
        sizes = [parameter.numel() * parameter.element_size() for parameter in trained]
        newton = lbfgs.Lbfgs(recorder, work, sizes, closure)
    for recorder.iteration in range(1, iterations + 1):
        if newton is not None:
            newton.fill()
            closure()
            recorder.held = True
            newton.step()
            recorder.held = False
            recorder.close(wire.OPTIMIZER)
            continue
        alive = passes()
        if optimizer is not None:
            optimizer.step()
            recorder.name(_state(optimizer), "optimizer")
            recorder.close(wire.OPTIMIZER)
            optimizer.zero_grad(set_to_none=work.set_to_none)
        elif not work.inference:
            run.module.zero_grad(set_to_none=work.set_to_none)
        del alive


def without_forward(module: torch.nn.Module, all_sparse: bool) -> torch.nn.Module:
    """Wraps a module without a known forward: backward only creates each parameter's gradient."""
    import torch

    class Gradients(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, *parameters: torch.Tensor) -> torch.Tensor:
            ctx.parameters = parameters
            return torch.zeros((), device="cpu")  # uses no device memory

        @staticmethod
        def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(gradient(parameter) for parameter in ctx.parameters)

    def gradient(parameter: torch.Tensor) -> torch.Tensor:
        if not all_sparse and id(parameter) not in sparse:
            return torch.empty_like(parameter)
        rows = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)  # the number of rows looked up is unknown
        values = parameter.new_empty(0, *parameter.shape[1:])
        return torch.sparse_coo_tensor(rows, values, parameter.shape, check_invariants=False)

    class Alone(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self) -> torch.Tensor:
            trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
            return Gradients.apply(*trained) if trained else torch.zeros((), device="cpu", requires_grad=True)

    sparse = {id(part.weight) for part in module.modules() if getattr(part, "sparse", False)}
    return Alone()


def _children_first(module: torch.nn.Module) -> Iterable[torch.nn.Module]:
    """The order in which `Module.to` moves modules."""
    for child in module.children():
        yield from _children_first(child)
    yield module


def _optimizer(module: torch.nn.Module, work: Workload) -> torch.optim.Optimizer:
    import torch

    kind = getattr(torch.optim, OPTIMIZERS[work.optimizer.name], None)
    if kind is None:
        raise Untraceable(f"torch {torch.__version__} has no optimizer {work.optimizer.name}")
    settings = {name: _value(text) for name, text in work.optimizer.settings}
    if work.optimizer.name not in NO_FOREACH:  # otherwise torch chooses by the parameters' device
        settings["foreach"] = work.optimizer.form == "foreach"
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    try:
        optimizer: torch.optim.Optimizer = kind(trained, **settings)
    except ValueError as reason:  # a setting's value, or Muon, which accepts matrices only
        raise Untraceable(f"torch's {OPTIMIZERS[work.optimizer.name]} refuses: {reason}") from None
    if work.optimizer.form == "fused":  # torch refuses it for this device only in the constructor
        for group in optimizer.param_groups:
            group.update(fused=True, foreach=False)
    return optimizer


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text.capitalize() if text in ("true", "false", "none") else text)
    except (ValueError, SyntaxError):
        raise Untraceable(f"{text!r} is no value for a setting of an optimizer") from None


def _state(optimizer: torch.optim.Optimizer) -> list[int]:
    import torch

    tensors = [value for state in optimizer.state.values() for value in state.values()]
    return [_key(tensor) for tensor in tensors if isinstance(tensor, torch.Tensor)]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of it, if it has one."""
    return getattr(tensor, "_local_tensor", tensor)


def _key(tensor: torch.Tensor) -> int:
    tensor = _local(tensor)
    return int((tensor._values() if tensor.is_sparse else tensor).untyped_storage()._cdata)
