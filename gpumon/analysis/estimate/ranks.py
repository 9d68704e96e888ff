"""One rank of several in a trace: PyTorch's own DDP, fully_shard and FullyShardedDataParallel, with nobody else there.

Model. The module is wrapped as a script would wrap it, in a process group whose collectives return at once. What the
wrappers make stands where they make it: buckets and their copies, gathered weights, shards, and on which stream, as
the allocator lends a block to no other stream. FSDP's units are the numbered layers and the rest, as in Model.units.

Source. PyTorch's own code, run; the group is torch.testing's fake one.
Cost. As the trace's own: about 0.1 ms an operator.

Known limitations. From torch 2.13; before it, and for ZeRO 1 and 2, estimate.from_module exchanges what ranks share in
the trace of one rank. Memory that waits for another stream (record_stream) is free when it is freed, as in a
simulation nothing lasts.
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
    """One of the device's streams, by a number of its own; 0 is where everything begins."""

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
    """What has always happened."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> _Event:
        return self

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class _Streams:
    """Which stream an allocation is made on: the current one, or in backward the one its operator's forward ran on."""

    def __init__(self, operator: Callable[[], str]) -> None:
        _Stream.made = -1
        self.current = _Stream()
        self._operator = operator
        self._spans: list[tuple[int, int, int]] = []  # autograd nodes from one number to the other, and their stream

    def number(self) -> int:
        if self.current.stream_id:
            return self.current.stream_id
        node = torch._C._current_autograd_node()
        if node is None:
            return 0
        if self._operator() == "aten.add.Tensor":  # the engine adds gradients up where they are used
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
        """What `torch.cuda` is to CUDA, for the device of a trace."""
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
    """Inside, this process is rank 0 of `work.world_size` on the meta device; tells the number of the stream in use.

    `operator()`: the name of the one that allocates.
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
        with _disable_current_modes():  # it tries an operator on tensors of its own, whole ones
            return ask(*args, **named)

    with ExitStack() as stack:
        for owner, name, value in (
            (torch, "meta", streams.module()),
            (distributed, "_verify_param_shape_across_processes", nothing),  # reads what the others would have sent
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
    """The module with a share of every weight, by units."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    parts = dict(module.named_modules())
    names = (_UNIT.match(name) for name, _ in module.named_parameters())
    units = list(dict.fromkeys(match[1] for match in names if match and _is_called(parts.get(match[1]))))
    if work.flat:

        def wrapped(unit: nn.Module) -> nn.Module:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that it is old, and that the device has no index
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
    """Whether it is a module that runs, rather than a list of others or of parameters."""
    return part is not None and not isinstance(part, (nn.ModuleList, nn.ModuleDict))


def in_buckets(module: nn.Module, work: Workload, filling: Callable[[bool], None]) -> nn.Module:
    """The module under DDP; `filling` hears when what is made are buckets."""
    from torch.nn.parallel import DistributedDataParallel

    def reduced(_, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations, and not those that are strings
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    filling(True)
    wrapped = DistributedDataParallel(module, gradient_as_bucket_view=work.bucket_views)
    filling(False)
    wrapped.register_comm_hook(None, reduced)
    wrapped.logger = SimpleNamespace(set_runtime_stats_and_log=lambda: None)  # its own warns of the device
    before = wrapped._pre_forward

    def rebuilding(*inputs: Any, **named: Any) -> Any:
        filling(True)
        try:
            return before(*inputs, **named)
        finally:
            filling(False)

    wrapped._pre_forward = rebuilding
    return wrapped
