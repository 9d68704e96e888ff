"""The output of `--json`, documented in docs/json.md. Long: one function for each kind of object.

Built from wire messages, frames and reports; docs/json.schema.json fixes the fields, their order and what null means.
Bytes are ints. `t` is Unix seconds by the receiver's clock (for steps and their events: the agent's time, converted to
that clock). Unknown fields are null, never 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from gpumon.analysis import ledger
from gpumon.analysis.answer import Answer
from gpumon.analysis.diagnosis.oom_report import OomReport
from gpumon.analysis.dryrun_result import HighestPeak, Outcome
from gpumon.analysis.job import died_unix_ns
from gpumon.analysis.layers import FIGURES, LayerNode, Tree
from gpumon.analysis.own_cost import own_cost
from gpumon.analysis.reports import DeviceReport
from gpumon.analysis.types import Breakdown, Estimate, Finding, Forecast, GrownByHolder, Peak
from gpumon.export.explained import explained
from gpumon.session.frame import HostSample, ModelRecord, RankFrame, StepRecord
from gpumon_agent import wire

Object = dict[str, Any]

_LINES = Breakdown.__struct_fields__
_encoder = msgspec.json.Encoder()


def line(obj: Object) -> bytes:
    """The object as one line, newline included."""
    return _encoder.encode(obj) + b"\n"


def hello(rank: RankFrame, unix_ns: int) -> Object:
    said = rank.hello
    return {
        **_head("hello", unix_ns, rank),
        "host": said.host,
        "argv": list(said.argv),
        "torch": said.torch,
        "backend": said.backend or None,
        "devices": [{"index": d.index, "uuid": d.uuid, "name": d.name, "total": d.total_bytes} for d in said.devices],
        "world_size": said.world_size,
        "protocol": f"{said.protocol[0]}.{said.protocol[1]}",
        "local_rank": said.local_rank,
        "local_world_size": said.local_world_size,
        "node": said.node,
        "run_id": said.run_id,
        "restarts": said.restarts,
    }


def model(rank: RankFrame, record: ModelRecord, unix_ns: int) -> Object:
    said = record.model
    return {
        **_head("model", unix_ns, rank),
        "model": said.model,
        "parameters": said.parameters,
        "trainable": said.trainable,
        "by_module": [
            {
                "path": m.path,
                "kind": m.kind,
                "parameters": m.parameters,
                "bytes": m.parameter_bytes,
                "shared_with": m.shared_with,
            }
            for m in record.modules
        ],
        "optimizer": _optimizer(said.optimizers),
        "parallel": _parallel(said.parallel),
    }


def _optimizer(optimizers: tuple[wire.Optimizer, ...]) -> Object | None:
    """One object for all optimizers of a model: sums of bytes, and the settings they agree on."""
    if not optimizers:
        return None
    states = [o.state_bytes for o in optimizers]
    return {
        "kind": " + ".join(dict.fromkeys(o.kind for o in optimizers)),
        "parameters": sum(o.parameters for o in optimizers),
        "parameter_bytes": sum(o.parameter_bytes for o in optimizers),
        "state_bytes": None if None in states else sum(s for s in states if s is not None),
        "foreach": _agreed([o.foreach for o in optimizers]),
        "fused": _agreed([o.fused for o in optimizers]),
        "settings": {
            name: value
            for name, value in optimizers[0].settings.items()
            if all(o.settings.get(name) == value for o in optimizers)
        },
    }


def _agreed(values: list[bool | None]) -> bool | None:
    return values[0] if len(set(values)) == 1 else None


def _parallel(parallel: wire.Parallel | None) -> Object | None:
    if parallel is None:
        return None
    return {
        "kind": parallel.kind,
        "world_size": parallel.world_size,
        "bucket_bytes": list(parallel.bucket_bytes),
        "rebuilt": parallel.rebuilt,
        "gradient_as_bucket_view": parallel.gradient_as_bucket_view,
        "static_graph": parallel.static_graph,
        "find_unused_parameters": parallel.find_unused_parameters,
        "first_bucket_bytes": list(parallel.first_bucket_bytes),
        "comm_hook": parallel.comm_hook,
        "comm_hook_bytes": parallel.comm_hook_bytes,
        "shard_bytes": parallel.shard_bytes,
        "whole_bytes": parallel.whole_bytes,
        "unit_bytes": parallel.unit_bytes,
        "unit": parallel.unit,
        "mesh": dict(parallel.mesh),
        "communicator_bytes": None,  # NCCL allocates from the driver and reports nothing: part of `context`
    }


def step(rank: RankFrame, record: StepRecord, report: DeviceReport) -> Object:
    """A closed step on one device. Raises ValueError for an open step."""
    closed = record.closed
    if closed is None:
        raise ValueError("a step under way has no object")
    end = ledger.boundary(record, report.device)
    owners = None if end is None else ledger.ledger_of(record, end)
    return {
        **_head("step", rank.unix_ns(closed.t_ns), rank),
        "step": closed.step,
        "device": report.device,
        "duration_s": _seconds(closed.duration_ns),
        "quiet_steps": closed.quiet,
        "quiet_peak": None if (peak := wire.quiet_peak(closed, report.device)) < 0 else peak,
        "input_bytes": closed.input_bytes,
        "input_shapes": [list(shape) for shape in closed.input_shapes],
        "phases": [_phase(record, phase, report.held) for phase in record.on(report.device)],
        "device_age_s": None if report.ledger_age_s is None else round(report.ledger_age_s, 6),
        "replayed": record.replayed,
        "ledger": _lines(report.ledger),
        "ledger_peak": _peak(report.peak),
        "estimate": _estimate(report.estimate),
        "forecast": _forecast(report.forecast),
        "hidden": None if owners is None else list(owners.hidden),
        "held_by": _held_by(report.held, owners),
        "highest": None if report.highest is None else msgspec.to_builtins(report.highest),
        "agent_cost": None if (cost := own_cost(rank.heartbeat)) is None else msgspec.to_builtins(cost),
    }


def _held_by(held: GrownByHolder | None, owners: wire.Ledger | None) -> list[Object] | None:
    """Holders of the line `variables`, growing ones first."""
    if held is None and owners is None:
        return None
    return [_variable(each) for each in ledger.holders(held, owners.held_by if owners is not None else ())]


def _variable(holder: wire.Holder) -> Object:
    return {"name": holder.text, "kind": holder.kind, "where": holder.where, "tensors": holder.count}


def _phase(record: StepRecord, phase: wire.Phase, held: GrownByHolder | None) -> Object:
    owners = ledger.ledger_of(record, phase)
    obj: Object = {
        "phase": phase.phase,
        "index": phase.index,
        "duration_s": _seconds(phase.duration_ns),
        "allocated": phase.allocated,
        "allocated_peak": phase.allocated_peak,
        "reserved": phase.reserved,
        "reserved_peak": phase.reserved_peak,
        "active": phase.active,
        "inactive_split": phase.inactive_split,
        "requested": phase.requested,
        "sampled": bool(phase.flags & wire.SAMPLED),
        "inferred": bool(phase.flags & wire.INFERRED),
        "bound": bool(phase.flags & wire.BOUND),
        "skipped": bool(phase.flags & wire.SKIPPED),
    }
    if owners is not None:
        lines = ledger.lines(phase, owners)
        at = record.step if phase.phase == wire.OPTIMIZER else record.step - 1
        obj["ledger"] = _lines(None if lines is None else ledger.with_held(lines, held, at, owners.held_by))
    return obj


def layers(rank: RankFrame, tree: Tree, unix_ns: int) -> Object:
    """The own memory of every module of a model, in the model's order."""
    return {
        **_head("layers", unix_ns, rank),
        "step": tree.step,
        "model": tree.model,
        "device": tree.device,
        "by_module": [
            {"path": layer.path, "kind": layer.kind, **{name: getattr(layer.own, name) for name in FIGURES}}
            for layer in _own(tree.root)
        ],
        "elsewhere": tree.elsewhere,
    }


