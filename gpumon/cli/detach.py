"""`gpumon detach`: removes the agent from a running process, which trains on."""

from __future__ import annotations

import click

from gpumon.cli.printing import say


@click.command("detach")
@click.argument("pid", type=click.IntRange(min=1))
def command(pid: int) -> None:
    """Remove the agent from process PID, and from the ranks that it started. They train on without it.

    It works for agents of `gpumon attach PID --inject` and of `gpumon run`. It needs gdb, and calls gpumon_agent.stop()
    there as soon as the main thread runs Python. Exit code 1: nothing was removed.
    """
    from gpumon.cli.joining import everywhere

    for each in everywhere(pid, "leave"):
        say(f"Process {each} trains on without an agent.")
