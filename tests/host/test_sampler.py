"""The sampler keeps its beat and leaves nothing behind, whatever the driver does. No device is needed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from ctypes.util import find_library
from itertools import chain, repeat

import forks
import psutil
import pytest

from gpumon.host.sampler import Driver, Sampler

HANGS = [sys.executable, "-c", "import time; time.sleep(600)"]
SAYS_NOTHING_SOUND = [sys.executable, "-c", "for _ in iter(input, None): print('{', flush=True)"]
DIES = [sys.executable, "-c", "raise SystemExit(3)"]

SAYS_20_MIB = [sys.executable, "-c", "import sys; sys.stdin.readline(); sys.stdout.write('x' * (20 << 20))"]


def no_driver() -> list[str]:
    """A child that answers at once, as on a machine without a driver."""
    return [sys.executable, "-c", """for _ in iter(input, None): print('{"why": "no driver"}', flush=True)"""]


def children() -> list[psutil.Process]:
    """Of this process, without the one that other tests fork from."""
    return [each for each in psutil.Process().children(recursive=True) if forks.__file__ not in each.cmdline()]


async def saying(sampler: Sampler, words: str) -> str:
    """Why there are no devices, as soon as that contains `words`."""
    async for received in sampler:
        if words in (received.event.why or ""):
            return received.event.why
    raise AssertionError


async def gone(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):  # as the second question is asked
        for _ in range(200):
            if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                return True
            await asyncio.sleep(0.01)
        return False
    return True


async def test_it_reads_this_process_and_the_machine():
    async with Sampler(lambda: {os.getpid()}, period_s=0.05, driver=Driver(no_driver)) as sampler:
        first, second = await anext(sampler), await anext(sampler)
    (before,), (after,) = first.event.processes, second.event.processes
    assert before.pid == after.pid == os.getpid()
    assert abs(after.rss - psutil.Process().memory_info().rss) < 64 << 20
    assert (before.cpu_percent, type(after.cpu_percent)) == (None, float)
    assert after.threads >= 1
    assert second.event.memory_total == psutil.virtual_memory().total
    assert second.source == f"host:{sampler.host}"


async def test_it_names_the_children_of_a_watched_process():
    child = subprocess.Popen(HANGS)
    try:
        async with Sampler(lambda: {os.getpid()}, driver=Driver(no_driver)) as sampler:
            (process,) = (await anext(sampler)).event.processes
    finally:
        child.kill()
        child.wait()
    assert child.pid in {c.pid for c in process.children if c.rss}


async def test_children_of_children_are_named_and_two_that_are_watched_each_have_their_own():
    shell = subprocess.Popen(["sh", "-c", "sleep 600 & echo; wait"], stdout=subprocess.PIPE)
    shell.stdout.readline()
    try:
        async with Sampler(lambda: {os.getpid(), shell.pid}, driver=Driver(no_driver)) as sampler:
            found = {p.pid: {c.pid for c in p.children} for p in (await anext(sampler)).event.processes}
        (sleeping,) = psutil.Process(shell.pid).children()
    finally:
        sleeping.kill()
        shell.communicate()
    assert found[shell.pid] == {sleeping.pid}
    assert {shell.pid, sleeping.pid} <= found[os.getpid()]


async def test_in_a_hurry_the_driver_is_asked_more_often_the_processes_are_not():
    async with Sampler(lambda: {os.getpid()}, period_s=1.0, driver=Driver(no_driver)) as sampler:
        first = await anext(sampler)
        began = time.monotonic()
        sampler.hurry(True)
        second = await anext(sampler)
        assert 0.2 <= time.monotonic() - began < 0.9  # five times as often, not more
    assert second.event.t_ns > first.event.t_ns
    assert second.event.processes is first.event.processes


async def test_a_process_that_is_gone_has_nothing_to_read():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    async with Sampler(lambda: {ended.pid}, driver=Driver(no_driver)) as sampler:
        (process,) = (await anext(sampler)).event.processes
    assert (process.rss, process.cpu_percent, process.threads, process.children) == (None, None, None, ())


async def test_no_nvml_is_said_in_a_sentence(monkeypatch):
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    if find_library("nvidia-ml"):
        pytest.skip("this machine has NVML")
    async with Sampler(period_s=0.1, driver=Driver(patience_s=30)) as sampler:
        assert await saying(sampler, "NVML is not installed: there is no NVIDIA driver here")


async def test_a_hung_driver_delays_no_reading_and_is_given_up():
    began = time.monotonic()
    async with Sampler(period_s=0.1, driver=Driver(lambda: HANGS, patience_s=2)) as sampler:
        first = (await anext(sampler)).event
        assert time.monotonic() - began < 2
        assert first.memory_total
        assert (first.devices, first.why) == ((), "the driver has not answered yet")
        (hung,) = children()
        while (later := (await anext(sampler)).event).why == first.why:
            pass
        assert later.why.startswith("the driver did not answer for ")
        assert await gone(hung)


async def test_it_asks_again_with_twice_the_patience_and_recovers():
    commands = chain([HANGS, HANGS], repeat(no_driver()))
    driver = Driver(lambda: next(commands), patience_s=0.2)
    patience = []
    async with Sampler(period_s=0.05, driver=driver) as sampler:
        async for received in sampler:
            if received.event.why == "no driver":
                break
            patience.append(driver._patience)
    assert sorted(set(patience))[:3] == [0.2, 0.4, 0.8]
    assert driver._patience == 0.2


@pytest.mark.parametrize(
    ("command", "why"),
    [(DIES, "exit code 3"), (SAYS_NOTHING_SOUND, "truncated"), (SAYS_20_MIB, "its answer has no end")],
)
async def test_a_child_that_fails_is_named(command, why):
    async with Sampler(period_s=0.05, driver=Driver(lambda: command, patience_s=30)) as sampler:
        assert why in await saying(sampler, "the process that queries the driver failed: ")


async def test_a_killed_child_is_replaced():
    async with Sampler(period_s=0.05, driver=Driver(no_driver, patience_s=1)) as sampler:
        assert await saying(sampler, "no driver")
        (child,) = children()
        child.kill()
        assert await saying(sampler, "exit code -9")
        assert await saying(sampler, "no driver")


async def test_closing_leaves_no_process_even_when_the_driver_hangs():
    sampler = Sampler(period_s=0.1, driver=Driver(lambda: HANGS))
    await anext(sampler)
    (hung,) = children()
    await sampler.aclose()
    assert await gone(hung)


def test_a_viewer_killed_hard_takes_its_child_along():
    code = (
        "import asyncio\nfrom gpumon.host import Sampler\n"
        "async def watch():\n    async for received in Sampler(period_s=0.1): print(received.event.why, flush=True)\n"
        "asyncio.run(watch())"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as viewer:
        assert viewer.stdout
        while "has not answered yet" in viewer.stdout.readline():
            pass
        (child,) = psutil.Process(viewer.pid).children()
        child.send_signal(signal.SIGSTOP)  # as if it hung: it cannot notice that its input ended
        viewer.kill()
    assert asyncio.run(gone(child))


async def test_a_file_in_the_current_directory_is_not_imported(tmp_path, monkeypatch):
    (tmp_path / "pynvml.py").write_text("raise SystemExit('imported by mistake')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    async with Sampler(period_s=0.1, driver=Driver(patience_s=30)) as sampler:
        while (host := (await anext(sampler)).event).why == "the driver has not answered yet":
            pass
    assert "failed" not in (host.why or "")
