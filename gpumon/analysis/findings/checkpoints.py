"""Findings on checkpoint loading: retained-checkpoint, checkpoint-device."""

from __future__ import annotations

from gpumon.analysis import units
from gpumon.analysis.findings.look import Evidence, Look, models
from gpumon.analysis.rules import CHECKPOINT_DEVICE, RETAINED_CHECKPOINT
from gpumon_agent import wire

GIVEN = "load_state_dict"
"""The source of tensors given to load_state_dict that no observed load returned: their file and reader are unknown."""

ON_HOST = {"torch": 'map_location="cpu"', "safetensors": 'device="cpu"'}


def retained_checkpoint(look: Look) -> tuple[Evidence, ...]:
    if not look.rank.checkpoints:
        return ()
    return tuple(_retained(look, loaded) for loaded in look.rank.checkpoints if _is_retained(look, loaded))


def _is_retained(look: Look, loaded: wire.Checkpoint) -> bool:
    rule = RETAINED_CHECKPOINT
    if loaded.device != look.device or loaded.used_step is None or loaded.foreign:
        return False
    if loaded.looked_step < loaded.used_step + rule.steps_after_use:
        return False
    return loaded.alive >= max(rule.least_bytes, rule.share_of_loaded * loaded.loaded)


def _retained(look: Look, loaded: wire.Checkpoint) -> Evidence:
    holder = loaded.holders[0] if loaded.holders else None
    weights = sum(record.model.parameter_bytes + record.model.buffer_bytes for record in models(look))
    like = ""
    if weights and abs(loaded.alive - weights) <= 0.05 * weights:
        like = ", as much as the weights"
    elif weights and loaded.alive > weights:
        like = f", {loaded.alive / weights:.1f} times the weights"
    by = f"held by `{holder.text}`" if holder else "no holder was found"
    name = holder.variable if holder else "the loaded dict"
    on_host = ON_HOST.get(loaded.source.partition(".")[0], "a load to the host")
    since = f"after it was passed to {GIVEN}" if loaded.source == GIVEN else f"since {loaded.source}"
    return Evidence(
        f"{units.size(loaded.alive)}{look.where} still alive {since}{_file(loaded)}"
        f"{_at(loaded)}{like}: {units.count(loaded.tensors)} tensors, {by}",
        loaded.alive,
        f"del {name} after load_state_dict, or {on_host}: load_state_dict copies it to the weights' device",
        holder=holder.text if holder else None,
        by=holder,
        where=loaded.where or (holder.where if holder else None),
        source_line=loaded.source_line if loaded.where or holder is None else holder.source_line,
        subject=f"load {loaded.number}",
        since=loaded.step,
    )


def checkpoint_device(look: Look) -> tuple[Evidence, ...]:
    """Reported once per load, on the rank's lowest device."""
    if not look.rank.checkpoints:
        return ()
    first = min((phase.device for phase in look.record.phases), default=look.device)
    if look.device != first:
        return ()
    foreign = (each for each in look.rank.checkpoints if each.foreign and each.source != GIVEN)
    return tuple(_elsewhere(look, each) for each in foreign if each.loaded >= CHECKPOINT_DEVICE.least_bytes)


def _elsewhere(look: Look, loaded: wire.Checkpoint) -> Evidence:
    backend = look.rank.hello.backend or "cuda"
    ours = f"{backend}:{look.device}"
    holder = loaded.holders[0] if loaded.holders else None
    still = f"{units.size(loaded.alive)} of it alive" if loaded.alive else "freed again, but the context stays"
    how = "map_location names it" if loaded.mapped else "without map_location it goes to the device it was saved from"
    after = f"; del {holder.variable} afterwards" if holder else ""
    return Evidence(
        f"{loaded.source}{_file(loaded)}{_at(loaded)} put {units.size(loaded.loaded)} on {backend}:{loaded.device}, "
        f"where {look.rank.label} trains nothing ({still}): {how}",
        loaded.alive or loaded.loaded,
        f'map_location="cpu", or map_location="{ours}"{after}',
        holder=holder.text if holder else None,
        by=holder,
        where=loaded.where,
        source_line=loaded.source_line,
        subject=f"load {loaded.number} {loaded.device}",
        since=loaded.step,
    )


def _file(loaded: wire.Checkpoint) -> str:
    return f" of {loaded.file}" if loaded.file else ""


def _at(loaded: wire.Checkpoint) -> str:
    return f" at {loaded.where}" if loaded.where else ""
