"""The ledger at one moment: bytes per owner, in lines that add up exactly.

Model. The phase's sample gives the allocator's allocated, requested and reserved; a `wire.Ledger` read at the same
boundary gives bytes by owner. Everything else is a difference, so the sum is exact by construction:

    rounding     = allocated − requested          (without freed blocks that wait for a stream)
    unexplained  = requested − owners            (on sampled steps)
    unattributed = requested − owners known      (on the others: activations and unexplained together)
    slack        = reserved − allocated
    context      = our process's bytes as the driver counts them − reserved
    other_processes = total − free − our process's bytes   (includes what the driver itself reserves)

Bytes whose holder a census has named move to `variables` (`with_held`), in every ledger and at every peak: live, in
JSON and at an out-of-memory.

If a backend does not report `requested`, rounding is None and part of unexplained or unattributed.

The driver's lines are included only if a device reading fell between two samples with equal `reserved`, equal to the
ledger's own, and no higher `reserved_peak` in between: only then do both describe the same state.

Source: the definitions of torch.cuda.memory_stats ("allocated_bytes", "requested_bytes", "reserved_bytes").
Cost: O(1) per ledger, plus a walk over at most `READINGS_LOOKED_AT` readings.

Known limitations. On unsampled steps, owners that last from step to step come from the newest sampled ledger of the
same boundary, if they still fit into `requested`. `unexplained` is negative if owners were counted that the allocator
does not hold (say, a tensor in host memory), and is shown so. A segment released and taken again between two samples
goes unnoticed; the reading in between is then used.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from gpumon.analysis.suspects import root
from gpumon.analysis.types import OWNERS, Breakdown, GrownByHolder, Peak, Read
from gpumon.analysis.units import size
from gpumon.session.frame import HostSample, RankFrame, StepRecord
from gpumon_agent import wire

AT_FAILURE = (*(line for line in wire.LASTING if line not in ("gradients", "workspaces")), "checkpoints")
"""Owners that last from a boundary to a failure in the next step; gradients and workspaces change within it."""

READINGS_LOOKED_AT = 16
"""Newest host readings that are tried for the driver's lines."""

CLOCKS_AGREE_WITHIN_NS = 2_000_000_000


class DriverLines(msgspec.Struct, frozen=True):
    """The driver's figures for a device and our process, in a state known to be the allocator's too."""

    unix_ns: int
    reserved: int
    ours: int | None
    free: int | None
    total: int | None


def boundary(record: StepRecord, device: int) -> wire.Phase | None:
    """The sample at the end of the step's last optimizer phase; without one, the step's last sample."""
    newest: wire.Phase | None = None
    for phase in reversed(record.phases):
        if phase.device != device:
            continue
        if phase.phase == wire.OPTIMIZER:
            return phase
        newest = newest or phase
    return newest


def ledger_of(record: StepRecord, phase: wire.Phase) -> wire.Ledger | None:
    """The owners read when `phase` closed."""
    if not record.ledgers:
        return None
    for ledger in reversed(record.ledgers):
        if (
            not ledger.peak
            and ledger.device == phase.device
            and ledger.phase == phase.phase
            and ledger.index == phase.index
        ):
            return ledger
    return None


def lines(
    phase: wire.Phase, owners: wire.Ledger | None, lasting: wire.Ledger | None = None, driver: DriverLines | None = None
) -> Breakdown | None:
    """The ledger at the end of `phase`. `lasting`: the newest sampled ledger of this boundary, for unsampled steps.

    None if neither the allocator nor the owners are known.
    """
    known = owned(owners) if owners is not None else _carried(phase, lasting)
    if phase.allocated is None and not known:
        return None
    requested = requested_of(phase)
    if requested is not None and phase.requested != requested:  # how those blocks were rounded is not known
        requested = max(requested, min(sum(known.values()), phase.allocated or 0))
    rest = requested if requested is not None else phase.allocated
    left = None if rest is None else rest - sum(known.values())
    sampled = owners is not None and owners.activations is not None
    if driver is not None and driver.reserved != phase.reserved:
        driver = None
    return Breakdown(
        **known,
        unexplained=left if sampled else None,
        unattributed=None if sampled else left,
        rounding=_difference(phase.allocated, requested),
        slack=_difference(phase.reserved, phase.allocated),
        allocated=phase.allocated,
        reserved=phase.reserved,
        context=_difference(driver.ours, driver.reserved) if driver else None,
        other_processes=_others(driver) if driver else None,
        free=driver.free if driver else None,
        total=driver.total if driver else None,
    )


