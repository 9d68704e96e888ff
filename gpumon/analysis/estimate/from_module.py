"""Estimates a torch.nn.Module: it is built on the meta device, with shapes and no bytes.

Cost. Building the module once, without memory for its weights. Each trace changes its module, so it gets a copy; a
module that cannot be copied safely is rebuilt for each. No workload is traced twice.

Known limitations. A factory that reads values of its tensors, or loads a checkpoint, fails on the meta device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from types import FunctionType
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from gpumon.analysis.estimate.model import ModelTensors, Tensor
from gpumon.analysis.estimate.optimizers import eight_bit_states
from gpumon.analysis.estimate.plan import Played
from gpumon.analysis.estimate.simulator import OutOfMemory
from gpumon.analysis.estimate.traced import (
    ITERATIONS,
    AllocatorRequests,
    PhaseBytes,
    Untraceable,
    shares,
    trace,
    without_forward,
)
from gpumon.analysis.estimate.workload import EIGHT_BIT, HALF, NONE, PRECISIONS, OptimizerChoice, Workload
from gpumon.analysis.types import Breakdown
from gpumon_agent import wire

if TYPE_CHECKING:
    from torch import nn

    from gpumon.analysis.estimate.on_meta import Shapes
    from gpumon.analysis.estimate.plan import Subject


def on_meta(factory: Callable[[], Any]) -> Any:
    """The factory's result, built from tensors without storage."""
    import torch

    with torch.device("meta"):
        return factory()


def is_module(made: object) -> bool:
    from torch import nn

    return isinstance(made, nn.Module)


def describe(module: nn.Module) -> ModelTensors:
    """Its tensors in the order of `parameters()`; tied ones point to the first name."""
    from torch import nn

    sparse = {
        id(part.weight)
        for part in module.modules()
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse
    }
    first: dict[int, str] = {}
    parameters = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        tied = first.setdefault(id(parameter), name)
        parameters.append(
            Tensor(
                name,
                tuple(parameter.shape),
                parameter.element_size(),
                parameter.requires_grad,
                None if tied == name else tied,
                id(parameter) in sparse,
            )
        )
    buffers = tuple(
        Tensor(name, tuple(buffer.shape), buffer.element_size(), trainable=False)
        for name, buffer in module.named_buffers()
    )
    return ModelTensors(type(module).__name__, tuple(parameters), buffers)


def copied(module: nn.Module) -> nn.Module | None:
    """A copy of the module. None if it might share something with the original (closures in its attributes, weak
    references, tensors that share a storage), or if copying fails."""
    if any(_may_lead_back(part) for part in module.modules()):
        return None
    tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    if len({tensor.untyped_storage()._cdata for tensor in tensors.values()}) < len(tensors):
        return None
    try:
        return deepcopy(module)
    except Exception:  # noqa: BLE001 - anything the user's class may raise: the module is rebuilt
        return None


def _may_lead_back(part: nn.Module) -> bool:
    values = [
        each for value in vars(part).values() for each in (value.values() if isinstance(value, dict) else [value])
    ]
    values = [getattr(value, "func", value) for value in values]  # of a functools.partial
    return any(
        isinstance(value, weakref.ref) or (isinstance(value, FunctionType) and value.__closure__ is not None)
        for value in values
    )


class _Trace(msgspec.Struct, frozen=True):
    phases: tuple[PhaseBytes, ...]
    requests: AllocatorRequests
    as_rank: bool  # False: one of several ranks was requested, but the module was traced alone


def _no_shapes() -> Shapes:
    from gpumon.analysis.estimate.on_meta import Shapes

    return Shapes()


