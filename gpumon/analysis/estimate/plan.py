"""What a run will need: the peak and its phase, bytes by line, what fits on a device, and what each remedy saves.

Model. A `Subject` runs any workload on the meta device (estimate.traced). The memory needed is the peak of reserved
bytes plus the context. Whether a workload fits is simulated: its requests are replayed on an allocator with the
device's capacity, which releases cached segments before it fails, as PyTorch's does.

Source. estimate.traced; the usual rule of thumb: 4 bytes × 4 copies (weights, gradients, two moments) per parameter,
activations, and 2 GB for the rest.
Cost. A trace for the estimate, one for the floor, three or four for each limit, about one for each remedy; a subject
caches its traces. Each takes about a third of a second for a transformer of 24 layers.

Known limitations. The context is assumed: it depends on driver and libraries as much as on the device. Each remedy is
computed alone, not combined with others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import msgspec
from msgspec.structs import replace

from gpumon.analysis.estimate import lbfgs
from gpumon.analysis.estimate.kernels import Hardware
from gpumon.analysis.estimate.model import ModelTensors
from gpumon.analysis.estimate.traced import AllocatorRequests, PhaseBytes
from gpumon.analysis.estimate.workload import EIGHT_BIT, FUSED, NONE, PRECISIONS, OptimizerChoice, Workload
from gpumon_agent import wire

LARGEST = 1 << 20
"""No batch and no sequence is searched beyond."""


class Subject(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def longest(self) -> int | None:
        """The most tokens the model accepts; None if it does not say, or has no tokens."""

    def play(self, work: Workload) -> Played:
        """The load and two iterations. Raises simulator.OutOfMemory beyond the capacity of any device."""

    def variants(self) -> Iterator[tuple[str, str, Subject]]:
        """(code, title, subject) of changes to the model itself."""


class Played(msgspec.Struct, frozen=True):
    """The result of a run. `forward`: whether its forward is known. `requests`: None if parts are computed."""

    model: ModelTensors
    phases: tuple[PhaseBytes, ...]
    requests: AllocatorRequests | None
    forward: bool
    has_tokens: bool = False  # the user chooses the sequence length
    tables: bool = False  # it has embeddings that are used for lookup only
    layers: bool = True  # it can be checkpointed layer by layer
    kv_cache: int = 0
    gathered: str = "assumed"  # source of what FSDP gathers

    @property
    def reserved(self) -> int:
        return max(phase.reserved for phase in self.phases)

    def fits(self, budget: int) -> bool:
        """Whether the two iterations run within `room` bytes."""
        if self.reserved <= budget:
            return True
        if self.requests is None or max(phase.peak for phase in self.phases) > budget:
            return False
        return self.requests.fit(budget)


class TargetDevice(msgspec.Struct, frozen=True):
    """A device by name: total bytes, and a process's bytes beside its allocator."""

    name: str
    total: int
    context: int
    hardware: Hardware = msgspec.field(default_factory=Hardware)

    @property
    def budget(self) -> int:
        return self.total - self.context


class Expected(msgspec.Struct, frozen=True):
    """The estimate of one workload. `peak` is of allocated bytes, over all iterations run."""

    played: Played
    work: Workload
    sources: tuple[tuple[str, str], ...]

    @property
    def model(self) -> ModelTensors:
        return self.played.model

    @property
    def phases(self) -> tuple[PhaseBytes, ...]:
        return self.played.phases

    @property
    def highest(self) -> PhaseBytes:
        return max(self.phases, key=lambda phase: phase.peak)

    @property
    def peak(self) -> int:
        return self.highest.peak

    @property
    def reserved(self) -> int:
        return self.played.reserved

    @property
    def steady(self) -> tuple[PhaseBytes, ...]:
        """The load, and the phases of the last iteration, which every later one resembles."""
        last = self.phases[-1].iteration
        return tuple(phase for phase in self.phases if phase.iteration in (0, last) and phase.phase != wire.BETWEEN)

    def phase(self, name: str, iteration: int | None = None) -> PhaseBytes | None:
        wanted = self.phases[-1].iteration if iteration is None and name != wire.LOAD else iteration or 0
        return next((p for p in self.phases if p.phase == name and p.iteration == wanted), None)


class PlanChange(msgspec.Struct, frozen=True):
    """One change, and the peak with it. `saves` is negative if it costs memory."""

    code: str
    title: str
    peak: int
    saves: int
    fits: bool | None  # None without a device


class Thumb(msgspec.Struct, frozen=True):
    """The rule of thumb: its sum, and its relative error to the computed need (0.1: a tenth too much)."""

    total: int
    parameters: int
    activations: int
    rest: int
    off: float


def expect(subject: Subject, work: Workload) -> Expected:
    played = subject.play(work)
    return Expected(played, work, _sources(work, played))


def _sources(work: Workload, played: Played) -> tuple[tuple[str, str], ...]:
    found = dict.fromkeys(("weights", "buffers", "gradients", "inputs", "optimizer"), "exact")
    if work.optimizer.name in EIGHT_BIT:
        found["optimizer"] = "closed form"
    found["buckets"] = played.gathered if work.zero == 3 else "exact"
    found["temporaries"] = found["workspaces"] = "traced"
    if work.optimizer.name == lbfgs.NAME and lbfgs.searches(dict(work.optimizer.settings)):
        found["temporaries"] = "at most"
    if played.forward:
        found["activations"] = "traced"
    found["rounding"] = found["reserved"] = "simulated"
    found["context"] = "assumed"
    return tuple(found.items())


