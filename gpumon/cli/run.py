"""`gpumon run`: the user's command with the agent inside."""

from __future__ import annotations

import contextlib
import sys
from typing import NoReturn

import click

from gpumon.cli import native_reader
from gpumon.cli.command_words import own_options_only
from gpumon.cli.printing import say
from gpumon_agent.shim import launch

AUTO = "auto"
PATIENCE_S = 7.0
"""After the training's end, for its last messages and what trackers still write (`tracking`: 1 s and 5 s)."""

_BESIDE = """
import sys
number, wanted, *sys.path[:] = sys.argv[1:]
from gpumon.cli.tracking import main
main(int(number), tuple(filter(None, wanted.split(","))))
"""
"""With this process's sys.path: not the current folder's, where a `wandb.py` may be the user's own."""


@click.command(
    "run",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    options_metavar="[--name NAME] [--track-cpu] [--log-to auto|TRACKER,…] [--summary]",
)
@click.option("--name", help="The job's name in viewers (default: the script's file name).")
@click.option("--track-cpu", is_flag=True, help="Exact bytes of CPU tensors; slows small operations.")
@click.option(
    "--log-to", "log_to", metavar="auto|TRACKER,…",
    help="Log peaks, headroom, forecast and findings to the trackers that the script uses, or only to those named "
    "(wandb, mlflow, tensorboard, trackio, otlp), from a process beside the training.",
)  # fmt: skip
@click.option("--summary", is_flag=True, help="Print a few lines at the end: highest peak, headroom, findings.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="COMMAND…")
def command(name: str | None, track_cpu: bool, log_to: str | None, summary: bool, command: tuple[str, ...]) -> None:
    """Start a training script with the agent inside, its code unchanged.

    \b
    gpumon run train.py --epochs 3
    gpumon run -m pkg.train
    gpumon run torchrun --nproc-per-node 4 train.py
    gpumon run accelerate launch train.py

    This process becomes the command: tracebacks, signals and exit code are its own. (With --log-to and --summary it
    waits for the command instead, passes signals on, and ends as the command did.) The agent is in every Python
    process that the command starts, and becomes active in those that train. It uses PYTHONPATH, so interpreters
    started with -I, -E or -S have no agent.
    """
    own_options_only(command)
    with contextlib.suppress(native_reader.NotBuilt):  # `gpumon doctor` says why
        native_reader.build(again=False)
    wanted = () if log_to is None else _trackers(log_to)
    try:
        launch.command(command)
    except launch.Refused as refusal:
        _refused(refusal)

    def become() -> NoReturn:
        try:
            launch.execute(command, name=name, track_cpu=track_cpu)
        except launch.Refused as refusal:
            _refused(refusal)

    if wanted or summary:
        from gpumon.cli import supervised

        supervised.supervise(become, lambda pid: _beside(pid, wanted), PATIENCE_S)
    become()


def _refused(refusal: launch.Refused) -> NoReturn:
    say(f"gpumon: {refusal}", err=True)
    sys.exit(refusal.exit_code)


def _beside(pid: int, wanted: tuple[str, ...]) -> list[str]:
    return [sys.executable, "-c", _BESIDE, str(pid), ",".join(wanted), *sys.path]


def _trackers(text: str) -> tuple[str, ...]:
    """Raises BadParameter for names that are none, and for libraries that are not installed."""
    from gpumon.export import trackers

    wanted = tuple(dict.fromkeys(word for word in text.split(",") if word))
    known = ", ".join(("auto", *trackers.NEEDS))
    for word in wanted or ("",):
        if word != AUTO and word not in trackers.NEEDS:
            raise click.BadParameter(f"{word!r} is none of {known}", param_hint="--log-to")
        if word != AUTO and not trackers.installed(word):
            missing = " and ".join(trackers.NEEDS[word])
            raise click.BadParameter(f"{word} needs {missing}, which is not installed here", param_hint="--log-to")
    return wanted
