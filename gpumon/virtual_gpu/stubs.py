"""Generates a C definition for every NVIDIA symbol that torch imports and nvidia-ml-py looks up.

The definitions are weak: whatever the hand-written sources define wins, so no list of what they define is kept here.
What remains is either mathematics (a launch that changes nothing), a setting that cannot matter here (success), or
something this virtual GPU does not do: that fails, with its own library's error code, and says its name once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_COLLECTIVES = "AllGather|AllReduce|Alltoall|AlltoAll|Bcast|Broadcast|Gather|Reduce|ReduceScatter|Scatter|Send|Recv"

#: (pattern of the whole name, how it answers). The first that matches decides.
_RULES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), kind)
    for pattern, kind in (
        (r"\w+GetErrorString|cusparseGetErrorName|cublasGetStatus\w+", "VGPU_ERROR_TEXT({name})"),
        (r"cublas(Lt)?\w*(Set|Init|Destroy)\w*", "VGPU_SUCCEEDS({name})"),
        (r"cublas(Lt)?\w*(Get|Create)\w*", "VGPU_UNSUPPORTED({name}, 15)"),  # CUBLAS_STATUS_NOT_SUPPORTED
        (r"cublas\w+", "VGPU_BLAS({name})"),
        (rf"nccl({_COLLECTIVES})", "VGPU_NCCL({name})"),
        (r"nccl\w+", "VGPU_UNSUPPORTED({name}, 5)"),  # ncclInvalidUsage
        (r"cudnn(Set|Destroy|RestoreDropout)\w*", "VGPU_SUCCEEDS({name})"),
        (r"cudnn(Conv|BatchNorm|Normalization|Pooling|Spatial|Activation|Softmax)\w*", "VGPU_DNN({name})"),
        (r"cudnnRNN(Forward|Backward)\w*", "VGPU_DNN({name})"),
        (r"cudnn\w+", "VGPU_UNSUPPORTED({name}, 3000)"),  # CUDNN_STATUS_NOT_SUPPORTED
        (r"cufft\w+", "VGPU_UNSUPPORTED({name}, 16)"),  # CUFFT_NOT_SUPPORTED
        (r"cusolver\w+", "VGPU_UNSUPPORTED({name}, 9)"),  # CUSOLVER_STATUS_NOT_SUPPORTED
        (r"cusparse\w+", "VGPU_UNSUPPORTED({name}, 10)"),  # CUSPARSE_STATUS_NOT_SUPPORTED
        (r"curand\w+", "VGPU_UNSUPPORTED({name}, 999)"),
        (r"nvrtc\w+", "VGPU_UNSUPPORTED({name}, 11)"),  # NVRTC_ERROR_INTERNAL_ERROR
        (r"nvJitLink\w+", "VGPU_UNSUPPORTED({name}, 1)"),
        (r"cupti\w+", "VGPU_UNSUPPORTED({name}, 15)"),  # CUPTI_ERROR_NOT_INITIALIZED
        (r"cuFile\w+", "VGPU_UNSUPPORTED({name}, 5001)"),  # CU_FILE_DRIVER_NOT_INITIALIZED
        (r"nvtx\w+", "VGPU_SUCCEEDS({name})"),
        (r"nvshmem\w+", "VGPU_UNSUPPORTED({name}, 1)"),
        (r"(__cuda|cuda[A-Z])\w+", "VGPU_UNSUPPORTED({name}, 801)"),  # cudaErrorNotSupported
        (r"cu[A-Z]\w+", "VGPU_UNSUPPORTED({name}, 801)"),  # CUDA_ERROR_NOT_SUPPORTED
    )
)


def cuda(imports: Iterable[str]) -> str:
    """The C text for the symbols torch's libraries import; names of other libraries are left alone."""
    lines = ['#include "stubs.h"']
    for name in sorted(set(imports)):
        for pattern, kind in _RULES:
            if pattern.fullmatch(name):
                lines.append(kind.format(name=name))
                break
    return "\n".join(lines) + "\n"


def nvml(reader_source: str) -> str:
    """The C text for every NVML function that nvidia-ml-py's source (``reader_source``) looks up by name."""
    names = sorted(set(re.findall(r"[\"'](nvml[A-Z]\w*)[\"']", reader_source)))
    return "\n".join(['#include "nvml_stubs.h"', *(f"VGPU_NVML_UNSUPPORTED({name})" for name in names)]) + "\n"
