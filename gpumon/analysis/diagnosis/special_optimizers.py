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

HALF = 2
FOREACH = "foreach"
_A100 = Hardware()
_MUON_ITERATIONS = 5


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


def rprop(stands: Allocated, group: Sequence[Tensor], way: str) -> Iterator[Event]:
    """Signs of the product with the previous gradient, their masks, and the masked gradient."""
    if way == FOREACH:
        yield from _rprop_lists(stands, group)
        return
    sign: list[int] = []  # of the previous parameter, and its gradient
    gradient: list[int] = []
    for tensor in group:
        stands.gone(*gradient)
        yield stands.asked("product with the previous gradient", tensor, tensor.bytes)
        yield stands.asked("sign of the product", tensor, tensor.bytes)
        stands.gone(tensor.bytes, *sign)
        yield from _masks(stands, tensor, ("positive", "negative", "zero"))
        yield stands.asked("gradient where its sign is the same", tensor, tensor.bytes)
        yield from _masks(stands, tensor, ("turned",))
        yield stands.asked("sign of the gradient", tensor, tensor.bytes)
        stands.gone(tensor.bytes)
        sign, gradient = [tensor.bytes], [tensor.bytes]
    stands.gone(*sign, *gradient)


def _rprop_lists(stands: Allocated, group: Sequence[Tensor]) -> Iterator[Event]:
    """All signs of products, then one masked gradient after the other, then all signs of gradients."""
    for tensor in group:
        yield stands.asked("product with the previous gradient", tensor, tensor.bytes)
    for tensor in group:
        yield from _masks(stands, tensor, ("positive", "negative", "zero"))
    for tensor in group:
        yield stands.asked("mask of changed signs", tensor, tensor.count)
        yield stands.asked("gradient where its sign is the same", tensor, tensor.bytes)
        stands.gone(tensor.count, tensor.bytes)
    *others, last = group
    stands.gone(*(tensor.bytes for tensor in others))  # the last one is still a loop's variable
    for tensor in group:
        yield stands.asked("sign of the gradient", tensor, tensor.bytes)
    stands.gone(last.bytes, *(tensor.bytes for tensor in group))


def adafactor(stands: Allocated, group: Sequence[Tensor], way: str) -> Iterator[Event]:
    """Norms over the columns, then an estimate of the parameter's size, which becomes its update."""
    if way == FOREACH:
        matrices = [tensor for tensor in group if len(tensor.shape) > 1]
        vectors = [tensor for tensor in group if len(tensor.shape) < 2]
        for tensor in matrices:
            yield from _norm(stands, tensor)
        for tensor in vectors:
            yield stands.asked("squared gradient", tensor, tensor.bytes)
        stands.gone(*(tensor.bytes for tensor in vectors))
        for tensor in (*matrices, *vectors):
            yield stands.asked("estimate of the squares, then the update", tensor, tensor.bytes)
        stands.gone(*(tensor.bytes for tensor in group))
        return
    before: list[int] = []
    for tensor in group:
        if len(tensor.shape) > 1:
            yield from _norm(stands, tensor)
        yield stands.asked("estimate of the squares, then the update", tensor, tensor.bytes)
        stands.gone(*before)
        before = [tensor.bytes]
    stands.gone(*before)


def _norm(stands: Allocated, tensor: Tensor) -> Iterator[Event]:
    rows, columns = tensor.shape[-2:]
    sizes = reduction(
        tensor.count // rows, rows, along_fastest=False, one_dimension=True, output_row=columns, hardware=_A100
    )
    for size in sizes:
        yield stands.asked("norms over the columns, in parts", tensor, size)
    stands.gone(*sizes)


def _masks(stands: Allocated, tensor: Tensor, names: Sequence[str]) -> Iterator[Event]:
    for name in names:
        yield stands.asked(f"where it is {name}", tensor, tensor.count)
        stands.gone(tensor.count)


def muon(stands: Allocated, group: Sequence[Tensor], way: str) -> Iterator[Event]:
    """Newton–Schulz iterations on the update in bf16: two products of its smaller side, and the next update."""
    assert way
    before: list[int] = []
    for tensor in group:
        half, gram = HALF * tensor.count, HALF * min(tensor.shape) ** 2
        yield stands.asked("update", tensor, tensor.bytes)
        stands.gone(*before)
        yield stands.asked("update in bf16", tensor, half)
        old: list[int] = []  # of the previous iteration
        for _ in range(_MUON_ITERATIONS):
            yield stands.asked("product with itself", tensor, gram)
            stands.gone(*old[:1])
            yield stands.asked("polynomial of the product", tensor, gram)
            stands.gone(*old[1:])
            yield stands.asked("next update in bf16", tensor, half)
            stands.gone(half)
            old = [gram, gram]
        stands.gone(tensor.bytes, *old)
        before = [half]
    stands.gone(*before)