def _own(layer: LayerNode) -> Iterator[LayerNode]:
    if layer.own.total:
        yield layer
    for child in layer.children:
        yield from _own(child)


def finding(rank: RankFrame, found: Finding, unix_ns: int) -> Object:
    return {
        **_head("finding", unix_ns, rank),
        "code": found.code,
        "severity": found.severity,
        "step": found.step,
        "title": found.title,
        "bytes": found.bytes,
        "bytes_per_step": found.bytes_per_step,
        "holder": found.holder,
        "where": found.where,
        "source_line": found.source_line,
        "remedy": found.remedy,
        "state": found.state,
    }


def host(rank: RankFrame, sample: HostSample, our_pids: frozenset[int]) -> Object:
    """Host readings for one rank: its devices and its process."""
    reading = sample.host
    ours = next((p for p in reading.processes if p.pid == rank.hello.pid), None)
    return {
        **_head("host", sample.unix_ns, rank),
        "devices": [_device(device, our_pids) for device in reading.devices],
        "rss": ours.rss if ours is not None else None,
        "pinned": rank.heartbeat.pinned if rank.heartbeat is not None else None,
        "cpu_percent": ours.cpu_percent if ours is not None else None,
        "children": [{"pid": c.pid, "name": c.name, "rss": c.rss} for c in ours.children] if ours is not None else [],
    }


