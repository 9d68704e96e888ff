"""The verdict: capacity, fragmentation, another process, a limit, one oversized request, or a leak, from the figures.

Model. Before PyTorch raises, it has given back every segment that is wholly free and tried again. So what is reserved
and not allocated then (slack) lies in segments that are partly in use. With r requested, S slack and F free,

    r > total                    oversized: no arrangement holds it
    F ≥ r, own limit is set      limit: the driver would have given it
    F ≥ r                        refused: a limit outside PyTorch, or memory was freed before F was read
    S + F ≥ r                    fragmentation: enough is unused, in pieces that are too small. Not if S < r and less
                                 than `CRUMBS` of the device would be left (then it is full), and not if the step's
                                 forecast peak is above allocated + S + F (then this request was not its last)
    S + F + others ≥ r           other-process: theirs is what is missing
    else                         capacity: r − S − F is missing even without fragmentation

Each figure is an interval (gpumon.analysis.diagnosis.figures). For fragmentation, a reason says so if the verdict
depends on the rounding. Old messages do not name other processes: bytes that are neither free nor reserved count as
this process's CUDA context up to CONTEXT_MAX, and as another process's above it. The step's forecast peak is known for
a watched run only: the agent's forecast when the batch entered forward. The lower end of its interval is compared;
other processes are checked for the missing bytes first. A leak needs a watched run or a recording: the growth per step.
It takes precedence over the last three verdicts if the leaked bytes exceed both the slack and the shortfall, so that
the request would have succeeded without it.
"""

from __future__ import annotations

import msgspec

from gpumon.analysis import units
from gpumon.analysis.diagnosis.figures import Figure, known
from gpumon.analysis.diagnosis.message_parser import OomMessage
from gpumon.analysis.types import Finding
from gpumon_agent.units import torch_size as shown

CONTEXT_MAX = 2 << 30
"""A CUDA context with its libraries takes 0.3 to 1.8 GiB; more outside PyTorch means another process."""

CRUMBS = 0.02
"""A device with less than this share left counts as full."""

ZERO = known(0)


class Cause(msgspec.Struct, frozen=True):
    verdict: str
    sentence: str
    reasons: tuple[str, ...] = ()
    missing: Figure | None = None


class LeakEvidence(msgspec.Struct, frozen=True):
    """Growth per step in bytes, the number of steps it lasted, and findings that name the holders."""

    bytes_per_step: int
    steps: int
    named: tuple[Finding, ...] = ()  # most bytes first


class PredictedPeak(msgspec.Struct, frozen=True):
    """The step's forecast peak when its batch entered forward, and the lower end of its interval, in bytes."""

    peak: int
    low: int
    inputs: tuple[tuple[int, ...], ...] = ()
    """shapes of that batch"""


def find_cause(message: OomMessage, growth: LeakEvidence | None = None, foreseen: PredictedPeak | None = None) -> Cause:
    """The verdict on a message; `growth` if there is a trend, `foreseen` if the step's peak was forecast."""
    if message.kind != "allocator":
        return _without_figures(message)
    requested = message.requested
    if requested is None:
        return Cause("unknown", f"{_place(message)} is full; the message does not give the size of the request.")
    if "per_process_memory_fraction" in message.text:
        return Cause(
            "limit",
            f"This process's own limit: the {shown(requested.middle)} would exceed its memory fraction.",
            ("torch.cuda.set_per_process_memory_fraction sets it; the device may have more.",),
        )
    if message.total is not None and requested.low > message.total.high:
        return _oversized(message, requested, message.total)
    limited = _limited(message, requested)
    if limited is not None:
        return limited
    if message.allocated is None or (message.free is None and message.slack is None):
        return Cause("unknown", f"{shown(requested.middle)} could not be allocated; the message is cut off.")
    return _by_room(message, requested, message.slack or ZERO, message.free or ZERO, growth, foreseen)


def _oversized(message: OomMessage, requested: Figure, total: Figure) -> Cause:
    side = round((requested.middle / 4) ** 0.5)
    return Cause(
        "oversized",
        f"One request too large: {shown(requested.middle)} can never fit on {shown(total.middle)}.",
        (
            f"In fp32 it is {requested.middle // 4:,} elements, as many as a square of {side:,} × {side:,}: two "
            "shapes that were broadcast against each other, pairwise distances, an outer product, or a wrong "
            "batch or length.",
        ),
        requested - total,
    )


