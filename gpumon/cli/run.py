"""`gpumon run`: the user's command with the agent inside."""

from __future__ import annotations

import contextlib
import sys

import click

from gpumon.cli import native_reader
from gpumon.cli.command_words import own_options_only
from gpumon.cli.printing import say
from gpumon_agent.shim import launch


@click.command(
    "run",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    options_metavar="[--name NAME] [--track-cpu]",
)
@click.option("--name", help="The job's name in viewers (default: the script's file name).")
@click.option("--track-cpu", is_flag=True, help="Exact bytes of CPU tensors; slows small operations.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="COMMAND…")
def command(name: str | None, track_cpu: bool, command: tuple[str, ...]) -> None:
    """Start a training script with the agent inside, its code unchanged.

    \b
    gpumon run train.py --epochs 3
    gpumon run -m pkg.train
    gpumon run torchrun --nproc-per-node 4 train.py
    gpumon run accelerate launch train.py

    This process becomes the command: tracebacks, signals and exit code are its own. The agent is in every Python
    process that the command starts, and becomes active in those that train. It uses PYTHONPATH, so interpreters
    started with -I, -E or -S have no agent.
    """
    own_options_only(command)
    with contextlib.suppress(native_reader.NotBuilt):  # `gpumon doctor` says why
        native_reader.build(again=False)
    try:
        launch.execute(command, name=name, track_cpu=track_cpu)
    except launch.Refused as refusal:
        say(f"gpumon: {refusal}", err=True)
        sys.exit(refusal.exit_code)
