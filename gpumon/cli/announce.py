"""`gpumon announce`: this machine's agents and readings as lines of JSON, for `gpumon attach HOST` through ssh."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

import click
import msgspec

from gpumon.cli import screen

if TYPE_CHECKING:
    from gpumon.link.ssh import Announced

LOOK_S = 0.25
LOOK_AGAIN = 8  # looks until the agents are read again though no file changed: one may have been killed


@click.command("announce")
def command() -> None:
    """Print this machine's agents and readings until nobody reads them. A viewer elsewhere runs it through ssh."""
    screen.import_asyncio()
    import asyncio

    try:
        asyncio.run(_announce())
    except (BrokenPipeError, KeyboardInterrupt):  # the viewer, or the link to it, is gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it again at exit


async def _announce() -> None:
    import asyncio

    pids: set[int] = set()
    looking = [asyncio.create_task(work) for work in (_agents(pids), _readings(pids))]
    try:
        await asyncio.gather(*looking)
    finally:
        for task in looking:
            task.cancel()
        await asyncio.gather(*looking, return_exceptions=True)


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
