"""A virtual GPU: PyTorch's own CUDA caching allocator, autograd and optimizers on a machine without a GPU.

``environment()`` returns the environment in which any command sees virtual devices; ``python -m gpumon.virtual_gpu
run`` does the same in a shell. README.md in this folder lists what it does and does not do.
"""

from __future__ import annotations

from gpumon.virtual_gpu.building import BuildUnavailable, build
from gpumon.virtual_gpu.launch import environment, new_session, remove_session, set_faults
from gpumon.virtual_gpu.profiles import PROFILES
from gpumon.virtual_gpu.records import Absence, Record, absence, records

__all__ = [
    "PROFILES",
    "Absence",
    "BuildUnavailable",
    "Record",
    "absence",
    "build",
    "environment",
    "new_session",
    "records",
    "remove_session",
    "set_faults",
]
