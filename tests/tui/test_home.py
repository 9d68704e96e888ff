"""The Home screen: jobs of one name told apart, opened and left; jobs that come and end; processes without an agent."""

from __future__ import annotations

import asyncio
import os
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pictured import text_of
from watched import START_NS, Run

from gpumon.analysis import Reporter
from gpumon.analysis.answer import Answer, answer
from gpumon.cli.home_jobs import facts, machine
from gpumon.host import Sampler
from gpumon.tui.app import MonitorApp, Options
from gpumon.tui.feed import JobChoice, Machine, ProcessFacts
from gpumon.tui.home import ENDED_MAX
from gpumon.tui.styles import UNICODE
from gpumon.tui.text_layout import plain, width
from gpumon.tui.widgets.home_lines import columns, home_lines
from gpumon.tui.widgets.home_rows import HomePage, JobRow, coarse_age, job_rows, process_rows, short_path
from gpumon.tui.widgets.home_table import HomeTable
from gpumon_agent import wire

GIB, MIB = 1 << 30, 1 << 20
LARGE, SMALL = (120, 40), (80, 24)


def rows_of(store_of: Any, *runs: Run, job: str = "job", about: str = "pid 1 · --lr 0.1") -> list[JobRow]:
    frame = store_of(*runs).frame(max(each.unix_ns for run in runs for each in run.events))
    reports = Reporter().report(frame)
    return job_rows(job, runs[0].name, about, frame, reports, answer(frame, reports))


# ------------------------------------------------------------------------------------------------------------- drawing


def test_a_job_of_one_rank_is_one_row_with_its_figures(store_of) -> None:
    (row,) = rows_of(store_of, Run().usual(40))
    assert (row.label, row.device_name, row.step) == ("train.py", "cuda:0", 12_431)
    assert row.peak is not None
    assert row.reserved is not None
    assert row.peak < row.reserved < row.capacity == round(139.8 * GIB)
    text = plain(home_lines(HomePage((row,), ready=True), 0, 160, 24, UNICODE).lines)
    for words in ("61.0 GiB of 139.8 GiB", "12,431", "3.2 it/s", "✓ OK", "pid 1 · --lr 0.1", "1 job runs"):
        assert words in text


def test_a_job_of_several_ranks_has_a_row_for_each_below_its_own(store_of) -> None:
    runs = [Run(rank=number, world_size=2, pid=5000 + number) for number in range(2)]
    for run in runs:
        run.usual(20)
    rows = rows_of(store_of, *runs)
    assert [(row.label, row.head) for row in rows] == [("train.py", True), ("rank 0", False), ("rank 1", False)]
    assert rows[0].about.startswith("2 ranks · ")
    assert rows[0].peak is None  # a sum over devices says nothing
    assert len({row.key for row in rows}) == 3


NAMES = ["job", "device", "bar", "peak", "step", "it/s", "headroom", "answer"]


def test_columns_are_given_up_in_the_order_that_is_stated() -> None:
    given_up, shown = [], set(NAMES)
    for room in range(140, 0, -1):
        kept = [column.name for column in columns(room)]
        assert sum(column.width for column in columns(room)) <= room
        given_up += [name for name in NAMES if name in shown and name not in kept]
        shown = set(kept)
    assert given_up == ["device", "peak", "it/s", "step", "headroom", "bar", "answer", "job"]
    assert [column.name for column in columns(78)] == ["job", "bar", "step", "it/s", "headroom", "answer"]
    assert [column.name for column in columns(118)] == NAMES  # a window of 120
    heading = plain(home_lines(HomePage((JobRow(("a",), "a", "a", Answer("ok", "")),)), 0, 80, 24, UNICODE).lines[1:2])
    assert "it/s" in heading  # of a window of 80
    assert {column.width for column in columns(78) if column.name == "answer"} == {22}  # of the others none is wider
    assert {column.width for column in columns(118) if column.name == "answer"} == {30}


@pytest.mark.parametrize("size", [(200, 60), LARGE, SMALL, (60, 12), (30, 5), (8, 3)], ids=str)
def test_the_row_under_the_cursor_is_seen_and_no_line_is_too_wide(store_of, size) -> None:
    jobs = [
        msgspec.structs.replace(row, job=str(i), key=(str(i),), label=f"job{i}")
        for i in range(30)
        for row in rows_of(store_of, Run().usual(3))
    ]
    page = HomePage(tuple(jobs), ready=True)
    for at in (0, 15, 29):
        drawn = home_lines(page, at, size[0], size[1], UNICODE)
        assert all(width(line) <= size[0] for line in drawn.lines)
        assert at in drawn.rows[: size[1]]
        assert len(drawn.lines) <= max(size[1], 3)
        if size[0] >= 60:
            line = plain([drawn.lines[drawn.rows.index(at)]])
            assert f"▸  job{at}" in line
            assert "OK" in line


