"""Which steps of a long run are kept. The helper and every viewer thin the past by this one function.

Kept of the steps up to `Thinned.until`:
  - the first `BEGINNING_STEPS` of the run;
  - the first `ALIKE_STEPS` of each kind of step (which optimizers stepped, how many dimensions each input had), and the
    first of that kind whose batch has another size: what the estimate learns from;
  - on each device the step with the highest peak;
  - of every `Thinned.stride` steps one: the newest whose owners were read, or else the newest.

What is kept of what was kept is what would have been kept of everything, so thinning again and again, or by others, or
with a longer stride later, ends with the same steps. A step with more than `PHASES_MAX` phases is not kept: it may not
fit a frame.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from .stream import Step

BEGINNING_STEPS = 16
KINDS_MAX = 8
ALIKE_STEPS = 3
PHASES_MAX = 256

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
    """Of one closed step: how many phases and ledgers it has, and device and `allocated_peak` of each phase."""
    highest: dict[int, int] = {}
    for device, peak in peaks:
        if peak is not None and peak > highest.get(device, -1):
            highest[device] = peak
    kind = step.optimizers, tuple(len(shape) for shape in step.input_shapes)
    return Facts(step.step, kind, step.input_bytes, step.skipped, ledgers > 0, phases, tuple(highest.items()))


def kept(steps: Iterable[Facts], stride: int) -> set[int]:
    """The numbers of those that are kept. `steps`: in order, the older ones already thinned by this function."""
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
        if not each.skipped and _tells(each, of_kind):
            found.add(number)
        for device, peak in each.peaks:
            if peak > highest.get(device, (-1, 0))[0]:
                highest[device] = peak, number
        part = number // stride
        parts[part] = max(parts.get(part, (False, number)), (each.sampled, number))
    found.update(number for _, number in highest.values())
    found.update(number for _, number in parts.values())
    return found


def _tells(each: Facts, of_kind: dict[Kind, list[int | None]]) -> bool:
    """Whether it is among the first of its kind, or the first of another size."""
    sizes = of_kind.get(each.kind)
    if sizes is None:
        if len(of_kind) >= KINDS_MAX:
            return False
        sizes = of_kind[each.kind] = []
    if len(sizes) < ALIKE_STEPS:
        sizes.append(each.input_bytes)
        return True
    if len(sizes) > ALIKE_STEPS or len(set(sizes)) > 1 or each.input_bytes in (None, *sizes) or None in sizes:
        return False
    sizes.append(each.input_bytes)
    return True
