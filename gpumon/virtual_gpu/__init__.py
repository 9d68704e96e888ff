"""A virtual GPU: PyTorch's own CUDA caching allocator, autograd and optimizers on a machine without a GPU.

``environment()`` gives the environment in which any command sees virtual devices; ``python -m gpumon.virtual_gpu run``
is the same from a shell. What it does and does not do is in README.md beside this file.
"""

from __future__ import annotations

from gpumon.virtual_gpu.building import Unavailable, build
from gpumon.virtual_gpu.launch import environment, new_session, remove_session, set_faults
from gpumon.virtual_gpu.profiles import PROFILES
from gpumon.virtual_gpu.records import Absence, Record, absence, records

__all__ = [
    "PROFILES",
    "Absence",
    "Record",
    "Unavailable",
    "absence",
    "build",
    "environment",
    "new_session",
    "records",
    "remove_session",
    "set_faults",
]
