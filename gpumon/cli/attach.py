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
    from gpumon.link.machines import Machines, Readings
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
@click.argument("target", metavar="[PID|NAME|ENDPOINT|HOST1,HOST2]", required=False)
@click.argument("job", metavar="[JOB]", required=False)
@click.option("--slurm", metavar="JOBID", help="Watch the machines of a SLURM job, through ssh.")
@click.option("--remote-python", metavar="PATH", help="The Python that runs gpumon on those machines.")
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
    job: str | None,
    slurm: str | None,
    remote_python: str | None,
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

    Other machines, through ssh: HOST1,HOST2, USER@HOST or ssh://HOST (a comma, an @ or ssh:// says that it is no job's
    name), and JOB, a name or pid there, if they run several. gpumon must be installed on them.
    """
    if not as_json and (steps or seconds):
        raise click.UsageError("--steps and --for need --json: the screen stays until you quit it")
    once = once or not (as_json or screen.usable())
    hosts = _machines(target, job, slurm, remote_python, inject)
    if hosts:
        target = target if slurm else job  # the job there
    if inject:
        from gpumon.cli.joining import inject_into

        inject_into(target)
    screen.import_asyncio()

    def watch(machines: Machines | None = None) -> int:
        find = _finder(target, wait, slurm)
        readings = machines.readings if machines is not None else this_machine
        if as_json:
            from gpumon.cli.attach_json import attach_json

            return attach_json(lambda: having(find(), rank), rank, once, steps, seconds, readings)
        look = options(light, ansi, plain, rank)
        return _show(find, target, once, look, readings, elsewhere=machines is not None)

    if not hosts:
        raise click.exceptions.Exit(watch())
    from gpumon.cli.machines import linked

    with linked(hosts, remote_python) as machines:
        code = watch(machines)
    raise click.exceptions.Exit(code)


def _machines(
    target: str | None, job: str | None, slurm: str | None, remote_python: str | None, inject: bool
) -> tuple[str, ...]:
    """The machines to watch through ssh; empty: this one. Raises click's errors."""
    hosts: tuple[str, ...] = ()
    if slurm is not None or (target is not None and ("," in target or "@" in target or "://" in target)):
        from gpumon.cli.machines import named_in, of_slurm_job

        hosts = of_slurm_job(slurm) if slurm is not None else named_in(target)
    if slurm is not None and job is not None:
        raise click.UsageError("--slurm names the machines: give only the JOB there")
    if hosts and inject:
        raise click.UsageError("--inject works on this machine only: run it there, through ssh")
    if not hosts and (job is not None or remote_python is not None):
        raise click.UsageError("JOB and --remote-python are for other machines: HOST1,HOST2, USER@HOST or ssh://HOST")
    return hosts


def _finder(target: str | None, wait: bool, slurm: str | None) -> Callable[[], tuple[Descriptor, ...]]:
    """Finds the job's agents. Called once: the process may end, but its past is still shown."""
    from gpumon import link

    def find() -> tuple[Descriptor, ...]:
        if slurm is not None and target is None:
            from gpumon.cli.machines import of_the_slurm_job

            ours = link.jobs(of_the_slurm_job(slurm, link.discover()))
            if len(ours) == 1:
                return ours[0].descriptors
        return _await(target) if wait else link.resolve(target)

    return find


def _show(
    find: Callable[[], tuple[Descriptor, ...]],
    target: str | None,
    once: bool,
    look: Options,
    readings: Callable[[Callable[[], Collection[int]]], Sampler | Readings],
    *,
    elsewhere: bool,
) -> int:
    """The screen, or one picture as text. `elsewhere`: the job is on other machines. Returns the exit code."""
    from gpumon import link

    if once and look.ascii:
        say_only_ascii()
    descriptors: tuple[Descriptor, ...] = ()
    try:
        descriptors = having(find(), look.rank)
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

        return print_live(descriptors, look, readings)
    gc.disable()  # until the imports are done: none of it is garbage
    from gpumon.cli.budget_sender import BudgetSender
    from gpumon.cli.home_jobs import machine
    from gpumon.tui.app import MonitorApp

    budgets = BudgetSender(descriptors)
    known = {descriptor.nonce: descriptor for descriptor in descriptors}
    feed = (lambda: link.subscribe_batches(descriptors, follow=True)) if descriptors else None
    app = MonitorApp(
        feed,
        machine=machine(lambda met: known.update({each.nonce: each for each in met}), elsewhere=elsewhere),
        host=lambda pids: budgets.beside(readings(seen_here(known.values(), pids))),
        seen=budgets.seen,
        asker=link.Asker(descriptors),
        options=look,
        watch_terminal=True,
    )
    app.outputs = click.get_current_context().obj or app.outputs  # of `gpumon demo`
    return run(app)


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
