"""Each thing the README says the virtual GPU does not do fails by name, in torch's error and on stderr."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from gpumon import virtual_gpu as vgpu
from gpumon.virtual_gpu import building

README = Path(vgpu.__file__).parent / "README.md"
SHOWN_BY = {
    "Compute.": (
        "test_uploads_come_back_and_computed_scalars_are_zero",
        "test_larger_reads_give_what_the_memory_held_and_only_so_many_uploads_are_known",
        "test_a_shape_that_depends_on_values_comes_out_empty_and_is_reported_once",
    ),
    "Time.": (
        "test_kernels_take_no_time_and_convolutions_no_workspace",
        "test_the_context_is_one_constant_whatever_runs",
    ),
    "cuFFT,": (
        "test_what_is_not_supported_says_its_name_and_torch_raises",
        "test_every_symbol_that_is_not_supported_says_its_name_and_fails",
        "test_without_the_nvidia_wheels_training_runs_and_nvrtc_fails_by_name",
    ),
    "The profiler": ("test_the_profiler_goes_on_without_the_device",),
    "cuDNN workspaces": (
        "test_kernels_take_no_time_and_convolutions_no_workspace",
        "test_a_product_takes_the_workspace_this_torch_takes",
    ),
    "Memory outside": (
        "test_the_context_is_one_constant_whatever_runs",
        "test_one_process_is_a_rank_of_many_over_the_nccl_stand_in",
        "test_a_profile_is_approximate_and_what_it_says_is_what_torch_sees",
    ),
    "NCCL moves": (
        "test_objects_of_other_ranks_arrive",
        "test_small_tensors_that_were_uploaded_arrive",
        "test_a_rank_that_does_not_come_releases_the_others_and_is_named",
        "test_who_is_one_rank_of_a_larger_job_hears_itself_and_other_s_objects_come_from_nobody",
        "test_ranks_over_gloo_agree_although_scalars_are_zero",
    ),
    "A communicator": (
        "test_a_group_split_off_has_its_own_number_of_ranks",
        "test_the_colour_tells_the_ranks_of_a_split_or_it_fails_by_name",
    ),
    "A build": ("test_a_build_belongs_to_one_torch", "test_layouts_are_those_of_nvidias_headers"),
}
"""Each item of the page's list by its first words, and what shows it."""


def test_each_item_of_the_page_has_a_test_that_shows_it():
    section = README.read_text().partition("## What it does not do")[2].partition("\n## ")[0]
    items = [re.sub(r"\s+", " ", item) for item in section.split("\n- ")[1:]]
    assert len(items) == len(SHOWN_BY)
    for item, words in zip(items, SHOWN_BY, strict=True):
        assert item.startswith(words)
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    missing = [name for names in SHOWN_BY.values() for name in names if f"\ndef {name}(" not in tests]
    assert missing == []


def test_every_symbol_that_is_not_supported_says_its_name_and_fails(virtual_gpu):
    folder = building.build(virtual_gpu().python)
    known = subprocess.run(["nm", "-D", folder / "libcuda.so.1"], capture_output=True, text=True, check=True).stdout
    generated = set(re.findall(r" W (\w+)", known))  # weak: where no source file defines it
    declared = re.findall(r"VGPU_UNSUPPORTED\((\w+), (\d+)\)", (folder / "cuda_stubs.c").read_text())
    expected = {name: int(status) for name, status in declared if name in generated}
    call = "import ctypes, json, sys\nlibrary = ctypes.CDLL(sys.argv[1])\n"
    call += "print(json.dumps({name: getattr(library, name)() for name in sys.argv[2:] * 2}))"
    command = [sys.executable, "-c", call, str(folder / "libcuda.so.1"), *expected]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(ran.stdout) == expected
    assert all(expected.values())
    said = [line.split()[2] for line in ran.stderr.splitlines() if line.endswith(" is not supported")]
    assert sorted(set(said)) == sorted(expected)
    assert len(expected) > 200


