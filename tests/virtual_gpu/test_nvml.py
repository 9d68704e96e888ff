"""NVML as containers, split boards, unlike machines and failing drivers show it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pynvml
import pytest

from gpumon import virtual_gpu as vgpu
from gpumon.virtual_gpu.profiles import mig_names

MIB = 2**20

HOLD = """
    import sys, torch
    held = [torch.empty(300 << 20, dtype=torch.uint8, device=f"cuda:{i}") for i in range(torch.cuda.device_count())]
    print(getattr(torch.cuda.get_device_properties(0), "uuid", "unknown before torch 2.5"), flush=True)
    sys.stdin.readline()
    try:
        held[0].add_(1)
        torch.cuda.synchronize()
    except RuntimeError as error:
        print(str(error).splitlines()[0])
    """


def ask(device, code: str, timeout: float = 30) -> object:
    """What `code`, an expression over `n` (pynvml) and `d` (device 0), gives in a reader of its own."""
    program = f"import json, pynvml as n; n.nvmlInit(); d = n.nvmlDeviceGetHandleByIndex(0); print(json.dumps({code}))"
    answer = subprocess.run(
        [sys.executable, "-c", program],
        env=device.environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=True,
    )
    return json.loads(answer.stdout)


class Training:
    """A process that holds 300 MiB on each device it sees, until told to go on."""

    def __init__(self, device):
        self.process = subprocess.Popen(
            device.command(HOLD), env=device.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.uuid = self.process.stdout.readline().strip()

    def __enter__(self):
        return self

    def go_on(self) -> str:
        return self.process.communicate("\n", timeout=300)[0]

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()


PROCESSES = "[(p.pid, p.usedGpuMemory) for p in n.nvmlDeviceGetComputeRunningProcesses(d)]"


def test_a_container_can_hide_bytes_processes_or_pids(virtual_gpu):
    device = virtual_gpu(context="100MiB")
    with Training(device) as training:
        pid = training.process.pid
        assert ask(device, PROCESSES) == [[pid, 400 * MIB]]
        vgpu.set_faults(device.session, {"hide": "bytes"}, device.python)
        assert ask(device, PROCESSES) == [[pid, None]]
        vgpu.set_faults(device.session, {"hide": "processes"}, device.python)
        assert ask(device, PROCESSES) == []
        vgpu.set_faults(device.session, {"hide": "pids"}, device.python)
        [[other, held]] = ask(device, PROCESSES)
        assert (other != pid, held) == (True, 400 * MIB)
        assert ask(device, "n.nvmlDeviceGetMemoryInfo(d).used") == 400 * MIB


def test_a_device_lost_in_mid_run_fails_for_cuda_and_nvml(virtual_gpu):
    device = virtual_gpu()
    with Training(device) as training:
        command = [sys.executable, "-m", "gpumon.virtual_gpu", "fault", "--python", device.python, device.session]
        subprocess.run([*command, "lost0=1"], check=True)
        program = (
            "import pynvml as n\nn.nvmlInit()\nd = n.nvmlDeviceGetHandleByIndex(0)\n"
            "try: n.nvmlDeviceGetMemoryInfo(d)\nexcept n.NVMLError as error: print(error)"
        )
        read = subprocess.run([sys.executable, "-c", program], env=device.environment, capture_output=True, text=True)
        assert read.stdout == "GPU is lost\n"
        assert "unspecified launch failure" in training.go_on()


def test_mig_instances_agree_between_cuda_and_nvml(virtual_gpu):
    device = virtual_gpu(devices=2, profile="a100-40", mig="3g.20gb", context="100MiB")
    half = 40339 * MIB // 2 // MIB * MIB
    with Training(device) as training:  # CUDA shows one instance unless it is told which
        instances = "[n.nvmlDeviceGetMigDeviceHandleByIndex(d, i) for i in range(2)]"
        assert ask(device, "n.nvmlDeviceGetCount()") == 1
        assert ask(device, "n.nvmlDeviceGetMigMode(d)") == [1, 1]
        uuid = ask(device, f"[n.nvmlDeviceGetUUID(i) for i in {instances}]")[0]
        assert training.uuid in (uuid.removeprefix("MIG-"), "unknown before torch 2.5")
        assert ask(device, f"[n.nvmlDeviceGetMemoryInfo(i).total for i in {instances}]") == [half, half]
        assert ask(device, f"[n.nvmlDeviceGetMemoryInfo(i).used for i in {instances}]") == [400 * MIB, 0]
        assert ask(device, "n.nvmlDeviceGetMemoryInfo(d).used") == 400 * MIB
        assert ask(device, "n.nvmlDeviceGetMemoryInfo(d).total") == 40339 * MIB
        assert ask(device, "[p.gpuInstanceId for p in n.nvmlDeviceGetComputeRunningProcesses(d)]") == [1]
        names = ask(device, f"[n.nvmlDeviceGetName(i) for i in [d, *{instances}]]")
        assert names == ["Virtual A100-40GB", *["Virtual A100-40GB MIG 3g.20gb"] * 2]


def test_cuda_can_count_devices_in_another_order_than_nvml(virtual_gpu):
    def count():
        import torch

        from gpumon_agent.allocator.cuda import uuid_of_driver

        told = uuid_of_driver(0)
        assert str(getattr(torch.cuda.get_device_properties(0), "uuid", told)) == told  # since torch 2.5
        assert uuid_of_driver(2) is None
        print([torch.cuda.get_device_name(i) for i in range(2)], told)

    device = virtual_gpu(devices=2, profile=["t4", "a100-80"], cuda_order=[1, 0])
    fastest_first = device.run(count).stdout
    assert "'Virtual A100-80GB', 'Virtual T4'" in fastest_first
    uuids = ask(device, "[n.nvmlDeviceGetUUID(n.nvmlDeviceGetHandleByIndex(i)) for i in range(2)]")
    assert uuids[1].removeprefix("GPU-") in fastest_first
    by_bus = device.run(count, env={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}).stdout
    assert "'Virtual T4', 'Virtual A100-80GB'" in by_bus


def test_each_call_can_fail_hang_or_be_slow(virtual_gpu):
    faults = {"nvmlDeviceGetPowerUsage": "na", "nvmlDeviceGetTemperature": 999, "nvmlDeviceGetMemoryInfo": "hang"}
    device = virtual_gpu(nvml_faults={**faults, "nvmlDeviceGetName": "slow:300"})
    program = """
