"""One rank of several in a trace: PyTorch's own DDP, fully_shard and FullyShardedDataParallel, without other processes.

Model. The module is wrapped as a script would wrap it, in a process group whose collectives return at once. The
wrappers allocate where and when they really do: buckets and their copies, gathered weights, shards, each on its stream,
since the allocator does not reuse blocks across streams. FSDP's units are the numbered layers and the rest, as in
Model.units.

Source. PyTorch's own code, run; torch.testing's fake process group.
Cost. That of the trace: about 0.1 ms per operator.

Known limitations. Needs torch 2.13; before it, and for ZeRO 1 and 2, estimate.from_module replaces what ranks shard in
the trace of one rank. Memory that waits for another stream (record_stream) is free when it is freed, since nothing
takes time in a simulation.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from gpumon.analysis.estimate.replacing import replaced
from gpumon.analysis.estimate.workload import Workload

META = torch.device("meta")
_UNIT = re.compile(r"^((?:.*?\.)?\d+)(?=\.|$)")


class _Stream:
    """One of the device's streams, by number; 0 is the default stream."""

    device, device_index, device_type = META, 0, 1

    def __init__(self, *_: Any, **__: Any) -> None:
        _Stream.made += 1
        self.stream_id = _Stream.made

    made = -1

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def wait_event(self, _: Any) -> None: ...

    def wait_stream(self, _: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class _Event:
    """An event that has always happened."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> _Event:
        return self

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class _Streams:
    """The stream of an allocation: the current one; in backward, that of the operator's forward."""

    def __init__(self, operator: Callable[[], str]) -> None:
        _Stream.made = -1
        self.current = _Stream()
        self._operator = operator
        self._spans: list[tuple[int, int, int]] = []  # (first node, end, stream): sequence numbers of autograd nodes

    def number(self) -> int:
        if self.current.stream_id:
            return self.current.stream_id
        node = torch._C._current_autograd_node()
        if node is None:
            return 0
        if self._operator() == "aten.add.Tensor":  # the engine adds gradients on the consumer's stream
            return max((self._of(other) for other, _ in node.next_functions if other is not None), default=0)
        return self._of(node)

    def _of(self, node: Any) -> int:
        made = node._sequence_nr()
        return next((stream for first, end, stream in reversed(self._spans) if first <= made < end), 0)

    @contextmanager
    def stream(self, wanted: _Stream | None) -> Iterator[None]:
        before, first = self.current, torch.autograd._get_sequence_nr()
        self.current = wanted or before
        try:
            yield
        finally:
            end = torch.autograd._get_sequence_nr()
            if end > first:
                self._spans.append((first, end, self.current.stream_id))
            self.current = before

    def module(self) -> ModuleType:
        """The counterpart of `torch.cuda` for the trace's device."""
        module = ModuleType("torch.meta")
        module.__dict__.update(
            Stream=_Stream,
            Event=_Event,
            stream=self.stream,
            current_stream=lambda *_: self.current,
            current_device=lambda: META,
            set_device=lambda *_: None,
            synchronize=lambda *_: None,
            is_available=lambda: True,
            device_count=lambda: 1,
        )
        return module


@contextmanager
def among(work: Workload, operator: Callable[[], str]) -> Iterator[Callable[[], int]]:
    """Inside, this process is rank 0 of `work.world_size` on the meta device. Yields a function that gives the current
    stream's number.

    `operator()`: name of the operator that allocates.
    """
    import torch.distributed as dist
    from torch.distributed.fsdp import _init_utils as flat
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group, _fully_shard
    from torch.distributed.tensor._sharding_prop import ShardingPropagator
    from torch.nn.parallel import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def nothing(*_: Any, **__: Any) -> None: ...

    streams = _Streams(operator)
    ask = ShardingPropagator._propagate_tensor_meta_non_cached

    def aside(*args: Any, **named: Any) -> Any:
        with _disable_current_modes():  # it tries the operator on unsharded tensors of its own
            return ask(*args, **named)

    with ExitStack() as stack:
        for owner, name, value in (
            (torch, "meta", streams.module()),
            (distributed, "_verify_param_shape_across_processes", nothing),  # reads messages of other ranks
            (_fsdp_param_group.FSDPParamGroup, "_validate_no_meta_params", nothing),
            (_fully_shard, "_get_device_from_mesh", lambda _: META),
            (ShardingPropagator, "_propagate_tensor_meta_non_cached", aside),
            (flat, "_need_to_materialize_module", lambda *_: (False, False)),
        ):
            stack.enter_context(replaced(owner, name, value))
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=work.world_size)
        stack.callback(dist.destroy_process_group)
        yield streams.number


def sharded(module: nn.Module, work: Workload) -> nn.Module:
    """The module with every weight sharded, by units."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    parts = dict(module.named_modules())
    names = (_UNIT.match(name) for name, _ in module.named_parameters())
    units = list(dict.fromkeys(match[1] for match in names if match and _is_called(parts.get(match[1]))))
    if work.flat:

        def wrapped(unit: nn.Module) -> nn.Module:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about deprecation, and a device without index
                return FullyShardedDataParallel(unit, device_id=META, use_orig_params=True)

        for name in units:
            parent, _, last = name.rpartition(".")
            setattr(module.get_submodule(parent), last, wrapped(module.get_submodule(name)))
        return wrapped(module)
    mesh = init_device_mesh("meta", (work.world_size,))
    for name in units:
        fully_shard(module.get_submodule(name), mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


def _is_called(part: nn.Module | None) -> bool:
    """Whether the module runs, rather than being a list or dict of others."""
    return part is not None and not isinstance(part, (nn.ModuleList, nn.ModuleDict))


def in_buckets(module: nn.Module, work: Workload, filling: Callable[[bool], None]) -> nn.Module:
    """The module under DDP. `filling(True)` is called before buckets are allocated, `filling(False)` after."""
    from torch.nn.parallel import DistributedDataParallel

    def reduced(_, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations, but not as strings
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    filling(True)
    wrapped = DistributedDataParallel(module, gradient_as_bucket_view=work.bucket_views)
    filling(False)
    wrapped.register_comm_hook(None, reduced)
    wrapped.logger = SimpleNamespace(set_runtime_stats_and_log=lambda: None)  # its own warns about the device
    before = wrapped._pre_forward

    def rebuilding(*inputs: Any, **named: Any) -> Any:
        filling(True)
        try:
            return before(*inputs, **named)
        finally:
            filling(False)

    wrapped._pre_forward = rebuilding
    return wrapped
