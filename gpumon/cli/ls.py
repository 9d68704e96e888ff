"""`gpumon ls`: the training processes that can be attached to, and their state."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import msgspec

from gpumon.cli.printing import say, say_json
from gpumon.cli.screen import dumb
from gpumon.link.discovery import discover, stopped
from gpumon.link.glancing import Glance, glance

EVERY_S = 1.0
NONE = "no training process with a gpumon agent runs here; start one with `gpumon run train.py`"
_CLEAR = "\x1b[H\x1b[2J"
_NUMBERS = ("PID", "STEP")
_TITLES = ("PID", "NAME", "RANK", "DEVICE", "STEP", "AGE", "STATUS")


@click.command("ls")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line instead of a table.")
@click.option("--watch", is_flag=True, help="List them again every second, until ctrl-c.")
def command(as_json: bool, watch: bool) -> None:
    """List the training processes that you can attach to."""
    if not watch:
        _say(glances := glance(discover()), as_json)
        if not glances:
            say(NONE, err=True)
        return
    try:
        with contextlib.suppress(KeyboardInterrupt):
            _watch(as_json)
    except BrokenPipeError:  # the reader has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it again at exit


def _say(glances: Sequence[Glance], as_json: bool) -> None:
    if as_json:
        for one in glances:
            say_json(msgspec.json.encode(_object(one)))
    elif glances:
        say("\n".join(_table([_TITLES, *map(_cells, glances)])))


def _watch(as_json: bool) -> None:
    """On a terminal each list replaces the one before; in a pipe the jobs' lines follow each other, with the time."""
    drawn = sys.stdout.isatty() and not dumb() and not as_json
    titled, were = False, True
    while True:
        began = time.monotonic()
        glances = glance(discover(), EVERY_S)
        if drawn:
            click.echo(_CLEAR, nl=False)
            _say(glances, as_json=False)
        elif as_json:
            _say(glances, as_json)
        elif glances:
            now = time.strftime("%H:%M:%S")
            lines = list(_table([("TIME    ", *_TITLES), *((now, *_cells(one)) for one in glances)]))
            say("\n".join(lines[titled:]))
            titled = True
        if not glances and (drawn or were):  # on a terminal always, elsewhere once
            say(NONE, err=True)
        were = bool(glances)
        time.sleep(max(0.0, began + EVERY_S - time.monotonic()))


def _cells(one: Glance) -> tuple[str, ...]:
    descriptor = one.descriptor
    rank = "-" if descriptor.rank is None else f"{descriptor.rank}/{descriptor.world_size or '?'}"
    age = _age_s(one)
    return (
        str(descriptor.pid),
        descriptor.name,
        rank,
        ",".join(_devices(one)) or "-",
        f"{one.heartbeat.step:,}" if one.heartbeat else "-",
        "-" if age is None else _duration(age),
        _status(one),
    )


def _object(one: Glance) -> dict[str, object]:
    descriptor, beat = one.descriptor, one.heartbeat
    age = _age_s(one)
    return {
        "type": "agent",
        "t": time.time(),
        "pid": descriptor.pid,
        "name": descriptor.name,
        "rank": descriptor.rank,
        "local_rank": descriptor.local_rank,
        "world_size": descriptor.world_size,
        "run_id": descriptor.run_id,
        "devices": _devices(one) if one.hello else None,
        "step": beat.step if beat else None,
        "phase": beat.phase if beat else None,
        "age_s": None if age is None else round(age, 1),
        "status": _status(one),
        "endpoint": descriptor.endpoint,
        "host": descriptor.host,
        "argv": descriptor.argv,
        "agent": descriptor.agent,
        "protocol": descriptor.protocol,
    }


def _devices(one: Glance) -> list[str]:
    """Devices of the watched models; before that, all it sees."""
    if one.hello is None:
        return []
    watched = one.heartbeat.devices if one.heartbeat else ()
    devices = [d for d in one.hello.devices if d.index in watched or not watched]
    return [device.label for device in devices] or [one.hello.backend or "-"]


def _status(one: Glance) -> str:
    if one.why is None:
        return "live"
    return "stopped (SIGSTOP)" if stopped(one.descriptor) else one.why


def _age_s(one: Glance) -> float | None:
    """Age of the process; its start time counts from boot."""
    try:
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except OSError:
        return None
    return max(0.0, uptime - one.descriptor.start_time / os.sysconf("SC_CLK_TCK"))


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours}h"
    return f"{hours}h {minutes:02}m" if hours else f"{minutes}m {rest:02}s" if minutes else f"{rest}s"


def _table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """The lines of a table whose first row has the titles."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            text.rjust(width) if title in _NUMBERS else text.ljust(width)
            for title, text, width in zip(rows[0], row, widths, strict=True)
        ]
        yield "  ".join(cells).rstrip()
