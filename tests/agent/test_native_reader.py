"""The native reader of the allocator is used only if it is the user's own and equal to torch, and never in the way."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpumon_agent import compiled

Gpu = Callable[..., Any]

WRONG = """
long long gpumon_boundary(int device, long long* figures, long long* peaks, int what) { figures[0] = 1; return 0; }
"""


def readings(count: int = 6) -> None:
    """Whether each of `count` boundaries was read natively, what the agent would say, and torch's figures beside."""
    import json

    import torch

    from gpumon_agent.allocator.peaks import Peaks, figures

    kept = torch.ones(1000, device="cuda")
    said = []
    peaks = Peaks(tell=said.append)
    read = [peaks.boundary(0) for _ in range(count)]
    natively = [isinstance(each, tuple) for each in read]
    last = read[-1] if natively[-1] else figures(read[-1])
    print(json.dumps([natively, said, list(last[:8]), [torch.cuda.memory_allocated(), kept.nbytes]]))


@pytest.fixture
def cached(native_reader: Path, tmp_path: Path) -> Path:
    """A copy of the reader in another cache."""
    copy = tmp_path / "cache" / "gpumon" / "native" / native_reader.name
    copy.parent.mkdir(parents=True, mode=0o700)
    shutil.copy(native_reader, copy)
    return copy


def run(gpu: Gpu, reader: Path, *args: Any) -> list[Any]:
    cache = {"XDG_CACHE_HOME": str(reader.parents[2])}
    return json.loads(gpu().run(readings, *args, env=cache).stdout)


def test_it_is_used_after_three_readings_that_equal_torchs(virtual_gpu: Gpu, cached: Path) -> None:
    natively, said, last, (allocated, nbytes) = run(virtual_gpu, cached)
    assert natively == [False, False, False, True, True, True]
    assert not said
    assert last[:2] == [allocated, allocated]
    assert allocated >= nbytes


def test_one_that_differs_from_torch_is_not_used(virtual_gpu: Gpu, cached: Path, tmp_path: Path) -> None:
    (tmp_path / "wrong.c").write_text(WRONG)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(cached), str(tmp_path / "wrong.c")], check=True)
    cached.write_bytes(compiled.sealed(cached.read_bytes()))
    natively, said, last, (allocated, _) = run(virtual_gpu, cached)
    assert not any(natively)
    assert said == ["the native reader of the allocator is not used: it differs from torch.cuda.memory_stats()"]
    assert last[0] == allocated


@pytest.mark.parametrize("which", ["file", "folder"])
def test_one_that_others_could_change_is_not_loaded(virtual_gpu: Gpu, cached: Path, which: str) -> None:
    (cached if which == "file" else cached.parent).chmod(0o722)
    natively, said, *_ = run(virtual_gpu, cached)
    assert not any(natively)
    assert not said


@pytest.mark.parametrize("content", [b"", b"\x7fELF", compiled.sealed(b"no library"), None])
def test_what_cannot_be_loaded_is_as_if_it_were_not_there(
    virtual_gpu: Gpu, cached: Path, content: bytes | None
) -> None:
    cached.write_bytes(cached.read_bytes()[:9000] if content is None else content)
    natively, said, *_ = run(virtual_gpu, cached)
    assert not any(natively)
    assert not said


@pytest.mark.usefixtures("native_reader")
def test_private_pools_are_read_through_the_dict(virtual_gpu: Gpu) -> None:
    def script() -> None:
        import torch

        from gpumon_agent.allocator.peaks import Peaks

        torch.ones(1, device="cuda")
        peaks = Peaks()
        kinds = [type(peaks.boundary(0)) for _ in range(5)]
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            kept = torch.ones(1000, device="cuda")
        kinds.append(type(peaks.boundary(0)))
        assert kinds == [dict, dict, dict, tuple, tuple, dict], kinds
        assert kept.nbytes

    virtual_gpu().run(script)