@pytest.mark.parametrize(("height", "most"), [(24, 4), (15, 2), (11, 0)])
def test_the_whole_answer_of_the_row_under_the_cursor_is_below(store_of, height, most) -> None:
    """Two rows for what, two for what to do; fewer where the jobs need them."""
    (row,) = rows_of(store_of, Run().usual(3))
    said = Answer("leak", "`cache[*]` grows by 4.00 MiB a step " * 4, do="bound `cache` " * 12)
    page = HomePage((msgspec.structs.replace(row, answer=said),), ready=True)
    lines = plain(home_lines(page, 0, 80, height, UNICODE).lines).splitlines()
    rules = [y for y, line in enumerate(lines) if line.startswith("────")]
    assert len(lines) - rules[0] - 1 == most if most else not rules


def test_the_bar_is_the_peak_what_is_reserved_and_others_up_to_the_capacity() -> None:
    row = JobRow(
        ("a",), "a", "a", Answer("ok", ""), peak=2 * GIB, reserved=4 * GIB, used=7 * GIB, capacity=8 * GIB
    )  # fmt: skip
    text = plain(home_lines(HomePage((row,), ready=True), 0, 100, 10, UNICODE).lines)
    signs = UNICODE.lines
    assert f"{signs['allocated'] * 2}{signs['slack'] * 2}{signs['other_processes'] * 3}{signs['free']}  " in text
    ended = plain(home_lines(HomePage((msgspec.structs.replace(row, ended=True),)), 0, 100, 10, UNICODE).lines)
    assert "⣿" not in ended


def test_an_ended_job_is_grey_but_for_its_answer(store_of) -> None:
    (row,) = rows_of(store_of, Run().usual(20).goodbye("exception", 12_433, "backward", "RuntimeError: x"))
    assert row.ended
    drawn = home_lines(HomePage((row,), ready=True), 1, 120, 10, UNICODE)
    line = drawn.lines[drawn.rows.index(0)]
    assert {role for text, role in line if text.strip()} == {"dim", "warn"}
    assert next(text for text, role in line if role == "warn").strip().startswith("■ ENDED  ended by an exc")


def test_ages_and_paths_are_short() -> None:
    assert [coarse_age(s) for s in (-1, 0.4, 59.9, 61, 3_599, 3_700, 100_000)] == [
        "0 s", "0 s", "59 s", "1 min", "59 min", "1 h 01 m", "1 d 3 h",
    ]  # fmt: skip
    assert short_path(os.environ["HOME"] + "/a") == "~/a"
    assert short_path("/" + "d" * 31) == "/" + "d" * 31
    assert short_path("/" + "d" * 32) == "…" + "d" * 31


def test_processes_are_listed_by_gpu_without_those_that_have_an_agent() -> None:
    def reading(uuid: str, *processes: wire.DeviceProcess) -> wire.DeviceReading:
        return wire.DeviceReading(uuid, name="A100", processes=processes)

    host = wire.Host(
        "node1", 0, devices=(
            reading("GPU-a", wire.DeviceProcess(7, GIB, "python"), wire.DeviceProcess(8, None, "Xorg"),
                    wire.DeviceProcess(9, 3 * GIB, "python")),
            reading("GPU-b", wire.DeviceProcess(8, 5, "Xorg")),
            wire.DeviceReading("GPU-c", why={"processes": "a container hides them"}),
        ),
    )  # fmt: skip
    known = {9: ProcessFacts("ann", ("/usr/bin/python3", "serve.py", "--port", "80"))}
    rows = process_rows(host, {7}, known)
    assert [(row.gpu, row.pid, row.bytes) for row in rows] == [("0", 9, 3 * GIB), ("0", 8, None), ("1", 8, 5)]
    assert (rows[0].user, rows[0].command) == ("ann", "python3 serve.py --port 80")
    assert (rows[1].user, rows[1].command) == ("n/a", "Xorg")


