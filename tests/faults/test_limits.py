"""What the system gives a process runs out: the training goes on as without gpumon."""

from __future__ import annotations

import subprocess
import sys

import pytest
from faults.training import Begin, Same

pytestmark = pytest.mark.torch

WITH_FREE = """
def only(free):
    "So many descriptors are left to this process."
    kept = opened()
    limit = max(kept) + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    taken = []
    try:
        while True:
            taken.append(os.dup(0))
    except OSError:
        for each in taken[len(taken) - free:] if free else []:
            os.close(each)
    return taken
"""


@pytest.mark.parametrize("free", [0, 1, 2, 3, 4])
def test_descriptors_run_out_before_it_watches(same: Same, free: int) -> None:
    same(f"{WITH_FREE}\nonly({free})\nwatch(awaited=False)\ntrain()", lines=1)


@pytest.mark.parametrize("free", [0, 1, 3])
def test_descriptors_run_out_and_viewers_come(begin: Begin, free: int) -> None:
    """The reason for a helper: libzmq in the training would end it with abort()."""
    script = f"""{WITH_FREE}
watch()
train()
only({free})
print("pid=" + str(os.getpid()), flush=True)
until = time.monotonic() + 3
while time.monotonic() < until:
    train(1)
"""
    training = begin(script)
    pid = training.asked("pid")
    for _ in range(3):
        found = subprocess.run([sys.executable, "-m", "gpumon", "ls"], capture_output=True, text=True, timeout=60)
        assert str(pid) in found.stdout, found
    ran = training.result()
    assert (ran.code, ran.err) == (0, "")


@pytest.mark.parametrize("streams", [True, False])
def test_all_descriptors_are_closed(same: Same, streams: bool) -> None:
    closes = "os.closerange(3, 1 << 16)" if streams else "os.closerange(0, 1)\nos.closerange(2, 1 << 16)"
    same(f"watch()\ntrain(2)\n{closes}\ntrain(2)")


def test_standard_streams_are_closed_before(same: Same) -> None:
    """Then the descriptor of what is shared would be 0."""
    same("out = os.dup(1); os.closerange(0, 3); watch(); os.dup2(out, 1); train()")


@pytest.mark.parametrize("free", [0, 1, 2])
def test_processes_run_out(same: Same, free: int) -> None:
    same(
        f"""
another = 1_000_000 + os.getpid()
os.chmod(os.getcwd(), 0o777)
os.setresuid(another, another, 0)
resource.setrlimit(resource.RLIMIT_NPROC, ({free} + 1, {free} + 1))
watch(awaited=False)
train()
""",
        lines=2,
        XDG_RUNTIME_DIR="",
    )


@pytest.mark.parametrize("more", [0, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20])
def test_address_space_runs_out_before_it_watches(same: Same, more: int) -> None:
    """The training itself has what it needs; nothing is left for gpumon."""
    same(
        f"""
import gc
train(1)
if WATCHED:
    import gpumon_agent.agent, gpumon_agent.transport.trainer
    memory = torch.empty(0)
    import gpumon_agent.leaks.leak_monitor, gpumon_agent.hooks.torch_hooks, gpumon_agent.attribution.describe
size = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
if WATCHED:
    resource.setrlimit(resource.RLIMIT_AS, (size + {more}, resource.RLIM_INFINITY))
    try:
        watch(awaited=False)
    except MemoryError:
        print("out of memory")
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
train()
""",
        lines=2,
    )


def test_address_space_runs_out_while_it_watches(same: Same) -> None:
    same(
        """
watch()
train(5)
size = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (size + (1 << 20), resource.RLIM_INFINITY))
train(20)
""",
        lines=1,
    )


@pytest.mark.parametrize("action", ["SIG_IGN", "SIG_DFL"])
def test_files_may_not_grow(same: Same, action: str) -> None:
    """The kernel counts a memfd as a file: beyond the limit it sends SIGXFSZ, which ends a program that takes it."""
    same(
        f"""
signal.signal(signal.SIGXFSZ, signal.{action})
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
watch(awaited=False)
train()
""",
        lines=1,
    )


@pytest.mark.parametrize(
    "limit", ["RLIMIT_MEMLOCK", "RLIMIT_CORE", "RLIMIT_MSGQUEUE", "RLIMIT_SIGPENDING", "RLIMIT_NICE"]
)
def test_other_limits_at_zero(same: Same, limit: str) -> None:
    same(f"resource.setrlimit(resource.{limit}, (0, 0))\nwatch()\ntrain()")


def test_a_small_stack(same: Same) -> None:
    same("resource.setrlimit(resource.RLIMIT_STACK, (256 << 10, 256 << 10))\nwatch()\ntrain()")


def test_cpu_seconds_run_out(same: Same) -> None:
    """The helper's own do not count against the training's."""
    same(
        """
spent = int(time.process_time())
resource.setrlimit(resource.RLIMIT_CPU, (spent + 30, spent + 60))
watch()
train()
"""
    )


def test_the_recursion_limit_is_near(same: Same) -> None:
    same(
        """
watch()
def deep(n):
    return deep(n - 1) if n else train()
import inspect
sys.setrecursionlimit(400)
deep(300)
"""
    )
