"""Loads the agent into a process that trains (`gpumon attach PID --inject`), and removes it (`gpumon detach`)."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import click
import psutil

import gpumon
from gpumon import link
from gpumon.cli.progress import working
from gpumon.host import debugger
from gpumon.link import LinkError
from gpumon_agent import endpoint

ANSWERS_IN_S = 30.0
_TORCH = "libtorch"
_IN_MAIN = """try:
 exec(open({path!r}).read(), {{}})
except KeyboardInterrupt:
 __import__('_thread').interrupt_main()
except BaseException:
 pass
"""
"""Leaves no name in __main__. An exception out of a pending call would end the training; ctrl-c is raised again."""
_SCRIPT = """
import importlib, os, sys
def tell(said):
    with open({answer!r} + ".new", "w") as file:
        file.write(said)
    os.rename({answer!r} + ".new", {answer!r})
try:
    importlib.invalidate_caches()
    from gpumon_agent.shim import joining
except ImportError as error:
    tell(f"its Python has no gpumon ({{error}}): install it there with {{sys.executable}} -m pip install torch-gpumon")
else:
    try:
        joining.{function}(tell)
    except Exception as error:
        tell(f"the agent failed: {{error!r}}")
"""


_NOTHING = Path(gpumon.__file__).with_name("py.typed")
"""An empty file that stays."""


class Failed(Exception):
    """One sentence: why the process was not changed."""


def processes(pid: int) -> list[int]:
    """`pid` and those that it started, of which have torch: the ranks of a launcher."""
    try:
        process = psutil.Process(pid)
        found = [process, *process.children(recursive=True)]
    except psutil.Error:
        return []
    return [each.pid for each in found if _has_torch(each.pid)]


def _has_torch(pid: int) -> bool:
    try:
        return _TORCH in Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except OSError:
        return False


def call(pid: int, function: str) -> str:
    """Calls `function` of gpumon_agent.shim.joining there. Empty, or why nothing was done. Raises Failed."""
    with tempfile.TemporaryDirectory(prefix="attach-", dir=_private()) as folder, working(f"waiting for process {pid}"):
        answer, script, first = (Path(folder, name) for name in ("answer", "script.py", "first.py"))
        script.write_text(_SCRIPT.format(function=function, answer=str(answer)))
        code = _IN_MAIN.format(path=str(script))
        first.write_text(code)
        try:
            remotely = debugger.remotely(pid, first)
            if not remotely:
                debugger.queue(pid, code)
        except debugger.Refused as error:
            raise Failed(str(error)) from None
        for _ in _until(time.monotonic() + ANSWERS_IN_S):
            if answer.exists():
                return answer.read_text()
            if not psutil.pid_exists(pid):
                raise Failed(f"process {pid} has ended")
        if remotely:  # Python would print that the file is gone
            with contextlib.suppress(debugger.Refused):
                debugger.remotely(pid, _NOTHING)
        raise Failed(
            f"the main thread of process {pid} has run no Python for {ANSWERS_IN_S:.0f} s: it waits in C code, "
            "so nothing was changed; try again later"
        )


def _private() -> Path:
    """Where no other user can put a script in the place of ours once it is removed: its path stays queued."""
    reasons: list[str] = []
    for directory, fd in endpoint.openings(reasons):
        os.close(fd)
        return directory
    raise Failed("; ".join(reasons) or "no directory for temporary files can be written to")


def _until(end: float) -> Iterator[None]:
    while time.monotonic() < end:
        yield
        time.sleep(0.02)


def everywhere(pid: int, function: str) -> list[int]:
    """Calls `function` in `pid` and its ranks. Those where it succeeded, at least one. Raises ClickException."""
    found = processes(pid)
    if not found:
        if not psutil.pid_exists(pid):
            raise click.ClickException(f"No process has pid {pid}; `gpumon ls` lists the jobs that you can attach to.")
        raise click.ClickException(f"Process {pid} does not use PyTorch, nor does a process that it started.")
    reasons, done = [], []
    for each in found:
        try:
            refused = call(each, function)
        except Failed as error:
            refused = str(error)
        if refused:
            reasons.append(f"process {each}: {refused}")
        else:
            done.append(each)
    if not done:
        raise click.ClickException(f"Nothing was changed: {'; '.join(reasons)}.")
    return done


def inject_into(target: str | None) -> None:
    """Loads the agent into the process named, and waits until it can be attached to. Raises click's errors."""
    if target is None or not target.isdecimal():
        raise click.UsageError("--inject needs the pid of the process: gpumon attach PID --inject")
    pid = int(target)
    with contextlib.suppress(LinkError):
        link.resolve(target)
        return  # it has an agent already
    everywhere(pid, "join")
    for _ in _until(time.monotonic() + ANSWERS_IN_S):
        with contextlib.suppress(LinkError):
            link.resolve(target)
            return
