"""`gpumon announce`: this machine's agents and readings as lines of JSON, for `gpumon attach HOST` through ssh."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import TYPE_CHECKING

import click
import msgspec

from gpumon.cli import screen

if TYPE_CHECKING:
    import asyncio

    from gpumon.link.ssh import Announced

LOOK_S = 0.25
LOOK_AGAIN = 8  # looks until the agents are read again though no file changed: one may have been killed


@click.command("announce")
def command() -> None:
    """Print this machine's agents and readings until stdin ends. A viewer on another machine runs it through ssh."""
    screen.import_asyncio()
    import asyncio

    try:
        asyncio.run(_announce())
    except (BrokenPipeError, KeyboardInterrupt):  # the viewer is gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it again at exit


async def _announce() -> None:
    import asyncio

    ended = asyncio.Event()
    pids: set[int] = set()
    looking = [asyncio.create_task(work) for work in (_agents(pids), _readings(pids), ended.wait())]
    threading.Thread(target=_until_the_end, args=(asyncio.get_running_loop(), ended), daemon=True).start()
    try:
        done, _ = await asyncio.wait(looking, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in looking:
            task.cancel()
        await asyncio.gather(*looking, return_exceptions=True)


def _until_the_end(loop: asyncio.AbstractEventLoop, ended: asyncio.Event) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    loop.call_soon_threadsafe(ended.set)


async def _agents(pids: set[int]) -> None:
    """Writes all agents whenever they change."""
    import asyncio

    from gpumon.link import discovery
    from gpumon.link.ssh import Announced
    from gpumon_agent.endpoint import pid_namespace

    here, files, written, looks = pid_namespace(), None, None, 0
    while True:
        now = discovery.listing()
        looks += 1
        if now != files or looks % LOOK_AGAIN == 0:
            files, found = now, tuple(discovery.discover())
            if found != written:
                written = found
                pids.clear()
                pids.update(each.pid for each in found if each.pid_ns == here)
                _write(Announced(time.time_ns(), agents=found))
        await asyncio.sleep(LOOK_S)


async def _readings(pids: set[int]) -> None:
    """Writes what the driver and the system report, once a second."""
    from gpumon.host import Sampler
    from gpumon.link.ssh import Announced
    from gpumon_agent import wire

    async with Sampler(lambda: pids) as sampler:
        async for received in sampler:
            assert isinstance(received.event, wire.Host)
            _write(Announced(time.time_ns(), reading=received.event))


def _write(line: Announced) -> None:
    click.echo(msgspec.json.encode(line))
