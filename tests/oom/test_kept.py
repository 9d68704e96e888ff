"""What a logout leaves: snapshots that a viewer requests, and reports of out-of-memory errors; how many stay."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import tempfile
import time
from pathlib import Path
from threading import Thread

import msgspec
import pytest

from gpumon_agent import endpoint
from gpumon_agent.oom import memory_viz
from gpumon_agent.oom.memory_viz import SnapshotWriter
from gpumon_agent.oom.report_file import RECORDING, REPORTS_MAX, VARIABLE, ReportFile, newest
from gpumon_agent.transport.helper import Helper

from .test_report_file import REPORT


def written(bytes_: int = 8, **environment: str) -> SnapshotWriter:
    writer = SnapshotWriter(ReportFile(environment), keep=True)
    writer.add(b"x" * bytes_)
    writer.end()
    return writer


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0, 0o022, 0o777])
def test_it_is_in_the_home_directory_and_nobody_else_can_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int
) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_STATE_HOME")
    before = os.umask(umask)
    try:
        made = written()
    finally:
        os.umask(before)
    assert made.why is None
    path = Path(made.path or "")
    assert path.parent == home / ".local" / "state" / "gpumon" / "snapshots"
    assert mode(path) == 0o600
    assert {mode(folder) for folder in list(path.parents)[:4]} == {0o700}


def test_folders_that_exist_keep_their_rights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".local" / "state").mkdir(parents=True)
    (tmp_path / ".local" / "state").chmod(0o755)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", "relative")  # to be ignored, says the specification
    assert Path(written().path or "").is_relative_to(tmp_path / ".local" / "state" / "gpumon")
    assert mode(tmp_path / ".local" / "state") == 0o755


@pytest.mark.parametrize("how", ["no home", "a file", "open to others", "a link", "read-only"])
def test_where_that_cannot_be_it_is_in_the_runtime_directory_and_the_file_s_message_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    if how == "no home":
        monkeypatch.delenv("XDG_STATE_HOME")
        monkeypatch.setenv("HOME", str(tmp_path / "nowhere"))
    elif how == "a file":
        (state / "gpumon").write_text("")
    elif how == "open to others":
        state.chmod(0o777)
    elif how == "a link":
        (tmp_path / "elsewhere").mkdir()
        (state / "gpumon").symlink_to(tmp_path / "elsewhere")
    elif os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", state]).returncode:
        pytest.skip("mounting needs root")
    try:
        made = written()
    finally:
        if how == "read-only":
            subprocess.run(["umount", "-l", state], check=True)
    assert Path(made.path or "").parent == Path(os.environ["XDG_RUNTIME_DIR"], "gpumon", "oom")
    assert (made.why or "").startswith("it may be gone after you log out, because ")
    assert ("no home" if how == "no home" else str(state)) in (made.why or "")
    assert not list(tmp_path.rglob("snapshot-*"))
    assert not (tmp_path / "nowhere").exists()


def test_a_folder_that_you_name_holds_them_too(tmp_path: Path) -> None:
    made = written(8, **{VARIABLE: str(tmp_path)})
    assert (Path(made.path or "").parent, made.why) == (tmp_path, None)


def test_the_newest_stay_up_to_a_number_and_a_size_and_what_was_left_half_written_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place, fd = endpoint.open_kept("snapshots")
    os.close(fd)
    for number in range(10):
        (place / f"snapshot-{number:013d}-1.pickle").write_bytes(b"x" * 10)
    drafts = [place / f".snapshot-{number:013d}-1.pickle" for number in (1, 2)]
    for draft in (*drafts, place / "notes.txt"):
        draft.write_bytes(b"")
    long_ago = time.time() - 2 * memory_viz.ABANDONED_S
    os.utime(drafts[0], (long_ago, long_ago))
    newest = Path(written().path or "")
    stays = {f"snapshot-{number:013d}-1.pickle" for number in range(3, 10)} | {newest.name}
    assert {path.name for path in place.iterdir()} == {*stays, "notes.txt", drafts[1].name}
    monkeypatch.setattr(memory_viz, "BYTES_MAX", 28)
    large = Path(written(bytes_=20).path or "")
    assert {path.name for path in place.glob("snapshot-*")} == {newest.name, large.name}
    largest = Path(written(bytes_=100).path or "")
    assert {path.name for path in place.glob("snapshot-*")} == {largest.name}


# -------------------------------------------------------------------------------------------------- reports


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No reports of other tests, whose runtime directory could not be used."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def kept_place() -> Path:
    place = endpoint.kept()
    assert place is not None
    return place / "oom"


def reported(**environment: str) -> tuple[ReportFile, Path]:
    """A report in the runtime directory, with the run's past."""
    box = ReportFile(environment)
    path, why = box.write(REPORT)
    assert path is not None, why
    box.write_past(path, b"a recording")
    return box, Path(path)


@pytest.mark.usefixtures("alone")
def test_a_report_is_copied_with_the_run_s_past_and_found_when_the_runtime_directory_is_gone() -> None:
    box, path = reported()
    box.keep(str(path))
    kept = kept_place()
    assert {each.name for each in kept.iterdir()} == {each.name for each in path.parent.iterdir()}
    assert mode(kept) == 0o700
    assert {mode(each) for each in kept.iterdir()} == {0o600}
    assert newest() == (path, REPORT)
    shutil.rmtree(path.parents[1])
    assert newest() == (kept / path.name, REPORT)
    assert (kept / path.name).with_suffix(RECORDING).read_bytes() == b"a recording"


def test_the_newest_copies_stay() -> None:
    for number in range(20):
        box = ReportFile({})
        path, _ = box.write(msgspec.structs.replace(REPORT, unix=1e9 + number))
        box.write_past(path, b"")
        box.keep(path)
    names = sorted(each.name for each in kept_place().glob("*.json"))
    assert len(names) == REPORTS_MAX
    assert names[-1] == Path(path).name


def test_in_a_folder_that_you_name_it_has_no_copy(tmp_path: Path) -> None:
    box, path = reported(**{VARIABLE: str(tmp_path)})
    before = path.stat()
    box.keep(str(path))
    assert path.stat().st_ino == before.st_ino
    assert not kept_place().exists()


@pytest.mark.usefixtures("alone")
def test_without_a_home_it_stays_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "nowhere"))
    box, path = reported()
    box.keep(str(path))
    assert newest() == (path, REPORT)
    assert not (tmp_path / "nowhere").exists()


def test_the_helper_s_end_waits_for_a_copy_that_is_being_made() -> None:
    helper = Helper.__new__(Helper)
    helper._keeping = Thread(target=time.sleep, args=(0.5,), daemon=True)
    helper._keeping.start()
    helper.finish()
    assert not helper._keeping.is_alive()