class FromModule(msgspec.Struct):
    """The module and the functions given with it. `began` is called with each workload that is traced."""

    module: nn.Module
    factory: Callable[[], nn.Module]
    batches: Callable[[int], Any] | None = None
    loss: Callable[[Any], Any] | None = None
    began: Callable[[Workload], object] = lambda _: None
    shapes: Shapes = msgspec.field(default_factory=_no_shapes)
    _traces: dict[Workload, _Trace] = msgspec.field(default_factory=dict)

    @property
    def name(self) -> str:
        return type(self.module).__name__

    @property
    def longest(self) -> int | None:
        return None

    @property
    def model(self) -> ModelTensors:
        return describe(self.module)

    @property
    def has_forward(self) -> bool:
        return self.batches is not None

    def instance(self, work: Workload) -> nn.Module:
        """A module for one trace, which may change it."""
        copy = copied(self.module)
        return self.factory() if copy is None else copy

    def given(self, work: Workload) -> Any:
        if work.embedding_on_cpu or work.kv_cache:
            raise Untraceable("an embedding on the CPU and a cache of keys are the model's own business: build it so")
        return () if self.batches is None else self.batches(work.batch)

    def play(self, work: Workload) -> Played:
        """Traces the workload. Without `batches` no forward is known, only gradients and the optimizer step.

        Raises traced.Untraceable, and whatever the user's functions raise.
        """
        model, plain = self.model, traceable(work)
        if work.precision.weights == HALF:
            model = model.in_width(HALF)
        forward = self.has_forward
        if not forward:  # these make no difference either
            work = replace(work, batch=1, sequence=1, checkpointing=False)
            plain = alone(replace(plain, batch=1, sequence=1, checkpointing=False))
        done = self.traced(plain)
        phases = done.phases
        if not done.as_rank:
            plain = alone(plain)
        if plain != work:
            phases = shared(phases, model, plain, work)
        if not forward:
            phases = tuple(phase for phase in phases if phase.phase != wire.FORWARD)
        return Played(
            model,
            phases,
            done.requests if plain == work else None,
            forward,
            layers=hasattr(self.module, "gradient_checkpointing_enable"),
            gathered="traced" if plain.world_size > 1 else "assumed",
        )

    def traced(self, work: Workload, **how: Any) -> _Trace:
        """Traces it as a rank, if PyTorch's code for ranks can wrap it; otherwise alone."""
        if work not in self._traces:
            self.began(work)
            try:
                self._traces[work] = self._traced(work, how)
            except OutOfMemory:
                raise
            except Exception:  # DDP or FSDP cannot wrap it; the user's own errors are raised again
                if work.world_size == 1:
                    raise
                self._traces[work] = replace(self.traced(alone(work), **how), as_rank=False)
        return self._traces[work]

    def _traced(self, work: Workload, how: dict[str, Any]) -> _Trace:
        requests = AllocatorRequests()

        def build() -> nn.Module:
            made = self.factory() if how.get("built_on_device") else self.instance(work)  # a copy is not built
            if self.has_forward:
                return made
            return without_forward(made, all_sparse=work.optimizer.name == "sparseadam")

        phases = trace(
            build,
            lambda _: self.given(work),
            work,
            self.loss,
            hardware=work.hardware,
            requests=requests,
            shapes=self.shapes,
            **{"iterations": 1 if work.inference else ITERATIONS, **how},
        )
        return _Trace(tuple(phases), requests, as_rank=True)

    def variants(self) -> Iterator[tuple[str, str, Subject]]:
        yield from ()


class FromTensors(FromModule, kw_only=True):
    """From names and shapes alone."""

    tensors: ModelTensors

    @classmethod
    def of(cls, model: ModelTensors) -> FromTensors:
        def factory() -> nn.Module:
            import torch
            from torch import nn

            module = nn.Module()
            for number, tensor in enumerate(model.own):
                width = torch.float32 if tensor.width == 4 else torch.float16
                parameter = nn.Parameter(torch.empty(tensor.shape, dtype=width), tensor.trainable)
                part = nn.Module()
                part.register_parameter("weight", parameter)
                part.sparse = tensor.sparse
                module.add_module(str(number), part)
            for number, tensor in enumerate(model.buffers):
                module.register_buffer(f"buffer{number}", torch.empty(tensor.bytes, dtype=torch.uint8))
            return module

        return cls(on_meta(factory), factory, tensors=model)

    @property
    def name(self) -> str:
        return self.tensors.name

    @property
    def model(self) -> ModelTensors:
        return self.tensors


