"""The training's own output on the Log screen: from real processes, with what they do to a terminal."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
from msgspec.structs import replace
from pictured import text_of
from watched import Run

from gpumon.session.store import SessionStore
from gpumon.tui.position import Position
from gpumon.tui.screens.log import output_of
from gpumon.tui.text_layout import cells, chop
from gpumon.tui.training_output import LINE_CHARS_MAX, LINES_MAX, READ_BYTES, Outputs, TrainingOutput
from gpumon_agent import endpoint


@pytest.fixture
def file() -> Iterator[IO[bytes]]:
    with tempfile.TemporaryFile() as opened:
        yield opened


def printed(file: IO[bytes], code: str) -> tuple[str, ...]:
    """What a process of that code prints, on both of its streams."""
    subprocess.run([sys.executable, "-c", code], stdout=file, stderr=subprocess.STDOUT, check=True)
    return TrainingOutput(file.fileno(), "a test's").lines()


def test_both_streams_line_by_line_and_the_beginning_of_one(file: IO[bytes]) -> None:
    code = "import sys; print('one', flush=True); print('two', file=sys.stderr); print('thr', end='')"
    assert printed(file, code) == ("one", "two", "thr")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (r"\x1b[1;31mred\x1b[0m\x1b]52;c;aGk=\x07 \x1b]0;title\x1b\\end", "red end"),
        (r" 10%|#\r 20%|##\r 30%|###", " 30%|###"),  # a progress bar
        (r"done\r\n", "done"),
        (r"a\tb", "a       b"),
        (r"\x07\x9b31m\u202etxt\x00", "\ufffd\ufffd31m\ufffdtxt\ufffd"),
        (r"half\x1b[3", "half"),
        (r"\x1b]0;never ended", "0;never ended"),
        (r"[/]\x1b[2J[bold]", "[/][bold]"),
    ],
)
def test_nothing_in_it_can_control_the_terminal(file: IO[bytes], text: str, shown: str) -> None:
    (line,) = printed(
        file, f"import sys; sys.stdout.reconfigure(encoding='utf-8', newline=''); print('{text}', end='')"
    )
    assert line == shown
    assert line.isprintable()


def test_the_last_thousand_lines_stay_and_none_is_endless(file: IO[bytes]) -> None:
    lines = printed(file, "for i in range(5_000): print(i)")
    assert lines == tuple(map(str, range(4_000, 5_000)))
    assert len(lines) == LINES_MAX
    (line,) = printed(file, "print('x' * 100_000)")[-1:]
    assert len(line) == LINE_CHARS_MAX


def test_it_goes_on_where_it_was_and_what_comes_too_fast_is_counted(file: IO[bytes]) -> None:
    output = TrainingOutput(file.fileno(), "a test's")
    assert output.lines() == ()
    os.write(file.fileno(), "grü".encode()[:-1])  # half a character
    assert output.lines() == ("gr",)
    os.write(file.fileno(), "ü".encode()[1:] + b"n\nnext")
    before = output.lines()
    assert before == ("grün", "next")
    assert output.lines() is before  # nothing is drawn again
    os.write(file.fileno(), b"\n" + b"y" * (READ_BYTES + 99) + b"\nlast\n")
    *_, skipped, cut, last = output.lines()
    assert (skipped, last) == ("… 106 bytes before this are not shown …", "last")
    assert cut == "y" * (LINE_CHARS_MAX - 1) + "…"


@pytest.mark.parametrize("room", [2, 5, 20])
def test_long_lines_are_cut_into_rows_with_their_spaces_and_no_character_is_lost(room: int) -> None:
    for text in ("", "a" * 20, "  indented   text", "漢字 and 🙂 wide"):
        rows = chop(text, room)
        assert "".join(rows) == text
        assert all(cells(row) <= room for row in rows)


@pytest.mark.parametrize("size", [(120, 40), (80, 24)])
async def test_the_log_screen_shows_it_below_the_events_and_follows_it(
    app_of: Any, new_run: Any, settled: Any, file: IO[bytes], size: tuple[int, int]
) -> None:
    app = app_of(new_run().usual(3))
    app.outputs = Outputs(TrainingOutput(file.fileno(), "the training that `gpumon dryrun` started"), others=False)
    async with app.run_test(size=size) as pilot:
        await settled(pilot)
        await pilot.press("7")
        await settled(pilot)
        shown = text_of(app)
        assert "Output  the training that `gpumon dryrun` started" in shown
        assert "nothing printed yet" in shown
        printed(file, "for i in range(300): print('epoch', i)")
        await settled(pilot)
        shown = text_of(app)
        assert "epoch 299" in shown
        assert "epoch 200" not in shown
        assert "Output  the training that `gpumon dryrun` started" in shown
        assert "listening to train.py" in shown.split("epoch")[0]
        await pilot.press("tab", "home")
        await settled(pilot)
        assert "epoch 0" in text_of(app)
        await pilot.press("e")
        await settled(pilot)
        assert "PYTHONUNBUFFERED=1" in text_of(app)


PRINTS = """
import sys
for line in sys.stdin:
    print(line, end="", file=sys.stderr if line.startswith("!") else sys.stdout, flush=True)
