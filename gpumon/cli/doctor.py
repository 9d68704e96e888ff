"""`gpumon doctor`: what gpumon finds on this machine, and what is missing."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import click
import msgspec

from gpumon.cli import native_reader
from gpumon.cli.printing import say, say_json
from gpumon.cli.progress import working
from gpumon.host import read_driver
from gpumon_agent import endpoint, environment, patching, wire
from gpumon_agent._version import __version__
from gpumon_agent.oom import report_file

OLDEST_TORCH = (2, 4)
IMPORT_PATIENCE_S = 120.0
AGENTS_PATIENCE_S = 3.0

Verdict = Literal["ok", "note", "fails"]
_COLOURS: dict[Verdict, str] = {"ok": "green", "note": "yellow", "fails": "red"}

_ASK_TORCH = """
import json, os, sys
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # asks the driver for its devices without a context on any
import torch
print(json.dumps({
    "version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip,
    "devices": torch.cuda.device_count(),
}))
"""


class Seen(msgspec.Struct, frozen=True):
    """One line. `fails`: gpumon cannot work here; `note`: it can, but something is missing."""

    verdict: Verdict
    subject: str
    text: str


@click.command("doctor")
@click.option("--replaced", is_flag=True, help="List what the agent replaces in a training process, and until when.")
@click.option("--build", is_flag=True, help="First compile the agent's C++ for this torch.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
def command(*, replaced: bool, build: bool, as_json: bool) -> None:
    """Show what gpumon finds on this machine, and what is missing.

    Exit code 1 if a training process could not be watched here, or if --build could not compile.
    """
    if replaced:
        _say_replaced_json() if as_json else _say_replaced()
        return
    failed = False
    if build:
        try:
            native_reader.build()
        except native_reader.NotBuilt as reason:
            say(f"gpumon: {reason}", err=True)
            failed = True
    plain = "NO_COLOR" in os.environ
    for check in CHECKS:
        with working(f"looking at: {check.__name__.replace('_', ' ').strip()}"):
            found = list(check())
        for seen in found:
            failed |= seen.verdict == "fails"
            if as_json:
                say_json(
                    {
                        "type": "check",
                        "t": time.time(),
                        "rank": None,
                        "pid": None,
                        "verdict": seen.verdict,
                        "subject": seen.subject,
                        "text": seen.text,
                    }
                )
                continue
            verdict = seen.verdict.ljust(5)
            click.echo(
                f"{verdict if plain else click.style(verdict, _COLOURS[seen.verdict])}  {seen.subject:<12} ", nl=False
            )
            say(seen.text)
    if failed:
        sys.exit(1)


def _say_replaced() -> None:
    click.echo(f"The agent replaces these attributes in a training process ({len(patching.LIST)}, not all at once):\n")
    for each in patching.LIST.values():
        _say_entry(f"{each.name} ({each.where})", each.why, each.noticed, f"restored {each.restored}")
    click.echo("And it adds:\n")
    for added in patching.STAYS:
        _say_entry(added.name, added.why, added.noticed, f"removed {added.removed}")


def _say_replaced_json() -> None:
    for each in patching.LIST.values():
        say_json(_replaced(each.name, each.where, each.why, each.noticed, each.restored))
    for added in patching.STAYS:
        say_json(_replaced(added.name, None, added.why, added.noticed, added.removed))


def _replaced(name: str, where: str | None, why: str, noticed: str, until: str) -> dict[str, str | float | None]:
    """`where` is None for what the agent adds."""
    return {
        "type": "replaced",
        "t": time.time(),
        "rank": None,
        "pid": None,
        "name": name,
        "where": where,
        "why": why,
        "noticed": noticed,
        "until": until,
    }


def _say_entry(name: str, *lines: str) -> None:
    click.echo(name)
    for line in lines:
        click.echo(textwrap.fill(line.replace("`", ""), 100, initial_indent="  ", subsequent_indent="    "))
    click.echo()


def _gpumon() -> Iterator[Seen]:
    major, minor = wire.PROTOCOL_MAJOR, wire.PROTOCOL_MINOR
    yield Seen("ok", "gpumon", f"{__version__}, protocol {major}.{minor}")
    yield Seen("ok", "Python", f"{platform.python_version()}, {sys.executable}")


def _torch() -> Iterator[Seen]:
    try:
        ran = subprocess.run(
            [sys.executable, "-c", _ASK_TORCH], capture_output=True, text=True, timeout=IMPORT_PATIENCE_S, check=False
        )
    except subprocess.TimeoutExpired:
        yield Seen("fails", "torch", f"importing it took longer than {IMPORT_PATIENCE_S:.0f} s")
        return
    if ran.returncode:
        last = (ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"])[-1]
        yield Seen("fails", "torch", f"cannot be imported by this Python ({last}); get it with: pip install torch")
        return
    yield from judge_torch(json.loads(ran.stdout.splitlines()[-1]))


def judge_torch(facts: dict[str, Any]) -> Iterator[Seen]:
    """Checks what torch reports (`version`, `cuda`, `hip`, `devices`)."""
    version = tuple(int(part) for part in facts["version"].split("+")[0].split(".")[:2])
    if version < OLDEST_TORCH:
        yield Seen("fails", "torch", f"{facts['version']} is too old: gpumon reads torch 2.4 and newer")
        return
    built = (
        f"for CUDA {facts['cuda']}"
        if facts["cuda"]
        else f"for ROCm {facts['hip']}"
        if facts["hip"]
        else "without a GPU"
    )
    yield Seen("ok", "torch", f"{facts['version']}, built {built}")
    if not facts["cuda"] and not facts["hip"]:
        yield Seen(
            "note", "devices", "this torch supports only the CPU: phases show host memory (exact with --track-cpu)"
        )
    elif not facts["devices"]:
        yield Seen("note", "devices", "torch sees no GPU here (CUDA_VISIBLE_DEVICES, driver): training runs on the CPU")
    else:
        yield Seen("ok", "devices", f"torch sees {facts['devices']}")
        yield Seen(
            "note",
            "peaks",
            "readers in C++, and names imported from torch._C before the agent started, see the peak of one phase; "
            "GPUMON_PEAKS=bounds never resets a peak",
        )


def _native_reader() -> Iterator[Seen]:
    """Nothing if torch has no GPU."""
    slower = "the agent's hooks and its reader of the allocator run in Python, at two to four times the cost"
    try:
        path, there = native_reader.find()
        if there:
            yield Seen("ok", "reader", f"native, {path}")
        else:
            native_reader.compiler()
            yield Seen("note", "reader", f"{slower}: compile them with: gpumon doctor --build")
    except native_reader.NotNeeded:
        return
    except native_reader.NotBuilt as reason:
        yield Seen("note", "reader", f"{slower}: {reason}")


def _driver() -> Iterator[Seen]:
    reading = asyncio.run(read_driver())
    if reading.driver:
        yield Seen("ok", "driver", reading.driver)
    if reading.why:
        yield Seen("note", "driver", reading.why)
    yield from map(_device, reading.devices)


def _device(device: wire.DeviceReading) -> Seen:
    from gpumon.analysis.units import size

    total = size(device.total) if device.total is not None else "size not known"
    silent = "; ".join(f"no {field}: {why}" for field, why in device.why.items())
    text = f"{device.uuid}  {device.name or 'unnamed'}, {total}"
    return Seen("note" if silent else "ok", "device", f"{text}; {silent}" if silent else text)


def _runtime_directory() -> Iterator[Seen]:
    try:
        place = endpoint.claim(endpoint.describe("doctor"))
    except endpoint.Unavailable as reason:
        yield Seen("fails", "runtime dir", f"{reason}; set XDG_RUNTIME_DIR to a folder of yours")
    else:
        yield Seen("note" if place.instead else "ok", "runtime dir", place.instead or str(place.socket.parent))


def _environment() -> Iterator[Seen]:
    """Nothing if no GPUMON_ variable is set."""
    for name in sorted(name for name in os.environ if name.startswith("GPUMON_")):
        set_to = wire.clean(f"{name}={os.environ[name]}")
        if name not in environment.TAKES:
            yield Seen("note", "environment", f"{set_to}: gpumon has no such variable (docs/environment.md)")
        elif (why := environment.problem(name, os.environ[name])) is not None:
            yield Seen("note", "environment", f"{wire.clean(why)}: it is ignored")
        else:
            yield Seen("ok", "environment", set_to)


def _agents() -> Iterator[Seen]:
    from gpumon import link
    from gpumon.analysis.own_cost import own_cost

    found = link.discover()
    names = ", ".join(f"{descriptor.name} (pid {descriptor.pid})" for descriptor in found[:8])
    more = f" and {len(found) - 8} more" if len(found) > 8 else ""
    yield Seen("ok", "agents", names + more if found else "none runs now; start one with: gpumon run train.py")
    for each in link.glance(found[:8], AGENTS_PATIENCE_S) if found else ():
        cost = own_cost(each.heartbeat)
        if cost is not None:
            yield Seen("ok", "cost", f"gpumon {cost.text} of {each.descriptor.name} (pid {each.descriptor.pid})")


def _out_of_memory() -> Iterator[Seen]:
    """Nothing if no watched training ever ran out of memory."""
    found = report_file.newest()
    if found is not None:
        _, report = found
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(report.unix))
        yield Seen(
            "note",
            "last OOM",
            f"{report.name}, step {report.step}, {report.phase}, {when}; read it with: gpumon explain --last",
        )


def _virtual_gpu() -> Iterator[Seen]:
    from gpumon import virtual_gpu

    try:
        folder = virtual_gpu.build()
    except virtual_gpu.BuildUnavailable as reason:
        yield Seen("note", "virtual GPU", str(reason))
    else:
        yield Seen("ok", "virtual GPU", f"built in {folder}")


def _terminal() -> Iterator[Seen]:
    size = shutil.get_terminal_size()
    if not sys.stdout.isatty():
        yield Seen("note", "terminal", "standard output is not one: `gpumon attach` prints one picture here")
    elif size.columns < 80 or size.lines < 24:
        yield Seen(
            "note", "terminal", f"{size.columns}×{size.lines}: the screen needs 80×24; below that it omits columns"
        )
    else:
        yield Seen("ok", "terminal", f"{size.columns}×{size.lines}, {os.environ.get('TERM', 'no TERM')}")


CHECKS: tuple[Callable[[], Iterator[Seen]], ...] = (
    _gpumon,
    _torch,
    _native_reader,
    _driver,
    _runtime_directory,
    _environment,
    _agents,
    _out_of_memory,
    _virtual_gpu,
    _terminal,
)
