"""Finding agents, burying dead ones, and understanding what a person means."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpumon import link
from gpumon_agent import endpoint

Start = Callable[..., Any]


@pytest.fixture
def leave(runtime: Path) -> Callable[..., Path]:
    """Leaves a descriptor (of this living process, but for what is changed) and its socket's file behind."""
    runtime.mkdir(0o700)

    def leave(**changes: Any) -> Path:
        descriptor = msgspec.structs.replace(endpoint.describe("left.py"), **changes)
        path = runtime / f"{descriptor.stem}.json"
        path.write_bytes(msgspec.json.encode(descriptor))
        path.with_suffix(".sock").touch()
        return path

    return leave


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_what_a_dead_process_left_behind_is_removed(leave: Callable[..., Path]) -> None:
    path = leave(pid=dead_pid())
    assert link.discover() == []
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize("change", [{"start_time": 7}, {"boot_id": "another boot"}], ids=["pid reused", "rebooted"])
def test_the_same_pid_of_another_life_is_stale(leave: Callable[..., Path], change: dict[str, Any]) -> None:
    path = leave(**change)
    assert link.discover() == []
    assert not path.exists()


def test_a_zombie_is_dead(leave: Callable[..., Path]) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    pid = process.pid
    leave(pid=pid, start_time=endpoint.start_time(pid), program=endpoint.program(pid))
    assert len(link.discover()) == 1
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert link.discover() == []
    process.communicate()


def test_an_agent_in_another_container_or_on_another_host_is_not_reaped(leave: Callable[..., Path]) -> None:
    leave(pid=dead_pid(), pid_ns="pid:[1]")
    leave(pid=dead_pid(), boot_id="another", host="another")
    assert len(link.discover()) == 2


def test_a_live_process_is_listed(leave: Callable[..., Path]) -> None:
    leave()
    assert [descriptor.name for descriptor in link.discover()] == ["left.py"]


def test_jobs_are_listed_by_their_oldest_start_and_ranks_by_number(leave: Callable[..., Path]) -> None:
    def began(second: int, name: str, rank: int | None = None, run_id: str | None = None) -> None:
        leave(unix_ns=second * 10**9, name=name, rank=rank, run_id=run_id, nonce=f"{second}" * 16)

    began(4, "alone")
    began(3, "ranks", rank=2, run_id="a")
    began(5, "ranks", rank=1, run_id="a")
    began(6, "ranks", rank=0, run_id="a")
    began(2, "first")
    assert [(d.name, d.rank) for d in link.discover()] == [
        ("first", None), ("ranks", 0), ("ranks", 1), ("ranks", 2), ("alone", None),
    ]  # fmt: skip


def test_ranks_are_one_job_by_where_they_meet_or_who_started_them() -> None:
    def process(pid: int, name: str, **changes: Any) -> endpoint.Descriptor:
        return msgspec.structs.replace(endpoint.describe(name), pid=pid, **changes)

    meets = {"rendezvous": "10.0.0.1:29500", "world_size": 2}
    meets_later = meets | {"rendezvous": "10.0.0.1:29501"}
    jobs = link.jobs([
        process(1, "meets", rank=0, parent=101, **meets),
        process(2, "meets", rank=1, parent=102, **meets),
        process(3, "meets", rank=0, parent=103, **meets_later),
        process(4, "torchrun", rank=0, parent=104, run_id="none", **meets),
        process(5, "torchrun", rank=1, parent=104, run_id="none", **meets_later),
        process(6, "exported", parent=105, rendezvous="10.0.0.1:29500"),  # one process: its shell names a port
        process(7, "exported", parent=105, rendezvous="10.0.0.1:29500"),
        process(8, "spawned", parent=106, spawned=True),
        process(9, "spawned", parent=106, spawned=True, rank=1, **meets),
        process(10, "begins"),  # Lightning's first rank: it starts the others
        process(11, "begins", parent=10, rank=1, **meets),
        process(12, "evaluates", parent=10),
    ])  # fmt: skip
    assert [(job.name, [d.pid for d in job.descriptors]) for job in jobs] == [
        ("meets", [1, 2]), ("meets", [3]), ("torchrun", [4, 5]), ("exported", [6]), ("exported", [7]),
        ("spawned", [8, 9]), ("begins", [10, 11]), ("evaluates", [12]),
    ]  # fmt: skip