"""


@contextlib.contextmanager
def training(**streams: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process that prints what it reads."""
    with subprocess.Popen([sys.executable, "-c", PRINTS], stdin=subprocess.PIPE, **streams) as process:
        try:
            yield process
        finally:
            process.stdin.close()


def hello_of(run: Any, pid: int, **changes: Any) -> Any:
    """A run of that process, as its agent would tell it."""
    began = {"start_time": endpoint.start_time(pid), "boot_id": endpoint.boot_id()}
    run.hello(**{"pid": pid, **began, **changes}).model()
    for step in range(3):
        run.step(step)
    return run.beat(3, "forward").synced()


def tell(process: subprocess.Popen[bytes], line: str, file: Path) -> None:
    """Makes it print a line, and waits until it has."""
    process.stdin.write(f"{line}\n".encode())
    process.stdin.flush()
    while line not in file.read_text():
        time.sleep(0.01)


async def test_a_training_s_own_file_is_shown_until_it_ends_and_after(
    app_of: Any, new_run: Any, settled: Any, tmp_path: Path
) -> None:
    """As by `gpumon run train.py > train.log`; gpumon has nothing to do with the file."""
    log = tmp_path / "train.log"
    log.write_text("of an earlier run\n")
    with log.open("ab") as file, training(stdout=file, stderr=subprocess.DEVNULL) as process:
        app = app_of(hello_of(new_run(), process.pid))
        async with app.run_test(size=(200, 40)) as pilot:
            await settled(pilot)
            await pilot.press("7")
            await settled(pilot)
            assert f"Output  {log}: stdout of train.py" in text_of(app)
            assert "of an earlier run" in text_of(app)
            tell(process, "epoch 1", log)
            await settled(pilot)
            assert "epoch 1" in text_of(app)
            os.truncate(log, 0)  # by whoever rotates logs
            tell(process, "epoch 2", log)
            await settled(pilot)
            assert "epoch 2" in text_of(app)
            tell(process, "last words", log)
            process.stdin.close()
            process.wait(60)
            await settled(pilot)
            assert "last words" in text_of(app)
            await pilot.press("e")
            await settled(pilot)
            assert "PYTHONUNBUFFERED=1" in text_of(app)


def test_stderr_if_only_that_goes_to_a_file(new_run: Any, tmp_path: Path) -> None:
    log = tmp_path / "errors"
    with log.open("wb") as file, training(stdout=subprocess.PIPE, stderr=file) as process:
        outputs, rank = Outputs(), rank_of(hello_of(new_run(), process.pid))
        tell(process, "!warning", log)
        output = outputs.of(rank)
        assert (output.lines(), output.whose) == (("!warning",), f"{log}: stderr of train.py")
        assert outputs.of(rank) is output


