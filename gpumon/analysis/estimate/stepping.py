"""One step of an optimizer against the simulated memory: the state it keeps, and what it needs for a moment.

Model. State tensors per parameter by closed form (estimate.optimizers), by shape for Adafactor (rows and columns), by
blocks for 8-bit Adam. A foreach step builds whole lists; a loop goes parameter by parameter, its variables keeping a
tensor of the parameter before; a fused step needs nothing. Muon's products and Adafactor's norms take workspaces.

Source. torch/optim/*.py (2.15), read step by step; bitsandbytes' functional.py for 8-bit blocks; compared with the
allocator for every optimizer and form (tests/analysis/test_estimate_optimizers.py).
Cost. O(tensors).

Known limitations. Written down from torch 2.15: before it, cuBLAS kept its workspace, which adds 8 MiB once to what
Muon and Adafactor need, and ASGD's loop with maximize needs a tensor more. LBFGS, which evaluates a closure, is
estimate.lbfgs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpumon.analysis.estimate.kernels import CUBLASLT_WORKSPACE, Hardware, reduction
from gpumon.analysis.estimate.lbfgs import NAME as LBFGS
from gpumon.analysis.estimate.memory import Memory, Storage
from gpumon.analysis.estimate.model import Tensor
from gpumon.analysis.estimate.optimizers import needs
from gpumon.analysis.estimate.tape import FLOAT, HALF
from gpumon.analysis.estimate.workload import Workload

EIGHT_BIT_FROM, EIGHT_BIT_BLOCK = 4096, 256
"""bitsandbytes leaves tensors of fewer elements in fp32, and keeps one fp32 scale a block of the others."""


def state_tensors(work: Workload, tensor: Tensor) -> list[int]:
    """Bytes of each tensor of state for a parameter, the fp32 master copy first."""
    optimizer, precision, count = work.optimizer, work.precision, tensor.count
    sizes = [count * precision.master] if precision.master else []
    if optimizer.eight_bit:
        if count < EIGHT_BIT_FROM:
            return [*sizes, FLOAT * count, FLOAT * count]
        blocks = -(-count // EIGHT_BIT_BLOCK)
        return [*sizes, count, count, FLOAT * blocks, FLOAT * blocks]
    if optimizer.name == "adafactor":
        if len(tensor.shape) < 2:
            return [*sizes, count * precision.state]
        rows, columns = tensor.shape[-2:]
        return [*sizes, count // columns * precision.state, count // rows * precision.state]
    if optimizer.name == LBFGS:  # one flat tensor of all parameters, and its history: estimate.lbfgs
        return sizes
    sizes += _times([count * precision.state], needs(optimizer.described(count, count)).state or 0)
    if optimizer.form == "fused" and optimizer.name != "sgd":
        sizes.append(FLOAT)  # the step's number, on the device
    return sizes


def step(memory: Memory, work: Workload, tensors: Sequence[Tensor]) -> None:
    """What the step takes for a moment, and gives back."""
    optimizer, size = work.optimizer, work.precision.state
    if optimizer.form == "fused" or optimizer.eight_bit:
        return
    if optimizer.name == "muon":
        _muon(memory, work, tensors)
    elif optimizer.name == "adafactor":
        _adafactor(memory, work, tensors)
    elif optimizer.form == "foreach":
        known = needs(optimizer.described(1, FLOAT))
        sizes = [tensor.count * size for tensor in tensors]
        extra = [round(max(sizes) * known.foreach_largest)] if known.foreach_largest else []
        _drop(memory, [_take(memory, part) for part in (*_times(sizes, known.foreach or 0), *extra)])
    else:
        known = needs(optimizer.described(1, FLOAT))
        before: list[Storage] = []
        for tensor in tensors:
            fresh = max(0, (known.loop_tensors or 0) - known.loop_held)
            taken = [_take(memory, part) for part in _times([tensor.count * size], fresh)]
            _drop(memory, before)
            before = taken[: known.loop_held]
            _drop(memory, taken[known.loop_held :])
        _drop(memory, before)


def _muon(memory: Memory, work: Workload, tensors: Iterable[Tensor]) -> None:
    """torch/optim/_muon.py: the update, its bf16 copy twice, two Gram matrices, and a product's workspace."""
    before: list[Storage] = []
    for tensor in tensors:
        update = _take(memory, tensor.count * work.precision.state)
        _drop(memory, before)
        gram = HALF * min(tensor.shape) ** 2
        mine = [_take(memory, part) for part in (HALF * tensor.count, gram, gram, HALF * tensor.count)]
        memory.brief(max(work.hardware.cublas_workspace, CUBLASLT_WORKSPACE))
        before = mine[:1]
        _drop(memory, [update, *mine[1:]])
    _drop(memory, before)


def _adafactor(memory: Memory, work: Workload, tensors: Sequence[Tensor]) -> None:
    """torch/optim/_adafactor.py: norms over columns (partial sums), then an estimate as large as the parameter."""
    if work.optimizer.form == "foreach":
        matrices = [tensor for tensor in tensors if len(tensor.shape) > 1]
        for tensor in matrices:
            _norm(memory, work, tensor)
        vectors = [tensor for tensor in tensors if len(tensor.shape) < 2]
        held = [_estimate(memory, work, tensor) for tensor in (*matrices, *vectors)]
        _drop(memory, held)
        return
    before: list[Storage] = []
    for tensor in tensors:
        _norm(memory, work, tensor)
        fresh = _estimate(memory, work, tensor)
        _drop(memory, before)
        before = [fresh]
    _drop(memory, before)


def _norm(memory: Memory, work: Workload, tensor: Tensor) -> None:
    _drop(memory, [_take(memory, size) for size in norm_over_columns(tensor, work.hardware)])


def norm_over_columns(tensor: Tensor, hardware: Hardware) -> Sequence[int]:
    """Bytes of what the norm of each column is staged in."""
    if len(tensor.shape) < 2:
        return ()
    rows, columns = tensor.shape[-2:]
    return reduction(
        tensor.count // rows, rows, along_fastest=False, one_dimension=True, output_row=columns, hardware=hardware
    )


def _estimate(memory: Memory, work: Workload, tensor: Tensor) -> Storage:
    fresh = _take(memory, tensor.count * work.precision.state)
    if len(tensor.shape) > 1:
        memory.brief(work.hardware.cublas_workspace)
    return fresh


def _take(memory: Memory, size: int) -> Storage:
    return memory.take(size, "temporaries")


def _drop(memory: Memory, storages: Iterable[Storage]) -> None:
    for storage in storages:
        memory.drop(storage)


def _times(sizes: Sequence[int], multiple: float) -> list[int]:
    """Every size as often as `multiple` says, and a part of it for the fraction."""
    whole, part = int(multiple), multiple % 1
    return [size for size in sizes for _ in range(whole)] + [round(size * part) for size in sizes if part]
