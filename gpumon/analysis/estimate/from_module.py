"""A torch.nn.Module as the subject of an estimate: built on the meta device, so that it has shapes and no bytes.

Cost. Building the module without its weights, once: what its constructors cost, and no memory. Each trace changes its
module, so it has a copy; a module that copying could take apart is built anew for each.

Known limitations. A factory that reads values of its tensors, or loads a checkpoint, fails on the meta device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from types import FunctionType
from typing import TYPE_CHECKING, Any

from gpumon.analysis.estimate.memory import PhaseBytes
from gpumon.analysis.estimate.model import Model, Tensor
from gpumon.analysis.estimate.plan import Played, tensors_only
from gpumon.analysis.estimate.simulator import Allocator, OutOfMemory
from gpumon.analysis.estimate.tape import HALF
from gpumon.analysis.estimate.traced import shares, trace
from gpumon.analysis.estimate.workload import EIGHT_BIT, PRECISIONS, Optimizer, Workload
from gpumon.analysis.lines import Lines
from gpumon_agent import wire

if TYPE_CHECKING:
    from torch import nn

    from gpumon.analysis.estimate.plan import Subject


def on_meta(factory: Callable[[], Any]) -> Any:
    """What the factory returns when every tensor it makes has no storage."""
    import torch

    with torch.device("meta"):
        return factory()


def is_module(made: object) -> bool:
    from torch import nn

    return isinstance(made, nn.Module)


def describe(module: nn.Module) -> Model:
    """Its tensors in the order in which a loop over `parameters()` meets them; tied ones point to the first name."""
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
    return Model(type(module).__name__, tuple(parameters), buffers)


def copied(module: nn.Module) -> nn.Module | None:
    """The same once more. None where a copy might share something with it: what a function that was put into it has
    from around it, what is known by weak reference, tensors that share a storage; or where copying fails."""
    if any(_may_lead_back(part) for part in module.modules()):
        return None
    tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    if len({tensor.untyped_storage()._cdata for tensor in tensors.values()}) < len(tensors):
        return None
    try:
        return deepcopy(module)
    except Exception:  # noqa: BLE001 - anything their class may raise: it is built anew
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


@dataclass(frozen=True, slots=True)
class FromModule:
    """The module and the functions that were named with it."""

    module: nn.Module
    factory: Callable[[], nn.Module]
    batches: Callable[[int], Any] | None = None
    loss: Callable[[Any], Any] | None = None

    @property
    def name(self) -> str:
        return type(self.module).__name__

    @property
    def longest(self) -> int | None:
        return None

    def instance(self) -> nn.Module:
        """One for a trace, which may change it."""
        copy = copied(self.module)
        return self.factory() if copy is None else copy

    def play(self, work: Workload, room: int | None) -> Played:
        """Traced where `batches` tells what the module is given; its tensors alone where not.

        Raises traced.Untraceable, and whatever the user's functions raise.
        """
        model = describe(self.module)
        if work.precision.weights == HALF:
            model = model.in_width(HALF)
        if self.batches is None:
            return Played(model, tensors_only(model, work, None, room), None)
        phases, as_rank = self.traced(model, work, room)
        highest = max(phase.reserved for phase in phases)
        if room is not None and highest > room:
            raise OutOfMemory(highest, room, highest, highest)
        layers = hasattr(self.module, "gradient_checkpointing_enable")
        return Played(model, phases, "traced", layers=layers, gathered="traced" if as_rank else "assumed")

    def traced(
        self, model: Model, work: Workload, room: int | None = None, **how: Any
    ) -> tuple[tuple[PhaseBytes, ...], bool]:
        """Its iterations by the trace of the nearest workload that can be traced; whether it was traced as a rank."""
        plain = traceable(work)
        build = self.factory if how.get("built_on_device") else self.instance  # a copy is no building

        def run(plain: Workload) -> tuple[PhaseBytes, ...]:
            allocator = Allocator(room if plain == work else None)
            phases = trace(build, self.batches, plain, self.loss, allocator=allocator, **how)  # type: ignore[arg-type]
            return tuple(phases) if plain == work else shared(phases, model, plain, work)

        how["hardware"] = work.hardware
        if plain.world_size == 1:
            return run(plain), False
        try:
            return run(plain), True
        except OutOfMemory:
            raise
        except Exception:  # noqa: BLE001 - DDP or FSDP cannot wrap it so; what the user's functions raise comes again
            return run(replace(plain, world_size=1, zero=0, bucket_views=False, flat=False)), False

    def variants(self) -> Iterator[tuple[str, str, Subject]]:
        yield from ()


def traceable(work: Workload) -> Workload:
    """The nearest workload that can be traced: an optimizer of torch's own, weights that the step updates, and ranks
    where PyTorch's code for them runs in a trace."""
    optimizer, precision = work.optimizer, work.precision
    if optimizer.eight_bit:
        optimizer = Optimizer(EIGHT_BIT[optimizer.name].lower(), "fused")
    if precision.master:
        precision = PRECISIONS[precision.name.removesuffix("-master")]
    plain = replace(work, optimizer=optimizer, precision=precision)
    return plain if work.world_size == 1 or shares(work) else replace(plain, world_size=1, zero=0, bucket_views=False)


def shared(traced: Sequence[PhaseBytes], model: Model, plain: Workload, work: Workload) -> tuple[PhaseBytes, ...]:
    """The same phases with the tensors that ranks share, or another optimizer keeps, in place of those traced.

    Weights, gradients and states are what `estimate.replay` has for them, with and without sharing; what was traced of
    everything else stays. With ZeRO 3, what stands in no numbered layer is taken as gathered from its forward to its
    backward, and with it the buffer that the newest layer was gathered into, which lives until the next one's.
    """
    gathered = sum(model.units()) if work.zero == 3 and plain.zero != 3 else 0
    before = {(p.iteration, p.phase): p for p in tensors_only(model, plain, None, None)}
    after = {(p.iteration, p.phase): p for p in tensors_only(model, work, None, None)}
    phases = []
    for phase in traced:
        at = (phase.iteration, phase.phase if phase.phase != wire.FORWARD else wire.BETWEEN)
        at_peak = _exchanged(phase.at_peak, before[at].at_peak, after[at].at_peak)
        at_end = _exchanged(phase.at_end, before[at].at_end, after[at].at_end)
        if gathered and phase.phase in (wire.FORWARD, wire.BACKWARD):
            at_peak = _with_buckets(at_peak, gathered)
            at_end = _with_buckets(at_end, gathered if phase.phase == wire.FORWARD else 0)
        peak, end = at_peak.allocated or 0, at_end.allocated or 0
        reserved = max(peak, phase.reserved - phase.peak + peak)
        phases.append(replace(phase, peak=peak, end=end, at_peak=at_peak, at_end=at_end, reserved=reserved))
    return tuple(phases)


def _with_buckets(lines: Lines, nbytes: int) -> Lines:
    return replace(lines, buckets=(lines.buckets or 0) + nbytes, allocated=(lines.allocated or 0) + nbytes)


def _exchanged(lines: Lines, before: Lines, after: Lines) -> Lines:
    """`after` in place of `before`, in proportion where only a part stood (gradients in the middle of backward)."""
    changed = {}
    for name in ("weights", "gradients", "optimizer", "buckets"):
        mine, theirs, others = (getattr(each, name) or 0 for each in (lines, before, after))
        changed[name] = round(mine * others / theirs) if theirs else mine + others
    moved = sum(changed.values()) - sum(getattr(lines, name) or 0 for name in changed)
    return replace(lines, **changed, allocated=(lines.allocated or 0) + moved)
