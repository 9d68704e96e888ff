"""How a model is spread over ranks: DDP's buckets and hooks, FSDP's and ZeRO's shards, the local bytes of DTensors.

Read from the classes in the model and their own records: DDP's logger has the bucket sizes, FlatParameter and FSDPParam
have theirs. Bytes are this rank's. `whole_bytes`: the parameters unsharded; `unit_bytes`: the largest unit gathered, in
the dtype of the gathering.
Cost: one pass over the modules if the model is sharded, else none. Keeps nothing alive.
Known limitations. Only ZeRO 3 is visible on the parameters. ZeRO 1 and 2 need DeepSpeed's engine; without it they look
like an optimizer with fewer elements than the model. FSDP often prefetches one more unit. Tensors of DDP's mixed
precision, and of hooks that keep them outside their state, are not seen. Each pipeline stage is a separate model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.nn import Module

from gpumon_agent import wire
from gpumon_agent.attribution import zero
from gpumon_agent.storages import storages, tensors_within

_BUCKETS_MAX = 4096


class Meshes:
    """Collects facts about DTensors and ZeRO 3 during the description's pass over the parameters."""

    def __init__(self) -> None:
        self._widest: Any = None
        self.local_bytes = 0  # of all parameters, DTensors or not
        self.whole_bytes = 0
        self.partitioned = 0  # ranks that ZeRO 3 partitions the parameters over; 0: no ZeRO 3

    def see(self, parameter: Tensor, local_bytes: int) -> None:
        part = zero.partition(parameter)
        if part is not None:
            self.partitioned = int(getattr(parameter, "ds_zero_partition_world_size", 0)) or self.partitioned
            self.local_bytes += part.numel() * part.element_size()
            self.whole_bytes += zero.elements(parameter) * part.element_size()
            return
        self.local_bytes += local_bytes
        self.whole_bytes += parameter.numel() * parameter.element_size()
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is not None and (self._widest is None or mesh.ndim > self._widest.ndim):
            self._widest = mesh

    @property
    def size(self) -> int | None:
        return None if self._widest is None else int(self._widest.size())

    @property
    def dimensions(self) -> dict[str, int]:
        """Dimension → ranks, of the mesh with the most dimensions."""
        mesh = self._widest
        if mesh is None:
            return {}
        names = mesh.mesh_dim_names or range(mesh.ndim)
        return {str(name): int(mesh.size(at)) for at, name in enumerate(names)}


def parallel(root: Module, kinds: dict[type, Module], meshes: Meshes) -> wire.Parallel | None:
    """How `root` is spread over ranks, or None. `kinds`: the classes in it, with one module each."""
    by_name = {base.__name__: module for kind, module in reversed(kinds.items()) for base in kind.__mro__}
    if "DistributedDataParallel" in by_name:
        return _ddp(by_name["DistributedDataParallel"], meshes)
    if "FullyShardedDataParallel" in by_name:
        return _fsdp1(root, by_name["FullyShardedDataParallel"], meshes)
    if "DataParallel" in by_name:
        return wire.Parallel(
            "data_parallel", world_size=len(getattr(by_name["DataParallel"], "device_ids", ())) or None
        )
    if "FSDPModule" in by_name:
        return _fsdp2(root, meshes)
    if meshes.partitioned:
        return wire.Parallel(
            "zero3",
            world_size=meshes.partitioned,
            shard_bytes=meshes.local_bytes,
            whole_bytes=meshes.whole_bytes,
        )
    sharing = zero.keeper(by_name["DeepSpeedEngine"]) if "DeepSpeedEngine" in by_name else None
    if sharing is not None:  # all ranks have all parameters; the state, and in stage 2 the gradients, are partitioned
        return wire.Parallel(
            "zero2" if getattr(sharing, "partition_gradients", False) else "zero1",
            world_size=_group_size(getattr(sharing, "dp_process_group", None)),
        )
    if meshes.size is not None:  # DTensors without FSDP: tensor parallelism
        return wire.Parallel(
            "tensor_parallel",
            world_size=meshes.size,
            shard_bytes=meshes.local_bytes,
            whole_bytes=meshes.whole_bytes,
            mesh=meshes.dimensions,
        )
    return None


# ------------------------------------------------------------------------------------------------------------------ DDP


def ddp_logging(module: Any) -> dict[str, Any]:
    """The data of DistributedDataParallel's logger; empty if this torch has none."""
    read = getattr(module, "_get_ddp_logging_data", None)
    return {} if read is None or getattr(module, "logger", None) is None else read()


def bucket_sizes(logged: dict[str, Any]) -> tuple[int, ...]:
    """Bytes of each gradient bucket; of the rebuilt buckets, once they are logged."""
    return _sizes(logged.get("rebuilt_bucket_sizes")) or _sizes(logged.get("bucket_sizes"))