def test_what_is_not_supported_says_its_name_and_torch_raises(virtual_gpu):
    def ask():
        import json

        import torch

        matrix = torch.randn(8, 8, device="cuda")
        asks = {
            "cuFFT": lambda: torch.fft.fft(matrix),
            "cuSOLVER": lambda: torch.linalg.inv(matrix),
            "cuSPARSE": lambda: torch.sparse.mm(torch.eye(8).to_sparse().cuda(), matrix),
            "CUDA IPC": lambda: matrix.untyped_storage()._share_cuda_(),
        }
        raised = {}
        for name, call in asks.items():
            try:
                call()
                raised[name] = ""
            except RuntimeError as error:
                raised[name] = str(error).splitlines()[0]
        print(json.dumps(raised))

    ran = virtual_gpu().run(ask)
    raised = json.loads(ran.stdout)
    told = {
        "cuFFT": "CUFFT_NOT_SUPPORTED",
        "cuSOLVER": "when calling `cusolverDnCreate",
        "cuSPARSE": "not supported on the virtual GPU when calling `cusparseCreate",
        "CUDA IPC": "operation not supported on the virtual GPU",
    }
    assert [name for name, text in told.items() if text not in raised[name]] == [], raised
    said = [line.split()[2] for line in ran.stderr.splitlines() if line.endswith(" is not supported")]
    for function in (
        "cufftCreate",
        "cusolverDnCreate",
        "cusparseCreate",
        "cudaIpcGetMemHandle",
    ):
        assert said.count(function) == 1, ran.stderr
    text = README.read_text()
    for name in raised:
        assert name in text


def test_the_profiler_goes_on_without_the_device(virtual_gpu):
    def profile():
        import torch
        from torch.profiler import ProfilerActivity

        with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            torch.ones(8, device="cuda").add_(1)
        assert any(event.key == "aten::add_" for event in profiler.key_averages())
        assert all(event.device_type == torch.autograd.DeviceType.CPU for event in profiler.events())

    virtual_gpu().run(profile)
    assert "profiler" in README.read_text()


def test_kernels_take_no_time_and_convolutions_no_workspace(virtual_gpu):
    def convolve():
        import ctypes
        import time

        import torch

        image = torch.empty(2, 3, 64, 64, device="cuda")
        layer = torch.nn.Conv2d(3, 8, 3, bias=False).cuda()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with torch.no_grad():
            result = layer(image)
        assert torch.cuda.max_memory_allocated() - before == (result.nbytes + 511) // 512 * 512
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        time.sleep(0.05)
        end.record()
        end.synchronize()
        assert begin.elapsed_time(end) >= 50  # the host's time, without a kernel between
        runtime, blocks = ctypes.CDLL(None), ctypes.c_int()
        no_kernel = ctypes.c_void_p(1)
        assert not runtime.cudaOccupancyMaxActiveBlocksPerMultiprocessor(ctypes.byref(blocks), no_kernel, 256, 0)
        assert blocks.value == 2048 // 256  # an answer about nothing

    virtual_gpu().run(convolve)
    text = README.read_text()
    for said in ("cuDNN workspaces", "Kernels take none", "occupancy and register counts are invented"):
        assert said in text


def test_the_context_is_one_constant_whatever_runs(virtual_gpu):
    def grow():
        import pynvml
        import torch

        pynvml.nvmlInit()
        device = pynvml.nvmlDeviceGetHandleByIndex(0)

        def beside() -> int:
            return pynvml.nvmlDeviceGetMemoryInfo(device).used - torch.cuda.memory_reserved()

        x = torch.ones(64, 64, device="cuda")
        first = beside()
        for operation in (torch.sin, torch.mm, torch.softmax, torch.cumsum, torch.sort):
            operation(x, *([x] if operation is torch.mm else [] if operation in (torch.sin, torch.sort) else [0]))
        torch.nn.Conv2d(1, 8, 3).cuda()(x[None, None])
        print(first, beside())  # kernels and libraries that a real driver would load by now

    shown = virtual_gpu(profile="t4").run(grow).stdout.split()
    assert shown == [str(450 << 20)] * 2
    text = README.read_text()
    assert "constant context" in text


def test_what_only_a_computing_device_has_is_not_supported_unless_it_is_to_be_invented(virtual_gpu):
    def ask():
        import pynvml

        pynvml.nvmlInit()
        device = pynvml.nvmlDeviceGetHandleByIndex(0)
        calls = (
            lambda: pynvml.nvmlDeviceGetUtilizationRates(device).gpu,
            lambda: pynvml.nvmlDeviceGetTemperature(device, pynvml.NVML_TEMPERATURE_GPU),
            lambda: pynvml.nvmlDeviceGetPowerUsage(device),
            lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(device),
            lambda: pynvml.nvmlDeviceGetClockInfo(device, pynvml.NVML_CLOCK_SM),
        )
        for call in calls:
            try:
                print(call())
            except pynvml.NVMLError_NotSupported:
                print("not supported")

    assert virtual_gpu(profile="t4").run(ask).stdout.splitlines() == ["not supported"] * 5
    # made from the number of launches, nothing else: there was none
    invented = virtual_gpu(profile="t4", sensors="invented").run(ask).stdout.split()
    assert invented == ["0", "34", "62000", "400000", "210"]
    assert "NVML does not support utilization, temperature, power and" in README.read_text()


