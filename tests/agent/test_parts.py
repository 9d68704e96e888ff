"""The small parts: the guard, the queue, the governor, the last words."""

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
from gpumon_agent.governor import Governor
from gpumon_agent.guard import FAILURES_MAX, Guard
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


def run(governor: Governor, steps: int, *, step_ms: float, boundary_us: float, ledger_us: float) -> tuple[float, str]:
    """The mean cost of a step in µs, and what was said, where costs are as given."""
    spent, said = 0.0, []
    for _ in range(steps):
        if governor.reads:
            governor.boundary_ns = int(boundary_us * 1000)
        if governor.ledger:
            governor.ledger_ns = int(ledger_us * 1000)
        spent += governor.boundary_ns + governor.ledger_ns
        said.append(governor.step_closed(int(step_ms * 1e6)))
    return spent / steps / 1000, " ".join(filter(None, said))


@pytest.mark.parametrize(
    ("step_ms", "boundary_us", "ledger_us"),
    [(20, 120, 800), (100, 150, 9000), (5, 80, 400), (2, 130, 500), (1000, 150, 50)],
)
def test_the_governor_keeps_the_mean_within_the_budget(step_ms: float, boundary_us: float, ledger_us: float) -> None:
    governor = Governor()
    run(governor, 200, step_ms=step_ms, boundary_us=boundary_us, ledger_us=ledger_us)
    mean, _ = run(governor, 2000, step_ms=step_ms, boundary_us=boundary_us, ledger_us=ledger_us)
    assert mean <= max(step_ms * 10, 100)
    assert (governor.read_every > 1) == (boundary_us > max(step_ms * 8, 100))


def test_dear_boundaries_leave_the_ledger_its_share() -> None:
    governor = Governor()
    mean, _ = run(governor, 2000, step_ms=25, boundary_us=190, ledger_us=9000)
    assert governor.read_every == 1
    assert governor.ledger_every == 360  # 9 ms in 9 s
    assert mean <= 250


def test_the_governor_says_what_it_changes_and_comes_back() -> None:
    governor = Governor()
    _, said = run(governor, 100, step_ms=20, boundary_us=120, ledger_us=800)
    assert "the ledger is read every 20 steps" in said
    _, said = run(governor, 1000, step_ms=1000, boundary_us=120, ledger_us=800)
    assert governor.sample_every == 1


def test_an_evaluation_before_training_costs_no_readings() -> None:
    """nanoGPT begins with 400 forwards: 800 boundaries in step 0."""
    governor = Governor()
    governor.boundaries, governor.boundary_ns, governor.ledger_ns = 800, 24_000_000, 500_000
    told = [governor.step_closed(8_000_000_000)]
    read, ledgers = [], []
    for step in range(1, 120):
        read.append(governor.reads)
        if governor.ledger:
            ledgers.append(step)
            governor.ledger_ns = 500_000
        governor.boundaries, governor.boundary_ns = 5, 150_000
        told.append(governor.step_closed(20_000_000))
    assert all(read[20:]), read
    assert {1, 5, 10, 20, 40, 80} <= set(ledgers)
    assert not any("step" in text and "one step in" in text for text in told if text)


def test_steps_too_short_to_be_read_say_what_it_would_cost() -> None:
    governor = Governor()
    said = []
    for _ in range(60):
        governor.boundaries, governor.boundary_ns = (6, 600_000) if governor.reads else (0, 0)
        said.append(governor.step_closed(2_000_000))
    assert [text for text in said if text] == [
        "to read the allocator at each of 6 phases costs 0.6 ms of a step of 2 ms, so one step in 6 is read at every "
        "phase, one in 6 has a ledger"
    ]


def test_a_rate_that_wavers_with_the_load_is_told_once() -> None:
    governor = Governor()
    run(governor, 200, step_ms=20, boundary_us=120, ledger_us=800)
    said = [run(governor, 400, step_ms=20, boundary_us=120, ledger_us=cost)[1] for cost in (600, 1000, 700, 1200)]
    assert said == ["", "", "", ""]


@pytest.mark.parametrize(("dearer", "told"), [(2.5, False), (4, True)])
def test_a_ledger_that_comes_a_third_as_often_is_told(dearer: float, told: bool) -> None:
    """A user who compares two ledgers must know that they are further apart now."""
    governor = Governor()
    run(governor, 200, step_ms=20, boundary_us=120, ledger_us=800)
    _, said = run(governor, 2000, step_ms=20, boundary_us=120, ledger_us=800 * dearer)
    assert bool(said) is told


def test_the_clock_is_read_in_each_of_the_first_steps_and_then_in_one_of_four() -> None:
    """The first decisions need figures; later ones have enough, and the clock costs as much as a reading."""
    governor = Governor()
    timed = []
    for step in range(40):
        if governor.times:
            timed.append(step)
        governor.boundaries, governor.boundary_ns = 5, 10_000
        governor.step_closed(20_000_000)
    assert timed == [*range(8), *range(8, 40, 4)]


def test_a_cost_that_changes_is_answered_within_50_steps() -> None:
    governor = Governor()
    run(governor, 200, step_ms=20, boundary_us=120, ledger_us=800)
    assert governor.ledger_every > 1
    run(governor, 50, step_ms=1000, boundary_us=120, ledger_us=800)
    assert governor.ledger_every == 1


def test_one_step_in_ten_thousand_is_read_whatever_a_reading_costs() -> None:
    governor = Governor()
    run(governor, 9_999, step_ms=0.01, boundary_us=10_000_000, ledger_us=10_000_000)
    assert not governor.reads
    governor.step_closed(10_000)
    assert governor.reads
    assert governor.ledger


def test_a_governor_that_is_off_samples_every_step() -> None:
    governor = Governor(off=True)
    run(governor, 300, step_ms=1, boundary_us=5000, ledger_us=5000)
    assert governor.reads
    assert governor.ledger


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


def ledgers(governor: Governor, steps: int, *, thread_ns: int, wall_ns: int, every: int = 1) -> list[int]:
    """The steps whose ledger was read at every phase, of steps long enough to read it in each."""
    read = []
    for step in range(steps):
        if governor.ledger and not governor.ledger_at_end_only:
            read.append(step)
            governor.ledger_thread_ns, governor.ledger_ns = thread_ns, wall_ns
        governor.step_closed(10**12)
    return read


@pytest.mark.parametrize(
    ("thread_ms", "wall_ms", "dear"),
    [(9, 9, False), (11, 11, True), (1, 39, False), (1, 41, True)],  # its own time, or four times that by the clock
)
def test_a_ledger_of_more_than_10_ms_rests_after_eight_and_is_tried_again_by_two(
    thread_ms: int, wall_ms: int, dear: bool
) -> None:
    read = ledgers(Governor(), 64, thread_ns=thread_ms * 10**6, wall_ns=wall_ms * 10**6)
    expected = [*range(8), 16, 17, 34, 35] if dear else list(range(64))
    assert read == expected, read