def peak(record: StepRecord, device: int) -> Peak | None:
    """The step's highest moment on a device: the phase with the largest `allocated_peak` (the first of equals)."""
    here = record.on(device)
    highest = wire.tallest(here)
    if highest is None or highest.allocated_peak is None or any(each.phase == wire.GRAPH_REPLAY for each in here):
        return None  # the peak within a CUDA graph replay is unknown
    unread = any(each.allocated is None for each in here)
    composition = next((entry for entry in reversed(record.ledgers) if entry.peak and entry.device == device), None)
    once = unread and bool(highest.flags & wire.BOUND)  # the peak covers everything since the previous reading
    return Peak(
        step=record.step,
        phase=None if once else highest.phase,
        index=highest.index,
        allocated=highest.allocated_peak,
        lines=None if composition is None else peak_lines(composition),
        module=None if composition is None else composition.module,
    )


def peak_lines(composition: wire.Ledger) -> Breakdown:
    """The breakdown at a peak, without reserved, slack and the driver's lines, which were not read then."""
    known = owned(composition)
    rest = composition.requested if composition.requested is not None else composition.allocated
    left = None if rest is None else rest - sum(known.values())
    return Breakdown(
        **known,
        unexplained=left if composition.activations is not None else None,
        unattributed=None if composition.activations is not None else left,
        rounding=_difference(composition.allocated, composition.requested),
        allocated=composition.allocated,
    )


def read(record: StepRecord, device: int) -> Read | None:
    """The ledger at a step's end, if its owners were read; without the driver's lines."""
    if not record.ledgers:
        return None
    end = boundary(record, device)
    owners = ledger_of(record, end) if end is not None else None
    found = lines(end, owners) if end is not None and owners is not None else None
    return None if found is None or owners is None else Read(record.step, found, owners.hidden, owners.held_by)


def with_held(
    lines: Breakdown, held: GrownByHolder | None, step: int, variables: Sequence[wire.Holder] = ()
) -> Breakdown:
    """Moves bytes that a census has named to `variables`, at the end of `step`, as far as they have no owner yet.

    They come from the left-over line, then from activations, since a kept output was once saved for backward.
    `variables`: holders that the ledger counted itself; their bytes are not counted twice.
    """
    if held is None or lines.left_over is None:
        return lines
    seen = {root(each) for each in variables}
    counted = lines.variables or 0 if any(root(each) in seen for each in held.by) else 0
    wanted = max(0, held.at(step) - counted)
    changed = {"variables": lines.variables or 0}
    for line in (lines.left_over, "activations"):
        there = getattr(lines, line) or 0
        moved = min(max(0, there), wanted)
        if moved:
            changed[line] = there - moved
            changed["variables"] += moved
            wanted -= moved
    return replace(lines, **changed) if len(changed) > 1 else lines


def peak_with_held(peak: Peak | None, held: GrownByHolder | None) -> Peak | None:
    """Uses the bytes held at the previous step's end: the step's own addition comes at the peak or after it."""
    if peak is None or peak.lines is None:
        return peak
    return msgspec.structs.replace(peak, lines=with_held(peak.lines, held, peak.step - 1))


