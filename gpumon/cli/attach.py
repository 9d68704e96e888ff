"""`gpumon attach`: the screen, or JSON lines, of a training process that runs now."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from gpumon.link import Job
    from gpumon.tui.app import Options
    from gpumon.tui.feed import Choice
    from gpumon_agent.endpoint import Descriptor

NO_TERMINAL = "this is not a terminal, and the screen needs one; use --json for output that a program can read"
WAIT_LOOK_S = 0.25


@click.command("attach")
@click.argument("target", metavar="[PID|NAME|ENDPOINT]", required=False)
@click.option("--rank", type=click.IntRange(min=0), help="Show this rank first; with --json: only this rank.")
@click.option("--wait", is_flag=True, help="Nothing runs yet: wait for it.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line instead of the screen.")
@click.option("--once", "-1", is_flag=True, help="With --json: hello, model and the newest step, then end.")
@click.option("--steps", type=click.IntRange(min=1), help="With --json: end after so many live steps of each rank.")
@click.option("--for", "seconds", type=click.FloatRange(min=0, min_open=True), help="With --json: end after S seconds.")
@click.option("--light", is_flag=True, help="For a terminal with a light background.")
@click.option("--ansi", is_flag=True, help="Only the terminal's own sixteen colours.")
@click.option("--ascii", "plain", is_flag=True, help="Only ASCII signs: every category is a letter.")
def command(
    target: str | None,
    rank: int | None,
    wait: bool,
    as_json: bool,
    once: bool,
    steps: int | None,
    seconds: float | None,
    light: bool,
    ansi: bool,
    plain: bool,
) -> None:
    """Watch a training process that carries the agent (gpumon run …, or gpumon_agent.watch in its code).

    Without an argument the only job there is; a whole torchrun job is one. Quitting never signals the training.
    """
    if not as_json and (once or steps or seconds):
        raise click.UsageError("--once, --steps and --for go with --json: the screen stays until you quit it")
    if as_json:
        from gpumon.cli.attach_json import attach_json

        raise click.exceptions.Exit(attach_json(_wait_for(target) if wait else target, rank, once, steps, seconds))
    _need_a_terminal()
    from gpumon import link

    choices: Sequence[Job] = ()
    descriptors: tuple[Descriptor, ...] = ()
    try:
        descriptors = link.resolve(_wait_for(target) if wait else target)
    except link.SeveralJobs as error:
        choices = error.jobs
    except link.LinkError as error:
        raise click.ClickException(_sentence(str(error))) from error
    raise click.exceptions.Exit(show_live(descriptors, _choices(choices), options(light, ansi, plain, rank)))


def options(light: bool, ansi: bool, plain: bool, rank: int | None = None) -> Options:
    """The look that was asked for."""
    from gpumon.tui.app import Options

    theme = "gpumon-ansi" if ansi else "gpumon-light" if light else "gpumon-dark"
    return Options(theme, plain or not _draws_unicode(), rank)


def _draws_unicode() -> bool:
    """The locale's encoding can write braille; a console in plain C or POSIX cannot."""
    import sys

    encoding = (getattr(sys.stderr, "encoding", None) or "ascii").lower().replace("-", "")
    return encoding.startswith("utf") and os.environ.get("TERM") != "linux"


def show_live(descriptors: tuple[Descriptor, ...], choices: Sequence[Choice], look: Options) -> int:
    """Runs the screen; returns the exit code."""
    from gpumon import link
    from gpumon.tui.app import MonitorApp

    feed = (lambda: link.subscribe(descriptors, follow=True)) if descriptors else None
    return run(MonitorApp(feed, choices=choices, host=_this_machine, options=look, watch_terminal=True))


def run(app: object) -> int:
    """Runs an app to its end; what went wrong is said where the picture was."""
    from gpumon.tui.app import MonitorApp

    assert isinstance(app, MonitorApp)
    code = app.run()
    if app.failure is not None:
        click.echo(f"Error: {_sentence(app.failure)}", err=True)
        return 1
    return app.return_code or 0 if code is None else code


def _this_machine(pids: object) -> object:
    from gpumon.host import Sampler

    return Sampler(pids)  # type: ignore[arg-type]


def _choices(jobs: Sequence[Job]) -> list[Choice]:
    from gpumon import link
    from gpumon.tui.feed import Choice

    now = time.time()

    def choice(job: Job) -> Choice:
        ranks = f"{len(job.descriptors)} ranks, " if len(job.descriptors) > 1 else ""
        return Choice(
            job.name, f"{ranks}pid {job.pids}", lambda: link.subscribe(job.descriptors, follow=True)
        )

    del now
    return [choice(job) for job in jobs]


def _wait_for(target: str | None) -> str | None:
    """Returns once there is something to attach to; says that it waits."""
    from gpumon import link

    said = False
    while True:
        try:
            link.resolve(target)
        except link.NoJob as error:
            if not said:
                click.echo(f"Waiting: {error.what}. (Ctrl-C ends the waiting.)", err=True)
                said = True
            time.sleep(WAIT_LOOK_S)
        except link.LinkError:
            return target
        else:
            return target


def _need_a_terminal() -> None:
    from gpumon.tui.terminal import usable

    if not usable():
        raise click.ClickException(NO_TERMINAL)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")
