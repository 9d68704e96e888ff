"""Plays the operations of a `Tape` forward and backward: which tensors are alive when.

Model. A tensor lives from the operation that makes it to the last that needs it; what autograd saves lives until its
backward has run. A gradient is a new tensor, unless it is handed on as it is; a second one for the same tensor is added
in place if nobody else holds the first (torch/csrc/autograd/input_buffer.cpp). A parameter's gradient is complete when
every operation that uses the parameter has run (AccumulateGrad). With checkpointing a layer keeps its inputs only, and
runs forward again as backward reaches it (torch/utils/checkpoint.py, use_reentrant=False).

Cost. O(operations).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from gpumon.analysis.estimate.memory import Memory, Storage
from gpumon.analysis.estimate.model import Tensor
from gpumon.analysis.estimate.tape import HALF, Op, Tape, Value

Deposit = Callable[[Tensor, Storage], None]
"""Takes over a parameter's complete gradient."""
Enter = Callable[[int | None], None]
"""Told of the layer that runs next."""


@dataclass
class Pass:
    """One forward and its backward."""

    memory: Memory
    tape: Tape
    checkpointing: bool = False
    absent: frozenset[str] = frozenset()  # parameters that are not on this device
    _values: dict[Value, Storage] = field(default_factory=dict)
    _saved: dict[Op, list[Storage]] = field(default_factory=dict)
    _kept_for: dict[int, dict[Value, Storage]] = field(default_factory=dict)  # inputs of checkpointed layers
    _gradients: dict[Value, Storage] = field(default_factory=dict)
    _arrived: dict[str, Storage] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ops = self.tape.ops
        self._ever_saved = {value for op in ops for value in op.saved}
        self._held = {*self.tape.held, *self.tape.kept_keys}
        self._casts = set(self.tape.casts)
        self._layers: dict[int | None, list[Op]] = {}
        for op in ops:
            self._layers.setdefault(op.block, []).append(op)
        self._made_in = {block: {op.output for op in ops} for block, ops in self._layers.items()}
        self._awaited = Counter(weight.name for op in ops for weight in op.weights)

    # ------------------------------------------------------------------------------------------------------- forward

    def forward(self, enter: Enter) -> list[Storage]:
        """Runs it; returns what the outputs hold, to be dropped by the caller."""
        self._play(self.tape.ops, enter)
        for value in self._casts & self._values.keys():  # autocast ends
            self._release(value)
        return [self._values.pop(value) for value in self._held if value in self._values]

    def _play(self, ops: Sequence[Op], enter: Enter | None) -> None:
        """`enter` None: a layer is recomputed."""
        again = enter is None
        uses = Counter(value for op in ops for value in (*op.inputs, *op.until))
        block: int | None = None
        for op in ops:
            if enter is not None and op.block != block:
                block = op.block
                enter(block)
            thin = self.checkpointing and op.block is not None and not again
            if thin:
                self._keep_inputs(op)
            self._run(op, saving=not thin)
            for value in (*op.inputs, *op.until):
                uses[value] -= 1
                if not uses[value] and not self._outlives(value, again):
                    self._release(value)
            if op.output not in uses and not self._outlives(op.output, again):
                self._release(op.output)
        if again:
            for value in self._casts & self._values.keys():
                self._release(value)

    def _outlives(self, value: Value, again: bool) -> bool:
        return value not in self._values or value in self._casts or (value in self._held and not again)

    def _keep_inputs(self, op: Op) -> None:
        """A checkpointed layer holds what it was given."""
        if op.block is None:
            return
        kept = self._kept_for.setdefault(op.block, {})
        for value in (*op.inputs, *op.until):
            storage = self._values.get(value)
            if storage is not None and value not in self._made_in[op.block] and value not in kept:
                storage.uses += 1
                kept[value] = self.memory.move(storage, "activations")

    def _run(self, op: Op, *, saving: bool) -> None:
        base = self._values.get(op.inputs[0]) if op.view else None
        if base is not None:
            base.uses += 1
            self._values[op.output] = base
        else:
            stays = (saving and op.output in self._ever_saved) or op.output in self._held
            self._values[op.output] = self.memory.take(op.output.bytes, "activations" if stays else "temporaries")
        for value in op.extra:
            self._values[value] = self.memory.take(value.bytes, "activations" if saving else "temporaries")
        if op.temporary:
            self.memory.brief(op.temporary)
        if saving:
            kept = [self._values[value] for value in op.saved if value in self._values]
            for storage in kept:
                storage.uses += 1
            self._saved[op] = kept
        for value in op.extra:
            self._release(value)

    def _release(self, value: Value) -> None:
        self.memory.drop(self._values.pop(value))

    # ------------------------------------------------------------------------------------------------------ backward

    def backward(self, deposit: Deposit, enter: Enter) -> None:
        """From the last operation to the first; gradients of parameters go to `deposit`."""
        ops = self.tape.ops
        self._gradients[ops[-1].output] = self.memory.take(ops[-1].output.bytes, "temporaries")
        block: int | None = None
        for op in reversed(ops):
            if op.block != block:
                if block is not None and self.checkpointing:
                    self._drop_all(self._kept_for.pop(block, {}).values())
                block = op.block
                enter(block)
                if block is not None and self.checkpointing:
                    self._restore(block)
            self._back(op, deposit)
        self._drop_all(self._gradients.values())
        self._gradients.clear()
        for kept in self._kept_for.values():
            self._drop_all(kept.values())
        self._kept_for.clear()

    def _restore(self, block: int) -> None:
        """Runs a checkpointed layer forward again, from the inputs it kept."""
        kept = self._kept_for.get(block, {})
        for value, storage in kept.items():
            storage.uses += 1
            self._values[value] = storage
        self._play(self._layers[block], None)
        for value in kept.keys() & self._values.keys():
            self._release(value)

    def _back(self, op: Op, deposit: Deposit) -> None:
        gradient = self._gradients.pop(op.output, None)
        if gradient is None:
            self._drop_all(self._saved.pop(op, ()))
            return
        made: list[tuple[Value, Storage]] = []
        for value in op.inputs:
            if not value.needs_grad:
                continue
            if op.passes and value.bytes == op.output.bytes:
                gradient.uses += 1
                made.append((value, gradient))
            else:
                made.append((value, self.memory.take(value.bytes, "temporaries")))
        if op.backward_temporary:
            self.memory.brief(op.backward_temporary)
        for weight in op.weights:
            if weight.trainable and weight.name not in self.absent:
                self._weight(op, weight, deposit)
        self.memory.drop(gradient)
        self._drop_all(self._saved.pop(op, ()))
        for value, storage in made:
            self._arrive(value, storage)

    def _arrive(self, value: Value, storage: Storage) -> None:
        there = self._gradients.get(value)
        if there is None:
            self._gradients[value] = storage
        elif there.uses == 1:
            self.memory.drop(storage)
        else:
            self._gradients[value] = self.memory.take(value.bytes, "temporaries")
            self.memory.drop(there)
            self.memory.drop(storage)

    def _weight(self, op: Op, weight: Tensor, deposit: Deposit) -> None:
        size = weight.count * weight.width
        if weight.sparse:  # the rows looked up, and their numbers
            rows = op.saved[0].count if op.saved else 0
            size = rows * (weight.shape[-1] * weight.width + 8)
        low = self.memory.take(weight.count * HALF, "temporaries") if op.low_gradients else None
        storage = self.memory.take(size, "gradients")
        if low is not None:
            self.memory.drop(low)
        self._awaited[weight.name] -= 1
        there = self._arrived.get(weight.name)
        if there is not None:  # of a tied weight: added out of place
            both = self.memory.take(size, "gradients")
            self.memory.drop(there)
            self.memory.drop(storage)
            storage = both
        self._arrived[weight.name] = storage
        if not self._awaited[weight.name]:
            deposit(weight, self._arrived.pop(weight.name))

    def _drop_all(self, storages: Iterable[Storage]) -> None:
        for storage in storages:
            self.memory.drop(storage)