def _device(device: wire.DeviceReading, our_pids: frozenset[int]) -> Object:
    processes = None
    if device.processes is not None:
        processes = [{"pid": p.pid, "bytes": p.bytes, "ours": p.pid in our_pids} for p in device.processes]
    return {
        "uuid": device.uuid,
        "total": device.total,
        "free": device.free,
        "processes": processes,
        "utilization": device.utilization_percent,
        "temperature": device.temperature_c,
        "power": None if device.power_mw is None else device.power_mw / 1000,
    }


def outlook(rank: RankFrame, event: wire.Outlook, *, replayed: bool = False) -> Object:
    """The agent's forecast at a batch's forward."""
    return {
        **_head("outlook", rank.unix_ns(event.t_ns), rank),
        "step": event.step,
        "device": event.device,
        "input_bytes": event.input_bytes,
        "input_shapes": [list(shape) for shape in event.input_shapes],
        "phase": event.phase,
        "next_peak": event.next_peak,
        "low": event.low,
        "high": event.high,
        "headroom": event.headroom,
        "verdict": event.verdict,
        "replayed": replayed,
    }


def progress(rank: RankFrame, event: wire.Progress, *, replayed: bool = False) -> Object:
    """Where the training loop is, in its library's words."""
    return {
        **_head("progress", rank.unix_ns(event.t_ns), rank),
        "step": event.step,
        "library": event.library or None,
        "stage": event.stage or None,
        "epoch": event.epoch,
        "batch": event.batch,
        "batches": event.batches,
        "replayed": replayed,
    }


def oom(rank: RankFrame, event: wire.Oom, report: OomReport) -> Object:
    return {
        **_head("oom", rank.unix_ns(event.t_ns), rank),
        "step": event.step,
        "phase": event.phase,
        "module": event.module,
        "requested": event.requested,
        "message": event.message,
        "ledger": _lines(report.lines),
        **explained(report),
    }


def goodbye(rank: RankFrame, event: wire.Goodbye, unix_ns: int, first: RankFrame | None = None) -> Object:
    """`first`: the first rank of the job to die, as far as known."""
    last = died_unix_ns(rank)
    return {
        **_head("goodbye", unix_ns, rank),
        "reason": event.reason,
        "step": event.step,
        "phase": event.phase,
        "last_sign": None if last is None else _seconds(last),
        "detail": event.detail or None,
        "first_to_die": None if first is None else {"rank": first.hello.rank, "pid": first.hello.pid},
    }


