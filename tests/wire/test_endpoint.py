"""Where an agent puts its socket, and where it refuses to."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpumon_agent import endpoint


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="gm") as name:
        monkeypatch.setenv("XDG_RUNTIME_DIR", name)
        monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
        yield Path(name)


def test_the_directory_is_made_for_us_alone_whatever_the_umask(folder: Path) -> None:
    before = os.umask(0o777)
    try:
        endpoint.claim(endpoint.describe("x"))
        assert os.umask(0o777) == 0o777
    finally:
        os.umask(before)
    assert stat.S_IMODE((folder / "gpumon").stat().st_mode) == 0o700


def test_a_directory_of_ours_left_open_is_closed(folder: Path) -> None:
    (folder / "gpumon").mkdir()
    (folder / "gpumon").chmod(0o777)
    endpoint.claim(endpoint.describe("x"))
    assert stat.S_IMODE((folder / "gpumon").stat().st_mode) == 0o700


def test_a_symbolic_link_is_refused_even_to_a_directory_of_ours(folder: Path) -> None:
    (folder / "real").mkdir(0o700)
    (folder / "gpumon").symlink_to(folder / "real")
    with pytest.raises(endpoint.Unavailable, match="gpumon is no directory of ours"):
        endpoint.claim(endpoint.describe("x"))
    assert list((folder / "real").iterdir()) == []


def test_a_file_in_the_directorys_place_is_refused(folder: Path) -> None:
    (folder / "gpumon").touch()
    with pytest.raises(endpoint.Unavailable, match="gpumon is no directory of ours"):
        endpoint.claim(endpoint.describe("x"))


def test_a_parent_that_others_can_change_is_refused(folder: Path) -> None:
    folder.chmod(0o777)
    with pytest.raises(endpoint.Unavailable, match="can be changed by other users"):
        endpoint.claim(endpoint.describe("x"))
    folder.chmod(0o1777)
    endpoint.claim(endpoint.describe("x"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_another_users_directory_is_refused(folder: Path) -> None:
    (folder / "gpumon").mkdir(0o700)
    os.chown(folder / "gpumon", 65534, 65534)
    with pytest.raises(endpoint.Unavailable, match=r"belongs to another user \(uid 65534\)"):
        endpoint.claim(endpoint.describe("x"))


def test_a_path_too_long_for_a_socket_falls_back_to_the_temporary_directory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = folder / ("x" * 90)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    place = endpoint.claim(endpoint.describe("x"))
    assert place.socket.parent == folder / f"gpumon-{os.geteuid()}"
    assert len(os.fsencode(place.socket)) < 107


def test_what_stands_at_the_path_already_is_not_replaced(folder: Path) -> None:
    descriptor = endpoint.describe("x")
    (folder / "gpumon").mkdir(0o700)
    (folder / "gpumon" / f"{descriptor.stem}.sock").write_text("somebody's")
    with pytest.raises(endpoint.Unavailable, match="exists already"):
        endpoint.claim(descriptor)


def test_no_place_at_all_names_each_reason_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/nowhere/a")
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere/b")
    with pytest.raises(endpoint.Unavailable, match="/nowhere/a does not exist; /nowhere/b does not exist"):
        endpoint.claim(endpoint.describe("x"))


def test_where_nothing_can_be_written_there_is_no_place() -> None:
    code = """
import os, resource
from gpumon_agent import endpoint
os.environ.pop("XDG_RUNTIME_DIR", None)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
try:
    endpoint.claim(endpoint.describe("x"))
except endpoint.Unavailable as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "no directory for temporary files can be written to\n"


def test_a_descriptor_reads_back_as_it_was_written(folder: Path) -> None:
    descriptor = endpoint.describe("x", rank=3, world_size=8, run_id="r", unix_ns=5)
    place = endpoint.claim(descriptor)
    place.publish(descriptor)
    file = place.socket.with_suffix(".json")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    read = endpoint.read_descriptor(file)
    assert read is not None
    assert (read.rank, read.world_size, read.start_time, read.endpoint) == (3, 8, descriptor.start_time, place.endpoint)
    place.remove()
    assert list(file.parent.iterdir()) == []


def test_a_descriptor_file_of_more_than_128_kib_is_not_read(folder: Path) -> None:
    """A viewer reads every file in the directory."""
    descriptor = endpoint.describe("x")
    place = endpoint.claim(descriptor)
    place.publish(descriptor)
    file = place.socket.with_suffix(".json")
    begin, end = file.read_bytes()[:-1] + b', "later": "', b'"}'
    file.write_bytes(begin.ljust(128 * 1024 - len(end), b"x") + end)
    assert endpoint.read_descriptor(file) is not None
    file.write_bytes(begin.ljust(128 * 1024 - len(end) + 1, b"x") + end)
    assert endpoint.read_descriptor(file) is None


def test_ranks_of_one_launcher_are_one_job_though_torchrun_calls_every_run_none() -> None:
    ours = [endpoint.describe("x", rank=rank, world_size=2, run_id="none") for rank in range(2)]
    assert ours[0].key == ours[1].key
    assert endpoint.describe("x").key != endpoint.describe("x").key


def test_a_forked_child_removes_nothing(folder: Path) -> None:
    descriptor = endpoint.describe("x")
    place = endpoint.claim(descriptor)
    place.publish(descriptor)
    pid = os.fork()
    if pid == 0:
        place.remove()
        os._exit(0)
    os.waitpid(pid, 0)
    assert place.socket.with_suffix(".json").exists()
