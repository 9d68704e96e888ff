"""Optimizers whose states or temporaries differ in size from their parameters: the requests of one step.

Source. torch/optim/rprop.py, _muon.py and _adafactor.py (2.15), bitsandbytes' optim/optimizer.py.
Known limitations. Left out as small: single numbers, means of rows and columns, and cuBLAS's workspace (8 or 32 MiB for
Muon and Adafactor). A norm over long columns stages twice the parameter, depending on the device: an A100 is assumed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpumon.analysis.diagnosis.optimizer_events import Allocated, Event
from gpumon.analysis.estimate.kernels import Hardware, reduction
from gpumon.analysis.estimate.model import Tensor
from gpumon.analysis.estimate.optimizers import eight_bit_states
from gpumon.analysis.estimate.workload import HALF

FOREACH = "foreach"
_A100 = Hardware()
_MUON_ITERATIONS = 5  # torch.optim.Muon's default


def eight_bit(tensor: Tensor) -> list[tuple[str, int]]:
    """One byte per element and moment, one scale per block; small tensors stay as they are."""
    names = ("first moment (state1)", "second moment (state2)", "scales (absmax1)", "scales (absmax2)")
    return list(zip(names, eight_bit_states(tensor.count), strict=False))


def factored(tensor: Tensor) -> list[tuple[str, int]]:
    """Adafactor's states: row and column means of squares for a matrix, all squares for a vector."""
    if len(tensor.shape) < 2:
        return [("squares (variance)", tensor.bytes)]
    rows, columns = tensor.shape[-2:]
    return [("rows' squares (row_var)", tensor.bytes // columns), ("columns' squares (col_var)", tensor.bytes // rows)]


def rprop(memory: Allocated, group: Sequence[Tensor], way: str) -> Iterator[Event]:
    """Signs of the product with the previous gradient, their masks, and the masked gradient."""
    if way == FOREACH:
        yield from _rprop_lists(memory, group)
        return
    sign: list[int] = []  # of the previous parameter, and its gradient
    gradient: list[int] = []
    for tensor in group:
        memory.free(*gradient)
        yield memory.request("product with the previous gradient", tensor, tensor.bytes)
        yield memory.request("sign of the product", tensor, tensor.bytes)
        memory.free(tensor.bytes, *sign)
        yield from _masks(memory, tensor, ("positive", "negative", "zero"))
        yield memory.request("gradient where its sign is the same", tensor, tensor.bytes)
        yield from _masks(memory, tensor, ("turned",))
        yield memory.request("sign of the gradient", tensor, tensor.bytes)
        memory.free(tensor.bytes)
        sign, gradient = [tensor.bytes], [tensor.bytes]
    memory.free(*sign, *gradient)


def _rprop_lists(memory: Allocated, group: Sequence[Tensor]) -> Iterator[Event]:
    """All signs of products, then one masked gradient after the other, then all signs of gradients."""
    for tensor in group:
        yield memory.request("product with the previous gradient", tensor, tensor.bytes)
    for tensor in group:
        yield from _masks(memory, tensor, ("positive", "negative", "zero"))
    for tensor in group:
        yield memory.request("mask of changed signs", tensor, tensor.count)
        yield memory.request("gradient where its sign is the same", tensor, tensor.bytes)
        memory.free(tensor.count, tensor.bytes)
    *others, last = group
    memory.free(*(tensor.bytes for tensor in others))  # the last one is still a loop's variable
    for tensor in group:
        yield memory.request("sign of the gradient", tensor, tensor.bytes)
    memory.free(last.bytes, *(tensor.bytes for tensor in group))


def adafactor(memory: Allocated, group: Sequence[Tensor], way: str) -> Iterator[Event]:
    """Norms over the columns, then an estimate of the parameter's size, which becomes its update."""
    if way == FOREACH:
        matrices = [tensor for tensor in group if len(tensor.shape) > 1]
        vectors = [tensor for tensor in group if len(tensor.shape) < 2]
        for tensor in matrices:
            yield from _norm(memory, tensor)
        for tensor in vectors:
            yield memory.request("squared gradient", tensor, tensor.bytes)
        memory.free(*(tensor.bytes for tensor in vectors))
        for tensor in (*matrices, *vectors):
            yield memory.request("estimate of the squares, then the update", tensor, tensor.bytes)
        memory.free(*(tensor.bytes for tensor in group))
        return
    before: list[int] = []
    for tensor in group:
        if len(tensor.shape) > 1:
            yield from _norm(memory, tensor)
        yield memory.request("estimate of the squares, then the update", tensor, tensor.bytes)
        memory.free(*before)
        before = [tensor.bytes]
    memory.free(*before)


def _norm(memory: Allocated, tensor: Tensor) -> Iterator[Event]:
    rows, columns = tensor.shape[-2:]
    sizes = reduction(
        tensor.count // rows, rows, along_fastest=False, one_dimension=True, output_row=columns, hardware=_A100
    )
    for size in sizes:
        yield memory.request("norms over the columns, in parts", tensor, size)
    memory.free(*sizes)


def _masks(memory: Allocated, tensor: Tensor, names: Sequence[str]) -> Iterator[Event]:
    for name in names:
        yield memory.request(f"where it is {name}", tensor, tensor.count)
        memory.free(tensor.count)


def muon(memory: Allocated, group: Sequence[Tensor], way: str) -> Iterator[Event]:
    """Newton–Schulz iterations on the update in bf16: two products of its smaller side, and the next update."""
    assert way
    before: list[int] = []
    for tensor in group:
        half, gram = HALF * tensor.count, HALF * min(tensor.shape) ** 2
        yield memory.request("update", tensor, tensor.bytes)
        memory.free(*before)
        yield memory.request("update in bf16", tensor, half)
        old: list[int] = []  # of the previous iteration
        for _ in range(_MUON_ITERATIONS):
            yield memory.request("product with itself", tensor, gram)
            memory.free(*old[:1])
            yield memory.request("polynomial of the product", tensor, gram)
            memory.free(*old[1:])
            yield memory.request("next update in bf16", tensor, half)
            memory.free(half)
            old = [gram, gram]
        memory.free(tensor.bytes, *old)
        before = [half]
    memory.free(*before)