def test_without_a_driver_nothing_is_said_of_gpu_processes(store_of) -> None:
    (row,) = rows_of(store_of, Run().usual(3))
    assert "without an agent" not in plain(home_lines(HomePage((row,), ready=True), 0, 100, 24, UNICODE).lines)
    assert "without an agent\n   none" in plain(
        home_lines(HomePage((row,), ready=True, driver=True), 0, 100, 24, UNICODE).lines
    )


# ----------------------------------------------------------------------------------------------------------------- app


class Here:
    """Jobs of a machine; their agents are readers of written-down runs."""

    def __init__(self, reader_of: Any) -> None:
        self._reader_of = reader_of
        self.choices: list[JobChoice] = []
        self.readers: dict[int, Any] = {}
        self.heard: list[int] = []  # pids, each time that somebody begins to listen
        self.left: list[int] = []

    def add(self, run: Run, *arguments: str) -> None:
        events = list(run.events)
        self.readers[run.pid] = [self._reader_of(run)]

        async def feed() -> AsyncIterator[wire.Received]:
            reader = self._reader_of(Run())
            reader.add(_with(events))
            self.readers[run.pid].append(reader)
            self.heard.append(run.pid)
            try:
                async for received in reader():
                    yield received
                    if isinstance(received.event, wire.Goodbye):
                        return
            finally:
                self.left.append(run.pid)

        self.choices.append(
            JobChoice(run.name, frozenset([run.source]), run.source, feed, feed, arguments, (run.pid,))
        )  # fmt: skip

    def end(self, run: Run, reason: str = "finished") -> None:
        run.goodbye(reason, 12_433, "backward")
        for reader in self.readers[run.pid][1:]:
            reader.add(_with(run.events))
        self.choices = [choice for choice in self.choices if run.source not in choice.sources]

    @property
    def machine(self) -> Machine:
        def known(pid: int) -> ProcessFacts:
            return ProcessFacts("ann", ("python",), f"/data/{pid}", START_NS / 1e9 - 600)

        return Machine(lambda: list(self.choices), lambda: [choice.sources for choice in self.choices], known)


def _with(events: Sequence[wire.Received]) -> Run:
    run = Run()
    run.events = list(events)
    return run


@pytest.fixture
def here(reader_of) -> Here:
    return Here(reader_of)


def app_at(here: Here, **more: Any) -> MonitorApp:
    return MonitorApp(machine=here.machine, clock=lambda: START_NS + 10**12, **more)


async def shows(pilot: Any, *words: str, seconds: float = 60.0) -> str:
    """Waits until all of it is on the screen."""
    end = time.monotonic() + seconds
    while True:
        text = text_of(pilot.app)
        if all(word in text for word in words):
            return text
        assert time.monotonic() < end, f"{words} never came: {text}"
        await pilot.pause(0.05)


def two() -> list[Run]:
    return [Run(pid=41).usual(20), Run(pid=42, extra=8 * GIB).usual(20)]


@pytest.mark.parametrize("size", [LARGE, SMALL], ids=["120x40", "80x24"])
async def test_two_jobs_of_one_name_are_told_apart_opened_and_left(here, size) -> None:
    one, other = two()
    here.add(one, "--lr", "0.1")
    here.add(other, "--lr", "0.2")
    app = app_at(here)
    async with app.run_test(size=size) as pilot:
        shown = await shows(pilot, "2 jobs run", "UNKNOWN", "12,431")
        assert "pid 41 · for 26 min · in /data/41 · --lr 0.1" in shown
        assert "pid 42 · for 26 min · in /data/42 · --lr 0.2" in shown
        assert "J Jobs" not in shown
        assert "esc Back" not in shown
        await pilot.press("1")  # there is nothing to go to
        assert app.current_mode == "home"
        await pilot.press("j", "enter")
        shown = await shows(pilot, "train.py · pid 42", "J Jobs")
        assert app.view.rank.hello.pid == 42
        await pilot.press("J")
        shown = await shows(pilot, "2 jobs run", "opened · pid 42", "esc Back")
        await pilot.press("escape")
        await shows(pilot, "train.py · pid 42")
        await pilot.press("3", "J")
        await shows(pilot, "2 jobs run")
        await pilot.press("J")
        assert app.current_mode == "layers"
        await pilot.press("J")
        await shows(pilot, "opened · pid 42", "pid 41")
        await pilot.press("g", "enter")
        await shows(pilot, "train.py · pid 41")
        assert [rank.hello.pid for rank in app.view.frame.ranks] == [41]
        assert Counter(here.heard) - Counter(here.left) == {41: 1}


