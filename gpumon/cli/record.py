"""`gpumon record`: writes a session to a file for `gpumon replay`."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from pathlib import Path

import click

from gpumon import link
from gpumon.cli.budget_sender import BudgetSender
from gpumon.cli.printing import say
from gpumon_agent import wire
from gpumon_agent.endpoint import Descriptor

_FLUSH_S = 0.25  # `kill -9` of this command may lose this much


@click.command("record")
@click.option("--force", is_flag=True, help="Overwrite FILE.")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("target", required=False, metavar="[PID|NAME|ENDPOINT]")
def command(force: bool, file: Path, target: str | None) -> None:
    """Record a job and its host's readings to FILE, until the job ends or ctrl-c.

    The file is valid at every moment, also after `kill -9`. Without a target: the only job, with all its ranks.
    """
    try:
        descriptors = link.resolve(target)
        with link.Recording(file, force=force) as recording:
            asyncio.run(_record(descriptors, recording))
    except link.LinkError as error:
        raise click.ClickException(str(error)) from None
    say(f"{file}: {recording.messages:,} messages, {recording.nbytes / 1024:,.0f} KiB", err=True)


async def _record(descriptors: tuple[Descriptor, ...], recording: link.Recording) -> None:
    """Until the job ends or a signal stops it. Raises LinkError."""
    pids = {descriptor.pid for descriptor in descriptors}
    budgets = BudgetSender(descriptors)
    loop = asyncio.get_running_loop()
    enough = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, enough.set)
    say(f"recording {', '.join(str(pid) for pid in sorted(pids))}; ctrl-c stops it", err=True)
    ends = [asyncio.create_task(_agents(descriptors, recording, pids, budgets)), asyncio.create_task(enough.wait())]
    beside = [asyncio.create_task(_host(recording, pids, budgets)), asyncio.create_task(_flush(recording))]
    try:
        done, _ = await asyncio.wait([*ends, *beside], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in [*ends, *beside]:
            task.cancel()
        await asyncio.gather(*ends, *beside, return_exceptions=True)


async def _agents(
    descriptors: tuple[Descriptor, ...], recording: link.Recording, pids: set[int], budgets: BudgetSender
) -> None:
    async with contextlib.aclosing(link.subscribe(descriptors)) as stream:
        async for received in stream:
            recording.write(received)
            budgets.take(received)
            if isinstance(received.event, wire.Hello):
                pids.add(received.event.pid)


async def _host(recording: link.Recording, pids: set[int], budgets: BudgetSender) -> None:
    from gpumon.host import Sampler

    async with Sampler(lambda: pids) as sampler:
        async for received in sampler:
            recording.write(received)
            budgets.take(received)
            sampler.hurry(budgets.wanted(received.unix_ns))


async def _flush(recording: link.Recording) -> None:
    while True:
        await asyncio.sleep(_FLUSH_S)
        recording.flush()
