"""What tests of several folders share."""

from __future__ import annotations

import importlib.util
import inspect
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import slow
import virtual
from forks import Forks
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from gpumon import virtual_gpu as vgpu

Script = str | Path | Callable[..., Any]
PYTHON = os.environ.get("GPUMON_VIRTUAL_GPU_PYTHON", sys.executable)

if importlib.util.find_spec("torch") is None:
    # they import it themselves
    collect_ignore = ["agent", "inventory", "scenarios", "e2e/test_job_shards.py", "estimate_traced/test_traced.py"]

MOST_WORKERS = 8
LONGEST = (
    "tests/scenarios",
    "tests/agent/test_ledgers",
    "tests/shim/test_reach",
    "tests/cli/test_d",
    "tests/e2e",
    "tests/agent",
    "tests/inventory/test_owners",
    "tests/oom/test_live",
    "tests/cli",
    "tests/analysis",
    "tests/virtual_gpu",
)
"""The files that take longest begin first, so that no worker is left alone with one at the end."""

# The same examples in each run. By hand: with GPUMON_FUZZ_TIMES=100 a hundred times as many, others each time.
settings.register_profile(
    "same",
    deadline=None,
    derandomize="GPUMON_FUZZ_TIMES" not in os.environ,
    max_examples=100 * int(os.environ.get("GPUMON_FUZZ_TIMES", "1")),
    database=None,
)
settings.load_profile("same")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # started in a shell's background or by nohup, which what a test starts would inherit: verbs leave it ignored then,
    # as they should, and some tests press Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """A worker for each core; none for files or tests that are named, which run here, where a debugger reaches them."""
    named = any(".py" in argument for argument in config.args)
    if named or config.option.markexpr == "gpu":  # of physical GPUs there may be one
        return 0
    return min(len(os.sched_getaffinity(0)), MOST_WORKERS)


class _ByFile(LoadScopeScheduling):
    """A file's tests stay together, for they share fixtures, and so do all that look at the same scenarios' runs."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        own = file.endswith(("test_raised.py", "test_leaks.py"))
        return "tests/scenarios" if file.startswith("tests/scenarios/") and not own else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return _ByFile(config, log)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("torch") and importlib.util.find_spec("torch") is None:
        pytest.skip("needs PyTorch")


def pytest_configure(config: pytest.Config) -> None:
    """Nothing asked for: what takes longest is left to `.ci/run`."""
    plain = config.option.markexpr == "not gpu and not long" and not config.option.keyword
    if plain and config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        config.option.markexpr += " and not slow"


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    longest = frozenset(slow.LIST.read_text().split())
    for item in items:
        if item.nodeid.partition("[")[0] in longest:
            item.add_marker("slow")

    def place(item: pytest.Item) -> int:
        return next((i for i, start in enumerate(LONGEST) if item.nodeid.startswith(start)), len(LONGEST))

    items.sort(key=place)


@dataclass(frozen=True)
class VirtualGpu:
    """Virtual devices of one test: a session of its own, gone from /dev/shm when the test ends."""

    environment: dict[str, str]
    folder: Path
    python: str
    forks: Forks

    @property
    def session(self) -> str:
        return self.environment["VGPU_SESSION"]

    def run(
        self,
        script: Script,
        *args: object,
        check: bool = True,
        timeout: float = 300,
        env: dict[str, str] | None = None,
        fresh: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Run a script's path, its text, or a function that needs nothing from around it, in a process of its own.

        The process is a fork of one that has torch imported, where that saves time and nothing that torch reads as it
        is imported is asked for; `fresh` is for a test to which addresses or the import itself matter.
        """
        command = self.command(script, *args)
        environment = {**self.environment, **(env or {})}
        if fresh or "torch" not in Path(command[1]).read_text() or not self.forks.can(environment):
            completed = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=timeout, check=False
            )
        else:
            out = Path(tempfile.mkdtemp(prefix="forked-", dir=self.folder))
            ended = self.forks.run(command[1:], environment, out, timeout=timeout)
            completed = subprocess.CompletedProcess(command, ended.codes[0], ended.out[0], ended.err[0])
        assert not check or completed.returncode == 0, completed.stdout + completed.stderr
        return completed

    def command(self, script: Script, *args: object) -> list[str]:
        """The command line ``run`` would start, for a test that wants the process itself."""
        if isinstance(script, Path):
            return [self.python, str(script), *map(str, args)]
        if callable(script):
            name, text = script.__name__, textwrap.dedent(inspect.getsource(script))
            body = f'{text}\n\nif __name__ == "__main__":\n    {name}(*{args!r})\n'
            arguments: tuple[object, ...] = ()
        else:
            name, body, arguments = "script", textwrap.dedent(script), args
        path = self.folder / f"{name}.py"
        path.write_text(body)
        return [self.python, str(path), *map(str, arguments)]


