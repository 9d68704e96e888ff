"""What is printed where no screen can be drawn: in a pipe, on a dumb terminal, with --ascii."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pty_of import in_pty

from gpumon.cli.printing import only_ascii

GPUMON = (sys.executable, "-m", "gpumon")
RECORDING = Path(__file__).parents[1] / "data" / "json-example.gpumon"
TRAINS = """
import time, torch
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())
while True:
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
    time.sleep(0.05)
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment in which one process without a rank trains, named with a letter that ASCII lacks."""
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("job")
    (folder / "train.py").write_text(TRAINS)
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(folder), "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
    training = subprocess.Popen(
        [*GPUMON, "run", "--name", "trän", str(folder / "train.py")],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 300
    while "live" not in piped(environment, "ls").stdout:
        assert training.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.2)
    yield environment
    training.kill()
    training.wait()


def piped(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*GPUMON, *arguments], env=environment, capture_output=True, text=True, timeout=300)


def test_attach_in_a_pipe_prints_one_picture(job: dict[str, str]) -> None:
    shown = piped(job, "attach")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert " trän · pid " in shown.stdout
    assert "\x1b" not in shown.stdout


def test_attach_with_a_terminal_for_keys_and_a_pipe_for_output_prints_one_picture(job: dict[str, str]) -> None:
    code, out, _ = in_pty([*GPUMON, "attach"], job, stdout=subprocess.PIPE)
    assert (code, " trän · pid " in out) == (0, True), out


@pytest.mark.parametrize("term", ["dumb", "unknown"])
def test_attach_on_a_terminal_without_a_cursor_prints_one_picture(job: dict[str, str], term: str) -> None:
    code, _, shown = in_pty([*GPUMON, "attach"], {**job, "TERM": term})
    assert (code, " trän · pid " in shown, "\x1b" in shown) == (0, True, False), shown


def test_replay_in_a_pipe_prints_the_last_picture() -> None:
    shown = piped(dict(os.environ), "replay", str(RECORDING))
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.startswith(" OUT OF MEMORY: ")
    assert shown.stdout == piped(dict(os.environ), "replay", str(RECORDING), "--once").stdout


@pytest.mark.parametrize("more", [(), ("--once",), ("--json",), ("--json", "--once")])
def test_a_rank_that_the_job_has_not_is_one_sentence(job: dict[str, str], more: tuple[str, ...]) -> None:
    shown = piped(job, "attach", "--rank", "7", *more)
    said = "Error: There is no rank 7 in this job: it has no ranks.\n"
    assert (shown.returncode, shown.stdout, shown.stderr) == (1, "", said)


def test_a_rank_that_the_job_has_not_is_told_before_the_screen_opens(job: dict[str, str]) -> None:
    code, _, shown = in_pty([*GPUMON, "attach", "--rank", "7"], {**job, "TERM": "xterm-256color"})
    assert (code, shown) == (1, "Error: There is no rank 7 in this job: it has no ranks.\r\n")


@pytest.mark.parametrize("command", [("attach",), ("attach", "--once"), ("replay", str(RECORDING), "--once")])
def test_ascii_is_all_that_is_printed(job: dict[str, str], command: tuple[str, ...]) -> None:
    shown = piped(job, *command, "--ascii")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.isascii(), [each for each in shown.stdout if not each.isascii()]
    assert not piped(job, *command).stdout.isascii()


def test_ascii_is_all_of_a_message_too(job: dict[str, str]) -> None:
    shown = piped(job, "attach", "--once", "--ascii", "größer")
    said = "Error: no job is named 'grosser'; there is: tran; for a machine of that name write ssh://grosser.\n"
    assert (shown.returncode, shown.stderr) == (1, said)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a · b … −1 ± 2 ≤ 3 ≥ 1 – 4×5 → 6", "a | b ... -1 +- 2 <= 3 >= 1 - 4x5 -> 6"),
        ("Größe ﬁt café ½ 10⁹", "Grosse fit cafe 1/2 10^9"),
        ("█ 模 \N{REPLACEMENT CHARACTER}", "? ? ?"),
        ("plain\n", "plain\n"),
    ],
)
def test_signs_become_words_and_letters_lose_their_accents(text: str, said: str) -> None:
    assert only_ascii(text) == said


def test_ls_watch_lists_every_second_in_a_pipe_with_the_time(job: dict[str, str]) -> None:
    watched(job, lambda line: "trän" in line, ["ls", "--watch"])


def test_ls_watch_prints_objects(job: dict[str, str]) -> None:
    watched(job, lambda line: line.startswith('{"type":"agent"'), ["ls", "--watch", "--json"])


def watched(job: dict[str, str], is_job: Callable[[str], bool], arguments: list[str]) -> None:
    """Three lines of the job come one by one, at least almost a second apart; ctrl-c ends it without a word."""
    with subprocess.Popen(
        [*GPUMON, *arguments], env=job, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        came: list[float] = []
        while len(came) < 3:
            line = process.stdout.readline()
            assert line, process.stderr.read()
            if is_job(line):
                came.append(time.monotonic())
        process.send_signal(2)
        rest = process.stderr.read()
        assert (process.wait(60), rest) == (0, "")
    assert came[2] - came[0] > 1.5


def test_ls_watch_ends_with_its_reader(job: dict[str, str]) -> None:
    script = '"$0" -m gpumon ls --watch | head -1; echo "${PIPESTATUS[0]}"'
    done = subprocess.run(
        ["bash", "-c", script, sys.executable], env=job, capture_output=True, text=True, timeout=300, check=True
    )
    assert (done.stdout.splitlines()[0].split()[0], done.stdout.splitlines()[1:], done.stderr) == ("TIME", ["0"], "")


def test_ls_watch_redraws_a_terminal(job: dict[str, str]) -> None:
    code, _, shown = in_pty([*GPUMON, "ls", "--watch"], {**job, "TERM": "xterm"}, until="\x1b[H\x1b[2J", times=2)
    assert (code, "trän" in shown) == (0, True), shown


def test_ls_watch_of_nothing_says_so_once(tmp_path: Path) -> None:
    alone = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [*GPUMON, "ls", "--watch"], env=alone, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("no training process with a gpumon agent runs here")
        time.sleep(2.5)  # two more looks
        process.send_signal(2)
        assert process.communicate(timeout=60) == ("", "")
