"""`gpumon completion`: what a shell loads so that the tab key completes gpumon's verbs and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print what a shell needs to complete gpumon's commands with the tab key.

    \b
    eval "$(gpumon completion bash)"       in ~/.bashrc
    eval "$(gpumon completion zsh)"        in ~/.zshrc
    gpumon completion fish | source        in ~/.config/fish/config.fish
    """
    made = get_completion_class(shell)
    assert made is not None
    from gpumon.cli import main

    click.echo(made(main, {}, "gpumon", "_GPUMON_COMPLETE").source())
