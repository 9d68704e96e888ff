"""The command line: one module per verb, imported only when called, so that `gpumon --help` is fast."""

from __future__ import annotations

import contextlib
import difflib
import errno
import importlib
import io
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import click
from click.shell_completion import CompletionItem

from gpumon.cli.printing import say
from gpumon_agent._version import __version__

VERBS: dict[str, tuple[str, str]] = {
    "run": ("gpumon.cli.run", "Start a training script with the agent inside, its code unchanged."),
    "attach": ("gpumon.cli.attach", "Watch a running training process, live."),
    "detach": ("gpumon.cli.detach", "Remove the agent from a running training process."),
    "ls": ("gpumon.cli.ls", "List the training processes that you can attach to."),
    "record": ("gpumon.cli.record", "Record a session to a file."),
    "replay": ("gpumon.cli.replay", "Play a recorded session on the same screens."),
    "compare": ("gpumon.cli.compare", "Compare the memory of two runs, the biggest difference first."),
    "report": ("gpumon.cli.report", "Write one HTML page of a run, from a recording or a running job."),
    "export": ("gpumon.cli.export", "Serve the memory of this machine's jobs to Prometheus."),
    "estimate": ("gpumon.cli.estimate", "Estimate the memory of a run, without a GPU."),
    "whatif": ("gpumon.cli.whatif", "Estimate a recorded run with another batch, precision or optimizer."),
    "explain": ("gpumon.cli.explain", "Explain an out-of-memory: what failed, why, and what helps."),
    "snapshot": ("gpumon.cli.snapshot", "Show what a PyTorch memory snapshot file holds, or compare two."),
    "contribute": ("gpumon.cli.contribute", "Write what this machine can add to the comparison with physical GPUs."),
    "demo": ("gpumon.cli.demo", "Train a small model here and watch it."),
    "dryrun": ("gpumon.cli.dryrun", "Run a script on a virtual GPU: does it fit, and where does it peak?"),
    "doctor": ("gpumon.cli.doctor", "Show what gpumon finds on this machine, and what is missing."),
    "completion": ("gpumon.cli.completion", "Print what bash, zsh or fish needs for tab completion."),
}
"""Verb → the module with its `command`, and its help line (here, so that help imports no verb)."""

UNLISTED: dict[str, tuple[str, str]] = {
    "announce": ("gpumon.cli.announce", "Print this machine's agents and readings, for a viewer on another one."),
}
"""Verbs for programs, in no list and no completion."""


class _HarmlessError(click.ClickException):
    """A click error, printed sanitized: it may contain an argument or file content."""

    def __init__(self, error: click.ClickException) -> None:
        super().__init__(error.message)
        self.error = error
        self.exit_code = error.exit_code  # type: ignore[misc]

    def show(self, file: IO[Any] | None = None) -> None:
        said = io.StringIO()
        self.error.show(said)
        say(said.getvalue(), err=True, nl=False)


@contextlib.contextmanager
def _harmless_errors() -> Iterator[None]:
    try:
        yield
    except _HarmlessError:
        raise
    except click.ClickException as error:
        raise _HarmlessError(error) from error


class LazyGroup(click.Group):
    """A group whose commands are in `VERBS` and imported on use."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Adds to click's handling of closed pipes: a full disk, and a stdout that was never open."""
        if sys.stdout is None:
            sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 (until the process ends)
        try:
            return super().main(*args, **kwargs)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or error.filename is not None:
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it again at exit
            say(f"Error: the output cannot be written: {error.strerror}.", err=True)
            sys.exit(1)

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with _harmless_errors():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        with _harmless_errors():
            return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        known = VERBS.get(cmd_name) or UNLISTED.get(cmd_name)
        if known is None:
            return None
        module, summary = known
        command: click.Command = importlib.import_module(module).command
        command.short_help = summary
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(verb, summary) for verb, (_, summary) in VERBS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in VERBS and args[0] not in UNLISTED and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], VERBS, 1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            ctx.fail(f"No such command {args[0]!r}.{hint}")
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        verbs = _completions(VERBS.items(), incomplete)
        return verbs + click.Command.shell_complete(self, ctx, incomplete)


def _completions(verbs: Iterable[tuple[str, tuple[str, str]]], incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(verb, help=summary) for verb, (_, summary) in verbs if verb.startswith(incomplete)]


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "-V", "--version", prog_name="gpumon", message="%(prog)s %(version)s")
def main() -> None:
    """What is in the GPU's memory, in which phase of training it peaks, and whether the next iteration will fit."""
