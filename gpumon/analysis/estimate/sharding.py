"""Bytes a rank holds of a model with a known number of parameters, by precision, optimizer and ZeRO stage.

Model. With Ψ parameters in 2-byte numbers and an optimizer of K bytes per parameter (12 for Adam: master copy and two
moments) on N ranks: (2 + 2 + K)·Ψ; stage 1: (2 + 2)·Ψ + K·Ψ/N; stage 2: 2·Ψ + (2 + K)·Ψ/N; stage 3: (2 + 2 + K)·Ψ/N.
Other precisions and optimizers change the three numbers.

Source. ZeRO (arXiv 1910.02054), section 5 and Figure 1: 120, 31.4, 16.6 and 1.9 GB for 7.5·10⁹ parameters on 64 ranks.
Cost. O(1).

Known limitations. Activations, buffers and temporaries are not included.
"""

from __future__ import annotations

import msgspec

from gpumon.analysis.estimate.optimizers import EIGHT_BIT_BLOCK, needs
from gpumon.analysis.estimate.workload import NONE, Workload


class RankShare(msgspec.Struct, frozen=True):
    """What one rank holds permanently, in bytes."""

    stage: int
    weights: int
    gradients: int
    optimizer: int
    casts: int  # of weights, under autocast

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.casts


def state_per_parameter(work: Workload) -> float | None:
    """Bytes of optimizer state per parameter, master copy included; None without a formula for the class."""
    precision, optimizer = work.precision, work.optimizer
    if work.inference or optimizer.name == NONE:
        return 0
    if optimizer.eight_bit:
        return precision.master + 2 + 8 / EIGHT_BIT_BLOCK
    multiple = needs(optimizer.described(1, 1)).state
    return None if multiple is None else precision.master + multiple * precision.state


def per_rank(count: int, work: Workload) -> RankShare | None:
    """None if the optimizer's state depends on shapes."""
    state = state_per_parameter(work)
    if state is None:
        return None
    ranks, precision = work.world_size, work.precision
    gradients = 0 if work.inference else precision.gradients

    def share(bytes_each: float, stage: int) -> int:
        return round(count * bytes_each / (ranks if work.zero >= stage else 1))

    casts = share(2, 3) if precision.autocast else 0
    return RankShare(work.zero, share(precision.weights, 3), share(gradients, 2), share(state, 1), casts)