@pytest.mark.usefixtures("native_reader")
def test_a_thread_that_allocates_between_reading_and_reset_makes_the_peak_a_bound(virtual_gpu: Gpu) -> None:
    """torch allocates without the GIL, so another thread may do so at any moment."""

    def script() -> None:
        import threading
        import time

        import torch

        from gpumon_agent import wire
        from gpumon_agent.allocator.peaks import Peaks

        torch.ones(1, device="cuda")
        peaks = Peaks()
        alone = [peaks.boundary(0) for _ in range(100)][3:]
        assert not any(read[10] for read in alone)
        done = threading.Event()

        def allocate() -> None:
            while not done.is_set():
                torch.empty(100, device="cuda")

        threads = [threading.Thread(target=allocate) for _ in range(2)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 60
        while not (bound := peaks.boundary(0)[10]) and time.monotonic() < deadline:
            pass
        done.set()
        for thread in threads:
            thread.join()
        assert bound == wire.BOUND

    virtual_gpu().run(script)


@pytest.mark.usefixtures("native_reader")
def test_off_and_bounds_do_without_it(virtual_gpu: Gpu) -> None:
    gpu = virtual_gpu()
    for how in ({"GPUMON_NATIVE": "off"}, {"GPUMON_PEAKS": "bounds"}):
        code = """
            from gpumon_agent.agent import Agent
            print(Agent(publish=False).picture()[0].settings["reader"])
        """
        assert gpu.run(code, env=how).stdout == "torch\n"
        assert gpu.run(code).stdout == "native\n"


def gpumon(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment}
    return subprocess.run([sys.executable, "-m", "gpumon", *args], capture_output=True, text=True, env=env, timeout=120)


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({}, "compile them with: gpumon doctor --build"),
        ({"CXX": "no-such-compiler"}, "no-such-compiler was not found; set CXX"),
    ],
)
@pytest.mark.usefixtures("native_reader")
def test_doctor_says_that_it_is_not_there(tmp_path: Path, environment: dict[str, str], sentence: str) -> None:
    shown = gpumon("doctor", XDG_CACHE_HOME=str(tmp_path), **environment)
    (line,) = [line for line in shown.stdout.splitlines() if " reader " in line]
    assert line.startswith("note")
    assert line.endswith(sentence)
    assert shown.returncode == 0


@pytest.mark.usefixtures("native_reader")
def test_doctor_builds_it(tmp_path: Path) -> None:
    shown = gpumon("doctor", "--build", XDG_CACHE_HOME=str(tmp_path))
    (line,) = [line for line in shown.stdout.splitlines() if " reader " in line]
    (built,) = (tmp_path / "gpumon" / "native").iterdir()
    assert line.startswith("ok ")
    assert line.endswith(f"native, {built}")
    for environment, why in (
        ({"CXX": "false"}, "gpumon: the native reader could not be compiled for torch "),
        ({"XDG_CACHE_HOME": "/proc/1"}, "gpumon: the native reader cannot be built in /proc/1/"),
    ):
        refused = gpumon("doctor", "--build", **{"XDG_CACHE_HOME": str(tmp_path / "new"), **environment})
        assert refused.returncode == 1
        assert refused.stderr.startswith(why)


@pytest.mark.usefixtures("native_reader")
def test_run_builds_it_once_and_starts_without_it_if_it_cannot(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('trained')")
    for cache, compiler, built in ((tmp_path / "one", "g++", 1), (tmp_path / "two", "false", 0)):
        ran = gpumon("run", str(script), XDG_CACHE_HOME=str(cache), CXX=compiler)
        assert (ran.stdout, ran.stderr, ran.returncode) == ("trained\n", "", 0)
        assert len(list(cache.glob("gpumon/native/*.so"))) == built
    gpumon("run", str(script), XDG_CACHE_HOME=str(cache))  # a compiler that failed is not asked before each training
    assert not list(cache.glob("gpumon/native/*.so"))
    assert gpumon("doctor", "--build", XDG_CACHE_HOME=str(cache)).returncode == 0
    (built_at_last,) = (cache / "gpumon" / "native").iterdir()
    assert built_at_last.suffix == ".so"
