"""Plays a model's load and its first two iterations against the allocator simulator.

Model. Load: every parameter and buffer. Then twice: inputs, forward and backward of a `Tape` (estimate.autograd),
optimizer. The first iteration makes the optimizer's state; the second is like all that follow. Outputs live until the
optimizer has stepped, gradients until then too unless zero_grad keeps them. LBFGS runs both again within
its step: what that needs is the optimizer phase's, and the second iteration is one whose history is full.

DDP's buckets (torch/csrc/distributed/c10d/reducer.cpp) hold one copy of all gradients, which views share. ZeRO
(arXiv 1910.02054) leaves 1/N of the states (stage 1), gradients (2) and weights (3) on a rank; a layer whose weights
are shards is gathered while it runs, the next one with it, and its gradients are whole until it is done. FSDP2 shards
each parameter; FSDP1 a layer's in one piece (torch/distributed/fsdp/_flat_param.py), leaves no buffer behind, and
gathers the last layer as backward begins.

Cost. About 10 µs an allocation: 30 ms for a transformer of 24 layers.

Known limitations. One stream: no memory waits for another. What belongs to no layer (embedding, head) of a sharded
model is taken to be whole while forward and backward run. Communication buffers of DeepSpeed are not modelled.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from gpumon.analysis.estimate import stepping
from gpumon.analysis.estimate.autograd import Pass
from gpumon.analysis.estimate.lbfgs import NAME as LBFGS
from gpumon.analysis.estimate.lbfgs import Lbfgs
from gpumon.analysis.estimate.memory import Memory, PhaseBytes, Storage
from gpumon.analysis.estimate.model import Model, Tensor
from gpumon.analysis.estimate.tape import Tape
from gpumon.analysis.estimate.workload import NONE, Workload
from gpumon_agent import wire


@dataclass
class Replay:
    """One run of a model, with a tape where its forward is known."""

    model: Model
    workload: Workload
    tape: Tape | None = None
    memory: Memory = field(default_factory=Memory)
    _gradients: dict[str, Storage] = field(default_factory=dict)  # complete ones
    _whole: list[Tensor] = field(default_factory=list)  # gradients of the running layer, not yet reduced to shards
    _gathered: list[Storage] = field(default_factory=list)
    _copied: list[Storage] = field(default_factory=list)  # what the last layer was gathered in, until the next is
    _last: int | None = None  # the newest layer of this forward
    _in_forward: bool = False
    _prepared: bool = False
    _lbfgs: Lbfgs | None = None
    _stepping: bool = False

    def __post_init__(self) -> None:
        work = self.workload
        self._absent = frozenset(self.tape.tables if self.tape and work.embedding_on_cpu else ())
        self._parameters = [tensor for tensor in self.model.own if tensor.name not in self._absent]
        self._trained = [tensor for tensor in self._parameters if tensor.trainable]
        self._shards_of = {part: work.shards if work.zero >= stage else 1 for part, stage in _STAGES.items()}
        weights = self._weights_by_layer()
        self._layer_bytes = {layer: sum(each.values()) for layer, each in weights.items()}
        self._flat = work.flat and self._shards_of["weights"] > 1
        self._unit_of = {name: layer for layer, each in weights.items() for name in each} if self._flat else {}

    def run(self) -> list[PhaseBytes]:
        """Load and two iterations (one without training). Raises simulator.OutOfMemory if the allocator has a limit."""
        for size in self._sizes():
            self.memory.take(_share(size, self._shards_of["weights"]), "weights")
        for tensor in self.model.buffers:
            self.memory.take(tensor.bytes, "buffers")
        self.memory.close(wire.LOAD)
        if self._has_buckets:
            self.memory.take(sum(self._gradient_bytes(tensor) for tensor in self._trained), "buckets")
        for iteration in (1,) if self.workload.inference else (1, 2):
            self.memory.iteration = iteration
            self._iterate()
        return self.memory.phases

    def _sizes(self) -> list[int]:
        """Of what is sharded in one piece."""
        if not self._flat:
            return [tensor.bytes for tensor in self._parameters]
        units: dict[int | None, int] = {}
        for tensor in self._parameters:
            unit = self._unit_of.get(tensor.name)
            units[unit] = units.get(unit, 0) + tensor.bytes
        return list(units.values())

    # ----------------------------------------------------------------------------------------------------- iteration

    def _iterate(self) -> None:
        memory, work = self.memory, self.workload
        if self._lbfgs is not None:
            self._lbfgs.fill()
        inputs = [memory.take(value.bytes, "inputs") for value in self.tape.inputs] if self.tape else []
        memory.close(wire.BETWEEN)
        outputs = self._closure() if work.optimizer.name == LBFGS and not work.inference else self._passes()
        if not work.inference:
            self._step()
            memory.close(wire.OPTIMIZER)
            if work.optimizer.name != LBFGS:
                self._zero_grad()
        self._drop_all([*outputs, *inputs])

    def _passes(self) -> list[Storage]:
        outputs: list[Storage] = []
        for _ in range(min(2, self.workload.accumulation)):  # the third is like the second
            outputs = self._pass(outputs)
        return outputs

    def _closure(self) -> list[Storage]:
        """What LBFGS calls: it begins with zero_grad, and leaves no outputs."""
        self._zero_grad()
        self._drop_all(self._passes())
        return []

    def _zero_grad(self) -> None:
        if self.workload.set_to_none:
            self._drop_all(list(self._gradients.values()))
            self._gradients.clear()

    def _close(self, phase: str) -> None:
        if not self._stepping:
            self.memory.close(phase)

    def _pass(self, before: list[Storage]) -> list[Storage]:
        """Forward and backward; `before`: outputs of the micro-batch before, alive until this forward returns."""
        memory = self.memory
        if self.tape is None:
            if not self.workload.inference:
                for tensor in self._trained:
                    self._deposit(tensor, memory.take(self._gradient_bytes(tensor), "gradients"))
                self._reduce()
                self._close(wire.BACKWARD)
            return before
        run = Pass(memory, self.tape, self.workload.checkpointing and not self.workload.inference, self._absent)
        root = self._gather(None)
        self._in_forward, self._last = True, None
        outputs = run.forward(self._enter)
        self._enter(None)
        self._in_forward = False
        self._drop_all(before)
        self._close(wire.FORWARD)
        if not self.workload.inference:
            if self._flat and self._last is not None:  # gathered ahead of what runs in no layer
                self._copied.append(self.memory.take(self._layer_bytes.get(self._last, 0), "buckets"))
            run.backward(self._deposit, self._enter)
            self._enter(None)
            self._drop_all(self._copied)
            self._copied.clear()
            self._drop_all(root)
            self._close(wire.BACKWARD)
        else:
            self._drop_all([*root, *self._copied])
            self._copied.clear()
        return outputs

    # ----------------------------------------------------------------------------------------------------- gradients

    def _deposit(self, tensor: Tensor, fresh: Storage) -> None:
        """A complete gradient: kept, added to the one that stands, or copied into its bucket."""
        if self._has_buckets and self.workload.bucket_views:
            self.memory.drop(fresh)
        elif self._shards_of["gradients"] > 1:
            self._whole.append(tensor)
            self._gathered.append(fresh)
        elif tensor.name in self._gradients:
            self.memory.drop(fresh)
        else:
            self._gradients[tensor.name] = fresh

    def _reduce(self) -> None:
        """What a sharded layer leaves of its gradients when it is done."""
        for name, whole in self._reduced():
            if name not in self._gradients:
                self._gradients[name] = self.memory.take(_share(whole, self._shards_of["gradients"]), "gradients")
        self._whole.clear()
        self._drop_all(self._gathered)
        self._gathered.clear()

    def _reduced(self) -> Iterable[tuple[str, int]]:
        """Each piece and its bytes."""
        if not self._flat:
            return ((tensor.name, self._gradient_bytes(tensor)) for tensor in self._whole)
        units = {self._unit_of.get(tensor.name) for tensor in self._whole}
        sizes = {f"unit {unit}": 0 for unit in units}
        for tensor in self._trained:
            if (unit := self._unit_of.get(tensor.name)) in units:
                sizes[f"unit {unit}"] += self._gradient_bytes(tensor)
        return sizes.items()

    def _gradient_bytes(self, tensor: Tensor) -> int:
        if tensor.sparse:  # as many rows as a batch looks up, which the tape knows
            return 0
        return tensor.count * min(tensor.width, self.workload.precision.gradients)

    @property
    def _has_buckets(self) -> bool:
        return self.workload.world_size > 1 and not self.workload.zero and not self.workload.inference

    # ------------------------------------------------------------------------------------------------ sharded weights

    def _enter(self, layer: int | None) -> None:
        """A layer begins: what the one before had gathered goes, this one's weights and the next one's come.

        After forward's last layer the buffer it was gathered in stays, until backward gathers the next.
        """
        self._reduce()
        if layer is not None:
            self._drop_all(self._copied)
            self._copied.clear()
            self._gathered += self._gather(layer)
            self._last = layer
        elif self._in_forward and self._last is not None and not self._copied and self._keeps_a_copy:
            self._copied.append(self.memory.take(self._layer_bytes.get(self._last, 0), "buckets"))

    @property
    def _keeps_a_copy(self) -> bool:
        return self._shards_of["weights"] > 1 and not self._flat

    def _gather(self, layer: int | None) -> list[Storage]:
        if self._shards_of["weights"] == 1:
            return []
        copies = 1 if layer is None else 2  # the next layer is fetched ahead
        return [self.memory.take(copies * self._layer_bytes.get(layer, 0), "buckets")]

    def _weights_by_layer(self) -> dict[int | None, dict[str, int]]:
        found: dict[int | None, dict[str, int]] = {}
        for op in self.tape.ops if self.tape else ():
            found.setdefault(op.block, {}).update({w.name: w.bytes for w in op.weights if w.name not in self._absent})
        return found

    # ----------------------------------------------------------------------------------------------------- optimizer

    def _step(self) -> None:
        work = self.workload
        if work.optimizer.name == NONE or not self._trained:
            return
        shards = self._shards_of["optimizer"]
        tensors = self._trained
        if shards > 1:
            tensors = [Tensor("shard", (_share(sum(tensor.count for tensor in tensors), shards),))]
        if not self._prepared:
            self._prepared = True
            for tensor in tensors:
                for size in stepping.state_tensors(work, tensor):
                    self.memory.take(size, "optimizer")
            if work.optimizer.name == LBFGS:
                sizes = [tensor.count * work.precision.state for tensor in tensors]
                self._lbfgs = Lbfgs(self.memory, work, sizes, self._closure)
        if self._lbfgs is not None:
            self._stepping = True
            self._lbfgs.step()
            self._stepping = False
            return
        stepping.step(self.memory, work, tensors)

    def _drop_all(self, storages: list[Storage]) -> None:
        for storage in storages:
            self.memory.drop(storage)


_STAGES = {"optimizer": 1, "gradients": 2, "weights": 3}
"""From which stage of ZeRO on a rank has its share only."""


def _share(size: int, shards: int) -> int:
    return -(-size // shards)
