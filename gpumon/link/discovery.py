"""Finds the agents on this machine, and those that a target names."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from gpumon_agent import endpoint
from gpumon_agent.endpoint import Descriptor

from .errors import ForeignUser, LinkError, NoAgent, NoJob, NotGpumon

LOOK_S = 0.1  # between two looks of a command that waits for an agent
_BESIDE_DESCRIPTORS = (".sock", ".new", endpoint.CONTROL)
_LEFTOVER_AGE_S = 10.0  # a socket without a descriptor may be an agent that is just starting
_HOW_TO_START = "start one with `gpumon run train.py`, or add `gpumon_agent.watch(model)` to the script"


_elsewhere: tuple[Path, ...] = ()
"""The folders of forwarded agents, if this viewer watches other machines."""


def watch_elsewhere(folders: Iterable[Path]) -> None:
    """From now on the agents are those in `folders` (of `link.ssh`), and not this machine's. For the whole process."""
    global _elsewhere
    _elsewhere = tuple(folders)


def _folders() -> Iterable[Path]:
    return _elsewhere or endpoint.candidates()


class DiscoveredJob(msgspec.Struct, frozen=True):
    """The agents of one run: one process, or all local ranks of a launcher."""

    name: str
    descriptors: tuple[Descriptor, ...]

    @property
    def pids(self) -> str:
        return ", ".join(f"pid {d.pid}" for d in self.descriptors[:4]) + (", …" if len(self.descriptors) > 4 else "")


class SeveralJobs(LinkError):
    """Several jobs match; `jobs` are the choices."""

    def __init__(self, what: str, jobs: tuple[DiscoveredJob, ...]) -> None:
        super().__init__(what, "name one by its pid: " + ", ".join(f"{job.name} ({job.pids})" for job in jobs))
        self.jobs = jobs


def alive(descriptor: Descriptor) -> bool | None:
    """Whether the descriptor's process still runs the same program. None: not visible from here.

    Only its machine can tell of a forwarded one. A pid alone is not enough: it is reused (so the start time is
    compared), it is another process in another container (the namespace), it is invalid after a reboot (the boot id),
    and exec runs another program in the same process and so ends the agent (the program).
    """
    if descriptor.pid <= 0 or descriptor.via:
        return None
    if descriptor.boot_id != endpoint.boot_id():
        return False if descriptor.host == socket.gethostname() else None
    if descriptor.pid_ns != endpoint.pid_namespace():
        return None
    if endpoint.start_time(descriptor.pid) != descriptor.start_time:
        return False
    program = endpoint.program(descriptor.pid) if descriptor.program else ""
    return not program or program == descriptor.program


def stopped(descriptor: Descriptor) -> bool:
    """Whether the process is stopped, by SIGSTOP or a debugger. False if it cannot be seen from here."""
    if descriptor.pid <= 0 or descriptor.via:
        return False
    try:
        text = Path(f"/proc/{descriptor.pid}/stat").read_text(errors="replace")
    except OSError:
        return False
    return text[text.rindex(")") + 2] in "Tt"


def listing() -> frozenset[str]:
    """The descriptor files, unread: if unchanged, no agent is new and no file was rewritten.

    Only names and the directories' mtimes, since it is called all the time.
    """
    found = set()
    for directory in _folders():
        names = [f"{directory}/{name}" for name in _names(directory) if name.endswith(".json")]
        if names:
            with contextlib.suppress(OSError):
                found.add(f"{directory} {directory.stat().st_mtime_ns}")
        found.update(names)
    return frozenset(found)


def discover() -> list[Descriptor]:
    """All agents of this user: jobs by their oldest start, the ranks of each in order.

    Removes the files of dead ones.
    """
    found: dict[str, Descriptor] = {}
    for directory in _folders():
        for path in _safe_listing(directory):
            if path.suffix == ".json":
                descriptor = endpoint.read_descriptor(path)
                if descriptor is None:
                    continue
                if alive(descriptor) is False:
                    _remove(path, path.with_suffix(".sock"), path.with_suffix(endpoint.CONTROL))
                else:
                    found.setdefault(descriptor.nonce, descriptor)
            elif path.suffix in _BESIDE_DESCRIPTORS and not path.with_suffix(".json").exists():
                _reap_leftover(path)
    oldest_first = sorted(_newest(found.values()), key=lambda d: (d.unix_ns, d.pid))
    return [descriptor for job in jobs(oldest_first) for descriptor in job.descriptors]


def _newest(found: Iterable[Descriptor]) -> Iterable[Descriptor]:
    """One agent per name and rank in a process: the newest, after an exec that `endpoint.program` missed."""
    in_order = sorted(found, key=lambda d: d.unix_ns)
    return {(d.host, d.pid_ns, d.pid, d.start_time, d.name, d.rank): d for d in in_order}.values()


def jobs(descriptors: Iterable[Descriptor]) -> list[DiscoveredJob]:
    """Descriptors grouped into jobs, in the order in which they began.

    A rank started by another one belongs to its job, even before that one knows that it is a rank.
    """
    found = list(descriptors)
    began = {(d.host, d.pid_ns, d.pid, d.name): d.key for d in found}
    joined: dict[tuple[object, ...], tuple[object, ...]] = {}
    for d in found:
        parent = began.get((d.host, d.pid_ns, d.parent, d.name))
        if parent is not None and (d.spawned or (d.world_size or 1) > 1):
            joined[d.key] = parent
    groups: dict[tuple[object, ...], list[Descriptor]] = {}
    for d in found:
        key, passed = d.key, set[tuple[object, ...]]()
        while key in joined and key not in passed:
            passed.add(key)
            key = joined[key]
        groups.setdefault(key, []).append(d)
    return [
        DiscoveredJob(group[0].name, tuple(sorted(group, key=lambda d: (d.rank if d.rank is not None else -1, d.pid))))
        for group in groups.values()
    ]


