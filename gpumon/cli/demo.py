"""`gpumon demo`: starts, watches and ends a real training process."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import click

from gpumon.cli.printing import say
from gpumon.cli.subreaper import dies_with_parent
from gpumon.host import read_driver
from gpumon.tui.training_output import Outputs, TrainingOutput
from gpumon.virtual_gpu.building import BuildUnavailable, find_torch
from gpumon.virtual_gpu.profiles import DEVICES

START_PATIENCE_S = 180.0
"""Importing torch from a cold disk is slow."""
END_PATIENCE_S = 3.0
SCRIPT = Path(__file__).parents[1] / "demo" / "train.py"


@click.command("demo")
@click.option("--workload", type=click.Choice(["plain", "spikes", "leak", "ddp"]), default="plain", show_default=True)
@click.option("--device", metavar="NAME|SIZE", help=f"On a virtual GPU: {DEVICES}, or a size such as '16 GiB'.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line instead of the screen.")
@click.option("--steps", type=click.IntRange(min=1), help="With --json: exit after N steps.")
def command(workload: str, device: str | None, as_json: bool, steps: int | None) -> None:
    """Train a small transformer language model on Python's own source code, and watch it.

    On the GPU if there is one, else on the CPU. With --device on a virtual GPU: PyTorch's own CUDA allocator without a
    GPU, and the verdict of `gpumon dryrun` at the end. The workload "spikes" sometimes has a batch four times as long;
    "leak" keeps a few KiB of every step in a list; "ddp" trains two ranks, of which one keeps a copy of its gradients
    in DDP's buckets and the other does not (gradient_as_bucket_view). Quitting ends the training too.
    """
    if steps is not None and not as_json:
        raise click.UsageError("--steps needs --json: the screen stays until you quit it")
    if importlib.util.find_spec("torch") is None:
        raise click.ClickException(
            "the demo trains with PyTorch, which this Python lacks; get it with: pip install torch"
        )
    from gpumon.cli.attach import command as attach
    from gpumon.cli.attach import need_a_terminal

    if not as_json:
        need_a_terminal("this is not a terminal, and the screen needs one; use --json")
    if device is not None:
        from gpumon.cli.attach import options
        from gpumon.cli.dryrun import dryrun

        look = None if as_json else options(light=False, ansi=False, plain=False)
        code = dryrun(
            [str(SCRIPT), "--workload", workload], device, _ranks(workload), steps=steps, screen=look, as_json=as_json
        )
        raise click.exceptions.Exit(code)
    with training(workload) as (pid, output):
        arguments = [str(pid)]
        if as_json:
            arguments += ["--json"] if steps is None else ["--json", "--steps", str(steps)]
        code = attach.main(arguments, prog_name="gpumon attach", standalone_mode=False, obj=output)
    raise click.exceptions.Exit(code or 0)


@contextlib.contextmanager
def training(workload: str) -> Iterator[tuple[int, Outputs]]:
    """Starts a training process, waits for its agent, yields its pid and its output.

    It ends when its stdin is closed. The kernel kills it when this process ends, also by `kill -9` and even if it is
    stopped.
    """
    options = ["--name", "demo"] if _has_gpu() else ["--name", "demo", "--track-cpu"]
    own = ["--stop-with-input", "--workload", workload]
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            dies_with_parent([sys.executable, "-m", "gpumon", "run", *options, str(SCRIPT), *own]),
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C in the terminal is for the viewer
        )
        try:
            say("Starting a training process (it imports torch first) …", err=True)
            _await_agents(process, output, _ranks(workload))
            yield process.pid, Outputs(TrainingOutput(output.fileno(), "the training that `gpumon demo` started"))
        finally:
            _end(process)


def _ranks(workload: str) -> int:
    return 2 if workload == "ddp" else 1


def _await_agents(process: subprocess.Popen[bytes], output: IO[bytes], ranks: int) -> None:
    from gpumon import link
    from gpumon.link.discovery import LOOK_S

    deadline = time.monotonic() + START_PATIENCE_S
    while sum(process.pid in (found.pid, found.parent) for found in link.discover()) < ranks:
        if process.poll() is not None:
            output.seek(0)
            lines = output.read().decode(errors="replace").splitlines()
            raise click.ClickException("\n  ".join(["the demo's training process failed. Its output:", *lines]))
        if time.monotonic() > deadline:
            raise click.ClickException(
                f"the demo's training process sent nothing for {START_PATIENCE_S:.0f} s; `gpumon doctor` may show why"
            )
        time.sleep(LOOK_S)


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(END_PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _has_gpu() -> bool:
    """Whether torch is built for CUDA and the driver has a device, without importing torch."""
    try:
        find_torch()
    except BuildUnavailable:
        return False
    return bool(asyncio.run(read_driver()).devices)