@pytest.fixture
def as_init() -> list[str]:
    """The beginning of a command line whose process is number 1."""
    command = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if shutil.which("unshare") is None or subprocess.run([*command, "true"], capture_output=True).returncode != 0:
        pytest.skip("no pid namespace can be made here")
    return command


@pytest.fixture(autouse=True)
def _of_its_own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test starts meets neither the agents and files of other tests nor the size of somebody's terminal."""
    with tempfile.TemporaryDirectory(prefix="gm", ignore_cleanup_errors=True) as runtime:  # a socket's path: 107 bytes
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        monkeypatch.setenv("XDG_STATE_HOME", f"{runtime}/state")
        for size in ("LINES", "COLUMNS"):  # pytest-xdist's workers have them set
            monkeypatch.delenv(size, raising=False)
        yield


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """One process with torch imported, for all tests of this worker."""
    forks = Forks(PYTHON)
    yield forks
    forks.close()


@pytest.fixture(scope="session")
def native_build() -> tuple[Path | None, str]:
    """The native reader for the tests' torch, built; or None and why there is none."""
    code = "from gpumon.cli import native_reader; print(native_reader.build())"
    ran = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, timeout=300)
    if not ran.returncode:
        return Path(ran.stdout.strip()), ""
    why = ran.stderr.strip().splitlines()[-1]
    required = os.environ.get("GPUMON_REQUIRE_VIRTUAL_GPU") == "1" and os.environ.get("GPUMON_OLDER_TORCH") != "1"
    if required and shutil.which("g++") is not None:
        pytest.fail(why)
    return None, why


@pytest.fixture(scope="session")
def native_reader(native_build: tuple[Path | None, str]) -> Path:
    """Skips, or fails, as `virtual_gpu` does; without g++ it skips."""
    path, why = native_build
    if path is None:
        pytest.skip(why)
    return path


@pytest.fixture(params=["in Python", "compiled"])
def hooks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which hooks of idle steps run, and what reads storages for the ledger."""
    compiled = request.param == "compiled"
    monkeypatch.setenv("GPUMON_NATIVE", "on" if compiled else "off")
    if compiled:
        request.getfixturevalue("native_reader")
    return str(request.param)


@pytest.fixture
def virtual_gpu(tmp_path: Path, forks: Forks) -> Iterator[Callable[..., VirtualGpu]]:
    """``virtual_gpu(devices=2, profile="a100-40", memory="16GiB", context="450MiB").run(script_or_function, *args)``.

    Skips where the virtual GPU cannot be built, with the reason; fails there if GPUMON_REQUIRE_VIRTUAL_GPU is 1.
    GPUMON_VIRTUAL_GPU_PYTHON names another interpreter, to run the same test with its torch.
    """
    sessions: list[str] = []

    def make(**options: Any) -> VirtualGpu:
        environment = virtual.environment(PYTHON, **options)
        sessions.append(environment["VGPU_SESSION"])
        return VirtualGpu(environment, tmp_path, PYTHON, forks)

    yield make
    for session in sessions:
        vgpu.remove_session(session)