def test_forwarded_ranks_are_one_job_on_whichever_machine_they_are() -> None:
    def process(pid: int, name: str, via: str, **changes: Any) -> endpoint.Descriptor:
        return msgspec.structs.replace(endpoint.describe(name), pid=pid, host=via, via=via, world_size=2, **changes)

    here, there = {"via": "node7", "rank": 0, "parent": 101}, {"via": "node8", "rank": 1, "parent": 102}
    everywhere, alone = {"rendezvous": "10.0.0.1:29500"}, {"rendezvous": "127.0.0.1:29500"}
    jobs = link.jobs([
        process(1, "slurm", run_id="4711.0", **alone, **here),
        process(2, "slurm", run_id="4711.0", **alone, **there),
        process(3, "torchrun", run_id="none", **everywhere, **here),  # it has no id unless one is chosen
        process(4, "torchrun", run_id="none", **everywhere, **there),
        process(5, "by hand", **everywhere, **here),
        process(6, "by hand", **everywhere, **there),
        process(7, "standalone", run_id="none", **alone, **here),  # two jobs that happen to use the same port
        process(8, "standalone", run_id="none", **alone, **there),
    ])  # fmt: skip
    assert [(job.name, [d.pid for d in job.descriptors]) for job in jobs] == [
        ("slurm", [1, 2]), ("torchrun", [3, 4]), ("by hand", [5, 6]), ("standalone", [7]), ("standalone", [8]),
    ]  # fmt: skip


def test_what_this_machine_says_of_a_pid_is_not_said_of_a_forwarded_process() -> None:
    ours = endpoint.describe("x")
    assert link.alive(ours) is True
    assert link.alive(msgspec.structs.replace(ours, via="node7")) is None
    assert link.alive(msgspec.structs.replace(ours, via="node7", start_time=1)) is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"pid": 1}', b"\xff" * 200_000])
def test_a_file_that_is_no_descriptor_is_left_alone(runtime: Path, content: bytes) -> None:
    runtime.mkdir(0o700)
    (runtime / "1-ab.json").write_bytes(content)
    assert link.discover() == []
    assert (runtime / "1-ab.json").exists()


def test_a_descriptor_cannot_point_elsewhere(leave: Callable[..., Path]) -> None:
    path = leave(endpoint="ipc:///etc/passwd")
    assert link.discover()[0].endpoint == f"ipc://{path.with_suffix('.sock')}"


def test_a_descriptor_that_is_a_symbolic_link_or_a_pipe_is_ignored(leave: Callable[..., Path]) -> None:
    path = leave()
    path.rename(path.with_name("real"))
    path.symlink_to(path.with_name("real"))
    os.mkfifo(path.with_name("7-ab.json"))
    assert link.discover() == []


def test_a_socket_whose_agent_died_before_its_descriptor_is_removed_when_old(runtime: Path) -> None:
    runtime.mkdir(0o700)
    for name in ("1-aa.sock", "2-bb.sock"):
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(runtime / name))
    os.utime(runtime / "1-aa.sock", (time.time() - 11,) * 2)
    link.discover()
    assert [path.name for path in runtime.iterdir()] == ["2-bb.sock"]


def test_a_runtime_directory_that_is_a_symbolic_link_is_not_looked_into(leave: Callable[..., Path]) -> None:
    path = leave()
    path.parent.rename(path.parent.with_name("elsewhere"))
    path.parent.symlink_to(path.parent.with_name("elsewhere"))
    assert link.discover() == []