async def test_only_an_open_home_listens_and_never_twice_to_the_opened_job(here) -> None:
    for run in two():
        here.add(run)
    app = app_at(here)
    async with app.run_test(size=LARGE) as pilot:
        await shows(pilot, "12,431")
        assert sorted(here.heard) == [41, 42]
        await pilot.press("enter")
        await shows(pilot, "train.py · pid 41")
        assert sorted(here.left) == [41, 42]
        assert here.heard[2:] == [41]
        await pilot.press("J")
        await shows(pilot, "opened · pid 41", "pid 42")
        assert here.heard[3:] == [42]


async def test_jobs_come_and_end_while_it_is_open(here) -> None:
    one, other = two()
    here.add(one)
    app = app_at(here)
    async with app.run_test(size=LARGE) as pilot:
        await shows(pilot, "1 job runs", "12,431")
        here.add(other)
        await shows(pilot, "2 jobs run", "pid 42")
        here.end(one)
        shown = await shows(pilot, "1 job runs, 1 ended", "■ ENDED  training finished")
        assert shown.index("pid 42") < shown.index("pid 41")  # what ended is below
        await pilot.press("G", "enter")
        await pilot.pause(0.1)
        assert [each.message for each in app._notifications] == ["This job has ended, and nobody recorded it."]
        assert app.current_mode == "home"


async def test_of_many_ended_jobs_the_newest_20_stay(here) -> None:
    """A page of them at 80x24; their sessions are gone."""
    runs = [Run(pid=100 + i).hello().model().steps(1, 1).synced() for i in range(ENDED_MAX + 2)]
    for run in runs:
        here.add(run)
    app = app_at(here)
    async with app.run_test(size=(120, 60)) as pilot:
        await shows(pilot, "22 jobs run")
        while len(here.heard) < len(runs):
            await pilot.pause(0.05)
        for run in runs:
            here.end(run)
        await shows(pilot, "0 jobs run, 20 ended")
        assert app._home._watches == []


async def test_a_click_selects_a_job_and_another_opens_it(here) -> None:
    for run in two():
        here.add(run)
    app = app_at(here)
    async with app.run_test(size=LARGE) as pilot:
        await shows(pilot, "12,431", "pid 42")
        table = app.screen.query_one(HomeTable)
        y = table._drawn_rows.index(1)
        await pilot.click(HomeTable, offset=(9, y + 1))  # also on its second line
        assert table._at == 1
        assert app.current_mode == "home"
        await pilot.click(HomeTable, offset=(9, y))
        await shows(pilot, "train.py · pid 42")


async def test_a_process_without_an_agent_says_how_to_get_one(here, new_run) -> None:
    run = Run(pid=41).usual(20)
    reading = new_run(pid=41).host(processes=(wire.DeviceProcess(41, GIB, "python"), wire.DeviceProcess(77, GIB, "x")))
    here.add(run)

    async def host(pids: Callable[[], Any]) -> AsyncIterator[wire.Received]:
        yield reading.events[0]
        await asyncio.Event().wait()

    app = app_at(here, host=host, options=Options(ascii=True))
    async with app.run_test(size=LARGE) as pilot:
        shown = await shows(pilot, "GPU processes without an agent", "12,431", "77  ann")
        assert shown.isascii()
        assert "no agent: `gpumon run COMMAND` starts a training with one" in shown
        await pilot.press("G", "enter")
        await pilot.pause(0.1)
        assert [each.message for each in app._notifications] == [
            "Process 77: no agent: `gpumon run COMMAND` starts a training with one."
        ]
        await pilot.press("e")
        await shows(pilot, "As a bar up to the device's capacity", "UNKNOWN, OK.")
        await pilot.press("end")
        await shows(pilot, "that no agent reports")


async def test_the_cursor_is_at_the_top_until_it_is_moved(here, new_run) -> None:
    """Processes of the GPU are known before the first job may be."""
    reading = new_run(pid=41).host(processes=(wire.DeviceProcess(77, GIB, "x"),))

    async def host(pids: Callable[[], Any]) -> AsyncIterator[wire.Received]:
        yield reading.events[0]
        await asyncio.Event().wait()

    app = app_at(here, host=host)
    async with app.run_test(size=LARGE) as pilot:
        await shows(pilot, "0 jobs run", "▸    0       77")
        here.add(two()[0])
        await shows(pilot, "▸  train.py")
        await pilot.press("G")
        here.add(two()[1])
        await shows(pilot, "2 jobs run", "▸    0       77")