def fits(subject: Subject, work: Workload, device: TargetDevice) -> bool:
    """Whether two iterations run on the device."""
    return subject.play(work).fits(device.budget)


def largest_batch(subject: Subject, work: Workload, device: TargetDevice) -> int:
    """The most samples of one forward that fit; 0: not even one."""
    return _largest(subject, device, work.batch, LARGEST, lambda batch: replace(work, batch=batch))


def longest_sequence(subject: Subject, work: Workload, device: TargetDevice) -> int:
    """The most tokens that fit and that the model accepts; 0: not even one."""
    most = subject.longest or LARGEST
    return _largest(subject, device, min(work.sequence, most), most, lambda length: replace(work, sequence=length))


def _largest(subject: Subject, device: TargetDevice, start: int, most: int, of: Callable[[int], Workload]) -> int:
    """The largest size that fits, if every smaller one does.

    Each phase's peak is nearly linear in the size, so two runs give a starting point; the result itself has been run.
    """

    def good(size: int) -> bool:
        return fits(subject, of(size), device)

    high = max(1, min(_guess(subject, device, start, of), most))
    low, step = 0, max(1, high // 16)
    while good(high):
        low = high
        if high == most:
            return most
        high, step = min(high + step, most), 2 * step
    while high - low > max(1, low // 256):  # within 0.4 %
        middle = max(low + 1, high - step) if not low else (low + high) // 2
        step *= 2
        if good(middle):
            low = middle
        else:
            high = middle
    return low


def _guess(subject: Subject, device: TargetDevice, start: int, of: Callable[[int], Workload]) -> int:
    """The size at which the first phase fills the device, by a line through two sizes."""
    sizes = (start, 2 * start) if start < 4 else (start // 2, start)
    one, two = (subject.play(of(size)).phases for size in sizes)
    found = []
    for first, second in zip(one, two, strict=True):
        each = (second.peak - first.peak) / (sizes[1] - sizes[0])
        if each > 0:
            found.append(sizes[0] + (device.budget - first.peak) / each)
    return int(min(found, default=start))


def rule_of_thumb(expected: Expected) -> Thumb | None:
    """None without a known forward: the rule needs the activations."""
    if expected.work.inference or not expected.played.forward:
        return None
    activations = max((phase.at_peak.activations or 0) for phase in expected.phases)
    parameters, rest = 16 * expected.model.count, 2 * 10**9
    total = parameters + activations + rest
    return Thumb(total, parameters, activations, rest, total / expected.reserved - 1)


def remedies(subject: Subject, expected: Expected, device: TargetDevice | None = None) -> list[PlanChange]:
    """Every change not made yet, the one that saves most first."""
    found = []
    for code, title, other, work in _changes(subject, expected):
        changed = expect(other, work)
        possible = None if device is None else fits(other, work, device)
        found.append(PlanChange(code, title, changed.peak, expected.peak - changed.peak, possible))
    return sorted(found, key=lambda remedy: -remedy.saves)


def _changes(subject: Subject, expected: Expected) -> Iterator[tuple[str, str, Subject, Workload]]:
    work, played = expected.work, expected.played
    forward = played.forward
    if not work.inference:
        if forward and played.layers and not work.checkpointing:
            yield "checkpointing", "activation checkpointing of every layer", subject, replace(work, checkpointing=True)
        if forward and work.precision.name == "fp32":
            yield "autocast", "bf16 autocast", subject, replace(work, precision=PRECISIONS["bf16-autocast"])
        if work.optimizer.form == "foreach":
            form = "fused" if work.optimizer.name in FUSED else "loop"
            better = replace(work.optimizer, form=form)
            yield form, f"{work.optimizer.name}:{form} instead of foreach", subject, replace(work, optimizer=better)
        if work.optimizer.name in ("adam", "adamw") and not work.precision.master:
            small = OptimizerChoice.parse(f"{work.optimizer.name}8bit")
            yield "8-bit", f"{small.name} (bitsandbytes)", subject, replace(work, optimizer=small)
        if forward and work.batch > 1:
            title = f"accumulation, {work.batch} × batch 1"
            yield "accumulation", title, subject, replace(work, batch=1, accumulation=work.batch * work.accumulation)
        if work.world_size > 1 and not work.zero and not work.bucket_views:
            yield "bucket-views", "gradient_as_bucket_view=True", subject, replace(work, bucket_views=True)
        if not work.set_to_none:
            yield "set-to-none", "zero_grad(set_to_none=True)", subject, replace(work, set_to_none=True)
        ranks = work.world_size if work.world_size > 1 else 8
        for stage in range(work.zero + 1, 4) if work.optimizer.name not in (NONE, lbfgs.NAME) else ():
            name = f"ZeRO {stage} over {ranks} ranks" if stage < 3 else f"FSDP (ZeRO 3) over {ranks} ranks"
            yield f"zero-{stage}", name, subject, replace(work, world_size=ranks, zero=stage)
    elif work.precision.name == "fp32":
        yield "bf16", "weights in bf16", subject, replace(work, precision=PRECISIONS["bf16"])
    if played.tables and not work.embedding_on_cpu:
        yield "embedding-on-cpu", "the embedding on the CPU", subject, replace(work, embedding_on_cpu=True)
    for code, title, other in subject.variants():
        yield code, title, other, work
