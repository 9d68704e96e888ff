"""The small parts: the guard, the queue, the last words."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gpumon_agent
from gpumon.analysis.findings.agent import MISSING
from gpumon_agent import wire
from gpumon_agent.guard import FAILURES_MAX, Guard, pass_on
from gpumon_agent.guard import guard as registry
from gpumon_agent.hooks.recorder import Recorder


def notice(text: str = "") -> wire.Notice:
    return wire.Notice(0, text)


def test_a_failing_part_is_told_once_and_switched_off(capfd: pytest.CaptureFixture[str]) -> None:
    told: list[str] = []
    calls: list[int] = []

    def fails() -> int:
        calls.append(1)
        raise ValueError("two\nlines")

    guard = Guard()
    guard.listen(told.append)
    guarded = guard.protect("hook", fails)
    assert [guarded() for _ in range(20)] == [None] * 20
    assert len(calls) == FAILURES_MAX
    assert capfd.readouterr().err == "gpumon: hook: ValueError: two lines (training is not affected)\n"
    assert len(told) == 2
    assert "switched off" in told[1]


def test_what_fails_before_an_agent_exists_is_told_once_one_does(capfd: pytest.CaptureFixture[str]) -> None:
    guard = Guard()
    for _ in range(FAILURES_MAX):
        guard.protect("early", lambda: 1 // 0)()
    told: list[str] = []
    guard.listen(told.append)
    assert told == [
        "early: ZeroDivisionError: integer division or modulo by zero",
        "early: ZeroDivisionError: integer division or modulo by zero; switched off after 5 failures",
    ]
    (off,) = guard.off.values()
    assert (off.part, off.error) == ("early", "ZeroDivisionError: integer division or modulo by zero")
    assert off.where.startswith("guard.py:")  # a part of the agent names its own line


def test_the_catalogue_says_of_every_part_what_is_missing_without_it() -> None:
    agent = Path(gpumon_agent.__file__).parent
    parts = {part for path in agent.rglob("*.py") for part in re.findall(r'protect\(\s*"([^"]+)"', path.read_text())}
    assert parts == MISSING.keys()


def test_a_wrong_argument_of_watch_is_one_line_and_no_failure(capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(FAILURES_MAX):
        gpumon_agent.watch([1])  # type: ignore[arg-type]
    expected = "gpumon: watch() takes a torch.nn.Module, not list: nothing is watched\n"
    assert capfd.readouterr().err == FAILURES_MAX * expected
    assert not registry.off


@pytest.mark.parametrize("stderr", [None, open, io.StringIO])
def test_a_failure_that_cannot_be_told_stays_inside(stderr: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = None
    if stderr is not None:
        closed = stderr(os.devnull, "w") if stderr is open else stderr()
        closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    assert Guard().protect("hook", lambda: 1 // 0)() is None


def test_what_the_user_raises_passes_the_guard() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Guard().protect("hook", interrupted)()


def test_an_exception_that_cannot_be_told_is_still_caught(capfd: pytest.CaptureFixture[str]) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    def fails() -> None:
        raise Mute

    assert Guard().protect("hook", fails)() is None
    assert "Mute" in capfd.readouterr().err


def test_a_full_queue_drops_the_oldest_and_the_gap_shows() -> None:
    recorder = Recorder(limit=3)
    for text in "abcde":
        recorder.append(notice(text))
    assert [(seq, event.text) for seq, event in recorder.drain()] == [(2, "c"), (3, "d"), (4, "e")]
    assert (recorder.dropped, recorder.last_seq) == (2, 4)
    assert recorder.drain() == []


def test_the_queue_holds_16_384_events() -> None:
    """Some 5 MiB, of the training's memory."""
    recorder = Recorder()
    for _ in range(16_400):
        recorder.append(notice("a"))
    assert len(recorder.drain()) == 16_384


def test_the_queue_is_inert_in_a_forked_child() -> None:
    recorder = Recorder()
    pid = os.fork()
    if pid == 0:
        recorder.append(notice())
        os._exit(len(recorder.drain()))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


CAUGHT = """
try:
    sys.exit(3)
except SystemExit as error:
    assert error.__traceback__.tb_next is None
try:
    raise ValueError("caught")
except ValueError:
    pass
"""


@pytest.mark.parametrize(
    ("ending", "reason", "detail", "code"),
    [
        ("pass", "finished", "", 0),
        ("raise ValueError('mine')", "exception", "ValueError: mine", 1),
        ("sys.excepthook = print; raise ValueError('mine')", "exception", "ValueError: mine", 1),
        ("raise KeyboardInterrupt", "signal", "SIGINT", -2),
        ("sys.exit(3)", "finished", "", 3),
        ("sys.exit('no data')", "finished", "", 1),
        ("exit(4)", "finished", "", 4),
        ("sys.exit()", "finished", "", 0),
        ("exit(0)", "finished", "", 0),
        (CAUGHT, "finished", "", 0),
        ("farewell.remove(); sys.exit(5)", None, None, 5),
        ("os._exit(6)", None, None, 6),
    ],
)
def test_the_last_words_name_the_reason(ending: str, reason: str | None, detail: str | None, code: int) -> None:
    script = f"""
import os, sys
from gpumon_agent.transport.exit_reason import ExitReason
def said(*words):
    print(*words, sep="|", file=sys.stderr)
farewell = ExitReason(said)
{ending}
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == code
    words = [line for line in done.stderr.splitlines() if "|" in line]
    assert words == ([] if reason is None else [f"{reason}|{detail}"])


def test_the_last_words_of_an_agent() -> None:
    assert last_words("import sys; sys.exit(3)") == "finished|backward|\n"  # an exit code is nowhere to be seen
    assert last_words("gpumon_agent.stop()") == "stopped|backward|\n"


def test_the_last_words_name_the_phase_that_the_exception_ended() -> None:
    assert last_words("model(None)").startswith("exception|forward|TypeError")


def last_words(ending: str) -> str:
    script = f"""
import atexit, gpumon_agent, torch
from gpumon_agent import agent
def tell():
    *_, (_, event) = watched.recorder.drain()
    print(event.reason, event.phase, event.detail, sep="|")
atexit.register(tell)
watched = agent.REGISTRY.agent = agent.Agent(publish=False)
model = torch.nn.Linear(4, 4)
watched.adopt(model)
model(torch.ones(2, 4))
{ending}
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    return done.stdout.splitlines(keepends=True)[-1]


@pytest.mark.parametrize("lack", [MemoryError, SystemError])
def test_without_memory_to_look_what_says_so_is_not_the_users(
    monkeypatch: pytest.MonkeyPatch, lack: type[Exception]
) -> None:
    def look(_: BaseException) -> bool:
        raise lack

    monkeypatch.setattr("gpumon_agent.guard.is_the_users", look)
    for error in (MemoryError(), OSError(12, "Cannot allocate memory"), SystemError()):
        pass_on(error)
    with pytest.raises(ValueError, match="theirs"):
        pass_on(ValueError("theirs"))
