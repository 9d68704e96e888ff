"""`gpumon replay FILE`: a recording on the same screens, or as the same JSON objects."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpumon.cli import screen
from gpumon.cli.attach import looks, options, run, sentence
from gpumon.cli.printing import say_only_ascii
from gpumon.cli.progress import working

if TYPE_CHECKING:
    from gpumon.link import Replay
    from gpumon_agent import wire


@click.command("replay")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--rank", type=click.IntRange(min=0), help="Show this rank first; with --json: only this rank.")
@click.option("--speed", type=click.FloatRange(min=0), default=1.0, show_default=True,
              help="Speed, as a multiple of the original; 0: at once. < and > on the screen change it.")  # fmt: skip
@click.option(
    "--json", "as_json", is_flag=True, help="One JSON object a line, as fast as possible, instead of the screen."
)
@click.option(
    "--once", "-1", is_flag=True, help="Print the last picture as text, then exit; with --json: the last step."
)
@click.option("--steps", type=click.IntRange(min=1), help="With --json: exit after N steps of each rank.")
@click.option(
    "--for", "seconds", type=click.FloatRange(min=0, min_open=True), help="With --json: exit after S seconds."
)
@looks
def command(
    file: Path,
    rank: int | None,
    speed: float,
    as_json: bool,
    once: bool,
    steps: int | None,
    seconds: float | None,
    light: bool,
    ansi: bool,
    plain: bool,
) -> None:
    """Play FILE, made by `gpumon record`, back as if it happened now.

    Space holds it, , and . go by one step, left and right by 100, [ and ] to the event before and after, : to a step,
    home and end to the first and the last.

    In a pipe, or with TERM=dumb, it prints the last picture, as --once does.
    """
    if not as_json and (steps or seconds):
        raise click.UsageError("--steps and --for need --json")
    if as_json:
        from gpumon.cli.attach_json import run_replay

        code = run_replay(file, once=once, steps=steps, seconds=seconds, rank=rank)
        raise click.exceptions.Exit(code)
    screen.import_asyncio()
    from gpumon import link

    look = options(light, ansi, plain, rank)
    once = once or not screen.usable()
    if once and look.ascii:
        say_only_ascii()
    try:
        recording = link.replay(file)
    except link.LinkError as error:
        raise click.ClickException(sentence(str(error))) from error
    if once:
        from gpumon.tui.once import print_replay

        raise click.exceptions.Exit(print_replay(_Reading(file, recording), look))
    from gpumon.tui.app import MonitorApp
    from gpumon.tui.feed import Pace

    app = MonitorApp(recording=recording, pace=Pace(speed), options=look, watch_terminal=True)
    app.ending = lambda: recording.cut
    raise click.exceptions.Exit(run(app))


class _Reading:
    """The recording, with a progress line while it is read."""

    def __init__(self, file: Path, recording: Replay) -> None:
        self._file, self._recording = file, recording

    def __iter__(self) -> Iterator[wire.Received]:
        with working(f"reading {self._file}"):
            yield from self._recording.tail()

    @property
    def cut(self) -> str | None:
        return self._recording.cut