def test_another_process_and_other_files_are_not_taken_for_it(new_run: Any, tmp_path: Path) -> None:
    def found(pid: int, **changes: Any) -> bool:
        return Outputs().of(rank_of(hello_of(new_run(), pid, **changes))) is not None

    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    held = os.open(fifo, os.O_RDWR)
    with (tmp_path / "log").open("wb") as file, training(stdout=file) as one:
        assert found(one.pid)
        assert not found(one.pid, boot_id="of another machine")
        assert not found(one.pid, start_time=endpoint.start_time(one.pid) + 1)  # its pid was used again
        for stdout in (held, subprocess.PIPE, subprocess.DEVNULL):
            with training(stdout=stdout, stderr=subprocess.DEVNULL) as other:
                assert not found(other.pid)
    assert Outputs().of(None) is None
    os.close(held)


def test_what_gpumon_started_keeps_its_title_and_is_not_shown_for_another_job(
    file: IO[bytes], new_run: Any, tmp_path: Path
) -> None:
    """As where `gpumon demo` opens another job from Home."""
    own = TrainingOutput(file.fileno(), "the training that `gpumon demo` started")
    with (
        training(stdout=file, stderr=file) as started, training(stdout=subprocess.PIPE, stderr=subprocess.PIPE) as mute,
        (tmp_path / "log").open("wb") as log, training(stdout=log) as other,
    ):  # fmt: skip
        of = [rank_of(hello_of(Run(pid=each.pid), each.pid)) for each in (started, mute, other)]
        for rank in (of[0], of[1], of[2], of[0]):
            shown = Outputs(own).of(rank)
            if rank is of[0]:
                assert shown is own
            elif rank is of[1]:
                assert shown is None
            else:
                assert shown.whose == f"{tmp_path / 'log'}: stdout of train.py"
            assert Outputs(own, others=False).of(rank) is own
        assert Outputs(own).of(None) is own
        started.stdin.close()
        started.wait(60)
        assert Outputs(own).of(of[0]) is own


def test_the_file_of_the_rank_that_was_shown_before_is_closed(new_run: Any, tmp_path: Path) -> None:
    outputs = Outputs()
    with (
        (tmp_path / "a").open("wb") as a, training(stdout=a) as one,
        (tmp_path / "b").open("wb") as b, training(stdout=b) as two,
    ):  # fmt: skip
        ranks = [rank_of(hello_of(Run(pid=each.pid), each.pid)) for each in (one, two)]
        counts = set()
        for rank, name in ((ranks[0], "a"), (ranks[1], "b"), (ranks[0], "a")):
            assert outputs.of(rank).whose.startswith(f"{tmp_path / name}: ")
            counts.add(len(os.listdir("/proc/self/fd")))  # noqa: PTH208
        assert len(counts) == 1


def rank_of(run: Any) -> Any:
    store = SessionStore()
    for received in run.events:
        store.apply(received)
    return store.frame(0).ranks[0]


async def test_a_replay_shows_no_output_of_now(app_of: Any, new_run: Any, settled: Any, tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    with log.open("wb") as file, training(stdout=file) as process:
        tell(process, "epoch 1", log)
        app = app_of(hello_of(new_run(), process.pid))
        async with app.run_test(size=(120, 40)) as pilot:
            await settled(pilot)
            await pilot.press("7")
            await settled(pilot)
            assert "epoch 1" in text_of(app)
            app.view = replace(app.view, position=Position(1, 1))
            assert output_of(app) is None


async def test_without_it_the_log_has_the_whole_screen_and_says_where_the_output_is(
    app_of: Any, new_run: Any, settled: Any
) -> None:
    app = app_of(new_run().usual(3))
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        await pilot.press("7")
        await settled(pilot)
        assert " Output" not in text_of(app)
        await pilot.press("e")
        await settled(pilot)
        shown = text_of(app)
        assert "What the training prints is not here" in shown
        assert "`gpumon demo` and" in shown