def answer(said: Answer, unix_ns: int) -> Object:
    """The state of the whole job, not of one rank, though `who` may name one."""
    return {
        "type": "answer",
        "t": _seconds(unix_ns),
        "rank": None,
        "pid": None,
        "state": said.state,
        "what": said.what,
        "who": None if said.who is None else msgspec.to_builtins(said.who),
        "when": None if said.when is None else msgspec.to_builtins(said.when),
        "do": said.do or None,
        "evidence": list(said.evidence),
    }


def verdict(outcome: Outcome, checked: str, not_modelled: str, unix_ns: int) -> Object:
    """The last object of a dry run, about the whole job."""
    return {
        "type": "verdict",
        "t": _seconds(unix_ns),
        "rank": None,
        "pid": None,
        "fits": outcome.fits,
        "ended": outcome.ended,
        "exit_code": outcome.exit_code,
        "error": outcome.error or None,
        "steps": outcome.steps,
        "devices": [
            {
                "name": device.name,
                "capacity": device.capacity,
                "reserved": device.reserved,
                "context": device.context,
                "margin": device.margin,
            }
            for device in outcome.devices
        ],
        "peaks": [_highest(highest) for highest in outcome.highest],
        "failed": [
            {
                "rank": failed.rank,
                "device": failed.oom.device,
                "step": failed.oom.step,
                "phase": failed.oom.phase,
                "requested": failed.oom.requested,
                "allocated": failed.oom.allocated,
                "reserved": failed.oom.reserved,
                "free": failed.oom.free,
                "survived": failed.survived,
            }
            for failed in outcome.failed
        ],
        "forecast": _forecast(outcome.forecast),
        "findings": sorted({found.code for found in outcome.findings}),
        "checked": checked,
        "not_modelled": not_modelled,
    }


def _highest(highest: HighestPeak) -> Object:
    return {
        "rank": highest.rank,
        "pid": highest.pid,
        "device": highest.device,
        "step": highest.step,
        "phase": highest.phase,
        "module": highest.module,
        "allocated": highest.allocated,
        "reserved": highest.reserved,
        "ledger": _lines(highest.lines),
        "ledger_of": highest.lines_of,
        "ledger_step": highest.lines_step,
        "ledger_phase": highest.lines_phase,
    }


# ------------------------------------------------------------------------------------------------------------- parts


def _head(kind: str, unix_ns: int, rank: RankFrame) -> Object:
    return {"type": kind, "t": _seconds(unix_ns), "rank": rank.hello.rank, "pid": rank.hello.pid}


def _seconds(nanoseconds: int) -> float:
    return round(nanoseconds / 1e9, 6)


def _lines(lines: Breakdown | None) -> Object | None:
    return None if lines is None else {name: getattr(lines, name) for name in _LINES}


def _peak(peak: Peak | None) -> Object | None:
    """Null without a breakdown of the peak; `phases` has its place and height."""
    if peak is None or peak.lines is None:
        return None
    return {**(_lines(peak.lines) or {}), "phase": peak.phase, "module": peak.module}


def _estimate(estimate: Estimate | None) -> Object | None:
    return None if estimate is None else {**(_lines(estimate.lines) or {}), "peak": estimate.peak}


def _forecast(forecast: Forecast | None) -> Object | None:
    if forecast is None:
        return None
    return {
        "next_peak": forecast.next_peak,
        "low": forecast.low,
        "high": forecast.high,
        "headroom": forecast.headroom,
        "headroom_at_most": forecast.headroom_at_most,
        "p_oom": forecast.p_oom,
        "steps_to_oom": forecast.steps_to_oom,
        "steps_to_oom_low": forecast.steps_to_oom_low,
        "steps_to_oom_high": forecast.steps_to_oom_high,
        "max_batch_factor": forecast.max_batch_factor,
        "verdict": forecast.verdict,
    }
