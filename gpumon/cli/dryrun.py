"""`gpumon dryrun`: runs the user's unmodified script on virtual devices and says whether it fits."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpumon.cli import checked, exits
from gpumon.cli.attach import looks
from gpumon.cli.command_words import own_options_only
from gpumon.cli.printing import say, say_only_ascii
from gpumon.cli.progress import working
from gpumon.virtual_gpu.profiles import DEVICES
from gpumon_agent.shim import launch

if TYPE_CHECKING:
    from gpumon.analysis.dryrun_result import Outcome
    from gpumon.cli.virtual_run import VirtualRun
    from gpumon.tui.themed_app import Options

NOT_MODELLED = (
    "Values have no meaning (only shapes and bytes are computed): losses are zeros, and a shape that depends on values "
    "is empty. cuFFT, cuSOLVER, cuSPARSE and cuDNN's RNNs do not exist; calls name them. Kernels take no time. "
    "The context's size is assumed (--context); memory of NCCL and cuDNN outside PyTorch's allocator is not counted."
)
"""A summary of gpumon/virtual_gpu/README.md."""

INTERRUPTED = 128 + signal.SIGINT


@click.command(
    "dryrun",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    options_metavar="--device NAME|SIZE [OPTIONS]",
)
@click.option("--device", required=True, metavar="NAME|SIZE", help=f"{DEVICES}, or a size such as '16 GiB'.")
@click.option(
    "--devices",
    type=click.IntRange(1, 16),
    default=1,
    show_default=True,
    help="Number of devices, such as one for each rank.",
)
@click.option("--context", metavar="SIZE", help="Memory of a process outside its allocator.  [default: 450MiB]")
@click.option("--steps", type=click.IntRange(min=1), help="End the script when every rank has done N steps.")
@click.option(
    "--wait",
    type=click.IntRange(min=1),
    metavar="SECONDS",
    default=60,
    show_default=True,
    help="How long ranks wait for one that does not reach a collective.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="One JSON object a line instead of the screen; the last is the verdict."
)
@click.option("--no-screen", is_flag=True, help="Show the script's own output, then the verdict; so it is in a pipe.")
@looks
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="COMMAND…")
def command(
    device: str, devices: int, context: str | None, steps: int | None, wait: int, as_json: bool,
    no_screen: bool, light: bool, ansi: bool, plain: bool, command: tuple[str, ...],
) -> None:  # fmt: skip
    """Run an unchanged training script on a virtual GPU, and show whether it fits.

    \b
    gpumon dryrun --device a100-40 train.py --epochs 1
    gpumon dryrun --device "16 GiB" --steps 5 -m pkg.train
    gpumon dryrun --device a100-80 --devices 8 torchrun --nproc-per-node 8 train.py

    PyTorch's own CUDA allocator, autograd and optimizers run without a GPU; only kernels do nothing. Exit code 0: it
    fits. 1: it does not, or will not. 2: wrong arguments. 3: unknown, also if the script fails for its own reasons.
    """
    from gpumon.cli import screen
    from gpumon.cli.attach import options

    look = options(light, ansi, plain)
    drawn = not (as_json or no_screen) and screen.usable()
    if look.ascii:
        say_only_ascii()
    own_options_only(command)
    code = dryrun(command, device, devices, context, steps, wait, screen=look if drawn else None, as_json=as_json)
    raise click.exceptions.Exit(code)


def dryrun(
    words: Sequence[str],
    device: str,
    devices: int = 1,
    context: str | None = None,
    steps: int | None = None,
    wait: int | None = None,
    *,
    screen: Options | None = None,
    as_json: bool = False,
) -> int:
    """Runs the command with `screen`, `as_json` or its own output; prints the verdict. Returns the exit code."""
    from gpumon.cli.virtual_run import VirtualRun

    argv, environment = prepare(words, device, devices, context, wait)
    with tempfile.TemporaryFile() as kept:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that the script is ended too
        out, err = (kept.fileno(), kept.fileno()) if screen is not None else (2, 2) if as_json else (1, 2)
        with VirtualRun(argv, environment, out=out, err=err, steps=steps) as run:
            try:
                code = _watch(run, screen, as_json, steps, kept.fileno())
            except KeyboardInterrupt:
                code = INTERRUPTED
            run.end("left")
            outcome = run.outcome()
        if screen is not None and outcome.ended == "failed":
            kept.seek(0)
            shutil.copyfileobj(kept, sys.stderr.buffer)
            sys.stderr.flush()
    for note in run.notes:
        say(f"gpumon: {note}.", err=True)
    _tell(outcome, as_json)
    return code or exits.of(outcome.fits)


def prepare(
    words: Sequence[str], device: str, devices: int, context: str | None, wait: int | None = None
) -> tuple[list[str], dict[str, str]]:
    """The real argv, and the environment of a new session with the agent's shim. Raises click's errors."""
    from gpumon import virtual_gpu

    try:
        argv = launch.command(words)
        python = argv[0] if Path(argv[0]).name.startswith("python") else launch.python()
        with working("building the virtual GPU"):
            inner = virtual_gpu.environment(devices, device, context=context, python=python, nccl_wait=wait)
    except launch.Refused as refusal:
        kind = click.UsageError if refusal.exit_code == 2 else exits.CannotTell
        raise kind(str(refusal)) from refusal
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    except virtual_gpu.BuildUnavailable as error:
        raise exits.CannotTell(str(error)) from error
    inner.pop("CUDA_VISIBLE_DEVICES", None)  # it names real devices
    os.environ.update({name: value for name, value in inner.items() if name.startswith(("VGPU_", "LD_"))})
    return argv, launch.environment(inner)


def _watch(run: VirtualRun, screen: Options | None, as_json: bool, steps: int | None, kept: int) -> int:
    """Follows the run to its end. Returns an exit code above 0 if the output failed or on ctrl-c.

    `kept`: with a screen, the file of the script's output.
    """
    if as_json:
        from gpumon.cli.attach_json import Until, print_objects
        from gpumon.export.objects import Objects

        until = Until(once=False, steps=steps, seconds=None, ranks=None)
        return print_objects(lambda: run.messages(machine=True), Objects(), until)
    if screen is None:
        asyncio.run(_listen(run))
        return 0
    say("Starting the script on a virtual GPU (it imports torch first) …", err=True)
    if not run.await_agent():
        return 0
    from gpumon import link
    from gpumon.cli import attach
    from gpumon.tui.app import MonitorApp
    from gpumon.tui.training_output import Outputs, TrainingOutput

    app = MonitorApp(
        lambda: run.messages(machine=False),
        host=run.machine,
        asker=link.Asker(),
        options=screen,
        watch_terminal=True,
    )
    app.outputs = Outputs(TrainingOutput(kept, "the training that `gpumon dryrun` started"), others=False)
    return attach.run(app)


async def _listen(run: VirtualRun) -> None:
    async for _ in run.messages(machine=True):
        pass


def _tell(outcome: Outcome, as_json: bool) -> None:
    if as_json:
        from gpumon.analysis.answer import of_outcome
        from gpumon.export import jsonl

        now = time.time_ns()
        sys.stdout.buffer.write(jsonl.line(jsonl.answer(of_outcome(outcome), now)))
        sys.stdout.buffer.write(jsonl.line(jsonl.verdict(outcome, checked.VIRTUAL_GPU, NOT_MODELLED, now)))
        sys.stdout.flush()
    else:
        from gpumon.cli.verdict import lines

        say("\n".join(lines(outcome, checked.VIRTUAL_GPU, NOT_MODELLED)))
