"""Which steps of a long run are kept. The helper and every viewer use this one function.

Of the steps up to `Thinned.until` these are kept:
  - the first `BEGINNING_STEPS` of the run;
  - the first `ALIKE_STEPS` of each kind of step (which optimizers stepped, how many dimensions each input had), and the
    first of that kind with another batch size: what the estimate learns from;
  - on each device the step with the highest peak;
- one of every `Thinned.stride` steps: the newest whose owners were read, else the newest.

Thinning an already thinned past gives the same steps as thinning the whole, so doing it repeatedly, elsewhere, or later
with a longer stride ends with the same steps. A step with more than `PHASES_MAX` phases is dropped: it may not fit a
frame.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from .stream import Step

BEGINNING_STEPS = 16
KINDS_MAX = 8  # alternating steps: a GAN's discriminator and generator, an actor every other step
ALIKE_STEPS = 3
PHASES_MAX = 256

BEATS_MAX = 256

Kind = tuple[tuple[int, ...], tuple[int, ...]]


class Facts(NamedTuple):
    """What decides whether a step is kept."""

    step: int
    kind: Kind
    input_bytes: int | None
    skipped: bool  # by the scaler
    sampled: bool  # owners were read in it
    phases: int
    peaks: tuple[tuple[int, int], ...]  # (device, highest allocated_peak)


def facts(step: Step, phases: int, peaks: Iterable[tuple[int, int | None]], ledgers: int) -> Facts:
    """Facts of a closed step. `phases`, `ledgers`: their number; `peaks`: (device, `allocated_peak`) of each phase.
    The quiet steps before it count as its own."""
    highest: dict[int, int] = {}
    quiet = ((each.device, each.allocated_peak) for each in step.quiet_peaks)
    for device, peak in chain(peaks, quiet):
        if peak is not None and peak > highest.get(device, -1):
            highest[device] = peak
    kind = step.optimizers, tuple(len(shape) for shape in step.input_shapes)
    return Facts(step.step, kind, step.input_bytes, step.skipped, ledgers > 0, phases, tuple(highest.items()))


def kept(steps: Iterable[Facts], stride: int) -> set[int]:
    """Numbers of the steps to keep. `steps`: in order, the older ones already thinned by this function."""
    found: set[int] = set()
    begun = 0
    of_kind: dict[Kind, list[int | None]] = {}  # the sizes of its first batches
    highest: dict[int, tuple[int, int]] = {}  # by device: peak, step
    parts: dict[int, tuple[bool, int]] = {}
    for each in steps:
        if each.phases > PHASES_MAX:
            continue
        number = each.step
        if begun < BEGINNING_STEPS:
            begun += 1
            found.add(number)
        if not each.skipped and tells(of_kind.get(each.kind), len(of_kind), each.input_bytes):
            of_kind.setdefault(each.kind, []).append(each.input_bytes)
            found.add(number)
        for device, peak in each.peaks:
            if peak > highest.get(device, (-1, 0))[0]:
                highest[device] = peak, number
        part = number // stride
        parts[part] = max(parts.get(part, (False, number)), (each.sampled, number))
    found.update(number for _, number in highest.values())
    found.update(number for _, number in parts.values())
    return found


def tells(first: Sequence[int | None] | None, kinds: int, input_bytes: int | None) -> bool:
    """Whether a step is among the first of its kind, or the first of another size: what the estimate learns from.

    `first`: batch sizes kept of its kind, None for a new kind; `kinds`: number of known kinds.
    """
    if first is None:
        return kinds < KINDS_MAX
    if len(first) != ALIKE_STEPS:
        return len(first) < ALIKE_STEPS
    return len(set(first)) == 1 and None not in first and input_bytes not in (None, *first)


def beat_is_kept(number: int, newest: int) -> bool:
    """Whether a heartbeat is kept: the newest `BEATS_MAX`, and every nth older one, as many at most."""
    older = newest - BEATS_MAX
    stride = 1
    while older // stride > BEATS_MAX:
        stride *= 2
    return number > older or number % stride == 0
