"""Reports an out-of-memory to viewers and to disk, before the exception, in the thread that failed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from gpumon_agent import environment, source_lines, wire
from gpumon_agent.attribution import workspaces
from gpumon_agent.guard import Guard
from gpumon_agent.oom import failure_site, memory_viz, report_file

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

_OWNERS = (
    "allocated", "requested", "reserved", "weights", "buffers", "gradients", "optimizer", "buckets", "inputs",
    "activations", "workspaces", "checkpoints",
)  # fmt: skip


SNAPSHOT = "GPUMON_OOM_SNAPSHOT"
"""1: write a snapshot of the allocator beside each report"""


class OomReporter:
    """Made in the training thread. `models`, `ledgers`, `groups` (of parameters) are called at each out-of-memory.

    `annotated` adds the phases to the annotations of a snapshot.
    """

    def __init__(
        self,
        guard: Guard,
        notice: Callable[[str], None],
        hello: Callable[[], wire.Hello],
        models: Callable[[], Sequence[tuple[Module, wire.Model | None]]],
        ledgers: Callable[[], Mapping[int, wire.Ledger]],
        groups: Callable[[], Mapping[int, int]],
        annotated: Callable[[list[dict[str, Any]], int], list[dict[str, Any]]],
    ) -> None:
        self._hello = hello
        self._models = models
        self._ledgers = ledgers
        self._groups = groups
        self._annotated = annotated
        self._notice = notice
        self._training_thread = threading.get_ident()
        self._box = report_file.ReportFile()
        self._complained = False
        self._scene = guard.protect("out-of-memory scene", self._look)
        self._keep = guard.protect("out-of-memory report", self._write)

    def of(self, oom: wire.Oom) -> wire.Oom:
        """Adds all details that can be read. Those that fail are left out; the event is always returned."""
        found = self._scene(oom)
        if found is None:
            return oom
        oom, seen = found
        return msgspec.structs.replace(oom, report=self._keep(oom, seen))

    def _look(self, oom: wire.Oom) -> tuple[wire.Oom, failure_site.FailureSite]:
        hello = self._hello()
        models = [model for model, _ in self._models()]
        seen = failure_site.read(models, self._training_thread)
        report = msgspec.structs.replace(
            oom,
            message=report_file.message(oom, hello.backend, _total(hello, oom.device)),
            where=None if seen.where is None else str(seen.where),
            source_line=source_lines.text(seen.where),
            module=seen.module,
            same_size=failure_site.same_size(models, oom.requested),
        )
        return report, seen

    def _write(self, oom: wire.Oom, seen: failure_site.FailureSite) -> str | None:
        path, problem = self._box.write(self._report(oom, seen))
        if problem is not None and not self._complained:
            self._complained = True
            self._notice(problem)
        if path is not None and environment.value(SNAPSHOT) == "1":
            self._snapshot(oom)
        return path

    def _snapshot(self, oom: wire.Oom) -> None:
        """Beside the report, for PyTorch's memory_viz page: all blocks, and their history if recorded."""
        rest = {**workspaces.snapshot(), **memory_viz.moment(oom.step, oom.phase)}
        rest["external_annotations"] = self._annotated(rest.get("external_annotations", []), oom.device)
        written = memory_viz.SnapshotWriter(self._box)
        for piece in memory_viz.pieces(rest.pop("segments"), rest):
            written.add(piece)
        written.end()
        self._notice(written.why or f"a snapshot of the out-of-memory: {written.path}")

    def _report(self, oom: wire.Oom, seen: failure_site.FailureSite) -> report_file.Report:
        hello = self._hello()
        ledger = self._ledgers().get(oom.device)
        models = self._models()
        groups = self._groups()
        return report_file.Report(
            unix=time.time(),
            host=hello.host,
            pid=hello.pid,
            rank=hello.rank,
            name=hello.name,
            argv=hello.argv,
            torch=hello.torch,
            backend=hello.backend,
            settings=hello.settings,
            device=oom.device,
            device_total=_total(hello, oom.device),
            step=oom.step,
            phase=oom.phase,
            requested=oom.requested,
            total=oom.total,
            free=oom.free,
            allocated=oom.allocated,
            reserved=oom.reserved,
            message=oom.message,
            where=oom.where,
            source_line=oom.source_line,
            module=oom.module,
            stack=seen.stack,
            ledger={n: v for n in _OWNERS if (v := getattr(ledger, n)) is not None} if ledger is not None else {},
            ledger_step=ledger.step if ledger is not None else None,
            ledger_phase=ledger.phase if ledger is not None else None,
            optimizers=tuple(
                report_file.Stepping(o.kind, o.foreach, o.fused, o.settings)
                for _, described in models
                if described is not None
                for o in described.optimizers
            ),
            parameters={
                wire.clean(path): report_file.Parameter(
                    _shape(each), each.element_size(), each.requires_grad, groups.get(id(each)) if groups else 0
                )
                for model, _ in models
                for path, each in model.named_parameters()
            },
        )


def _shape(parameter: Tensor) -> tuple[int, ...]:
    """Of a DTensor: its local shard."""
    local = getattr(parameter, "_local_tensor", parameter)
    return tuple(local.shape)


def _total(hello: wire.Hello, device: int) -> int | None:
    return next((each.total_bytes for each in hello.devices if each.index == device), None)
