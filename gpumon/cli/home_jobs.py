"""What the Home screen asks this machine: its jobs, and whose a process is. Reads /proc; psutil is not needed."""

from __future__ import annotations

import os
import pwd
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gpumon import link
from gpumon.link import discovery
from gpumon.tui.feed import JobChoice, Machine, ProcessFacts
from gpumon_agent import endpoint, wire

if TYPE_CHECKING:
    from gpumon.link import DiscoveredJob
    from gpumon_agent.endpoint import Descriptor


def machine(met: Callable[[Sequence[Descriptor]], object], *, elsewhere: bool = False) -> Machine:
    """`met`: called with the descriptors of the jobs, each time that they are read. `elsewhere`: on other machines."""
    here = endpoint.pid_namespace()

    def jobs() -> list[JobChoice]:
        found = link.discover()
        met(found)
        return [_choice(job, here) for job in discovery.jobs(found)]

    return Machine(jobs, discovery.listing, facts, not elsewhere)


def _choice(job: DiscoveredJob, here: str) -> JobChoice:
    descriptors = job.descriptors
    first = descriptors[0]
    return JobChoice(
        job.name,
        frozenset(each.nonce for each in descriptors),
        first.key,
        lambda: link.subscribe_batches(descriptors, follow=True),
        lambda: link.subscribe_batches(descriptors),
        first.argv[1:],
        tuple(each.pid for each in descriptors if each.pid_ns == here),
        first.unix_ns / 1e9 if first.unix_ns else None,
    )


def facts(pid: int) -> ProcessFacts:
    """Of any process, as far as this user may see: the directory of others' is private."""
    folder = Path(f"/proc/{pid}")
    try:
        uid = folder.stat().st_uid
        command = (folder / "cmdline").read_bytes().rstrip(b"\0").decode(errors="replace")
    except OSError:  # gone, or of another pid namespace
        return ProcessFacts()
    cwd = _cwd(folder)
    words = wire.clean_argv(tuple(command.split("\0"))) if command else ()
    if any(Path(word).name.startswith("ipykernel_launcher") for word in words):
        words = (endpoint.notebook(_environment(folder), cwd or "?"), "(Jupyter kernel)")
    return ProcessFacts(_user(uid), words, cwd, _began(pid))


def _user(uid: int) -> str:
    try:
        return wire.clean(pwd.getpwuid(uid).pw_name)
    except KeyError:  # a container need not know the users of the machine
        return f"uid {uid}"


def _environment(folder: Path) -> dict[str, str]:
    """As the process began."""
    try:
        lines = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def _cwd(folder: Path) -> str | None:
    try:
        return wire.clean(os.fspath((folder / "cwd").readlink()))
    except OSError:
        return None


def _began(pid: int) -> float | None:
    ticks = endpoint.start_time(pid)
    try:
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except OSError:
        return None
    return None if ticks is None else time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")