@pytest.mark.parametrize("name", vgpu.PROFILES)
def test_a_profile_is_approximate_and_what_it_says_is_what_torch_sees(virtual_gpu, name):
    profile = vgpu.PROFILES[name]
    assert 0.88 * profile.memory_gb * 2**30 < profile.capacity_bytes < profile.memory_gb * 2**30
    assert "Capacities of profiles are approximate" in README.read_text()
    if name == "l4":  # one is enough: all go the same way
        ask = "import torch; p = torch.cuda.get_device_properties(0); print(p.total_memory, p.name)"
        assert virtual_gpu(profile=name).run(ask).stdout == f"{profile.capacity_bytes} {profile.name}\n"


def test_who_is_one_rank_of_a_larger_job_hears_itself_and_other_s_objects_come_from_nobody(virtual_gpu):
    def gather():
        import os
        import pickle

        import torch
        from torch import distributed

        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29400", RANK="0", WORLD_SIZE="4")
        distributed.init_process_group("nccl", store=distributed.HashStore(), rank=0, world_size=4)
        torch.cuda.set_device(0)
        for text in ("x", "y" * 5000):
            found = [None] * 4
            distributed.all_gather_object(found, {"rank": 0, "text": text})
            assert found == [{"rank": 0, "text": text}] * 4, found
        own = [{"from": 0}]
        distributed.broadcast_object_list(own, 0)
        assert own == [{"from": 0}]
        asks = [
            lambda: distributed.broadcast_object_list([None], 1),
            lambda: distributed.scatter_object_list([None], None, 1),
        ]
        for ask in asks:
            try:
                ask()
            except (EOFError, RuntimeError, pickle.UnpicklingError):
                print("nobody sent it")

    assert virtual_gpu().run(gather).stdout == "nobody sent it\n" * 2
    text = README.read_text()
    assert "answered with its own data" in text


def test_without_the_nvidia_wheels_training_runs_and_nvrtc_fails_by_name(virtual_gpu, tmp_path):
    def train():
        import torch

        model = torch.nn.Linear(64, 64).cuda()
        model(torch.randn(4, 64, device="cuda")).sum().backward()
        torch.optim.AdamW(model.parameters()).step()
        try:
            torch.special.airy_ai(model.weight.data)  # compiled at run time
        except RuntimeError as error:
            print(error)

    gpu = virtual_gpu()
    if list(building.find_torch(gpu.python).folder.parent.glob("nvidia/**/libnvrtc.so.*")):
        assert gpu.run(train).stdout == ""
    slim = slim_copy(gpu.python, tmp_path / "slim")
    environment = vgpu.environment(python=str(slim))
    ran = subprocess.run(
        [slim, *gpu.command(train)[1:]], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    vgpu.remove_session(environment["VGPU_SESSION"])
    assert ran.returncode == 0, ran.stderr
    assert "NVRTC" in ran.stdout
    assert "nvrtcVersion is not supported" in ran.stderr
    assert "NVRTC works if its wheel is installed" in README.read_text()


def slim_copy(python: str, folder: Path) -> Path:
    """An interpreter that finds what `python` finds, except the nvidia-* wheels."""
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    original = Path(subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.strip())
    venv.create(folder, symlinks=True, with_pip=False)
    copy = next(folder.glob("lib/python*/site-packages"))
    for place in (
        copy,
        copy / "torch",
        copy / "torch" / "lib",
    ):  # torch's libraries look for the wheels in ../../nvidia
        place.mkdir(exist_ok=True)
        for entry in (original / place.relative_to(copy)).iterdir():
            wanted = not entry.name.startswith(("nvidia", "cusparselt")) and entry.name not in ("torch", "lib")
            if wanted and not (place / entry.name).exists():
                (place / entry.name).symlink_to(entry)
    return folder / "bin" / "python"
