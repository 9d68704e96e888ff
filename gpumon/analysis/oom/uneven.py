"""Optimizers whose states or temporaries are not as large as their parameters: what one step of theirs asks for.

Source. torch/optim/rprop.py and _muon.py (2.15), bitsandbytes' optim/optimizer.py.
Known limitations. Single numbers, norms over rows and columns, what a reduction stages, and cuBLAS's workspace (8 or
32 MiB for Muon) are left out: they are small beside what they are computed from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpumon.analysis.estimate.model import Tensor
from gpumon.analysis.estimate.stepping import EIGHT_BIT_BLOCK, EIGHT_BIT_FROM
from gpumon.analysis.oom.standing import Event, Standing

HALF, FLOAT = 2, 4
_MUON_ITERATIONS = 5


def eight_bit(tensor: Tensor) -> list[tuple[str, int]]:
    """A byte an element and moment, and a scale a block; small tensors stay as they are."""
    moments = ("first moment (state1)", "second moment (state2)")
    if tensor.count < EIGHT_BIT_FROM:
        return [(moment, FLOAT * tensor.count) for moment in moments]
    scales = FLOAT * -(-tensor.count // EIGHT_BIT_BLOCK)
    return [*((moment, tensor.count) for moment in moments), ("scales (absmax1)", scales), ("scales (absmax2)", scales)]


def rprop(stands: Standing, group: Sequence[Tensor], way: str) -> Iterator[Event]:
    """Signs of the product with the gradient before, masks of them, and what is left of the gradient."""
    assert way
    sign: list[int] = []  # of the parameter before, and its gradient
    gradient: list[int] = []
    for tensor in group:
        stands.gone(*gradient)
        yield stands.asked("product with the gradient before", tensor, tensor.bytes)
        yield stands.asked("sign of the product", tensor, tensor.bytes)
        stands.gone(tensor.bytes, *sign)
        yield from _masks(stands, tensor, ("positive", "negative", "zero"))
        yield stands.asked("gradient without what turned", tensor, tensor.bytes)
        yield from _masks(stands, tensor, ("turned",))
        yield stands.asked("sign of the gradient", tensor, tensor.bytes)
        stands.gone(tensor.bytes)
        sign, gradient = [tensor.bytes], [tensor.bytes]
    stands.gone(*sign, *gradient)


def _masks(stands: Standing, tensor: Tensor, names: Sequence[str]) -> Iterator[Event]:
    for name in names:
        yield stands.asked(f"where it is {name}", tensor, tensor.count)
        stands.gone(tensor.count)


def muon(stands: Standing, group: Sequence[Tensor], way: str) -> Iterator[Event]:
    """Newton and Schulz's iterations on the update in bf16: two products of its smaller side, and the next update."""
    assert way
    before: list[int] = []
    for tensor in group:
        half, gram = HALF * tensor.count, HALF * min(tensor.shape) ** 2
        yield stands.asked("update", tensor, tensor.bytes)
        stands.gone(*before)
        yield stands.asked("update in bf16", tensor, half)
        old: list[int] = []  # of the iteration before
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
