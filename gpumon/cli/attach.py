"""`gpumon attach`: the screen, or JSON lines, for a running training process."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gpumon.cli import screen
from gpumon.cli.printing import say, say_only_ascii

if TYPE_CHECKING:
    from gpumon.host.sampler import Sampler
    from gpumon.tui.app import MonitorApp
    from gpumon.tui.themed_app import Options
    from gpumon_agent.endpoint import Descriptor

COLLECTED_AFTER = 10_000
"""New objects until the screen looks for garbage: few are any. Python's 700 cost 2 % of a core with 64 ranks."""

ANSWERS_IN_S = 5.0
"""How long an agent is waited for whose rank is not known."""

F = TypeVar("F", bound=Callable[..., Any])


def looks(command: F) -> F:
    for option in (
        click.option("--ascii", "plain", is_flag=True, help="Only ASCII characters: every category is a letter."),
        click.option("--ansi", is_flag=True, help="Only the terminal's own sixteen colours."),
        click.option("--light", is_flag=True, help="For a terminal with a light background."),
    ):
        command = option(command)
    return command


@click.command("attach")
@click.argument("target", metavar="[PID|NAME|ENDPOINT]", required=False)
@click.option("--rank", type=click.IntRange(min=0), help="Show this rank first; with --json: only this rank.")
@click.option("--inject", is_flag=True, help="Load the agent into process PID, which runs without it (needs gdb).")
@click.option("--wait", is_flag=True, help="Wait for a training process to start.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line instead of the screen.")
@click.option("--once", "-1", is_flag=True, help="Print one picture as text, then exit; with --json: the newest step.")
@click.option("--steps", type=click.IntRange(min=1), help="With --json: exit after N live steps of each rank.")
@click.option(
    "--for", "seconds", type=click.FloatRange(min=0, min_open=True), help="With --json: exit after S seconds."
)
@looks
def command(
    target: str | None,
    rank: int | None,
    inject: bool,
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

    A process without it can be given one while it trains: gpumon attach PID --inject; gpumon detach PID removes it.

    Without an argument: the only job, with all ranks of a torchrun. If there is none yet, or several: the Home screen,
    which shows every job of this machine as it starts. Quitting never affects the training. In a pipe, or with
    TERM=dumb, it prints one picture, as --once does.
    """
    if not as_json and (steps or seconds):
        raise click.UsageError("--steps and --for need --json: the screen stays until you quit it")
    once = once or not (as_json or screen.usable())
    if inject:
        from gpumon.cli.joining import inject_into

        inject_into(target)
    screen.import_asyncio()
    from gpumon import link

    find = _await if wait else link.resolve  # call it once: the process may end, but its past is still shown
    if as_json:
        from gpumon.cli.attach_json import attach_json

        raise click.exceptions.Exit(attach_json(lambda: having(find(target), rank), rank, once, steps, seconds))
    look = options(light, ansi, plain, rank)
    if once and look.ascii:
        say_only_ascii()
    descriptors: tuple[Descriptor, ...] = ()
    try:
        descriptors = having(find(target), rank)
    except link.SeveralJobs as error:  # the Home screen shows them
        if once:
            raise click.ClickException(sentence(str(error))) from error
    except link.LinkError as error:
        if isinstance(error, link.NoAgent):
            from gpumon.cli.outside import lines

            say("\n".join(lines(error.pid)))
        if once or target is not None or not isinstance(error, link.NoJob):  # else the Home screen waits for one
            raise click.ClickException(sentence(str(error))) from error
    if once:
        from gpumon.tui.once import print_live

        raise click.exceptions.Exit(print_live(descriptors, look, this_machine))
    gc.disable()  # until the imports are done: none of it is garbage
    from gpumon.cli.budget_sender import BudgetSender
    from gpumon.cli.home_jobs import machine
    from gpumon.tui.app import MonitorApp

    budgets = BudgetSender(descriptors)
    known = {descriptor.nonce: descriptor for descriptor in descriptors}
    feed = (lambda: link.subscribe_batches(descriptors, follow=True)) if descriptors else None
    app = MonitorApp(
        feed,
        machine=machine(lambda met: known.update({each.nonce: each for each in met})),
        host=lambda pids: budgets.beside(this_machine(seen_here(known.values(), pids))),
        seen=budgets.seen,
        asker=link.Asker(descriptors),
        options=look,
        watch_terminal=True,
    )
    app.outputs = click.get_current_context().obj or app.outputs  # of `gpumon demo`
    raise click.exceptions.Exit(run(app))


def having(descriptors: tuple[Descriptor, ...], rank: int | None) -> tuple[Descriptor, ...]:
    """All of them, if one is this rank or may become it. Raises click's error.

    The agent of a process without a rank in its descriptor is asked. It has none, or will know it later (one of several
    that multiprocessing started), or the descriptor was not read (an endpoint elsewhere).
    """
    if rank is None or any(descriptor.rank == rank for descriptor in descriptors):
        return descriptors
    from gpumon import link

    found = {each.rank for each in descriptors if each.rank is not None}
    for each in link.glance([each for each in descriptors if each.rank is None], ANSWERS_IN_S):
        if each.hello is not None and each.hello.rank is not None:
            found.add(each.hello.rank)
        elif len(descriptors) > 1 or each.descriptor.spawned or (each.hello is None and not each.descriptor.pid):
            return descriptors
    if rank in found:
        return descriptors
    there = ", ".join(map(str, sorted(found)))
    has = f"its ranks are {there}" if len(found) > 1 else f"its only rank is {there}" if found else "it has no ranks"
    raise click.ClickException(f"There is no rank {rank} in this job: {has}.")


def options(light: bool, ansi: bool, plain: bool, rank: int | None = None) -> Options:
    from gpumon.tui.themed_app import Options

    theme = "gpumon-ansi" if ansi else "gpumon-light" if light else "gpumon-dark"
    return Options(theme, plain or not _draws_unicode(), rank)


def _draws_unicode() -> bool:
    """Whether the locale's encoding has braille (C and POSIX do not) and the terminal is not the Linux console."""
    encoding = (getattr(sys.stderr, "encoding", None) or "ascii").lower().replace("-", "")
    return encoding.startswith("utf") and os.environ.get("TERM") != "linux"


def run(app: MonitorApp) -> int:
    """Runs the app; prints its failure after the screen is closed. Returns the exit code."""
    gc.enable()
    gc.freeze()  # imported modules stay
    gc.set_threshold(COLLECTED_AFTER)
    code = app.run()
    if app.failure is not None:
        say(f"Error: {sentence(app.failure)}", err=True)
        return 1
    return app.return_code or 0 if code is None else code


def this_machine(pids: Callable[[], Collection[int]]) -> Sampler:
    from gpumon.host import Sampler

    return Sampler(pids)


def seen_here(known: Collection[Descriptor], pids: Callable[[], Collection[int]]) -> Callable[[], list[int]]:
    """`pids` without those in another pid namespace, which are other processes here. `known` may grow."""
    from gpumon_agent.endpoint import pid_namespace

    here = pid_namespace()

    def seen() -> list[int]:
        foreign = {descriptor.pid for descriptor in known if descriptor.pid_ns not in ("", here)}
        return [pid for pid in pids() if pid not in foreign]

    return seen


def _await(target: str | None) -> tuple[Descriptor, ...]:
    """Retries `link.resolve` until there is a job, or another error; prints once that it waits."""
    from gpumon import link
    from gpumon.link.discovery import LOOK_S

    said = False
    while True:
        try:
            return link.resolve(target)
        except link.NoJob as error:
            if not said:
                say(f"Waiting: {error.what}. Ctrl-C stops waiting.", err=True)
                said = True
            time.sleep(LOOK_S)


def need_a_terminal(why_not: str) -> None:
    """Raises ClickException (exit code 1) without a terminal."""
    from gpumon.tui.terminal import usable

    if not usable():
        raise click.ClickException(sentence(why_not))


def sentence(text: str) -> str:
    """Adds a full stop. The first letter stays: it may begin a file name."""
    return text + ("" if text.endswith((".", "!", "?")) else ".")
