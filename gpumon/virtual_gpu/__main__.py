"""``python -m gpumon.virtual_gpu``: run a command on virtual GPUs, or build them beforehand."""

from __future__ import annotations

import os
import sys

import click

from gpumon.virtual_gpu.build import Unavailable, build
from gpumon.virtual_gpu.launch import PROFILES, environment


@click.group()
def main() -> None:
    """Virtual GPUs for PyTorch on a machine without one."""


@main.command("build")
@click.option("--python", default=sys.executable, help="The interpreter whose torch is meant.")
def build_command(python: str) -> None:
    """Build for the installed torch and print the folder."""
    try:
        click.echo(build(python))
    except Unavailable as error:
        raise click.ClickException(str(error)) from error


@main.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--devices", "-n", default=1, show_default=True, help="How many.")
@click.option(
    "--profile", "-p", default="a100-80", show_default=True, help=f"One, or one for each: {', '.join(PROFILES)}."
)
@click.option("--memory", "-m", help="Capacity of each device, such as 16GiB; the profile's by default.")
@click.option("--context", "-c", help="What a process costs a device beside its allocator, such as 450MiB.")
@click.option("--session", "-s", help="Share devices with the other commands of this name.")
@click.option("--python", default=sys.executable, help="The interpreter whose torch will run.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(
    devices: int,
    profile: str,
    memory: str | None,
    context: str | None,
    session: str | None,
    python: str,
    command: tuple[str, ...],
) -> None:
    """Run COMMAND, for example: run -n 2 -m 16GiB -- python train.py"""
    try:
        variables = environment(devices, profile.split(","), memory, context, session, python)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    except Unavailable as error:
        raise click.ClickException(str(error)) from error
    try:
        os.execvpe(command[0], command, variables)
    except OSError as error:
        raise click.ClickException(f"{command[0]} could not be started: {error.strerror}.") from error


if __name__ == "__main__":
    main(prog_name="python -m gpumon.virtual_gpu")
