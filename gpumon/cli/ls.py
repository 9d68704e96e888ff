"""`gpumon ls`: the training processes that can be attached to, and their state."""

from __future__ import annotations

import os
import time
from pathlib import Path

import click
import msgspec

from gpumon.cli.printing import say, say_json
from gpumon.link.discovery import discover, stopped
from gpumon.link.glancing import Glance, glance

_TITLES = ("PID", "NAME", "RANK", "DEVICE", "STEP", "AGE", "STATUS")


@click.command("ls")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line instead of a table.")
def command(as_json: bool) -> None:
    """List the training processes that you can attach to."""
    glances = glance(discover())
    if as_json:
        for one in glances:
            say_json(msgspec.json.encode(_object(one)))
    elif glances:
        _print_table([_cells(one) for one in glances])
    else:
        say("no training process with a gpumon agent runs here; start one with `gpumon run train.py`", err=True)


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
    return [d.kind if d.kind == "cpu" else f"{d.kind}:{d.index}" for d in devices] or [one.hello.backend or "-"]


def _status(one: Glance) -> str:
    if one.why is None:
        return "live"
    return "stopped (SIGSTOP)" if stopped(one.descriptor.pid) else one.why


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


def _print_table(rows: list[tuple[str, ...]]) -> None:
    table = [_TITLES, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(_TITLES))]
    numbers = {0, 4}
    for row in table:
        cells = [
            text.rjust(width) if column in numbers else text.ljust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        say("  ".join(cells).rstrip())
