"""Where a training loop is, from two of its own variables: `epoch`, and `batch_idx`, which counts from 0.

Most loops have them under these names, on Accelerate, Fabric, DeepSpeed and Ray too, which know no epoch themselves. To
count passes over a DataLoader would give another number, after a checkpoint was loaded or a first batch was looked at.

Known limitations. Other names, attributes (`self.epoch`) and values that are no int are not read. A variable that an
earlier loop of the same function left is taken for the present one's.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

from gpumon_agent import frames
from gpumon_agent.attribution.caller_frames import variables

_NAMES = ("epoch", "batch_idx")
_MOST = 1 << 53  # also exact in JSON


class Position(NamedTuple):
    epoch: int | None = None  # as the loop counts
    batch: int | None = None  # the first is 1


def of_callers() -> Position:
    """Of each name the innermost, among the functions that called the optimizer's step."""
    found: dict[str, int] = {}
    for frame in frames.outwards(sys._getframe(1)):
        code = frame.f_code  # a notebook's cell has all cells' variables, and names its own
        named = {*code.co_varnames, *code.co_names, *code.co_cellvars, *code.co_freevars}
        names = [name for name in _NAMES if name in named and name not in found]
        held = variables(frame) if names else {}
        for name in names:
            value = held.get(name)
            if type(value) is int and 0 <= value < _MOST:
                found[name] = value
    batch = found.get("batch_idx")
    return Position(found.get("epoch"), None if batch is None else batch + 1)