def read_with_held(read: Read | None, held: GrownByHolder | None) -> Read | None:
    if read is None or held is None:
        return read
    lines = with_held(read.lines, held, read.step, read.held_by)
    return replace(read, lines=lines, held_by=holders(held, read.held_by))


def holders(held: GrownByHolder | None, variables: Sequence[wire.Holder]) -> tuple[wire.Holder, ...]:
    """Holders of the line `variables`: growing ones first, then the others that the ledger found."""
    growing = held.by if held is not None else ()
    named = {root(each) for each in growing}
    return (*growing, *(each for each in variables if root(each) not in named))


def at_failure(
    event: wire.Oom, owners: Mapping[str, int], total: int | None, held: GrownByHolder | None = None
) -> Breakdown:
    """The ledger when an allocation failed: `owners` from the newest ledger, the allocator's figures from the event."""
    owners = {name: nbytes for name, nbytes in owners.items() if name in AT_FAILURE}
    lines = Breakdown(
        **owners,
        unattributed=None if event.allocated is None or not owners else event.allocated - sum(owners.values()),
        slack=_difference(event.reserved, event.allocated),
        allocated=event.allocated,
        reserved=event.reserved,
        free=event.free,
        total=total or event.total,
    )
    return with_held(lines, held, event.step - 1)


def peak_text(peak: Peak) -> str:
    """A peak in one line: bytes, place, and the breakdown, largest first."""
    where = f"{peak.phase} of step {peak.step}" if peak.phase else f"step {peak.step}"
    where += f", in {peak.module}" if peak.module else ""
    head = f"{size(peak.allocated)} in {where}"
    if peak.lines is None:
        return f"{head}: not taken apart"
    parts = [(name, value) for name, value in peak.lines.known() if name in (*OWNERS, "unexplained", "rounding")]
    parts.sort(key=lambda part: -abs(part[1]))
    return f"{head}: " + ", ".join(f"{name.replace('_', ' ')} {size(value)}" for name, value in parts)


# ------------------------------------------------------------------------------------------------- the driver's side


def device_of(rank: RankFrame, index: int) -> wire.Device | None:
    for device in rank.hello.devices:
        if device.index == index:
            return device
    return None


def device_name(rank: RankFrame, index: int) -> str:
    """As torch writes it: "cuda:0", "cpu"."""
    described = device_of(rank, index)
    return described.label if described is not None else wire.device_label(rank.hello.backend or "device", index)


def reading_of(host: wire.Host | None, uuid: str | None) -> wire.DeviceReading | None:
    """The driver's reading of a device, matched by UUID only."""
    if host is None or uuid is None:
        return None
    return next((reading for reading in host.devices if reading.uuid == uuid), None)


def our_bytes(reading: wire.DeviceReading, pid: int) -> int | None:
    """Our process's bytes on the device; None if the driver does not report them."""
    if reading.processes is None:
        return None
    return next((process.bytes for process in reading.processes if process.pid == pid), None)


def driver_lines(rank: RankFrame, device: int) -> DriverLines | None:
    """The newest reading between two samples of equal `reserved`, with nothing higher in between."""
    if not rank.host_samples:
        return None
    described = device_of(rank, device)
    if described is None or described.uuid is None:
        return None
    steps = rank.steps
    for sample in rank.host_samples[: -READINGS_LOOKED_AT - 1 : -1]:
        reading = reading_of(sample.host, described.uuid)
        if reading is None:
            continue
        reserved = _steady_reserved(rank, steps, device, sample, reading)
        if reserved is not None:
            ours = our_bytes(reading, rank.hello.pid)
            return DriverLines(sample.unix_ns, reserved, ours, reading.free, reading.total)
    return None