import pynvml as n, time
n.nvmlInit()
d = n.nvmlDeviceGetHandleByIndex(0)
for call in (n.nvmlDeviceGetPowerUsage, lambda d: n.nvmlDeviceGetTemperature(d, 0)):
    try:
        print(call(d))
    except n.NVMLError as error:
        print(type(error).__name__)
began = time.monotonic()
n.nvmlDeviceGetName(d)
print(time.monotonic() - began >= 0.3, flush=True)
n.nvmlDeviceGetMemoryInfo(d, version=n.nvmlMemory_v2)
"""
    reader = subprocess.Popen(
        [sys.executable, "-c", program], env=device.environment, stdout=subprocess.PIPE, text=True
    )
    with reader:
        assert reader.stdout is not None
        answers = [reader.stdout.readline().strip() for _ in range(3)]
        assert answers == ["NVMLError_NotSupported", "NVMLError_Unknown", "True"]
        time.sleep(0.5)
        assert reader.poll() is None
        reader.kill()


CALL_ALL = """
import ctypes, json, os, sys, threading, time
nvml = ctypes.CDLL("libnvidia-ml.so.1")
names = sys.argv[1:]

def told(name, fault):
    os.environ["VGPU_NVML_FAULTS"] = f"{name}={fault}"
    return getattr(nvml, name)(*[None] * 8)

print(json.dumps({name: [told(name, "na"), told(name, "nopermission"), told(name, 777)] for name in names}))
os.environ["VGPU_NVML_FAULTS"] = ",".join(f"{name}=hang" for name in names)
threading.stack_size(1 << 16)
calls = [threading.Thread(target=getattr(nvml, name), args=[None] * 8, daemon=True) for name in names]
for call in calls:
    call.start()
