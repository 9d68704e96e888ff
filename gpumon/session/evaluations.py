"""Which forwards of a step were an evaluation: known when it closes, if a model in eval mode recorded graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from gpumon_agent import wire


def told_apart(
    phases: Iterable[wire.Phase], ledgers: Iterable[wire.Ledger], evaluated: Iterable[int]
) -> tuple[tuple[wire.Phase, ...], tuple[wire.Ledger, ...]]:
    """Renames the forwards of these indexes to eval and renumbers both. `phases`: of the whole step, in order."""
    chosen = set(evaluated)
    counts: Counter[tuple[int, str]] = Counter()
    names: dict[tuple[int, str, int], tuple[str, int]] = {}
    before: dict[tuple[int, str], int] = {}
    renamed = []
    for phase in phases:
        name = phase.phase
        if name in (wire.FORWARD, wire.EVAL):
            merged = phase.flags & wire.MERGED  # its index is the last one's
            several = phase.index - before.get((phase.device, name), -1) if merged else 1
            before[phase.device, name] = phase.index
            name = wire.EVAL if name == wire.FORWARD and phase.index in chosen else name
            counts[phase.device, name] += several
            index = counts[phase.device, name] - 1
            names[phase.device, phase.phase, phase.index] = name, index
            phase = msgspec.structs.replace(phase, phase=name, index=index)
        renamed.append(phase)
    return tuple(renamed), tuple(_named(ledger, names) for ledger in ledgers)


def _named(ledger: wire.Ledger, names: dict[tuple[int, str, int], tuple[str, int]]) -> wire.Ledger:
    found = names.get((ledger.device, ledger.phase, ledger.index))
    return ledger if found is None else msgspec.structs.replace(ledger, phase=found[0], index=found[1])
