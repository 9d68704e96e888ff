"""What a screen lists as holders of memory: groups of the newest census, and checkpoints still alive.

Model. A group's bytes per step are the bytes of tensors added since the previous census, divided by the steps between;
unknown without one. Source: wire.Census, wire.Checkpoint. Cost: O(groups).
Known limitations. A group is tensors that look alike: two lists of losses of one shape are one group with two holders.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from gpumon_agent import wire

ORDERS = ("step", "bytes", "count", "grown")
"""Sort keys of groups, descending, then by bytes; step: bytes per step, groups of several before single tensors."""


class CensusRow(msgspec.Struct, frozen=True):
    group: wire.Group
    per_step: int | None = None  # bytes

    @property
    def total(self) -> int:
        """Its own bytes and those of its graphs."""
        return self.group.bytes + (self.group.graph_bytes or 0)

    @property
    def key(self) -> tuple[object, ...]:
        """Identifies the group in another census."""
        g = self.group
        one = g.holders[0].text if g.count == 1 and g.holders else None  # single tensors: others may look alike
        return (g.shape, g.dtype, g.device, g.has_graph, g.where, one)


def rows_of(census: wire.Census, before: wire.Census | None, device: int | None, order: str) -> tuple[CensusRow, ...]:
    """The groups on a device (None: on any)."""
    steps = census.step - before.step if before is not None else 0
    rows = [
        CensusRow(group, _per_step(group, steps)) for group in census.groups if device is None or group.device == device
    ]
    return tuple(sorted(rows, key=lambda row: _by(row, order), reverse=True))


def _per_step(group: wire.Group, steps: int) -> int | None:
    if steps <= 0 or group.grown is None or not group.count:
        return None
    return round(group.grown * (group.bytes + (group.graph_bytes or 0)) / group.count / steps)


def _by(row: CensusRow, order: str) -> tuple[int, bool, int]:
    first = {
        "bytes": row.total,
        "count": row.group.count,
        "grown": row.group.grown or 0,
        "step": row.per_step or 0,
    }[order]
    return first, order == "step" and row.group.count > 1, row.total  # a single tensor is no leak yet


def alive(checkpoints: Iterable[wire.Checkpoint], device: int | None) -> tuple[wire.Checkpoint, ...]:
    """Loads with bytes still on the device, most bytes first."""
    found = [each for each in checkpoints if each.alive and (device is None or each.device == device)]
    return tuple(sorted(found, key=lambda each: -each.alive))
