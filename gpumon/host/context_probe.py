"""A process that takes each device once, and tells what that cost beside the allocator: `python -m` this module.

The driver's figure for this process (nvmlDeviceGetComputeRunningProcesses) less torch.cuda.memory_reserved(): context,
kernels and libraries. First after one tensor, then after one matrix product, which loads cuBLAS.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import pynvml
import torch


def main() -> None:
    """Writes one JSON line: a list of devices, empty without CUDA."""
    found = []
    if torch.cuda.is_available():
        pynvml.nvmlInit()
        found = [_device(index) for index in range(torch.cuda.device_count())]
    sys.stdout.write(json.dumps(found) + "\n")


def _device(index: int) -> dict[str, Any]:
    about = torch.cuda.get_device_properties(index)
    handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{about.uuid}")
    tensor = torch.ones(64, 64, device=f"cuda:{index}")
    torch.cuda.synchronize(index)
    first = _beside_allocator(handle, index)
    product = tensor @ tensor
    torch.cuda.synchronize(index)
    after = _beside_allocator(handle, index)
    del product
    return {
        "name": about.name,
        "capability": f"{about.major}.{about.minor}",
        "total_bytes": about.total_memory,
        "driver": pynvml.nvmlSystemGetDriverVersion(),
        "context_bytes": first,
        "context_after_product_bytes": after,
    }


def _beside_allocator(handle: Any, index: int) -> int | None:
    """None: the driver does not tell, as in a container with its own process numbers."""
    try:
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except pynvml.NVMLError:
        return None
    used = next((each.usedGpuMemory for each in processes if each.pid == os.getpid()), None)
    return None if used is None else used - torch.cuda.memory_reserved(index)


if __name__ == "__main__":
    main()
