"""Runs that leak, and the censuses that name who holds it."""

from __future__ import annotations

import msgspec
from synthetic import Run

from gpumon_agent import wire

LOSSES = wire.Holder("losses[*]", "local", "train.py:12", 0)
OUTPUTS = wire.Holder("Trainer.outputs['val'][*]", "attribute", "train.py:80", 0)


def group(count: int, holder: wire.Holder | None = LOSSES, **more: object) -> wire.Group:
    fields: dict[str, object] = {
        "shape": (), "dtype": "float32", "device": 0, "count": count, "bytes": 512 * count, "where": "train.py:57",
        **more,
    }  # fmt: skip
    named = () if holder is None else (msgspec.structs.replace(holder, count=count),)
    return wire.Group(holders=named, **fields)  # type: ignore[arg-type]


def census(step: int, *groups: wire.Group, number: int = 0) -> wire.Census:
    return wire.Census(step, step * 1000, number, "growth", groups, began_step=step)


def leaking(bytes_a_step: int, *censuses: wire.Census, **more: object) -> Run:
    sent = {each.step: (each,) for each in censuses}
    return Run(
        kept=lambda step: bytes_a_step * step,
        blocks=lambda step: 100 + step,
        beside=lambda step: sent.get(step, ()),
        **more,  # type: ignore[arg-type]
    )
