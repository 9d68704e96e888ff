"""From the training process through shared memory and the helper to a viewer: real processes, killed for real."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpumon import link
from gpumon_agent import endpoint, wire

SCRIPT = Path(__file__).with_name("trains.py")
ENDS_WITHIN_S = 2.0  # of the helper, after the trainer; more is allowed for a busy machine
BUSY_S = 20.0


class Trainer:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT)], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )  # fmt: skip
        assert self._line() == "begins"
        self.helper = 0

    def start(self) -> Trainer:
        assert self.tell("start")
        self.helper = self.tell("helper")
        return self

    def send(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def tell(self, command: str) -> Any:
        self.send(command)
        return self._line()

    def _line(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()
        return json.loads(line)

    def ask(self, what: str) -> wire.Reply:
        (descriptor,) = link.resolve(str(self.process.pid))
        return asyncio.run(link.Asker([descriptor])(descriptor.nonce, what))

    def heard(self, until: Callable[[wire.Event], bool]) -> list[wire.Event]:
        """What a viewer that comes now hears, to that event."""
        events: list[wire.Event] = []

        async def listen() -> None:
            async for received in link.subscribe(link.resolve(str(self.process.pid))):
                events.append(received.event)
                if until(received.event):
                    return

        asyncio.run(asyncio.wait_for(listen(), 60))
        return events


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    made = Trainer()
    yield made
    made.process.kill()
    made.process.communicate()


def gone(pid: int, within_s: float = BUSY_S) -> bool:
    until = time.monotonic() + within_s
    while endpoint.start_time(pid) is not None:
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def left() -> list[str]:
    """Files in the runtime directory, beside the folder of reports."""
    folder = Path(os.environ["XDG_RUNTIME_DIR"], "gpumon")
    return sorted(path.name for path in folder.iterdir() if path.name != "oom") if folder.exists() else []


def ends(step: int) -> Callable[[wire.Event], bool]:
    return lambda event: isinstance(event, wire.Step) and event.step == step


def steps_of(events: list[wire.Event]) -> list[int]:
    return [event.step for event in events if isinstance(event, wire.Step)]


def test_a_viewer_that_comes_late_hears_everything_in_order(trainer: Trainer) -> None:
    trainer.start()
    trainer.tell("steps 300")
    events = trainer.heard(ends(299))
    assert steps_of(events) == list(range(300))
    assert sum(isinstance(event, wire.Phase) for event in events) == 900
    assert isinstance(events[0], wire.Hello)
    assert sum(isinstance(event, wire.Module) for event in events) == 3


def test_a_long_description_goes_out_in_pieces_and_whole(trainer: Trainer) -> None:
    trainer.start()
    assert trainer.tell("many_modules 20000")
    trainer.tell("steps 1")
    until = time.monotonic() + 60
    count = 0
    while count != 20_000 and time.monotonic() < until:
        events = trainer.heard(lambda event: isinstance(event, wire.Synced))
        count = sum(isinstance(event, wire.Module) for event in events)
    assert count == 20_000


@pytest.mark.parametrize(("opened", "kept"), [([3, 49], []), ([3, 51], [3, 51])])
def test_a_kill_loses_the_phases_of_fifty_milliseconds_and_not_which_one_was_running(
    trainer: Trainer, opened: list[int], kept: list[int]
) -> None:
    trainer.start()
    trainer.tell("steps 1")
    for ms in opened:
        trainer.tell(f"opens {ms}")

    def ends(event: wire.Event) -> bool:
        if isinstance(event, wire.Heartbeat) and event.phase == f"phase {opened[-1]}":
            trainer.process.kill()
        return isinstance(event, wire.Goodbye)

    heard = trainer.heard(ends)
    assert [event.index for event in heard if isinstance(event, wire.Phase) and event.phase == "short"] == kept


def test_a_description_takes_a_fiftieth_of_the_training_between_200_us_and_5_ms_a_boundary(trainer: Trainer) -> None:
    """Else short steps would never describe a model, and long ones would stop for it."""
    assert trainer.start().tell("described_in 1 100 1000") == [200, 2_000, 5_000]


def test_a_viewers_request_reaches_the_next_boundary(trainer: Trainer) -> None:
    trainer.start()
    time.sleep(1.2)
    assert not trainer.tell("called")  # it has only said that it is alive
    assert trainer.ask(wire.CENSUS).accepted
    assert trainer.tell("called")
    assert trainer.ask(wire.CENSUS).why == "already requested: at the next phase boundary"
    assert not trainer.ask(wire.BLOCKS).accepted  # CUDA did not begin
    assert trainer.tell("requests") == ["census"]
    assert not trainer.tell("called")
    trainer.tell("steps 1")
    time.sleep(0.5)  # the helper looks ten times a second
    assert trainer.ask(wire.CENSUS).why == "at the next phase boundary"
    assert trainer.tell("requests") == ["census", "census"]


@pytest.mark.parametrize("how", ["SIGKILL", "dies 7", "execs"])
def test_the_helper_ends_with_the_trainer(trainer: Trainer, how: str) -> None:
    trainer.start()
    trainer.tell("steps 3")
    assert left()
    if how == "SIGKILL":
        trainer.process.kill()
        trainer.process.wait()
    else:
        trainer.send(how)
    assert gone(trainer.helper)
    assert left() == []


def test_it_ends_although_the_trainer_was_killed_while_it_began() -> None:
    for pause_s in (0.0, 0.01, 0.03, 0.1, 0.2):
        made = Trainer()
        made.send("start")
        time.sleep(pause_s)
        made.process.kill()
        made.process.communicate()
    until = time.monotonic() + BUSY_S
    while left() and time.monotonic() < until:
        time.sleep(0.05)
    assert left() == []


@pytest.mark.parametrize(("code", "reason", "detail"), [(0, "finished", ""), (3, "exception", "exit code 3")])
def test_a_viewer_hears_the_exit_code(trainer: Trainer, code: int, reason: str, detail: str) -> None:
    trainer.start()
    trainer.tell("steps 3")

    async def listen() -> wire.Goodbye:
        async for received in link.subscribe(link.resolve(str(trainer.process.pid))):
            if isinstance(received.event, wire.Synced):
                trainer.send(f"leaves {code}")
            if isinstance(received.event, wire.Goodbye):
                return received.event
        raise AssertionError("it ended without a word")

    goodbye = asyncio.run(asyncio.wait_for(listen(), 60))
    assert (goodbye.reason, goodbye.detail) == (reason, detail)
    assert trainer.process.wait(30) == code
    assert gone(trainer.helper)
    assert left() == []


def test_a_helper_that_dies_is_replaced_with_its_past_three_times(trainer: Trainer) -> None:
    trainer.start()
    trainer.tell("steps 20")
    helper = trainer.helper
    assert trainer.ask(wire.CENSUS).accepted
    taken = len(trainer.tell("requests"))
    assert taken == 1
    for _ in range(3):
        os.kill(helper, signal.SIGKILL)
        newer = trainer.tell("until_restarted")
        assert newer not in (0, helper)
        helper = newer
        last = trainer.tell("steps 1") - 1
        assert steps_of(trainer.heard(ends(last))) == list(range(last + 1))
        taken += 1
        assert trainer.ask(wire.CENSUS).accepted
        assert len(trainer.tell("requests")) == taken
    os.kill(helper, signal.SIGKILL)
    assert trainer.tell("until_restarted") == 0
    assert trainer.tell("waits") == [0, 0]
    trainer.process.kill()
    _, err = trainer.process.communicate()
    assert err == "gpumon: its helper process died repeatedly: no viewer can watch this run any more\n"


def test_a_forked_child_writes_nothing(trainer: Trainer) -> None:
    trainer.start()
    trainer.tell("steps 5")
    assert trainer.tell("fork") == 0
    trainer.tell("steps 1")
    assert steps_of(trainer.heard(ends(5))) == list(range(6))
    assert endpoint.start_time(trainer.helper) is not None


def test_a_program_that_closes_all_descriptors_is_watched_on(trainer: Trainer) -> None:
    trainer.start()
    trainer.tell("closes_all")
    trainer.tell("steps 1")
    assert steps_of(trainer.heard(ends(1))) == [0, 1]


def test_without_a_descriptor_training_goes_on_unwatched_with_one_line(trainer: Trainer) -> None:
    assert trainer.tell("takes_all_descriptors") == "unwatched"
    assert trainer.tell("steps 5") == 5
    assert trainer.tell("waits") == [0, 0]
    trainer.process.kill()
    _, err = trainer.process.communicate()
    assert err.startswith("gpumon: no viewer can attach to this process: ")
    assert err.count("\n") == 1


def test_watching_can_end_before_the_program(trainer: Trainer) -> None:
    trainer.start()
    trainer.tell("steps 5")
    assert trainer.tell("stops") < 1
    assert gone(trainer.helper)
    assert left() == []
    assert trainer.tell("steps 5") == 10


def test_a_viewer_that_was_stopped_as_the_training_ended_still_hears_how(trainer: Trainer) -> None:
    """As on a busy machine: more is left to send than its socket takes, and it reads again a second later."""
    trainer.start()
    command = [sys.executable, "-m", "gpumon", "attach", "--json", str(trainer.process.pid)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as viewer:
        assert viewer.stdout is not None
        assert json.loads(viewer.stdout.readline())["type"] == "hello"
        os.kill(viewer.pid, signal.SIGSTOP)
        trainer.tell("steps 2000")
        trainer.send("leaves 0")
        trainer.process.wait()
        time.sleep(1)
        os.kill(viewer.pid, signal.SIGCONT)
        goodbyes = [each for line in viewer.stdout if (each := json.loads(line))["type"] == "goodbye"]
    assert [each["reason"] for each in goodbyes] == ["finished"]
