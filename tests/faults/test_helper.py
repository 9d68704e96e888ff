"""The helper is killed, stopped, starved or lies: the training goes on as without gpumon."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from faults.training import Begin, Same

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGSEGV", "SIGHUP", "SIGINT", "SIGPIPE", "SIGBUS"])
def test_a_signal_to_it(same: Same, name: str) -> None:
    same(f"watch()\ntrain()\nif helper(): os.kill(helper(), signal.{name})\ntrain(20)", lines=1)


def test_it_is_killed_while_it_starts(same: Same) -> None:
    same("watch(awaited=False)\nif helper(): os.kill(helper(), signal.SIGKILL)\ntrain(20)")


def test_it_is_killed_again_and_again(same: Same) -> None:
    """Others take its place three times; then nobody does, which is one line."""
    ran = same(
        """
watch()
killed = []
until = time.monotonic() + 60
while WATCHED and time.monotonic() < until and transport().running:
    if helper() not in killed:
        Path(os.environ["HELPERS"], str(helper())).mkdir(exist_ok=True)
        killed.append(helper())
        transport().wait_ready(5)
        os.kill(helper(), signal.SIGKILL)
    optimizer.zero_grad()
    model(torch.zeros(8, 16)).sum().backward()
    time.sleep(0.02)
assert not WATCHED or len(killed) == 4, killed
optimizer.zero_grad()
train(20)
""",
        lines=1,
    )
    assert ran.own == ["gpumon: its helper process died repeatedly: no viewer can watch this run any more"]


@pytest.mark.parametrize("begins", [True, False], ids=["as it begins", "later"])
def test_it_is_stopped(same: Same, begins: bool) -> None:
    """Nothing waits for it, and what it does not take falls out of the ring."""
    same(
        f"""
watch(awaited={not begins})
if helper(): os.kill(helper(), signal.SIGSTOP)
for _ in range(20):
    train(50)
if WATCHED:
    began = time.monotonic()
    assert transport().running
pid = helper()
if pid: import atexit; atexit.register(os.kill, pid, signal.SIGCONT)
"""
    )


def test_it_is_stopped_and_the_training_ends(begin: Begin) -> None:
    """The end of the training does not wait for it."""
    script = """
import subprocess
watch()
train()
os.kill(helper(), signal.SIGSTOP)
print("helper=" + str(helper()), flush=True)
"""
    training = begin(script)
    helper = training.asked("helper")
    assert training.result().code == 0
    os.kill(helper, 18)  # SIGCONT: it finds the training ended


@pytest.mark.parametrize("junk", ["zeros", "ones", "random", "numbers", "lengths"])
def test_it_writes_junk(same: Same, junk: str) -> None:
    """Into all that it may write: the training process believes only what is whole, and nothing that it says hurts."""
    same(
        f"""
import random
watch()
train()
if WATCHED:
    from gpumon_agent.transport.memory import ANSWER
    os.kill(helper(), signal.SIGSTOP)
    transport()._memory.view  # it has one
    view, seeds = transport()._memory.view, random.Random(1)
    start, end = ANSWER.offset, ANSWER.offset + 2 * ANSWER.page_bytes
    for turn in range(300):
        what = {junk!r}
        if what == "zeros":
            view[start:end] = bytes(end - start)
        elif what == "ones":
            view[start:end] = b"\\xff" * (end - start)
        elif what == "random":
            view[start:end] = seeds.randbytes(end - start)
        else:
            at = seeds.randrange(start, start + 64) if what == "numbers" else start + seeds.choice((8, 12))
            view[at:at + 4] = seeds.randbytes(4)
        transport()._memory.words[ANSWER.latest] = seeds.randrange(1 << 64)
        optimizer.zero_grad(); model(torch.zeros(8, 16)).sum().backward()
    os.kill(helper(), signal.SIGKILL)
optimizer.zero_grad()
train(5)
""",
        lines=2,
    )


@pytest.mark.parametrize("answer", ["b''", "b'\\xc1' * 500", "b'\\x96\\x01\\x02'", "b'\\x91' * 7000"])
def test_it_answers_what_nobody_understands(same: Same, answer: str) -> None:
    """Whole, number and CRC, and yet no answer. Soon the part that fails is off, and nothing waits for it any more."""
    same(
        f"""
watch()
train()
if WATCHED:
    from gpumon_agent.transport.memory import ANSWER
    from gpumon_agent.transport.pages import Pages
    stopped = helper()
    os.kill(stopped, signal.SIGSTOP)
    pages = Pages(transport()._memory, ANSWER)
for _ in range(20):
    if WATCHED and transport().running: pages.write({answer})
    train(1)
if WATCHED:
    transport().say([b"something new"] * 100)
    assert not transport().running and not transport()._waiting
    os.kill(stopped, signal.SIGKILL)
""",
        lines=1,
    )


@pytest.mark.parametrize(
    "executable", ["''", "None", "'/nowhere/python'", "'/bin/true'", "'/bin/false'", "'/'", "'python'"]
)
def test_sys_executable(same: Same, executable: str) -> None:
    same(f"sys.executable = {executable}\nwatch(awaited=False)\ntrain(5)\ntime.sleep(0.5)\ntrain(5)", lines=1)


@pytest.mark.parametrize(
    "path",
    ["sys.path.clear()", "sys.path[:] = [None, 3, b'x', '']", "sys.path.insert(0, '/proc/self/mem')", "sys.path = ()"],
)
def test_sys_path(same: Same, path: str) -> None:
    same(
        f"import torch._dynamo\nkept = sys.path\nwatched = WATCHED\n"
        f"{path}\nwatch(awaited=False)\nsys.path = kept\ntrain(5)",
        lines=3,
    )


def test_pyzmq_is_missing(same: Same) -> None:
    ran = same(
        """
Path("zmq").mkdir()
Path("zmq", "__init__.py").write_text("raise ImportError('no zmq')")
sys.path.insert(0, os.getcwd())
watch(awaited=False)
for _ in range(40):
    train(1)
    time.sleep(0.05)
""",
        lines=1,
    )
    assert ran.code == 0


def test_nobody_gives_it_a_core(begin: Begin) -> None:
    """It is at the lowest priority, and each core is taken: the training goes on, viewers wait."""
    cores = len(os.sched_getaffinity(0))
    spin = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * cores)]
    try:
        assert begin("watch(awaited=False)\ntrain(50)").result().code == 0
    finally:
        for each in spin:
            each.kill()
            each.wait()
