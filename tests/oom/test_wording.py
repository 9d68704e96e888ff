"""Messages of exhausted memory as users paste them, and the figures read back from them."""
# ruff: noqa: E501  messages stay as they were pasted

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumon.analysis.diagnosis.figures import known, read
from gpumon.analysis.diagnosis.message_parser import OomMessage, find, find_all
from gpumon_agent.units import torch_size as shown

NEW = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 996.00 MiB. GPU 1 has a total capacity of 44.43 GiB "
    "of which 9.06 GiB is free. Process 2102129 has 17.54 GiB memory in use. Process 7 has 1.00 GiB memory in use. "
    "Including non-PyTorch memory, this process has 17.81 GiB memory in use. 17.69 GiB allowed; Of the allocated memory "
    "17.44 GiB is allocated by PyTorch, with 17.00 MiB allocated in private pools (e.g., CUDA Graphs), and 59.88 MiB is "
    "reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)

FIGURES = {
    "1.0, cached": (
        "RuntimeError: CUDA out of memory. Tried to allocate 294.00 MiB (GPU 0; 7.79 GiB total capacity; 6.27 GiB already "
        "allocated; 61.62 MiB free; 617.88 MiB cached)",
        {"requested": "294.00 MiB", "total": "7.79 GiB", "allocated": "6.27 GiB", "free": "61.62 MiB",
         "reserved": "617.88 MiB"},
    ),
    "1.8": (
        "Tried to allocate 2.69 GiB (GPU 0; 14.76 GiB total capacity; 12.32 GiB already allocated; 835.88 MiB free; "
        "13.06 GiB reserved in total by PyTorch)",
        {"requested": "2.69 GiB", "total": "14.76 GiB", "allocated": "12.32 GiB", "free": "835.88 MiB",
         "reserved": "13.06 GiB"},
    ),
    "1.8, with a fraction": (
        "CUDA out of memory. Tried to allocate 20.00 MiB (GPU 3; 7.80 GiB total capacity; 1.10 GiB already allocated; "
        "5.00 GiB free; 1.20 GiB allowed; 1.15 GiB reserved in total by PyTorch)",
        {"device": 3, "allowed": "1.20 GiB", "reserved": "1.15 GiB", "free": "5.00 GiB"},
    ),
    "1.10 to 2.0": (
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 338.00 MiB (GPU 0; 2.00 GiB total capacity; "
        "1.44 GiB already allocated; 0 bytes free; 1.50 GiB reserved in total by PyTorch) If reserved memory is >> "
        "allocated memory try setting max_split_size_mb to avoid fragmentation.  See documentation for Memory Management",
        {"requested": "338.00 MiB", "free": "0 bytes", "reserved": "1.50 GiB", "new": False},
    ),
    "2.1, with its slip of the pen": (
        "CUDA out of memory. Tried to allocate 8.00 GiB. GPU 0 has a total capacty of 23.69 GiB of which 7.11 GiB is free. "
        "Process 2006998 has 256.00 MiB memory in use. Including non-PyTorch memory, this process has 16.31 GiB memory in "
        "use. Of the allocated memory 16.01 GiB is allocated by PyTorch, and 7.47 MiB is reserved by PyTorch but "
        "unallocated. If reserved but unallocated memory is large try setting max_split_size_mb",
        {"total": "23.69 GiB", "process": "16.31 GiB", "others": ((2006998, read("256.00 MiB")),),
         "reserved": read("16.01 GiB") + read("7.47 MiB"), "new": True},
    ),
    "since 2.2": (
        NEW,
        {"device": 1, "requested": "996.00 MiB", "free": "9.06 GiB", "allowed": "17.69 GiB", "allocated": "17.44 GiB",
         "private": "17.00 MiB", "others": ((2102129, read("17.54 GiB")), (7, read("1.00 GiB"))), "expandable": None},
    ),
    "2.15, segments expandable": (
        "CUDA out of memory. Tried to allocate 900.00 MiB. GPU 0 has a total capacity of 2.00 GiB of which 1.07 GiB is free. "
        "Including non-PyTorch memory, this process has 950.00 MiB memory in use. 1.20 GiB allowed; Of the allocated memory "
        "500.00 MiB is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated. expandable_segments is "
        "enabled. If instead the process is running out of virtual address space (VSZ), expandable segments",
        {"expandable": True, "allocated": "500.00 MiB", "slack": known(0)},
    ),
    "Windows does not know its process": (
        "CUDA out of memory. Tried to allocate 3.98 GiB. GPU 0 has a total capacity of 31.84 GiB of which 16.30 GiB is free. "
        "Including non-PyTorch memory, this process has 17179869184.00 GiB memory in use. 17.51 GiB allowed; Of the "
        "allocated memory 6.74 GiB is allocated by PyTorch, and 7.02 GiB is reserved by PyTorch but unallocated.",
        {"process": None, "allowed": "17.51 GiB"},
    ),
    "ROCm": (
        "HIP out of memory. Tried to allocate 1.88 GiB. GPU 0 has a total capacity of 23.98 GiB of which 1.70 GiB is free. Of "
        "the allocated memory 21.65 GiB is allocated by PyTorch, and 279.78 MiB is reserved by PyTorch but unallocated.",
        {"backend": "hip", "requested": "1.88 GiB", "process": None},
    ),
    "XPU": (
        "torch.OutOfMemoryError: XPU out of memory. Tried to allocate 4.66 GiB. GPU 0 has a total capacity of 5.65 GiB of "
        "which 5.65 GiB is free. Of the allocated memory 195.50 KiB is allocated by PyTorch, and 1.81 MiB is reserved by "
        "PyTorch but unallocated. Please use `empty_cache` to release all unoccupied cached memory.",
        {"backend": "xpu", "allocated": "195.50 KiB"},
    ),
    "XPU's extension": (
        "RuntimeError: XPU out of memory. Tried to allocate 1.71 GiB (GPU 0; 15.56 GiB total capacity; 176.00 MiB already "
        "allocated; 176.00 MiB reserved in total by PyTorch)",
        {"backend": "xpu", "free": None, "reserved": "176.00 MiB"},
    ),
    "NPU": (
        "RuntimeError: NPU out of memory. Tried to allocate 898.00 MiB (NPU 0; 60.97 GiB total capacity; 58.21 GiB already "
        "allocated; 58.21 GiB current active; 848.37 MiB free; 58.31 GiB reserved in total by PyTorch) If reserved memory",
        {"backend": "npu", "device": 0, "free": "848.37 MiB"},
    ),
    "MPS": (
        "RuntimeError: MPS backend out of memory (MPS allocated: 17.36 GB, other allocations: 613.56 MB, max allowed: 18.13 "
        "GB). Tried to allocate 192.00 MB on private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit",
        {"backend": "mps", "allocated": "17.36 GiB", "allowed": "18.13 GiB", "requested": "192.00 MiB",
         "process": read("17.36 GiB") + read("613.56 MiB")},
    ),
    "cudaMallocAsync": (
        "torch.OutOfMemoryError: Allocation on device 2 would exceed allowed memory. (out of memory)\n"
        "Currently allocated     : 9.43 GiB\nRequested               : 640.00 MiB\nDevice limit            : 11.59 GiB\n"
        "Free (according to CUDA): 7.12 MiB\nPyTorch limit (set by user-supplied memory fraction)\n"
        "                        : 17179869184.00 GiB",
        {"device": 2, "allocated": "9.43 GiB", "requested": "640.00 MiB", "total": "11.59 GiB", "free": "7.12 MiB",
         "allowed": None},
    ),
    "rejected before it was tried": (
        "CUDA out of memory. Allocation was preemptively rejected because it would exceed per_process_memory_fraction limit. "
        "Requested size: 2.00 GiB",
        {"requested": "2.00 GiB", "kind": "allocator"},
    ),
    "every line with its rank, broken where the terminal was": (
        "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.16 GiB.\n[rank0]: GPU 0 has a total "
        "capacity of 31.36 GiB of which 471.69 MiB is free.\n[rank0]: Process 19239 has 14.26 GiB memory in use.\n[rank0]: "
        "Of the allocated memory 15.03 GiB is allocated by PyTorch, and 1.00 GiB\n[rank0]: is reserved by PyTorch but "
        "unallocated.",
        {"requested": "1.16 GiB", "reserved": read("15.03 GiB") + read("1.00 GiB")},
    ),
    "in a comment": (
        "# CUDA out of memory. Tried to allocate 36.00 MiB (GPU 0; 7.93 GiB total capacity; 130.35 MiB already\n"
        "# allocated; 47.06 MiB free; 188.00 MiB reserved in total by PyTorch)",
        {"allocated": "130.35 MiB"},
    ),
    "the host's": (
        "RuntimeError: [enforce fail at alloc_cpu.cpp:75] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 4096000000 bytes. Error code 12 (Cannot allocate memory)",
        {"kind": "host", "requested": known(4_096_000_000)},
    ),
    "NumPy's": (
        "numpy.core._exceptions.MemoryError: Unable to allocate 3.00 GiB for an array with shape (1000, 402653) and data "
        "type float64",
        {"kind": "host", "requested": "3.00 GiB"},
    ),
}  # fmt: skip

WORDS = {
    "CUDA out of memory. Tried to allocate more than 1EB memory.": ("overflow", "PyTorch", True),
    "RuntimeError: CUDA error: out of memory\nCUDA kernel errors might be": ("driver", "CUDA's driver", True),
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`": ("driver", "cuBLAS", True),
    "RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED": ("driver", "cuDNN", True),
    "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED": ("driver", "cuDNN", False),
    "RuntimeError: Unable to find a valid cuDNN algorithm to run convolution": ("driver", "cuDNN", False),
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'": (
        "driver", "NCCL", True,
    ),
    "RuntimeError: CUDA driver error: out of memory": ("driver", "CUDA's driver", True),
    "HIP error: out of memory": ("driver", "HIP's driver", True),
    "DataLoader worker (pid 1234) is killed by signal: Killed.": ("worker", "DataLoader", False),
    "RuntimeError: DataLoader worker (pid(s) 77, 78) exited unexpectedly": ("worker", "DataLoader", False),
    "It is possible that dataloader's workers are out of shared memory.": ("shared", "DataLoader", True),
    "epoch 3\nKilled\n": ("killed", "the kernel", False),
    "exitcode  : -9 (pid: 4711)": ("killed", "the kernel", False),
    "OSError: [Errno 12] Cannot allocate memory": ("host", "the operating system", True),
}  # fmt: skip


@pytest.mark.parametrize(("text", "figures"), FIGURES.values(), ids=FIGURES)
def test_every_wording_gives_its_figures(text: str, figures: dict[str, object]) -> None:
    message = find(text)
    assert message is not None
    for name, expected in figures.items():
        value = read(expected) if isinstance(expected, str) and name not in ("kind", "backend") else expected
        assert getattr(message, name) == value, name


@pytest.mark.parametrize(("text", "told"), WORDS.items())
def test_messages_without_figures_say_who_they_come_from(text: str, told: tuple[str, str, bool]) -> None:
    message = find(text)
    assert message is not None
    assert (message.kind, message.source, message.sure) == told


@pytest.mark.parametrize(
    "text",
    [
        "", "RuntimeError: mat1 and mat2 shapes cannot be multiplied (8x3 and 4x2)", "Killed the time with reading",
        "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 70000, Hardware limit: 65536",
    ],
)  # fmt: skip
def test_a_text_without_one_gives_none(text: str) -> None:
    assert find(text) is None


def test_of_several_the_last_that_has_figures_counts() -> None:
    text = FIGURES["1.0, cached"][0] + "\nretrying with half the batch\n" + NEW + "\nERROR: CUDA out of memory"
    assert [message.kind for message in find_all(text)] == ["allocator", "allocator", "driver"]
    found = find(text)
    assert found is not None
    assert found.requested == read("996.00 MiB")
    assert text[slice(*found.where)].startswith("CUDA out of memory. Tried to allocate 996.00 MiB.")
    assert text[slice(*found.where)].endswith("reserved by PyTorch but unallocated.")


@given(st.integers(0, 1 << 50))
def test_a_size_as_pytorch_shows_it_is_read_back_as_an_interval_that_holds_it(count: int) -> None:
    figure = read(shown(count))
    assert figure.low <= count <= figure.high
    assert figure.high - figure.low <= 0.0100001 * max(
        1, 1 << (10 * min(3, max(0, (count - 1).bit_length() - 1) // 10))
    )


@given(st.integers(1, 1 << 40))
def test_a_tensor_may_be_what_pytorch_says_it_tried_to_allocate(count: int) -> None:
    """PyTorch names the segment it asked for, by the rules of its allocator."""
    segment = 2 << 20 if count <= 1 << 20 else 20 << 20 if count < 10 << 20 else -(-count // (2 << 20)) * (2 << 20)
    message = OomMessage("", "allocator", requested=read(shown(segment)))
    assert message.may_be(count)


def test_a_segment_of_220_mib_is_for_a_tensor_just_below() -> None:
    message = OomMessage("", "allocator", requested=read("220.00 MiB"))
    assert message.may_be(220 << 20)
    assert message.may_be((218 << 20) + 1)
    assert not message.may_be(218 << 20)
    assert not message.may_be((220 << 20) + 1)


@pytest.mark.parametrize("text", ["", "many", "GiB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no size"):
        read(text)