time.sleep(0.5)
print(json.dumps([name for name, call in zip(names, calls) if not call.is_alive()]), flush=True)
os._exit(0)
"""


def test_every_function_that_a_reader_can_call_fails_is_refused_or_hangs_by_its_name(virtual_gpu):
    source = Path(pynvml.__file__).read_text()
    names = set(re.findall(r"[\"'](nvml[A-Z]\w*)[\"']", source)) - {"nvmlErrorString"}  # which is asked after a failure
    ran = subprocess.run(
        [sys.executable, "-c", CALL_ALL, *names],
        env=virtual_gpu().environment,
        capture_output=True,
        text=True,
        check=True,
    )
    told, did_not_hang = map(json.loads, ran.stdout.splitlines())
    assert {name: codes for name, codes in told.items() if codes != [3, 4, 777]} == {}
    assert did_not_hang == []
    assert len(told) > 200


@pytest.mark.parametrize(
    ("board", "names"),
    [
        ("a100-40", "1g.5gb 2g.10gb 3g.20gb 4g.20gb 7g.40gb"),
        ("h100-nvl", "1g.12gb 2g.24gb 3g.47gb 4g.47gb 7g.94gb"),
        ("h200", "1g.18gb 2g.35gb 3g.71gb 4g.71gb 7g.141gb"),
        ("gh200", "1g.12gb 2g.24gb 3g.48gb 4g.48gb 7g.96gb"),
        ("b200", "1g.23gb 2g.45gb 3g.90gb 4g.90gb 7g.180gb"),
        ("rtx5090", ""),
    ],
)
def test_instances_have_the_names_of_nvidia_s_user_guide(board, names):
    assert list(mig_names(vgpu.PROFILES[board])) == names.split()


def test_a_fault_that_makes_no_sense_is_one_sentence(virtual_gpu):
    with pytest.raises(ValueError, match="is not a fault"):
        vgpu.environment(nvml_faults={"nvmlDeviceGetName": "a b"})
    with pytest.raises(ValueError, match="no session 'nobody' is known"):
        vgpu.set_faults("nobody", {})
    with pytest.raises(ValueError, match="has no MIG profile '9g'"):
        vgpu.environment(profile="a100-40", mig="9g")
    with pytest.raises(ValueError, match="cannot be split"):
        vgpu.environment(profile="t4", mig="1g.2gb")


def test_a_rank_that_sets_its_device_first_has_a_context_on_no_other(virtual_gpu):
    """As with a real driver: torch asks it whether a device has one before it turns there."""
    script = """
        import os, sys, tempfile
        import pynvml
        import torch
        import torch.distributed as dist
        import torch.multiprocessing as mp

        def devices():
            handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(2)]
            processes = [pynvml.nvmlDeviceGetComputeRunningProcesses(handle) for handle in handles]
            return [at for at, found in enumerate(processes) if any(each.pid == os.getpid() for each in found)]

        def rank(index, folder):
            pynvml.nvmlInit()
            torch.manual_seed(0)
            torch.cuda.set_device(index)
            torch.cuda.manual_seed_all(0)
            assert [torch.cuda.get_device_properties(each).name for each in range(2)]
            dist.init_process_group("nccl", init_method=f"file://{folder}/meet", rank=index, world_size=2)
            dist.barrier()
            model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout()).cuda()
            parallel = torch.nn.parallel.DistributedDataParallel(model, device_ids=[index])
            optimizer = torch.optim.AdamW(parallel.parameters())
            scaler = torch.amp.GradScaler("cuda")
            data = torch.utils.data.TensorDataset(torch.randn(64, 64))
            for (batch,) in torch.utils.data.DataLoader(data, batch_size=32, pin_memory=True):
                batch = batch.cuda(non_blocking=True).requires_grad_()
                with torch.autocast("cuda"):
                    loss = torch.utils.checkpoint.checkpoint(parallel, batch, use_reentrant=False).sum()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            with tempfile.TemporaryFile() as file:
                torch.save(model.state_dict(), file)
                file.seek(0)
                torch.load(file)
            torch.cuda.get_rng_state_all()
            torch.cuda.max_memory_allocated(0)
            torch.cuda.synchronize()
            assert devices() == [index], (index, devices())
            torch.zeros(1, device="cuda:0")
            assert devices() == sorted({0, index}), (index, devices())
            dist.destroy_process_group()

        if __name__ == "__main__":
            import torch.utils.checkpoint
            mp.spawn(rank, (sys.argv[1],), 2)
        """
    device = virtual_gpu(devices=2)
    device.run(script, device.folder)
