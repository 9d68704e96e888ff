"""Building and launching: once for each torch, safely from many processes, with one sentence where it cannot be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from gpumon import virtual_gpu as vgpu
from gpumon.virtual_gpu import building, elf, sizes

LAUNCHER = [sys.executable, "-m", "gpumon.virtual_gpu"]
HERE = Path(__file__).parent


@pytest.fixture
def torch_with_cuda(virtual_gpu) -> Path:
    """A build of the torch under test; skips where there can be none."""
    return building.build(virtual_gpu().python)


def launch(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*LAUNCHER, *arguments], env={**os.environ, **environment}, capture_output=True, text=True)


def test_the_sources_compile_without_a_warning(torch_with_cuda):
    assert not (torch_with_cuda / "warnings.txt").exists()
    assert torch_with_cuda.stat().st_mode & 0o077 == 0


def test_what_a_library_needs_takes_and_gives_is_read_from_it(torch_with_cuda, tmp_path: Path) -> None:
    made = tmp_path / "libmade.so"
    source = 'int puts(const char *); int given(void) { return puts(""); }'
    subprocess.run(["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", made], input=source, text=True, check=True)
    read = elf.read(made)
    assert "libc.so.6" in read.needed
    assert ("given" in read.exports, "given" in read.imports) == (True, False)
    assert ("puts" in read.exports, "puts" in read.imports) == (False, True)


def test_layouts_are_those_of_nvidias_headers(torch_with_cuda, virtual_gpu):
    torch = building.find_torch(virtual_gpu().python)
    found = list(torch.folder.parent.glob("nvidia/**/include/cuda_runtime_api.h"))
    found = [path for path in found if (path.parent / "crt" / "host_defines.h").exists()]
    if not found:
        pytest.skip("needs NVIDIA's headers: pip install nvidia-cuda-runtime, nvidia-cuda-crt and nvidia-cublas")
    include = found[0].parent
    version = torch.cuda[0] * 1000 + torch.cuda[1] * 10
    check = ["gcc", "-fsyntax-only", f"-DVGPU_CUDA_VERSION={version}", f"-I{include}", f"-I{building.SOURCES}"]
    subprocess.run([*check, str(HERE / "check_abi.c")], check=True)


def test_a_build_belongs_to_one_torch(torch_with_cuda, virtual_gpu, monkeypatch):
    torch = building.find_torch(virtual_gpu().python)
    made = []
    monkeypatch.setattr(building, "find_torch", lambda python: replace(torch, version="0.1"))
    monkeypatch.setattr(building, "_make", lambda folder, *_: made.append(folder))
    other = building.build()
    assert made == [other]
    assert [folder.name.partition("-")[0] for folder in (torch_with_cuda, other)] == [torch.version, "0.1"]


def test_processes_that_build_at_once_end_with_one_build(torch_with_cuda, virtual_gpu, tmp_path):
    python = virtual_gpu().python
    with ThreadPoolExecutor(3) as pool:
        runs = list(pool.map(lambda _: launch("build", "--python", python, XDG_CACHE_HOME=str(tmp_path)), range(3)))
    assert len({run.stdout for run in runs}) == 1, runs
    folders = list((tmp_path / "gpumon" / "virtual_gpu").iterdir())
    assert [str(folder) + "\n" for folder in folders] == [runs[0].stdout]


def test_a_missing_compiler_is_one_sentence(torch_with_cuda, tmp_path):
    failed = launch("build", XDG_CACHE_HOME=str(tmp_path), CC="no-such-compiler")
    assert failed.returncode == 1
    assert failed.stderr == (
        "Error: The virtual GPU is built on demand and needs a C compiler: no-such-compiler was not found.\n"
    )


def test_a_torch_without_cuda_is_one_sentence(tmp_path):
    torch = tmp_path / "torch"
    (torch / "lib").mkdir(parents=True)
    (torch / "__init__.py").touch()
    (torch / "version.py").write_text("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    failed = launch("run", "--python", str(python), "--", "true")
    assert failed.returncode == 1
    assert "needs a PyTorch built for CUDA, and torch 2.13.0+cpu" in failed.stderr
    assert len(failed.stderr.splitlines()) == 1


@pytest.mark.parametrize(("demanded", "ended"), [("0", "2 skipped"), ("1", "2 failed")])
def test_where_it_cannot_be_had_tests_are_skipped_and_fail_if_that_is_demanded(tmp_path, demanded, ended):
    users = ("virtual_gpu/test_values.py::test_stale_bytes_can_be_asked_for", "scenarios/test_every_scenario.py")
    command = [sys.executable, "-m", "pytest", *users, "-n", "0", "-p", "no:cacheprovider", "-k", "stale or mlp"]
    environment = {**os.environ, "CC": "no-such-compiler", "GPUMON_REQUIRE_VIRTUAL_GPU": demanded}
    environment["XDG_CACHE_HOME"] = str(tmp_path)
    ran = subprocess.run(command, cwd=HERE.parent, env=environment, capture_output=True, text=True, check=False)
    assert ended in ran.stdout.splitlines()[-1], ran.stdout + ran.stderr
    assert ran.returncode == (demanded == "1")
    assert "The virtual GPU " in ran.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--profile", "abacus"], "'abacus' is not a device profile: choose from a100-80"),
        (["--memory", "16 apples"], "'16 apples' is not a size"),
        (["--devices", "99"], "99 devices: choose 0 to 16"),
        (["--session", "a/b"], "'a/b' is not a session name"),
        (["--nvml-fault", "power"], "'power' is not a fault"),
    ],
)
def test_a_wrong_argument_is_one_sentence_and_exit_code_2(arguments, sentence):
    failed = launch("run", *arguments, "--", "true")
    assert failed.returncode == 2
    assert sentence in failed.stderr
    assert "Traceback" not in failed.stderr


def test_sizes_are_read_in_binary_units():
    assert [sizes.parse(size) for size in (7, "7", "2KiB", "1.5 GiB")] == [7, 7, 2048, 1536 * 2**20]
    with pytest.raises(ValueError, match="is not a size"):
        sizes.parse("16GB")


def test_a_program_that_ends_while_autograd_wants_python_is_not_aborted(torch_with_cuda, virtual_gpu, tmp_path):
    def train_and_end():
        import time

        import torch

        def train():
            weight = torch.ones(4, device="cuda", requires_grad=True)
            loss = weight.sum()
            loss.grad_fn.next_functions[0][0].register_hook(lambda *gradients: None)
            loss.backward()

        train()
        end = time.monotonic() + 0.3
        while time.monotonic() < end:  # with Python's lock, up to the end
            pass

    gpu = virtual_gpu()
    late = tmp_path / "late_thread.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(late), str(HERE / "late_thread.c"), "-ldl"], check=True)
    preload = {"LD_PRELOAD": f"{late}:{gpu.environment['LD_PRELOAD']}"}
    with ThreadPoolExecutor(2) as pool:
        mended = pool.submit(gpu.run, train_and_end, env=preload, fresh=True)
        without = pool.submit(gpu.run, train_and_end, env={**preload, "WITHOUT_MEND": "1"}, fresh=True, check=False)
    assert "terminate called" not in mended.result().stderr
    # Python 3.14 lets such a thread wait for ever by itself; with torch 2.4 and 2.8 this does not bring it about
    if sys.version_info < (3, 14) and "GPUMON_OLDER_TORCH" not in os.environ:
        assert without.result().returncode == -signal.SIGABRT, without.result()
        assert "terminate called without an active exception" in without.result().stderr


def test_processes_that_start_at_once_share_one_table_and_a_fork_is_its_own_process(virtual_gpu):
    def start():
        import os

        import torch

        held = torch.empty(100 << 20, dtype=torch.uint8, device="cuda")
        child = os.fork()
        if child == 0:
            os._exit(0 if torch.cuda._is_in_bad_fork() else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert torch.cuda.memory_reserved() == 100 << 20
        del held

    device = virtual_gpu(context="0")
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: device.run(start, fresh=True), range(2)))
    ask = "import pynvml as n; n.nvmlInit(); print(n.nvmlDeviceGetMemoryInfo(n.nvmlDeviceGetHandleByIndex(0)).used)"
    read = subprocess.run(
        [sys.executable, "-c", ask], env=device.environment, capture_output=True, text=True, check=True
    )
    assert read.stdout == "0\n"


def test_a_signal_reaches_the_program_itself(virtual_gpu):
    device = virtual_gpu()
    command = [*LAUNCHER, "run", "--python", device.python, "--session", device.session, "--", "sleep", "600"]
    with subprocess.Popen(command) as program:
        time.sleep(2)
        program.send_signal(signal.SIGTERM)
        assert program.wait(300) == -signal.SIGTERM


def test_tables_nobody_removed_are_swept_after_an_hour(torch_with_cuda):
    def table(name: str, hours: float) -> Path:
        path = Path(f"/dev/shm/vgpu.{os.getuid()}.{name}")
        path.touch()
        os.utime(path, (time.time() - hours * 3600,) * 2)
        return path

    gone, fresh = table("4194305-00000000", 2), table("4194305-11111111", 0.5)
    mine = table(f"{os.getpid()}-00000000", 2)
    vgpu.environment(python=os.environ.get("GPUMON_VIRTUAL_GPU_PYTHON", sys.executable))
    assert [path.exists() for path in (gone, fresh, mine)] == [False, True, True]
    fresh.unlink()
    mine.unlink()
    with pytest.raises(ValueError, match="is not a session name"):
        vgpu.remove_session("../x")


def test_a_small_script_costs_little_beyond_importing_torch(virtual_gpu):
    def train():
        import time

        import torch

        imported = time.process_time()
        model = torch.nn.Linear(64, 64).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(4, 64, device="cuda")).sum().backward()
        optimizer.step()
        print(time.process_time() - imported)

    assert float(virtual_gpu().run(train).stdout) < 5
