"""Which machines `gpumon attach` is to watch through ssh, and the links to them while it runs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from types import FrameType

import click

from gpumon.cli.printing import say
from gpumon.link import discovery
from gpumon.link.machines import Failed, Machines
from gpumon_agent import wire
from gpumon_agent.endpoint import Descriptor

ANSWERS_IN_S = 30  # SLURM's controller, perhaps busy
HOSTS_MAX = 512


def named_in(target: str | None) -> tuple[str, ...]:
    """The machines of `HOST1,HOST2`, `USER@HOST` or `ssh://HOST`; empty: `target` names a process, a job or a socket.

    A job that runs here under exactly that name is the job.
    """
    if target is None or not ("," in target or "@" in target or target.startswith("ssh://")) or "ipc://" in target:
        return ()
    if any(each.name == target for each in discovery.discover()):
        return ()
    return tuple(part for part in (part.strip() for part in target.split(",")) if part)


def of_slurm_job(number: str) -> tuple[str, ...]:
    """The nodes of a running SLURM job. Raises ClickException."""
    if not number.replace("_", "").isdecimal():
        raise click.ClickException(f"{number!r} is no SLURM job: write its number, as squeue shows it.")
    nodes = _asked("squeue", "-j", number, "-h", "-o", "%N").split()
    if not nodes:
        raise click.ClickException(f"SLURM job {number} runs on no node: it is waiting, or has ended.")
    return tuple(_asked("scontrol", "show", "hostnames", ",".join(nodes)).split()[:HOSTS_MAX])


def _asked(*words: str) -> str:
    try:
        asked = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ANSWERS_IN_S, check=False
        )
    except FileNotFoundError:
        raise click.ClickException(f"There is no {words[0]} here: run this where SLURM's commands are.") from None
    except subprocess.TimeoutExpired:
        raise click.ClickException(f"{words[0]} did not answer within {ANSWERS_IN_S} s.") from None
    if asked.returncode:
        why = asked.stderr.strip().splitlines()[-1:] or [f"exit code {asked.returncode}"]
        raise click.ClickException(f"{words[0]}: {wire.clean(why[0], wire.TEXT_CHARS_MAX).rstrip('.')}.")
    return asked.stdout


def of_the_slurm_job(number: str, found: Sequence[Descriptor]) -> tuple[Descriptor, ...]:
    """Those that SLURM started in this job; all, if none says so (torchrun's ranks have its run id instead)."""
    ours = tuple(each for each in found if (each.run_id or "").partition(".")[0] == number)
    return ours or tuple(found)


@contextlib.contextmanager
def linked(hosts: Sequence[str], python: str | None) -> Iterator[Machines]:
    """The machines, connected; this process's agents are theirs. Raises ClickException if none can be reached.

    Until the screen takes the signals over, SIGTERM and SIGHUP end this as an exception does, so that nothing stays.
    """
    usual = {number: signal.signal(number, _leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        with Machines(hosts, python) as machines:
            machines.connect(lambda text: say(f"gpumon: {text}", err=True), ask=_can_ask())
            discovery.watch_elsewhere(machines.folders)
            yield machines
    except Failed as error:
        raise click.ClickException(f"{error}.") from error
    finally:
        discovery.watch_elsewhere(())
        for number, handler in usual.items():
            signal.signal(number, handler)


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _can_ask() -> bool:
    """Whether ssh can ask for a password: it opens the controlling terminal itself."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC))
    except OSError:
        return False
    return True
