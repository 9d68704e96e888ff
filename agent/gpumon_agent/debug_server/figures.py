"""What a rank tells the page, read in a thread of torch's worker server.

It reads what the agent has already: no call into CUDA, no lock, nothing that the training waits for.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from gpumon_agent import wire
from gpumon_agent._version import __version__
from gpumon_agent.logged import PEAK, Logged, Seen
from gpumon_agent.registry import REGISTRY
from gpumon_agent.units import torch_size
from gpumon_agent.wire.base import TEXT_CHARS_MAX, Bytes, Few, SignedBytes, StepNumber, Text

ENDPOINT = "gpumon"


class DeviceFigures(msgspec.Struct, frozen=True):
    """One device of a rank. Bytes; None if unknown."""

    device: Text  # cuda:0
    name: Text = ""
    peak: Bytes | None = None  # highest allocated, and below those of the phases
    forward_peak: Bytes | None = None
    backward_peak: Bytes | None = None
    optimizer_peak: Bytes | None = None
    allocated: Bytes | None = None  # newest
    reserved: Bytes | None = None
    limit: Bytes | None = None  # the device's total, or the share of it that the process allows itself
    next_peak: Bytes | None = None  # of the newest outlook
    headroom: SignedBytes | None = None
    verdict: Text = ""


class RankFigures(msgspec.Struct, frozen=True):
    """A rank's answer."""

    agent: Text | None  # its version; None: no agent in the process
    step: StepNumber | None = None
    phase: Text = ""
    phase_s: Annotated[float, Meta(ge=0, le=1e11)] | None = None  # since the phase began
    devices: Annotated[tuple[DeviceFigures, ...], Meta(max_length=64)] = ()
    notes: Few = ()


def answer(figures: Logged, request: Any, response: Any) -> None:
    """A handler of torch's worker server. If it fails, torch answers with the error."""
    response.set_content(msgspec.json.encode(_rank(figures)), "application/json")
    response.set_status(200)


def _rank(figures: Logged) -> RankFigures:
    agent = REGISTRY.agent
    if agent is None or agent.pid != os.getpid():
        return RankFigures(agent=None)
    step, phase, since_ns = agent.phases.where()
    devices, limits, seen = agent.devices.found, agent.devices.limits.copy(), figures.devices.copy()
    names = {(device.kind, device.index): device.name for device in devices}
    return RankFigures(
        agent=__version__,
        step=step,
        phase=phase,
        phase_s=max(0.0, (time.monotonic_ns() - since_ns) / 1e9),
        devices=tuple(
            _device(str(where), names.get((where.type, index), ""), limits.get(index), seen.get(index) or Seen())
            for _, index, where in agent.phases.readers or ()
        ),
        notes=(
            *_out_of_memory(seen),
            *(
                wire.clean(f"{off.part} is switched off: {off.error}", TEXT_CHARS_MAX)
                for off in agent.guard.off.copy().values()
            ),
        ),
    )


def _device(device: str, name: str, limit: int | None, seen: Seen) -> DeviceFigures:
    peaks, outlook = seen.peaks, seen.outlook
    return DeviceFigures(
        device=device,
        name=name,
        peak=peaks.get(PEAK),
        forward_peak=peaks.get(wire.FORWARD),
        backward_peak=peaks.get(wire.BACKWARD),
        optimizer_peak=peaks.get(wire.OPTIMIZER),
        allocated=seen.allocated,
        reserved=seen.reserved,
        limit=limit,
        next_peak=None if outlook is None else outlook.next_peak,
        headroom=None if outlook is None else outlook.headroom,
        verdict="" if outlook is None else outlook.verdict,
    )


def _out_of_memory(seen: dict[int, Seen]) -> Iterator[str]:
    for each in seen.values():
        if (oom := each.oom) is not None:
            where = f"step {oom.step} in {oom.phase}, device {oom.device}"
            yield f"out of memory at {where}: {torch_size(oom.requested)} requested"