def _steady_reserved(
    rank: RankFrame, steps: Sequence[StepRecord], device: int, sample: HostSample, reading: wire.DeviceReading
) -> int | None:
    """`reserved` during the reading, if all samples around it agree and no peak between them was higher."""
    began, ended = _read_between(rank, sample, reading)
    at = bisect_right(steps, began, key=_closed_at)  # steps before `at` had closed when the reading began
    before: wire.Phase | None = None
    for phase in _phases_from(rank, steps, max(0, at - 1), device):
        if phase.t_ns <= began:
            before = phase
            continue
        if before is None or before.reserved is None or phase.reserved != before.reserved:
            return None
        if phase.reserved_peak is not None and phase.reserved_peak > before.reserved:
            return None
        if phase.t_ns >= ended:
            return before.reserved
    return None


def reserved_around(rank: RankFrame, device: int) -> int | None:
    """The least `reserved` in the samples before, during and after the newest reading; None unless it lies between two.

    The process can have at least this plus the reading's free bytes.
    """
    described = device_of(rank, device)
    if described is None or not rank.host_samples:
        return None
    sample = rank.host_samples[-1]
    reading = reading_of(sample.host, described.uuid)
    if reading is None:
        return None
    began, ended = _read_between(rank, sample, reading)
    at = bisect_right(rank.steps, began, key=_closed_at)
    before: int | None = None
    least: int | None = None
    for phase in _phases_from(rank, rank.steps, max(0, at - 1), device):
        if phase.reserved is None:
            continue
        if phase.t_ns <= began:
            before = phase.reserved
            continue
        if before is None:
            return None
        least = min(before if least is None else least, phase.reserved)
        if phase.t_ns >= ended:
            return least
    return None


def _phases_from(rank: RankFrame, steps: Sequence[StepRecord], at: int, device: int) -> Iterator[wire.Phase]:
    for index in range(at, len(steps)):
        yield from steps[index].on(device)
    if rank.open_step is not None:
        yield from rank.open_step.on(device)


def _read_between(rank: RankFrame, sample: HostSample, reading: wire.DeviceReading) -> tuple[int, int]:
    """The interval of the agent's monotonic clock in which the driver was read.

    Viewer and agent on one machine share that clock. If it is too far from the reading's arrival (another time
    namespace), the arrival is used instead.
    """
    clock = rank.hello.clock
    arrived = clock.monotonic_ns + (sample.unix_ns - clock.unix_ns)
    began, ended = reading.began_ns, reading.ended_ns
    if began is None or ended is None or not 0 <= arrived - ended <= CLOCKS_AGREE_WITHIN_NS:
        return arrived, arrived
    return began, ended


def _closed_at(record: StepRecord) -> int:
    return record.closed.t_ns if record.closed is not None else record.phases[-1].t_ns


# ----------------------------------------------------------------------------------------------------------- helpers


def owned(ledger: wire.Ledger) -> dict[str, int]:
    """The ledger's known lines that name an owner."""
    return _named(ledger, OWNERS)


def _named(ledger: wire.Ledger, names: Sequence[str]) -> dict[str, int]:
    return {name: value for name in names if (value := getattr(ledger, name)) is not None}


def _carried(phase: wire.Phase, lasting: wire.Ledger | None) -> dict[str, int]:
    if lasting is None:
        return {}
    carried = _named(lasting, wire.LASTING)
    requested = requested_of(phase)
    limit = requested if requested is not None else phase.allocated
    return carried if limit is None or sum(carried.values()) <= limit else {}


def requested_of(phase: wire.Phase) -> int | None:
    """Bytes requested by live tensors. torch still counts freed blocks that wait for a stream as requested; active −
    allocated is their size, rounded.
    """
    if phase.requested is None or (not phase.requested and phase.allocated):  # cudaMallocAsync does not count it
        return None
    if phase.active is None or phase.allocated is None or phase.active <= phase.allocated:
        return phase.requested
    return max(0, phase.requested - (phase.active - phase.allocated))


def _difference(more: int | None, less: int | None) -> int | None:
    return None if more is None or less is None else more - less


def _others(driver: DriverLines) -> int | None:
    if driver.total is None or driver.free is None or driver.ours is None:
        return None
    return driver.total - driver.free - driver.ours
