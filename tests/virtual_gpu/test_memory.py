"""What the allocator, the driver and NVML say about memory on virtual devices, to the byte."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys

import pytest

MIB = 2**20
WORKSPACE = 8_519_680
"""What PyTorch hands cuBLAS on an A100: two buffers of 4 MiB and eight of 16 KiB."""

FIRST_TO_RETURN_WORKSPACES = (2, 15)


def test_addresses_follow_from_the_allocations_alone(virtual_gpu):
    def allocate(mapped):
        import mmap

        import torch

        kept = [mmap.mmap(-1, 1 << 22) for _ in range(mapped)]
        blocks = [torch.empty(n << 20, dtype=torch.uint8, device="cuda") for n in (1, 3, 30, 11)]
        print([block.data_ptr() for block in blocks])
        del kept

    gpu = virtual_gpu()
    assert gpu.run(allocate, 0, fresh=True).stdout == gpu.run(allocate, 7, fresh=True).stdout


def test_an_mlp_holds_exactly_its_bytes_at_the_end_of_each_phase(virtual_gpu):
    def train():
        import json

        import torch

        model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 1024)).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        held = [torch.cuda.memory_allocated()]
        for _ in range(2):
            batch = torch.randn(32, 1024, device="cuda")
            output = model(batch)
            loss = output.sum()
            held.append(torch.cuda.memory_allocated())
            loss.backward()
            held.append(torch.cuda.memory_allocated())
            optimizer.step()
            optimizer.zero_grad()
            held.append(torch.cuda.memory_allocated())
        print(json.dumps([held, torch.__version__]))

    held, version = json.loads(virtual_gpu().run(train).stdout)
    weights = 4 * (1024 * 4096 + 4096 + 4096 * 1024 + 1024)
    batch = output = 4 * 32 * 1024
    activation, loss = 4 * 32 * 4096, 512
    # Older versions keep a workspace for the thread that runs forward and one for autograd's.
    kept = 0 if returns_workspaces(version) else WORKSPACE
    around = batch + output + loss
    assert weights == 33_574_912
    assert held[:4] == [
        weights,
        weights + activation + around + kept,
        2 * weights + around + 2 * kept,
        3 * weights + around + 2 * kept,
    ]
    # In the second step the previous batch, output and loss are replaced one by one; the optimizer's state is there.
    assert held[5:] == [4 * weights + around + 2 * kept, 3 * weights + around + 2 * kept]


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize(
    ("profile", "workspace"), [("a100-80", WORKSPACE), ("h100-80", 33_554_432), ("b200", 33_554_432)]
)
def test_a_product_takes_the_workspace_this_torch_takes(virtual_gpu, profile, workspace, cached):
    def multiply():
        import ctypes
        import json

        import torch

        matrix, bias = torch.empty(256, 256, device="cuda"), torch.empty(256, device="cuda")
        product = torch.nn.functional.linear(matrix, matrix)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.mm(matrix, matrix, out=product)
        stays, beyond = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
        torch.cuda.reset_peak_memory_stats()
        torch.addmm(bias, matrix, matrix, out=product)
        with_bias = torch.cuda.max_memory_allocated() - before
        kept = before - 2 * matrix.nbytes - 1024
        # cublasLtMatmulHeuristicResult_t: an algorithm of 64 bytes, then how many bytes of workspace it wants
        answer, found = (ctypes.c_uint64 * 64)(*[1] * 64), ctypes.c_int()
        asked = ctypes.CDLL(None).cublasLtMatmulAlgoGetHeuristic
        assert not asked(*[None] * 7, 1, answer, ctypes.byref(found))
        print(json.dumps([torch.__version__, kept, stays, beyond, with_bias, found.value, answer[8]]))

    # Newer versions return the workspace after each product, so that only the peak shows it, unless they are told.
    environment = {"TORCH_CUBLAS_WORKSPACE_CACHE": "1"} if cached else {}
    told = json.loads(virtual_gpu(profile=profile).run(multiply, env=environment).stdout)
    version, kept, stays, beyond, with_bias, *algorithm = told
    returns = returns_workspaces(version)
    assert (kept, stays, beyond) == ((0, 0, workspace) if returns and not cached else (workspace, 0, 0))
    assert with_bias == (0 if returns and cached else MIB)  # cuBLASLt, for the fused bias
    assert algorithm == [1, 0]  # it is told of one, which wants nothing: what is taken is what PyTorch asks for


def test_the_error_of_a_full_device_reads_as_on_a_device(virtual_gpu):
    def fill():
        import torch

        held = torch.empty(600 << 20, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_allocated() == 600 << 20
        assert torch.cuda.mem_get_info() == ((1000 - 100 - 600) << 20, 1000 << 20)
        try:
            torch.empty(400 << 20, dtype=torch.uint8, device="cuda")
        except torch.cuda.OutOfMemoryError as error:
            print(error)
        assert torch.cuda.memory_stats()["num_ooms"] == 1
        del held

    message = virtual_gpu(memory="1000MiB", context="100MiB").run(fill).stdout
    assert (
        "Tried to allocate 400.00 MiB. GPU 0 has a total capacity of 1000.00 MiB of which 300.00 MiB is free" in message
    )
    assert "this process has 700.00 MiB memory in use" in message


def test_nvml_says_what_the_process_reserved_plus_its_context(virtual_gpu):
    def compare():
        import os

        import pynvml as nvml
        import torch

        held = torch.empty(300 << 20, dtype=torch.uint8, device="cuda:1")
        nvml.nvmlInit()
        device = nvml.nvmlDeviceGetHandleByIndex(1)
        expected = torch.cuda.memory_reserved(1) + (77 << 20)
        assert nvml.nvmlDeviceGetMemoryInfo(device).used == expected
        assert nvml.nvmlDeviceGetMemoryInfo(device, version=nvml.nvmlMemory_v2).used == expected
        free, total = torch.cuda.mem_get_info(1)
        assert total - free == expected
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(device)
        assert [(process.pid, process.usedGpuMemory) for process in processes] == [(os.getpid(), expected)]
        del held

    virtual_gpu(devices=2, context="77MiB").run(compare)


def test_expandable_segments_map_and_return_memory(virtual_gpu):
    def expand():
        import torch

        held = torch.empty(100 << 20, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_snapshot()[0]["is_expandable"]
        assert torch.cuda.mem_get_info()[0] == (1000 - 100 - 100) << 20
        del held
        torch.cuda.empty_cache()
        assert torch.cuda.mem_get_info()[0] == (1000 - 100) << 20

    device = virtual_gpu(memory="1000MiB", context="100MiB")
    device.run(expand, env={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})


def test_memory_is_gone_from_nvml_after_kill_9(virtual_gpu):
    device = virtual_gpu(context="100MiB")
    script = """
        import time, torch
        held = torch.empty(300 << 20, dtype=torch.uint8, device="cuda")
        print("ready", flush=True)
        time.sleep(60)
        """
    with subprocess.Popen(
        device.command(script), env=device.environment, stdout=subprocess.PIPE, text=True
    ) as training:
        assert training.stdout is not None
        assert training.stdout.readline() == "ready\n"
        assert nvml_used(device) == 400 * MIB
        training.send_signal(signal.SIGKILL)
    assert nvml_used(device) == 0


def test_another_process_on_the_device_takes_from_it(virtual_gpu):
    def share():
        import subprocess
        import sys

        import torch

        held = torch.empty(500 << 20, dtype=torch.uint8, device="cuda")
        ask = "import torch; print(torch.cuda.mem_get_info()[0] >> 20)"
        print(subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout)
        del held

    assert virtual_gpu(memory="1000MiB", context="50MiB").run(share).stdout.split() == ["400"]


def test_nvitop_shows_the_same_bytes_as_nvml_and_the_allocator(virtual_gpu):
    pytest.importorskip("nvitop")
    device = virtual_gpu(devices=2, profile="a100-40", context="450MiB")
    script = """
        import time, torch
        held = torch.empty(1000 << 20, dtype=torch.uint8, device="cuda:1")
        print(torch.cuda.memory_reserved(1), flush=True)
        time.sleep(60)
        """
    ask = (
        "import json, nvitop; device = nvitop.Device(1); "
        "processes = {pid: process.gpu_memory() for pid, process in device.processes().items()}; "
        "print(json.dumps([device.memory_total(), device.memory_used(), processes]))"
    )
    with subprocess.Popen(
        device.command(script), env=device.environment, stdout=subprocess.PIPE, text=True
    ) as training:
        assert training.stdout is not None
        reserved = int(training.stdout.readline())
        answer = run_here(device, ask)
        screen = run_here(device, "-m", "nvitop", "-1")
        training.kill()
    total, used, processes = json.loads(answer)
    assert used == reserved + 450 * MIB
    assert processes == {str(training.pid): used}
    assert total == 40339 * MIB
    assert re.search(rf"\b{used // MIB}(\.\d+)?MiB / ", screen)
    assert str(training.pid) in screen


def test_training_large_models_costs_no_host_memory(virtual_gpu):
    def load():
        import resource

        import torch

        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with torch.device("cuda"):
            layers = [torch.nn.Linear(8192, 8192, bias=False) for _ in range(64)]
        for layer in layers:
            layer.weight.data.zero_()
        assert torch.cuda.memory_allocated() == 64 * 8192 * 8192 * 4
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)

    kib = int(virtual_gpu().run(load).stdout)
    assert kib < 200 * 1024  # of 16 GiB


def returns_workspaces(version: str) -> bool:
    """Whether this torch takes a cuBLAS workspace for each product and returns it, instead of keeping one."""
    major, minor = version.split(".")[:2]
    return (int(major), int(minor)) >= FIRST_TO_RETURN_WORKSPACES


def nvml_used(device) -> int:
    """Bytes in use on device 0, as a reader sees them that has nothing to do with the process."""
    ask = "import pynvml as n; n.nvmlInit(); print(n.nvmlDeviceGetMemoryInfo(n.nvmlDeviceGetHandleByIndex(0)).used)"
    return int(run_here(device, ask))


def run_here(device, *arguments: str) -> str:
    """Run code or a module with this test's own interpreter, which needs no torch, on the same devices."""
    command = [sys.executable, *(arguments if len(arguments) > 1 else ("-c", *arguments))]
    environment = {**device.environment, "COLUMNS": "120", "LINES": "60", "TERM": "xterm"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300).stdout
