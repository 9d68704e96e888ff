"""Findings on free memory: near-capacity, oom-ahead, allocator-retries, fragmentation, other-process."""

from __future__ import annotations

from gpumon.analysis import units
from gpumon.analysis.findings.look import Evidence, Look
from gpumon.analysis.rules import FRAGMENTATION, NEAR_CAPACITY, OOM_AHEAD, OTHER_PROCESS
from gpumon.analysis.types import KEPT, Forecast
from gpumon.session.frame import StepRecord
from gpumon_agent import wire


def near_capacity(look: Look) -> Evidence | None:
    rule, forecast = NEAR_CAPACITY, look.forecast
    if forecast is None or forecast.headroom is None or not look.capacity:
        return None
    if forecast.learnt_from < rule.least_steps_learnt:
        return None
    if forecast.headroom >= rule.headroom_share_of_device * look.capacity:
        return None
    return Evidence(
        f"{'at most ' if forecast.headroom_at_most else ''}{units.size(max(0, forecast.headroom))} left at the next "
        f"peak{look.where}, "
        f"of {units.size(look.capacity)} on the device",
        max(0, forecast.headroom),
        _smaller_peak(forecast),
    )


def oom_ahead(look: Look) -> Evidence | None:
    rule, forecast = OOM_AHEAD, look.forecast
    said = _said_of_now(look)
    if said is not None:
        return said
    if forecast is None or forecast.headroom is None or forecast.learnt_from < rule.least_steps_learnt:
        return None
    steps = forecast.steps_to_oom
    kept = forecast.growth == KEPT
    far = rule.steps_to_oom if kept else rule.steps_to_oom_by_batch
    fits_as_before = forecast.next_peak <= rule.as_before * forecast.highest and forecast.headroom >= 0
    if forecast.growth is not None and steps is not None and steps <= far and (kept or not fits_as_before):
        return Evidence(
            f"the peak grows by {units.size(forecast.bytes_per_step)} a step{look.where} and will soon not fit",
            forecast.headroom,
            "find what is kept from step to step: a loss or an output stored with its graph, a growing list"
            if kept
            else _smaller_peak(forecast),
            bytes_per_step=forecast.bytes_per_step,
        )
    if fits_as_before or forecast.p_oom is None or forecast.p_oom < rule.p_oom:
        return None
    return Evidence(
        f"the next iteration needs {units.size(forecast.next_peak)} ({units.size(forecast.low)}–"
        f"{units.size(forecast.high)}) in {forecast.phase}{look.where}: "
        f"{units.percent(forecast.p_oom)} likely not to fit",
        forecast.headroom,
        _smaller_peak(forecast),
    )


def _said_of_now(look: Look) -> Evidence | None:
    """Evidence from the agent's forecast for the batch now in forward, whose shapes are known."""
    if not look.rank.outlooks:
        return None
    outlook = next((each for each in look.rank.outlooks if each.device == look.device), None)
    if outlook is None or outlook.verdict != wire.OOM_AHEAD or outlook.step <= look.record.step:
        return None
    batch = f" with its batch of {units.shapes(outlook.input_shapes)}" if outlook.input_shapes else ""
    headroom = _headroom(look, outlook)
    missing = f": {units.size(-headroom)} too much" if headroom is not None and headroom < 0 else ""
    return Evidence(
        f"step {units.count(outlook.step)}{batch} needs {units.size(outlook.next_peak)}"
        f"{units.between(outlook.low, outlook.high)} in {outlook.phase}{look.where}{missing}",
        headroom,
        "skip or cut such a batch: gpumon_agent.on_outlook(function) is called before its forward",
        since=outlook.step,
        at_once=True,
    )


def _headroom(look: Look, outlook: wire.Outlook) -> int | None:
    """The agent's headroom; after the allocation failed, no more than that failure reported.

    The agent may have known only the device's total, which includes the CUDA context.
    """
    failed = look.rank.oom
    if failed is None or (failed.device, failed.step) != (outlook.device, outlook.step):
        return outlook.headroom
    if failed.free is None or failed.reserved is None:
        return outlook.headroom
    left = failed.free + failed.reserved - outlook.next_peak
    return left if outlook.headroom is None else min(left, outlook.headroom)


def _smaller_peak(forecast: Forecast) -> str:
    if forecast.phase == wire.OPTIMIZER:
        return "the optimizer step makes the peak, so a smaller batch does not help: fused=True, or foreach=False"
    if forecast.max_batch_factor is not None and 0 < forecast.max_batch_factor < 1:
        return (
            f"at most {forecast.max_batch_factor:.2f} times this batch fits; or activation checkpointing, or autocast"
        )
    return "a smaller batch with gradient accumulation, activation checkpointing, or autocast"


def allocator_retries(look: Look) -> Evidence | None:
    newest = retries(look.record, look.device)
    if newest is None or look.retries_before is None or newest <= look.retries_before:
        return None
    again = newest - look.retries_before
    return Evidence(
        f"cudaMalloc failed and was retried after the cache was emptied ({units.count(again)} times since the "
        f"previous check{look.where}): memory is almost full, and each retry is slow",
        look.figures.reserved if look.figures is not None else None,
        "lower the peak"
        if _expandable(look)
        else "lower the peak, or set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True against fragmentation",
    )


def _expandable(look: Look) -> bool:
    settings = look.rank.hello.settings
    return any("expandable_segments:true" in value.replace(" ", "").lower() for value in settings.values())


def retries(record: StepRecord, device: int) -> int | None:
    """`num_alloc_retries` at the step's last sample on a device."""
    for phase in reversed(record.phases):
        if phase.device == device and phase.retries is not None:
            return phase.retries
    return None


def other_process(look: Look) -> Evidence | None:
    reading = look.reading
    if reading is None or reading.processes is None or look.rank.status != "live":
        return None
    if all(process.pid != look.rank.hello.pid for process in reading.processes):
        return None  # in a container the driver's pids differ from ours: the owners are unknown
    children = set()
    if look.rank.host is not None:
        children = {child.pid for process in look.rank.host.processes for child in process.children}
    others = [p for p in reading.processes if p.pid not in look.our_pids and p.pid not in children]
    held = sum(process.bytes or 0 for process in others)
    if held < OTHER_PROCESS.least_bytes:
        return None
    named = ", ".join(f"{p.name or 'pid'} {p.pid}" for p in sorted(others, key=lambda p: -(p.bytes or 0))[:3])
    return Evidence(
        f"other processes hold memory on this device{look.where}: {named}",
        held,
        "end them, or choose another device with CUDA_VISIBLE_DEVICES",
    )


def fragmentation(look: Look) -> Evidence | None:
    rule, found = FRAGMENTATION, look.standing.fragmented
    if found is None:
        return None
    unused = found.reserved - found.highest
    if unused < max(rule.least_bytes, rule.unused_share_of_reserved * found.reserved):
        return None
    slack = next((growth for growth in look.growth if growth.figure == "slack" and growth.growing), None)
    sizes = "run the largest batch first, or round lengths up to a few sizes"
    grows = f", growing by {units.size(round(slack.per_step))} a step" if slack and slack.per_step else ""
    return Evidence(
        f"{units.size(found.reserved)} reserved{look.where}, yet never more than {units.size(found.highest)} of it "
        f"allocated at once: the cached blocks do not fit the requests{grows}",
        unused,
        sizes if _expandable(look) else f"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; {sizes}",
        bytes_per_step=round(slack.per_step) if slack and slack.per_step else None,
        since=found.step,
    )