def _limited(message: OomMessage, requested: Figure) -> Cause | None:
    allowed = message.allowed
    if allowed is None:
        return None
    if message.backend == "mps" and message.process is not None:
        left = allowed - message.process
        return Cause(
            "limit" if left.low < requested.high else "fragmentation",
            f"The limit of the MPS backend: {shown(requested.middle)} requested, {shown(left.middle)} left of "
            f"{shown(allowed.middle)}.",
            ("The limit is a share of what macOS recommends, not the whole memory of the machine.",),
            requested - left,
        )
    slack, free = message.slack or ZERO, message.free or ZERO
    if free.high < requested.low or slack.low >= requested.high:
        return None
    return Cause(
        "limit",
        f"This process's own limit: {shown(allowed.middle)} allowed, {shown(free.middle)} free on the device.",
        (
            f"Reserved and requested together are above the {shown(allowed.middle)} that "
            "torch.cuda.set_per_process_memory_fraction leaves to this process.",
            f"The device itself still has {shown(free.middle)} free.",
        ),
        requested - slack - (allowed - (message.reserved or ZERO)),
    )


def _by_room(
    message: OomMessage,
    requested: Figure,
    slack: Figure,
    free: Figure,
    growth: LeakEvidence | None,
    foreseen: PredictedPeak | None,
) -> Cause:
    available = slack + free
    missing = requested - available
    if message.allowed is None and free.low >= requested.high:
        return Cause(
            "refused",
            f"Refused although free: {shown(requested.middle)} requested, {shown(free.middle)} free on the device.",
            (
                "Either a limit outside PyTorch applies (a container, MIG, the share Windows or WSL gives a process, "
                "the part of an APU's memory set aside for graphics), or another process freed memory after the "
                "failure and before the message.",
            ),
        )
    stayed = 0 if growth is None else growth.bytes_per_step * growth.steps
    if growth is not None and stayed > max(slack.middle, missing.middle, 1):
        return _leaked(growth, requested, available, missing)
    if available.high >= requested.low:
        if (
            foreseen is not None
            and message.allocated is not None
            and foreseen.low > (message.allocated + available).high
        ):
            whole, needed = message.allocated + available, known(foreseen.peak)
            return _others(message, needed, whole, needed - whole) or _foreseen(foreseen, whole, requested, available)
        full = message.total is not None and (available - requested).middle < CRUMBS * message.total.middle
        if not full or slack.high >= requested.low:
            return _fragmented(message, requested, slack, free, sure=available.low >= requested.high)
        return Cause(
            "capacity",
            f"Capacity: the device is full; {shown(requested.middle)} requested, "
            f"{shown(available.middle)} left in pieces.",
            (
                f"Free on the device {shown(free.middle)}, reserved but unallocated {shown(slack.middle)}: just enough "
                f"if it were one piece, with {shown((available - requested).middle)} left for everything after it.",
            ),
            missing,
        )
    return _others(message, requested, available, missing) or Cause(
        "capacity",
        f"Capacity: {shown(requested.middle)} requested, {shown(available.middle)} left: "
        f"{shown(missing.middle)} too little.",
        _capacity_reasons(message, slack, free, missing),
        missing,
    )


def _leaked(growth: LeakEvidence, requested: Figure, available: Figure, missing: Figure) -> Cause:
    each, stayed = growth.bytes_per_step, growth.bytes_per_step * growth.steps
    return Cause(
        "leak",
        f"A leak: {shown(each)} more stay allocated with every step, "
        + (f"held by `{growth.named[0].holder}`." if growth.named else "until the device is full."),
        (
            *(_held(finding) for finding in growth.named),
            f"Over {growth.steps:,} steps that is {shown(stayed)} that was not freed. "
            f"{shown(requested.middle)} was requested, {shown(available.middle)} was left.",
        ),
        missing,
    )


def _held(finding: Finding) -> str:
    made = f", made at {finding.where}" if finding.where else ""
    held = f"held {shown(finding.bytes or 0)} when last counted"
    return f"`{finding.holder}` {held}{made}, growing since step {units.count(finding.step)}."


def _foreseen(foreseen: PredictedPeak, whole: Figure, requested: Figure, available: Figure) -> Cause:
    missing = known(foreseen.peak) - whole
    shapes = units.shapes(foreseen.inputs)
    return Cause(
        "capacity",
        f"Capacity: this batch needs {shown(foreseen.peak)}, and {shown(whole.middle)} is all there is: "
        f"{shown(missing.middle)} too little.",
        (
            f"Forecast from earlier steps when the batch{f' of {shapes}' if shapes else ''} entered forward. The "
            f"{shown(requested.middle)} is only the request that failed: the {shown(available.middle)} unused, in "
            "pieces, would not have been enough for the peak.",
        ),
        missing,
    )


