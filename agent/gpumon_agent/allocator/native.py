"""Reads the CUDA allocator through a C++ function (native.cpp), a quarter of the cost of torch's dict.

`torch._C._cuda_memoryStats` builds a dict of a hundred entries: 12 to 40 µs with the cold caches of a training step.
`c10::DeviceAllocator::getDeviceStats` (c10/core/CachingDeviceAllocator.h, since torch 2.9) returns the same numbers as
a struct.

Known limitations. While private memory pools exist (CUDA graphs, `torch.cuda.MemPool`), the dict is read.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from gpumon_agent import compiled
from gpumon_agent.guard import pass_on

RESET, CHECK = 1, 2
FAILED, READ, DISTURBED, POOLS = -1, 0, 1, 2

Figures: Callable[[], ctypes.Array[ctypes.c_int64]] = ctypes.c_int64 * 10
Peaks: Callable[[], ctypes.Array[ctypes.c_int64]] = ctypes.c_int64 * 29
Boundary = Callable[[int, "ctypes.Array[ctypes.c_int64]", "ctypes.Array[ctypes.c_int64]", int], int]
"""device, figures, peaks (raised), RESET | CHECK → READ, DISTURBED, POOLS or FAILED"""


def load() -> Boundary | None:
    """None: it is not there."""
    library: Any = compiled.load()
    try:
        found: Boundary | None = library and library.gpumon_boundary
    except AttributeError as error:
        pass_on(error)
        return None
    return found