def traceable(work: Workload) -> Workload:
    """The nearest workload that can be traced: one of torch's optimizers, weights that the step updates, and ranks if
    PyTorch's code for them runs in a trace."""
    optimizer, precision = work.optimizer, work.precision
    if optimizer.eight_bit:
        optimizer = OptimizerChoice(EIGHT_BIT[optimizer.name].lower(), "fused")
    if precision.master:
        precision = PRECISIONS[precision.name.removesuffix("-master")]
    plain = replace(work, optimizer=optimizer, precision=precision)
    return plain if work.world_size == 1 or shares(work) else alone(plain)


def alone(work: Workload) -> Workload:
    return replace(work, world_size=1, zero=0, bucket_views=False, flat=False)


def shared(
    traced: Sequence[PhaseBytes], model: ModelTensors, plain: Workload, work: Workload
) -> tuple[PhaseBytes, ...]:
    """The traced phases with tensors replaced that ranks shard, or that another optimizer keeps.

    Weights, gradients and states are computed with and without sharding; the rest of the trace stays. With ZeRO 3,
    weights outside numbered layers count as gathered from their forward to their backward, together with the buffer of
    the newest gathered layer, which lives until the next one's.
    """
    gathered = sum(model.units()) if work.zero == 3 and plain.zero != 3 else 0
    before = {name: max(getattr(phase.at_end, name) or 0 for phase in traced) for name in _SHARED_OUT}
    after = _lasting(model, plain, work, before)
    phases = []
    for phase in traced:
        at_peak = _exchanged(phase, phase.at_peak, before, after)
        at_end = _exchanged(phase, phase.at_end, before, after)
        if gathered and phase.phase in (wire.FORWARD, wire.BACKWARD):
            at_peak = _with_buckets(at_peak, gathered)
            at_end = _with_buckets(at_end, gathered if phase.phase == wire.FORWARD else 0)
        peak, end = at_peak.allocated or 0, at_end.allocated or 0
        reserved = max(peak, phase.reserved - phase.peak + peak)
        phases.append(replace(phase, peak=peak, end=end, at_peak=at_peak, at_end=at_end, reserved=reserved))
    return tuple(phases)


_SHARED_OUT = tuple(line for line in wire.LASTING if line not in ("buffers", "workspaces", "other_models"))
"""The lasting lines that sharding over ranks changes."""


def _lasting(model: ModelTensors, plain: Workload, work: Workload, before: dict[str, int]) -> dict[str, int]:
    """What one rank keeps of each line when all of it exists. `before`: traced without sharding."""
    state = round(before["optimizer"] * work.precision.state / plain.precision.state)
    if work.optimizer.eight_bit:
        state = sum(sum(eight_bit_states(tensor.count)) for tensor in model.trained)
    steps = not work.inference and work.optimizer.name != NONE
    master = work.precision.master * model.trained_count if steps else 0
    shares = {line: work.world_size if work.zero >= stage else 1 for line, stage in _STAGES.items()}
    gradients = before["gradients"]
    reduced = work.world_size > 1 and not work.zero and not work.inference  # in DDP's buckets
    return {
        "weights": -(-before["weights"] // shares["weights"]),
        "gradients": 0 if reduced and work.bucket_views else -(-gradients // shares["gradients"]),
        "optimizer": -(-(state + master) // shares["optimizer"]),
        "buckets": gradients if reduced else before["buckets"],
    }


_STAGES = {"optimizer": 1, "gradients": 2, "weights": 3}
"""The ZeRO stage from which a rank keeps only its shard."""


def _with_buckets(lines: Breakdown, nbytes: int) -> Breakdown:
    return replace(lines, buckets=(lines.buckets or 0) + nbytes, allocated=(lines.allocated or 0) + nbytes)


def _exchanged(phase: PhaseBytes, lines: Breakdown, before: dict[str, int], after: dict[str, int]) -> Breakdown:
    """Replaces `before` by `after`, in proportion if only a part existed (gradients in the middle of backward)."""
    changed = {}
    for name in _SHARED_OUT:
        mine = getattr(lines, name) or 0
        added = 0 if phase.phase == wire.LOAD else after[name]
        changed[name] = round(mine * after[name] / before[name]) if before[name] else mine + added
    moved = sum(changed.values()) - sum(getattr(lines, name) or 0 for name in changed)
    return replace(lines, **changed, allocated=(lines.allocated or 0) + moved)
