"""Tensors of DeepSpeed's ZeRO outside of torch's structures: partitions, master copies, reduced gradients, buckets.

Source: deepspeed/runtime/zero/stage_1_and_2.py, stage3.py, partition_parameters.py (0.19); `ipg` is DeepSpeed's word
for a gradient on its way into a bucket. Attributes that another version renames stay unexplained.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.nn import Module

from gpumon_agent.storages import tensors_within

_MASTERS = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups")
_GRADIENTS = ("grad_partitions_flat_buffer", "averaged_gradients")
_BUCKETS = ("ipg_buffer", "_DeepSpeedZeroOptimizer_Stage3__ipg_bucket_flat_buffer")  # before `ipg_buckets`


def keeper(module: Module) -> Any:
    """The optimizer with this rank's partition if `module` is a ZeRO engine, else None."""
    if all(kind.__name__ != "DeepSpeedEngine" for kind in type(module).__mro__):
        return None
    optimizer = vars(module).get("optimizer")
    return optimizer if type(optimizer).__name__.startswith("DeepSpeedZeroOptimizer") else None


def partition(parameter: Tensor) -> Tensor | None:
    """ZeRO 3: this rank's part of `parameter`, which is empty while it is not gathered."""
    return getattr(parameter, "ds_tensor", None)


def elements(parameter: Tensor) -> int:
    """Elements of `parameter` on all ranks together."""
    return int(getattr(parameter, "ds_numel", 0))


def gathered(parameter: Tensor) -> bool:
    """ZeRO 3: whether `parameter` is temporarily whole. Small ("persistent") parameters always are: not counted."""
    return not getattr(parameter, "ds_persist", True) and parameter.numel() > 0


def masters(optimizer: Any) -> Iterator[Tensor]:
    """This rank's fp32 master weights."""
    return _kept(optimizer, _MASTERS)


def gradients(optimizer: Any) -> Iterator[Tensor]:
    return _kept(optimizer, _GRADIENTS)


def buckets(optimizer: Any) -> Iterator[Tensor]:
    """ZeRO 3 keeps one of `reduce_bucket_size` elements (default: 500 million) during the whole run."""
    yield from _kept(optimizer, _BUCKETS)
    for bucket in dict(getattr(optimizer, "ipg_buckets", ())).values():
        yield from _kept(bucket, ("buffer",))


def _kept(holder: Any, names: tuple[str, ...]) -> Iterator[Tensor]:
    for name in names:
        yield from tensors_within(getattr(holder, name, None))
