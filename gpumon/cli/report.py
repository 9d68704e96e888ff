"""`gpumon report`: one HTML page of a run, from a recording or a running job."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpumon.cli.printing import say

if TYPE_CHECKING:
    from gpumon.export.html_report import Colours
    from gpumon.session.store import SessionStore
    from gpumon_agent.endpoint import Descriptor

PATIENCE_S = 5.0
"""How long a running job's history and the first reading of the machine are waited for."""


@click.command("report")
@click.argument("source", metavar="FILE|PID|NAME|ENDPOINT")
@click.option("-o", "--output", metavar="PAGE", help="Where to write the page; - for stdout. Default: FILE, as .html.")
def command(source: str, output: str | None) -> None:
    """Write one HTML page of a run: answer, peaks by step, findings, breakdown, estimate, machine.

    \b
    gpumon report run.gpumon                  # writes run.html
    gpumon report run.gpumon -o - > page.html
    gpumon report 12345 -o now.html           # a running job

    FILE is made by `gpumon record`. The page needs no network and no other file.
    """
    made = _made(source)
    if output == "-":
        sys.stdout.buffer.write(made)
        return
    path = Path(output) if output is not None else _beside(source)
    if output is None and path.is_file() and not _ours(path):
        raise click.ClickException(f"{path} exists and is no page of gpumon report; overwrite it with -o {path}.")
    if path.exists() and Path(source).exists() and path.samefile(source):
        raise click.ClickException(f"{path} is the recording itself; choose another name with -o.")
    try:
        _write(path, made)
    except OSError as error:
        raise click.ClickException(f"{path} cannot be written: {error.strerror}.") from None
    say(f"{path}: {len(made) / 1024:,.0f} KiB")


def _made(source: str) -> bytes:
    from gpumon.analysis.answer import answer
    from gpumon.analysis.report import report
    from gpumon.export.html_report import page
    from gpumon.session.store import SessionStore

    recorded = _is_file(source)
    store = SessionStore(replaying=recorded)
    note = _replay(Path(source), store) if recorded else _listen(source, store)
    frame = store.frame(time.time_ns())
    if not frame.ranks:
        raise click.ClickException(f"{source} has no training process: there is nothing to report.")
    reports = report(frame)
    return page(frame, reports, answer(frame, reports), _colours(), time.time(), note)


def _is_file(source: str) -> bool:
    """A path, or what looks like one: the sentence is then about the file."""
    return "://" not in source and (Path(source).exists() or os.sep in source or source.endswith(".gpumon"))


def _replay(path: Path, store: SessionStore) -> str:
    """Returns what is missing at its end, as a sentence."""
    from gpumon import link

    try:
        recording = link.replay(path)
        for received in recording:
            store.apply(received)
    except link.LinkError as error:
        raise click.ClickException(f"{error}.") from None
    except OSError as error:
        raise click.ClickException(f"{path}: {error.strerror}.") from None
    if recording.cut:
        say(f"Note: {recording.cut}.", err=True)
    return f"{recording.cut}." if recording.cut else ""


def _listen(source: str, store: SessionStore) -> str:
    from gpumon import link

    try:
        asyncio.run(_gather(link.resolve(source), store))
    except link.LinkError as error:
        raise click.ClickException(f"{error}.") from None
    return ""


async def _gather(descriptors: tuple[Descriptor, ...], store: SessionStore) -> None:
    """The history of each rank, and a reading of the machine if it comes in time. Raises LinkError."""
    from gpumon import link
    from gpumon.host import Sampler
    from gpumon_agent import wire

    pids = {descriptor.pid for descriptor in descriptors}

    async def listen() -> None:
        synced = set()
        async with contextlib.aclosing(link.subscribe(descriptors)) as stream:
            async for received in stream:
                store.apply(received)
                if isinstance(received.event, (wire.Synced, wire.Goodbye)):
                    synced.add(received.source)
                if len(synced) >= len(descriptors):
                    return

    async def look() -> None:
        async with Sampler(lambda: pids) as sampler:
            async for received in sampler:
                store.apply(received)
                return

    looking = asyncio.create_task(look())
    try:
        await listen()
        await asyncio.wait({looking}, timeout=PATIENCE_S)
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)


def _colours() -> Colours:
    """The palette of the screens."""
    from gpumon.export.html_report import Colours
    from gpumon.tui.styles import ASCII, DARK, LIGHT, Palette

    def of(palette: Palette) -> dict[str, str]:
        roles = {name: getattr(palette, name) for name in ("text", "dim", "rule", "accent", "good", "warn", "bad")}
        roles |= {f"line-{line}": colour for line, colour in palette.lines.items()}
        return {name: colour for name, colour in roles.items() if colour}

    return Colours(of(LIGHT), of(DARK), ASCII.lines)


def _beside(source: str) -> Path:
    """FILE with .html in place of its suffix; of a job its name in this folder."""
    return Path(source).with_suffix(".html") if _is_file(source) else Path(f"{Path(source).name}.html")


def _ours(path: Path) -> bool:
    with contextlib.suppress(OSError), path.open("rb") as file:
        return b'content="gpumon ' in file.read(1_000)
    return False


def _write(path: Path, made: bytes) -> None:
    """A file appears whole or not at all; a device or a pipe is written to as it is. Raises OSError."""
    if path.exists() and not path.is_file():
        path.write_bytes(made)
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(made)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
