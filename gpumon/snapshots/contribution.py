"""What one machine can add to docs/physical.md: its devices, what a context costs there, and traces as numbers."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

import msgspec

from gpumon.snapshots.model import Device, Snapshot
from gpumon.snapshots.trace import ACTIONS
from gpumon_agent._version import __version__

SETTING = "PYTORCH_CUDA_ALLOC_CONF"


class MeasuredDevice(msgspec.Struct, frozen=True):
    """As gpumon.host.context_probe tells. Bytes; None: the driver does not tell."""

    name: str
    capability: str
    total_bytes: int
    driver: str
    context_bytes: int | None
    context_after_product_bytes: int | None


class Recorded(msgspec.Struct, frozen=True):
    """A trace in the format of tests/data/traces: requested bytes by number of the block, nothing else."""

    device: int
    alloc_conf: str
    start: tuple[tuple[int, int], ...]
    events: list[tuple[int, int, int, int]]  # code (its place in `codes`), block, bytes, stream
    requested_peak: int
    requested_end: int
    allocated_end: int
    reserved_start: int
    reserved_peak: int
    reserved_end: int
    segments_end: list[int]  # bytes of each


class Contribution(msgspec.Struct, frozen=True, kw_only=True):
    format: int = 1
    gpumon: str
    torch: str | None
    python: str
    devices: tuple[MeasuredDevice, ...]
    codes: tuple[str, ...] = ACTIONS
    traces: tuple[Recorded, ...]


def contribution(devices: Iterable[MeasuredDevice], snapshots: Iterable[Snapshot]) -> Contribution:
    """Devices of snapshots without events, or whose events and blocks disagree, are left out."""
    traces = [made for each in snapshots for device in each.devices if (made := recorded(device)) is not None]
    return Contribution(
        gpumon=__version__,
        torch=_torch(),
        python=platform.python_version(),
        devices=tuple(devices),
        traces=tuple(traces),
    )


def recorded(device: Device) -> Recorded | None:
    trace = device.trace
    if trace is None or trace.recorded is None or device.lost:
        return None
    figures = msgspec.structs.asdict(trace.recorded)
    del figures["segments_end"]
    return Recorded(
        device.index,
        trace.settings.get(SETTING, ""),
        trace.start,
        list(zip(trace.codes, trace.ids, trace.bytes, trace.streams, strict=True)),
        segments_end=[segment.size for segment in device.segments],
        **figures,
    )


def _torch() -> str | None:
    try:
        return version("torch")
    except PackageNotFoundError:
        return None