def _sizes(text: str | None) -> tuple[int, ...]:
    return tuple(int(size) for size in (text or "").split(",") if size.strip())


def _ddp(module: Any, meshes: Meshes) -> wire.Parallel:
    logged = ddp_logging(module)
    hooks = getattr(module, "_comm_hooks", ())
    return wire.Parallel(
        kind="ddp",
        world_size=logged.get("world_size", _group_size(getattr(module, "process_group", None))),
        bucket_bytes=bucket_sizes(logged)[:_BUCKETS_MAX],
        rebuilt=bool(logged.get("rebuilt_bucket_sizes")) if logged else None,
        gradient_as_bucket_view=getattr(module, "gradient_as_bucket_view", None),
        static_graph=getattr(module, "static_graph", None),
        find_unused_parameters=getattr(module, "find_unused_parameters", None),
        first_bucket_bytes=_sizes(logged.get("bucket_sizes"))[:_BUCKETS_MAX],
        comm_hook=_hook_name(hooks) or logged.get("comm_hook") or None,
        comm_hook_bytes=distinct_bytes(hook_tensors(module)) if hooks else None,
        mesh=meshes.dimensions,
    )


def hook_tensors(module: Any) -> Iterator[Tensor]:
    """Tensors in the states of DDP's communication hooks, such as PowerSGD's error and factors."""
    for _, state in getattr(module, "_comm_hooks", ()):
        names = [slot for kind in type(state).__mro__ for slot in getattr(kind, "__slots__", ())]
        kept = [getattr(state, name, None) for name in names] + list(getattr(state, "__dict__", {}).values())
        yield from tensors_within(kept)


def _hook_name(hooks: Iterable[tuple[Any, object]]) -> str | None:
    return " + ".join(str(getattr(hook, "__name__", type(hook).__name__)) for hook, _ in hooks) or None


def _group_size(group: Any) -> int | None:
    return None if group is None else int(group.size())


# ----------------------------------------------------------------------------------------------------------------- FSDP


def _fsdp1(root: Module, first: Any, meshes: Meshes) -> wire.Parallel:
    shard = whole = largest = 0
    unit = None
    for path, module in root.named_modules():
        handle: Any = getattr(module, "_handle", None)
        flat = getattr(handle, "flat_param", None)
        if flat is None or not handle.uses_sharded_strategy:
            continue
        local = math.prod(flat._sharded_size)
        shard += local * flat.element_size()
        whole += math.prod(flat._unpadded_unsharded_size) * flat.element_size()
        gathered = local * handle.world_size * _width(getattr(handle, "_fwd_bwd_param_dtype", None), flat)
        if gathered > largest:
            largest, unit = gathered, path
    return wire.Parallel(
        "fsdp1",
        world_size=_group_size(getattr(first, "process_group", None)),
        shard_bytes=shard or None,
        whole_bytes=whole or None,
        unit_bytes=largest or None,
        unit=unit if largest else None,
        mesh=meshes.dimensions,
    )


def _fsdp2(root: Module, meshes: Meshes) -> wire.Parallel:
    shard = whole = largest = 0
    unit = None
    for path, module in root.named_modules():
        gathered = 0
        for each in fsdp_parameters(module):
            sharded = each.sharded_param
            elements = math.prod(getattr(each, "_orig_size", sharded.shape))
            shard += distinct_bytes((sharded,))
            whole += elements * sharded.element_size()
            gathered += elements * _width(getattr(each, "param_dtype", None), sharded)
        if gathered > largest:
            largest, unit = gathered, path
    return wire.Parallel(
        "fsdp2",
        world_size=meshes.size,
        shard_bytes=shard or None,
        whole_bytes=whole or None,
        unit_bytes=largest or None,
        unit=unit if largest else None,
        mesh=meshes.dimensions,
    )


def flat_parameter(module: Module) -> Any:
    """The FlatParameter if `module` is a sharded unit of FSDP1, else None."""
    handle: Any = getattr(module, "_handle", None)
    flat = getattr(handle, "flat_param", None)
    return flat if flat is not None and handle.uses_sharded_strategy else None


def fsdp_parameters(module: Module) -> Iterable[Any]:
    """FSDP2's FSDPParams of the parameters that `module` shards; empty for other modules and old torch."""
    read = getattr(module, "_get_fsdp_state", None)
    if read is None:
        return []
    state = read()
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [each for group in groups if group is not None for each in group.fsdp_params]


def _width(gathered_as: Any, parameter: Tensor) -> int:
    return parameter.element_size() if gathered_as is None else int(gathered_as.itemsize)


def distinct_bytes(tensors: Iterable[Tensor]) -> int:
    """Storage bytes of `tensors`, each storage once; for a DTensor its local part."""
    return sum({identity: nbytes for tensor in tensors for identity, nbytes, _ in storages(tensor)}.values())