def resolve(target: str | None = None) -> tuple[Descriptor, ...]:
    """The agents for a pid, a job's name, an `ipc://` endpoint, or None: the only job there is.

    Raises LinkError: NoJob, SeveralJobs (with the choices), ForeignUser, NotGpumon.
    """
    if target is not None and "://" in target:
        return (_by_endpoint(target),)
    here = discover()
    if target is None:
        where = "on these machines" if _elsewhere else "here"
        return _the_only(
            jobs(here), f"several jobs run {where}", NoJob(f"no job with a gpumon agent runs {where}", _HOW_TO_START)
        )
    if target.isdecimal() and _elsewhere:
        pid = [d for d in here if d.pid == int(target)]
        return _the_only(
            jobs(pid), f"several machines have a process {target}", NoJob(f"no agent has pid {target}", _there(here))
        )
    if target.isdecimal():
        return _by_pid(int(target), here)
    named = [job for job in jobs(here) if job.name == target]
    if not named:
        remedy = _there(here)
        if not _elsewhere:
            remedy += f"; for a machine of that name write ssh://{target}"
        return _the_only(named, "", NoJob(f"no job is named {target!r}", remedy))
    return _the_only(named, f"several jobs are named {target!r}", NoJob("", ""))


def _there(found: list[Descriptor]) -> str:
    others = ", ".join(dict.fromkeys(job.name for job in jobs(found)))
    return f"there is: {others}" if others else _HOW_TO_START


def _the_only(found: list[DiscoveredJob], several: str, none: LinkError) -> tuple[Descriptor, ...]:
    if not found:
        raise none
    if len(found) > 1:
        raise SeveralJobs(several, tuple(found))
    return found[0].descriptors


def _by_pid(pid: int, here: list[Descriptor]) -> tuple[Descriptor, ...]:
    mine = [d for d in here if d.pid == pid and d.pid_ns == endpoint.pid_namespace()] or [
        d for d in here if d.pid == pid
    ]
    if mine:
        return tuple(mine)
    launched = [d for d in here if pid in _ancestors(d.pid)]
    if launched:
        return _the_only(jobs(launched), f"several jobs run under process {pid}", NoJob("", ""))
    try:
        owner = Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        raise NoJob(f"no process has pid {pid}", "`gpumon ls` lists the jobs that you can attach to") from None
    if owner != os.geteuid():
        raise ForeignUser(
            f"process {pid} belongs to another user (uid {owner})", "gpumon attaches only to your own processes"
        )
    if endpoint.start_time(pid) is None:
        raise NoJob(f"process {pid} has ended", "`gpumon ls` lists the jobs that you can attach to")
    raise NoAgent(pid)


def _ancestors(pid: int) -> set[int]:
    seen: set[int] = set()
    while pid > 1 and pid not in seen:
        seen.add(pid)
        try:
            text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        except OSError:
            break
        pid = int(text[text.rindex(")") + 2 :].split()[1])
    return seen


def _by_endpoint(target: str) -> Descriptor:
    scheme, _, name = target.partition("://")
    if scheme != "ipc" or not name:
        raise NotGpumon(
            f"{target} is no endpoint of an agent", "an endpoint is ipc://PATH, as `gpumon ls --json` shows"
        )
    path = Path(name)
    known = endpoint.read_descriptor(path.with_suffix(".json"))
    if known is not None and known.endpoint == target and alive(known) is not False:
        return known
    remedy = "`gpumon ls` lists the jobs that you can attach to"
    if len(os.fsencode(path)) > endpoint.PATH_BYTES_MAX:
        raise NotGpumon(f"{target} is too long for a socket", remedy)
    try:
        status = path.stat()
    except FileNotFoundError:
        raise NoJob(f"there is no socket {path}", remedy) from None
    except OSError as error:
        raise ForeignUser(f"{path}: {error.strerror}", "gpumon attaches only to your own processes") from error
    if not stat.S_ISSOCK(status.st_mode):
        raise NotGpumon(f"{path} is no socket", remedy)
    if refuses(path):
        raise NoJob(f"no process listens at {path}: the one that did has ended", remedy)
    return Descriptor(
        pid=0, start_time=0, boot_id="", pid_ns="", nonce="", name=path.stem, host="", argv=(), endpoint=target
    )


def refuses(path: Path) -> bool:
    """Nothing listens on the socket. A stopped process still does: True means dead, False not alive."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(0.1)
        try:
            probe.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return True
        except OSError:
            return False
    return False


# ----------------------------------------------------------------------------------------------------------- reaping


def _safe_listing(directory: Path) -> list[Path]:
    return [directory / name for name in sorted(_names(directory))]


def _names(directory: Path) -> list[str]:
    try:
        fd = endpoint.open_directory(directory, create=False)
    except (endpoint.Unavailable, OSError):
        return []  # missing, or not ours: no agent of ours uses it
    try:
        return os.listdir(fd)  # noqa: PTH208 — the directory just checked
    finally:
        os.close(fd)


def _reap_leftover(path: Path) -> None:
    """A socket or draft without descriptor: its agent was killed in between, or is just starting."""
    try:
        status = path.lstat()
    except OSError:
        return
    if time.time() - status.st_mtime < _LEFTOVER_AGE_S:
        return
    if stat.S_ISREG(status.st_mode) or (stat.S_ISSOCK(status.st_mode) and refuses(path)):
        _remove(path)


def _remove(*paths: Path) -> None:
    for path in paths:
        with contextlib.suppress(OSError):  # another viewer was faster, or the directory is read-only
            path.unlink(missing_ok=True)
