"""``python -m gpumon.virtual_gpu``: run a command on virtual GPUs, or build them beforehand."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any

import click

from gpumon.virtual_gpu.building import BuildUnavailable, build
from gpumon.virtual_gpu.launch import environment, set_faults
from gpumon.virtual_gpu.profiles import PROFILES


@click.group()
def main() -> None:
    """Virtual GPUs for PyTorch on a machine without one."""


@main.command("build")
@click.option("--python", default=sys.executable, help="The interpreter whose torch is used.")
def build_command(python: str) -> None:
    """Build for the installed torch and print the folder."""
    try:
        click.echo(build(python))
    except BuildUnavailable as error:
        raise click.ClickException(str(error)) from error


@main.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--devices", "-n", default=1, show_default=True, help="How many.")
@click.option("--profile", "-p", default="a100-80", show_default=True, help=f"One, or one each: {', '.join(PROFILES)}.")
@click.option("--memory", "-m", help="Capacity of each device, such as 16GiB; the profile's by default.")
@click.option("--context", "-c", help="Memory of a process outside its allocator, such as 450MiB.")
@click.option("--session", "-s", help="Share devices with the other commands of this name.")
@click.option("--python", default=sys.executable, help="The interpreter whose torch will run.")
@click.option("--mig", help="The devices are MIG instances of one board, such as 3g.20gb.")
@click.option("--cuda-order", help="CUDA's order of NVML's devices, such as 1,0.")
@click.option("--stream-delay", type=click.IntRange(0), help="Launches the device lags behind the host.  [default: 32]")
@click.option("--nccl-buffers", help="What an NCCL communicator takes from the device.  [default: 0]")
@click.option("--nccl-wait", type=click.IntRange(1), help="Seconds a rank is waited for in NCCL.  [default: 60]")
@click.option("--scalars", type=click.Choice(["zero", "bytes"]), default="zero", help="What .item() of a result reads.")
@click.option("--sensors", type=click.Choice(["none", "invented"]), default="none", help="Utilization, heat and power.")
@click.option("--hide", type=click.Choice(["bytes", "processes", "pids"]), help="What NVML hides, as in a container.")
@click.option("--nvml-fault", multiple=True, metavar="FUNCTION=WHAT", help="na, error, lost, hang, slow:MS, …")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(
    command: tuple[str, ...], profile: str, memory: str | None, cuda_order: str | None, nvml_fault: tuple[str, ...],
    **options: Any,
) -> None:  # fmt: skip
    """Run COMMAND, for example: run -n 2 -m 16GiB -- python train.py"""
    try:
        variables = environment(
            profile=profile.split(","),
            memory=memory.split(",") if memory else None,
            cuda_order=[int(item) for item in cuda_order.split(",")] if cuda_order else None,
            nvml_faults=_faults(nvml_fault),
            **options,
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    except BuildUnavailable as error:
        raise click.ClickException(str(error)) from error
    try:
        os.execvpe(command[0], command, variables)
    except OSError as error:
        raise click.ClickException(f"{command[0]} could not be started: {error.strerror}.") from error


@main.command()
@click.option("--python", default=sys.executable, help="The interpreter whose torch the session runs.")
@click.argument("session")
@click.argument("faults", nargs=-1, metavar="[NAME=WHAT]...")
def fault(session: str, faults: tuple[str, ...], python: str) -> None:
    """Let things go wrong in a running SESSION from now on; without any NAME=WHAT all is well again.

    lost0=1 takes device 0 off the bus; hide=bytes hides processes' bytes; nvmlDeviceGetMemoryInfo=hang and the like.
    """
    try:
        set_faults(session, _faults(faults), python)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    except BuildUnavailable as error:
        raise click.ClickException(str(error)) from error


def _faults(items: Iterable[str]) -> dict[str, str]:
    faults = {}
    for item in items:
        name, separator, value = item.partition("=")
        if not separator:
            raise click.UsageError(f"{item!r} is not a fault: write NAME=WHAT, such as nvmlDeviceGetPowerUsage=na")
        faults[name] = value
    return faults


if __name__ == "__main__":
    main(prog_name="python -m gpumon.virtual_gpu")