def _capacity_reasons(message: OomMessage, slack: Figure, free: Figure, missing: Figure) -> tuple[str, ...]:
    reasons = [
        f"Free on the device {shown(free.middle)}, reserved but unallocated {shown(slack.middle)}: even if all of it "
        f"lay in one piece, {shown(missing.middle)} would be missing. Fragmentation is not the cause."
    ]
    outside = _outside(message)
    if outside is not None and outside.middle > 0:
        whose = "as much as a CUDA context" if outside.low <= CONTEXT_MAX else "contexts, libraries, other processes"
        reasons.append(f"In use outside PyTorch's allocator {shown(outside.middle)}: {whose}.")
    return tuple(reasons)


def _fragmented(message: OomMessage, requested: Figure, slack: Figure, free: Figure, *, sure: bool) -> Cause:
    unused = slack + free
    total, outside = message.total, _outside(message)
    speaks_for = (
        f"For fragmentation: {shown(slack.middle)} is reserved but unallocated. PyTorch releases every segment that is "
        f"completely free before it raises, so this lies between live tensors, in pieces smaller than "
        f"{shown(requested.low)}. With the {shown(free.middle)} free on the device, "
        f"{shown(unused.middle)} is unused, {unused.middle / max(1, requested.middle):.1f} times the request."
    )
    against = (
        f"For capacity: the {shown(free.middle)} free on the device is {shown((requested - free).middle)} too little"
    )
    if message.allocated is not None and total is not None:
        left = total - message.allocated - (outside or ZERO) - requested
        against += (
            f", and {shown(message.allocated.middle)} of {shown(total.middle)} is allocated. Without gaps "
            f"this request would leave {shown(left.middle)} for later ones; if the peak is higher by more than that, "
            "the cause is capacity."
        )
    else:
        against += "."
    doubt = () if sure else ("The figures are rounded: it is just enough, or just too little.",)
    return Cause(
        "fragmentation",
        f"Fragmentation: {shown(unused.middle)} is unused, but in no piece of {shown(requested.middle)}.",
        (speaks_for, against, *doubt),
        ZERO,
    )


def _others(message: OomMessage, requested: Figure, available: Figure, missing: Figure) -> Cause | None:
    if message.others:
        held = ZERO
        for _, each in message.others:
            held = held + each
        if held.high >= missing.low:
            names = ", ".join(f"{pid} ({shown(each.middle)})" for pid, each in message.others)
            return Cause(
                "other-process",
                f"Another process: without its {shown(held.middle)} the {shown(requested.middle)} would fit.",
                (f"On the same device: process {names}.", f"Left for this one: {shown(available.middle)}."),
                missing,
            )
        return None
    outside = _outside(message)
    if outside is None or message.process is not None or outside.low - CONTEXT_MAX < missing.low:
        return None
    return Cause(
        "other-process",
        f"Another process: {shown(outside.middle)} of the device is neither free nor PyTorch's.",
        (
            f"A CUDA context takes up to {shown(CONTEXT_MAX)}; the rest belongs to another process (nvidia-smi names "
            "it) or to a library in this one.",
        ),
        missing,
    )


def _outside(message: OomMessage) -> Figure | None:
    """Bytes of the device neither free nor reserved by PyTorch in this process."""
    if message.total is None or message.free is None or message.reserved is None:
        return None
    return message.total - message.free - message.reserved


def _place(message: OomMessage) -> str:
    return "The device" if message.device is None else f"Device {message.device}"


# --------------------------------------------------------------------------------------- messages without figures


def _without_figures(message: OomMessage) -> Cause:
    requested = shown(message.requested.middle) if message.requested is not None else "its request"
    if message.kind == "overflow":
        return Cause(
            "oversized",
            "One request too large: more than 1 EiB, a size that was computed wrongly.",
            ("A negative or overflowed size: look at the shape that is computed at this line.",),
        )
    if message.kind == "host":
        return Cause(
            "host",
            f"The machine's memory, not the GPU's: {message.source} could not get {requested}.",
            ("Tensors on the CPU, a data set held in memory, or a checkpoint loaded there.",),
        )
    if message.kind == "shared":
        return Cause(
            "host",
            "Shared memory is full: DataLoader workers pass their batches through /dev/shm.",
            ("A container has 64 MiB of it by default.",),
        )
    if message.kind in ("worker", "killed"):
        who = "A DataLoader worker" if message.kind == "worker" else "The process"
        return Cause(
            "host",
            f"{who} was killed: most likely the machine ran out of memory, not the GPU.",
            ("The kernel ends the largest process when memory runs out; `dmesg | grep -i oom` shows it.",),
        )
    if message.sure:
        return Cause(
            "unknown",
            f"{message.source} could not get device memory; its message names no figures.",
            (
                "Libraries and the driver take memory beside PyTorch's allocator (handles, contexts, workspaces): "
                "they cannot use what PyTorch has reserved.",
            ),
        )
    return Cause(
        "unknown",
        f"{message.source} failed in a way that often, not always, means that memory ran out.",
        ("If nvidia-smi shows the device nearly full at that moment, it did.",),
    )
