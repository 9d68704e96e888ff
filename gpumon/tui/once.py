"""The Overview once, as plain text, for pipes and logs."""

from __future__ import annotations

import asyncio
import shutil
import textwrap
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import TYPE_CHECKING

import click

from gpumon.analysis import report
from gpumon.analysis.answer import answer, line
from gpumon.analysis.reports import ROOM_PATIENCE_S, room_known
from gpumon.link.errors import LinkError
from gpumon.session.frame import Frame
from gpumon.session.store import SessionStore
from gpumon.tui.feed import HostFeed, closing
from gpumon.tui.styles import ASCII, UNICODE, Glyphs
from gpumon.tui.text_layout import EMPTY, Line, plain, width
from gpumon.tui.themed_app import Options
from gpumon.tui.view import View, choose
from gpumon.tui.widgets.device_bar import bars, device_lines
from gpumon.tui.widgets.estimate_table import comparisons, estimate_lines
from gpumon.tui.widgets.findings_strip import finding_lines, findings
from gpumon.tui.widgets.forecast_panel import forecast_lines, outlook
from gpumon.tui.widgets.header import header_lines, heading
from gpumon.tui.widgets.host_line import host_facts, host_lines
from gpumon.tui.widgets.oom_panel import oom_lines
from gpumon.tui.widgets.phase_table import phase_lines, phases
from gpumon_agent import wire

if TYPE_CHECKING:
    from gpumon_agent.endpoint import Descriptor

PATIENCE_S, PATIENCE_MAX_S = 3.0, 60.0
"""How long it waits for one closed step and one reading of the machine: from each message while the past arrives, and
in all.
"""


def picture(view: View, columns: int, glyphs: Glyphs) -> str:
    """The Overview without the plot, as text of at most `columns` cells a line."""
    half = columns // 2
    left = [
        *phase_lines(phases(view), half, 10, glyphs, ""),
    ]
    right = forecast_lines(outlook(view), columns - half - 2, 7, glyphs, "")
    stated = textwrap.wrap(line(answer(view.frame, view.reports)), columns - 1, break_long_words=False)
    lines: list[Line] = [
        *(((f" {row}", "strong"),) for row in stated),
        *header_lines(heading(view), columns, glyphs),
        EMPTY,
        *device_lines(bars(view), columns, 8, glyphs, ""),
        EMPTY,
        *_oom(view, columns, glyphs),
        *_beside(left, right, half),
        EMPTY,
        *estimate_lines(comparisons(view), columns, 12, glyphs, ""),
        EMPTY,
        *finding_lines(findings(view), columns, 12, glyphs, ""),
        *host_lines(host_facts(view), columns, 3, ""),
    ]
    return plain(lines)


def _oom(view: View, columns: int, glyphs: Glyphs) -> list[Line]:
    report = view.report.oom if view.report else None
    return [] if report is None else [*oom_lines(report, columns, 12, glyphs), EMPTY]


def _beside(left: Sequence[Line], right: Sequence[Line], room: int) -> list[Line]:
    rows: list[Line] = []
    for i in range(max(len(left), len(right))):
        one = left[i] if i < len(left) else EMPTY
        other = right[i] if i < len(right) else EMPTY
        rows.append((*one, (" " * (room - width(one)), ""), *other))
    return rows


def print_live(descriptors: Iterable[Descriptor], look: Options, host: HostFeed) -> int:
    """Prints a running job. Returns the exit code."""
    from gpumon import link

    store = SessionStore()
    try:
        whole = asyncio.run(_gather(link.subscribe(descriptors), store, host))
    except LinkError as error:
        click.echo(f"Error: {error}.", err=True)
        return 1
    if not whole:
        click.echo("Note: not all of the past has arrived: these figures may be old.", err=True)
    return _print(store, look)


def print_replay(recording: Iterable[wire.Received], look: Options) -> int:
    """Prints a recording's end. Returns the exit code."""
    store = SessionStore(replaying=True)
    for received in recording:
        store.apply(received)
    cut = getattr(recording, "cut", None)
    if cut:
        click.echo(f"Note: {cut}.", err=True)
    return _print(store, look)


async def _gather(events: AsyncIterator[wire.Received], store: SessionStore, host: HostFeed) -> bool:
    """Whether the past has arrived whole."""
    reading = asyncio.create_task(_read_host(host, store))
    deadline: float | None = None
    last: float | None = None
    past = known = False
    try:
        async with closing(events) as heard:
            while True:
                # before the first message, the link has its own timeout and its own error message
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                if left == 0.0:
                    return past
                next_event = asyncio.ensure_future(anext(heard))
                done, _ = await asyncio.wait({next_event}, timeout=left)
                if not done:
                    next_event.cancel()
                    await asyncio.gather(next_event, return_exceptions=True)
                    return past
                try:
                    received = next_event.result()
                except StopAsyncIteration:
                    return True
                store.apply(received)
                now = time.monotonic()
                last = last or now + PATIENCE_MAX_S
                if not past:
                    deadline = min(now + PATIENCE_S, last)
                    if not isinstance(received.event, wire.Synced):  # a frame for each message takes long
                        continue
                ranks = store.frame(time.time_ns()).ranks
                past = past or all(rank.synced for rank in ranks)
                if not past or not reading.done() or not all(rank.steps or rank.goodbye for rank in ranks):
                    continue
                if not known:
                    known, deadline = True, now + ROOM_PATIENCE_S
                frame = store.frame(time.time_ns())
                if room_known(frame, report(frame)):
                    return True
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def _read_host(host: HostFeed, store: SessionStore) -> None:
    def pids() -> list[int]:
        return [rank.hello.pid for rank in store.frame(time.time_ns()).ranks]

    while not pids():
        await asyncio.sleep(0.02)
    async with closing(host(pids)) as readings:
        async for received in readings:
            store.apply(received)
            if _read_enough(store.frame(time.time_ns())):
                return


def _read_enough(frame: Frame) -> bool:
    """Whether the machine's totals are known. A device total is required only if a rank trains on a device."""
    on_device = any(device.kind != "cpu" for rank in frame.ranks for device in rank.hello.devices)
    if on_device:
        return any(reading.total for host in frame.hosts for reading in host.devices)
    return any(host.memory_total for host in frame.hosts)


def _print(store: SessionStore, look: Options) -> int:
    frame = store.frame(time.time_ns())
    wanted = next((r.source for r in frame.ranks if look.rank is not None and r.hello.rank == look.rank), None)
    view = choose(frame, report(frame), wanted, None)
    if view.rank is None:
        click.echo("Error: no message was received.", err=True)
        return 1
    columns = max(60, min(140, shutil.get_terminal_size((110, 40)).columns))
    click.echo(picture(view, columns, ASCII if look.ascii else UNICODE))
    return 0
