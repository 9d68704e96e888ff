"""The training's own output on the Log screen: from real processes, with what they do to a terminal."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import IO, Any

import pytest
from pictured import text_of

from gpumon.tui.text_layout import cells, chop
from gpumon.tui.training_output import LINE_CHARS_MAX, LINES_MAX, READ_BYTES, TrainingOutput


@pytest.fixture
def file() -> Iterator[IO[bytes]]:
    with tempfile.TemporaryFile() as opened:
        yield opened


def printed(file: IO[bytes], code: str) -> tuple[str, ...]:
    """What a process of that code prints, on both of its streams."""
    subprocess.run([sys.executable, "-c", code], stdout=file, stderr=subprocess.STDOUT, check=True)
    return TrainingOutput(file.fileno(), "gpumon demo").lines()


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
    output = TrainingOutput(file.fileno(), "gpumon demo")
    assert output.lines() == ()
    os.write(file.fileno(), "grü".encode()[:-1])  # half a character
    assert output.lines() == ("gr",)
    os.write(file.fileno(), "ü".encode()[1:] + b"n\nnext")
    before = output.lines()
    assert before == ("grün", "next")
    assert output.lines() is before  # nothing is drawn again
    os.write(file.fileno(), b"\n" + b"y" * (READ_BYTES + 99) + b"\nlast\n")
    *_, skipped, cut, last = output.lines()
    assert (skipped, last) == ("… 106 bytes came too fast to be shown …", "last")
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
    app.output = TrainingOutput(file.fileno(), "gpumon dryrun")
    async with app.run_test(size=size) as pilot:
        await settled(pilot)
        await pilot.press("7")
        await settled(pilot)
        shown = text_of(app)
        assert "Output  of the training that `gpumon dryrun` started" in shown
        assert "nothing printed yet" in shown
        printed(file, "for i in range(300): print('epoch', i)")
        await settled(pilot)
        shown = text_of(app)
        assert "epoch 299" in shown
        assert "epoch 200" not in shown
        assert "listening to train.py" in shown.split("epoch")[0]
        await pilot.press("tab", "home")
        await settled(pilot)
        assert "epoch 0" in text_of(app)
        await pilot.press("e")
        await settled(pilot)
        assert "PYTHONUNBUFFERED=1" in text_of(app)


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
