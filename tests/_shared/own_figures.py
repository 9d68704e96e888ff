"""A script's own readings of the allocator, as they are where the agent's phases end."""

from __future__ import annotations

from typing import Any

GRADIENT = {"allocated": 512, "active": 512, "inactive_split": -512, "requested": 4}
"""`loss.backward()` has the gradient of the loss until it returns. The phase ends before, as the engine returns."""


def as_phases_end(phases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The readings, each backward's with that gradient. The next phase begins with it: its peak is no lower."""
    begins_with = 0
    for phase in phases:
        phase["allocated_peak"] = max(phase["allocated_peak"], begins_with)
        begins_with = 0
        if phase["phase"] == "backward":
            phase.update({name: phase[name] + nbytes for name, nbytes in GRADIENT.items()})
            begins_with = phase["allocated"]
    return phases