async def test_a_job_that_cannot_be_reached_says_why(here) -> None:
    from gpumon.link.errors import NotAnswering

    async def feed() -> AsyncIterator[wire.Received]:
        raise NotAnswering("the agent of process 41 does not answer", "it may be busy")
        yield

    here.choices.append(JobChoice("busy.py", frozenset("n"), "n", feed, feed, (), (41,)))
    app = app_at(here)
    async with app.run_test(size=LARGE) as pilot:
        await shows(pilot, "busy.py", "UNKNOWN  the agent of proc", "the agent of process 41 does not answer")
        await pilot.press("enter")
        await pilot.pause(0.2)
        await shows(pilot, "the agent of process 41 does not answer", "1 job runs")
        assert app.current_mode == "home"


# ---------------------------------------------------------------------------------------------------------------- real


def train() -> None:
    import sys
    import time

    import torch

    model = torch.nn.Linear(512, 512).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    kept = []
    while True:
        loss = model(torch.ones(64, 512, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if "--leak" in sys.argv:
            kept.append(torch.ones(1 << 18, device="cuda"))
        time.sleep(0.1)


@pytest.fixture
def trainings(virtual_gpu, tmp_path, monkeypatch) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two of the same script, in two folders, and one process without an agent, all on one virtual GPU."""
    import sys

    gpu = virtual_gpu(memory="8GiB")
    environment = {**gpu.environment, "OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(tmp_path), "TMPDIR": str(tmp_path)}
    tmp_path.chmod(0o700)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)  # what reads NVML is a child
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # no other job is found here
    script = gpu.command(train)[1]
    bare = gpu.command("import time, torch\nx = torch.zeros(1 << 20, device='cuda')\ntime.sleep(3600)")
    run = [sys.executable, "-m", "gpumon", "run", script]
    started = []
    for folder, arguments in (("a", ["--lr", "0.1"]), ("b", ["--leak"])):
        (tmp_path / folder).mkdir()
        started.append(
            subprocess.Popen([*run, *arguments], cwd=tmp_path / folder, stdout=subprocess.DEVNULL)
        )  # fmt: skip
    started.append(subprocess.Popen(bare))
    yield started
    for process in started:
        process.kill()
        process.wait()


async def test_two_real_trainings_of_one_script_and_a_process_without_an_agent(trainings, tmp_path: Path) -> None:
    met: list[Any] = []
    app = MonitorApp(machine=machine(met.extend), host=lambda pids: Sampler(pids))
    async with app.run_test(size=LARGE) as pilot:
        shown = await shows(
            pilot, "2 jobs run; 1 GPU process without an agent", "▲ LEAK  `kept[*] in", "✓ OK", seconds=300
        )  # fmt: skip
        a, b, bare = (process.pid for process in trainings)
        lines = {pid: next(line for line in shown.splitlines() if f"pid {pid} · " in line) for pid in (a, b)}
        assert "/a · --lr 0.1" in lines[a]
        assert "/b · --leak" in lines[b]
        assert all(" · for " in line for line in lines.values())
        other = next(line for line in shown.splitlines() if f" {bare}  " in line)
        assert " MiB  " in other
        assert "python" in other
        assert {descriptor.pid for descriptor in met} == {a, b}
        trainings[0].kill()
        await shows(pilot, "1 job runs, 1 ended", "■ ENDED  the process is", seconds=120)
        await pilot.press("g", "enter")
        await shows(pilot, f"train.py · pid {b}", "LEAK", seconds=120)
        await pilot.press("J")
        await shows(pilot, f"opened · pid {b}", "1 job runs, 1 ended", seconds=120)


def test_what_the_system_knows_of_a_process() -> None:
    known = facts(os.getpid())
    assert known.cwd == str(Path.cwd())
    assert known.user
    assert known.began_unix is not None
    assert 0 <= time.time() - known.began_unix < 86_400
    with subprocess.Popen(["sleep", "60"]) as process:
        end = time.monotonic() + 60
        while (command := facts(process.pid).command) != ("sleep", "60"):
            assert time.monotonic() < end, command
        process.kill()
    assert facts(process.pid) == ProcessFacts()


async def test_secrets_of_other_processes_are_masked() -> None:
    with subprocess.Popen(["sh", "-c", "sleep 60", "--password=hunter2"]) as process:
        end = time.monotonic() + 60
        while len(command := facts(process.pid).command) < 3:
            assert time.monotonic() < end, command
        process.kill()
    assert "hunter2" not in " ".join(command)