def test_nothing_runs(runtime: Path) -> None:
    with pytest.raises(link.NoJob, match=r"no job with a gpumon agent runs here; start one with `gpumon run train.py`"):
        link.resolve()


def test_the_only_job_needs_no_name_and_several_are_choices(start: Start) -> None:
    first = start(name="a.py")
    assert [descriptor.pid for descriptor in link.resolve()] == [first.pid]
    second = start(name="b.py")
    with pytest.raises(link.SeveralJobs, match=rf"a.py \(pid {first.pid}\), b.py \(pid {second.pid}\)") as caught:
        link.resolve()
    assert [job.name for job in caught.value.jobs] == ["a.py", "b.py"]


def test_a_job_by_pid_name_and_endpoint(start: Start) -> None:
    agent = start(name="a.py")
    start(name="b.py")
    for target in (str(agent.pid), "a.py", agent.endpoint):
        assert [descriptor.pid for descriptor in link.resolve(target)] == [agent.pid]


def test_the_launchers_pid_means_what_it_launched(start: Start) -> None:
    agents = [start(rank=rank, world_size=2, run_id="none") for rank in range(2)]
    assert [descriptor.pid for descriptor in link.resolve(str(os.getpid()))] == [agent.pid for agent in agents]


def test_two_jobs_of_one_name_are_choices(start: Start) -> None:
    start(name="a.py")
    start(name="a.py")
    with pytest.raises(link.SeveralJobs, match=r"several jobs are named 'a\.py'"):
        link.resolve("a.py")


@pytest.mark.parametrize(
    ("target", "error", "sentence"),
    [
        ("4194999", link.NoJob, "no process has pid 4194999"),
        (
            str(os.getpid()),
            link.NoAgent,
            rf"process {os.getpid()} has no gpumon agent; `gpumon attach {os.getpid()} --inject` loads it",
        ),
        ("nosuch.py", link.NoJob, "no job is named 'nosuch.py'"),
        ("tcp://1.2.3.4:5", link.NotGpumon, "tcp://1.2.3.4:5 is no endpoint of an agent"),
        ("ipc:///nowhere/x.sock", link.NoJob, "there is no socket /nowhere/x.sock"),
        ("ipc:///etc/passwd", link.NotGpumon, "/etc/passwd is no socket"),
        ("ipc:///" + "x" * 200, link.NotGpumon, "too long for a socket"),
    ],
    ids=["no process", "no agent", "no name", "tcp", "no socket", "a file", "too long"],
)
def test_what_cannot_be_attached_to_is_told_in_one_sentence(
    runtime: Path, target: str, error: type[link.LinkError], sentence: str
) -> None:
    with pytest.raises(error, match=sentence) as caught:
        link.resolve(target)
    assert "\n" not in str(caught.value)


def test_a_socket_that_nobody_listens_at_is_told(runtime: Path) -> None:
    runtime.mkdir(0o700)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(runtime / "x.sock"))
    with pytest.raises(link.NoJob, match="no process listens at"):
        link.resolve(f"ipc://{runtime}/x.sock")


def test_an_emptied_runtime_directory_is_filled_again(start: Start, runtime: Path) -> None:
    """A logout removes XDG_RUNTIME_DIR under a training process that goes on."""
    agent = start()
    for path in runtime.iterdir():
        path.unlink()
    runtime.rmdir()
    end = time.monotonic() + 60
    while not link.discover() and time.monotonic() < end:
        time.sleep(0.05)
    glance = link.glance(link.resolve())[0]
    assert glance.why is None
    assert glance.hello is not None
    assert glance.hello.pid == agent.pid


def test_the_end_of_a_process_removes_its_files(start: Start, runtime: Path) -> None:
    agent = start()
    assert {path.suffix for path in runtime.iterdir()} == {".json", ".sock", ".ask"}
    agent.tell("exit")
    assert agent.stderr() == ""
    assert list(runtime.iterdir()) == []
