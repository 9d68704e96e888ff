"""Another user may be first in the temporary directory, and a umask may be anything: agents are found all the same."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpumon import link
from gpumon_agent import endpoint
from gpumon_agent.oom import report_file

OTHER = 65534
AS_OTHER = f"""
import json, os, stat, sys, tempfile, threading, time
import gpumon.link
from gpumon.link import discovery, glancing
import gpumon_agent.transport.publisher, gpumon_agent.oom.report_file as report_file, gpumon_agent.wire as wire
from gpumon_agent.transport import publisher
from gpumon_agent import endpoint
os.setgroups([]); os.setgid({OTHER}); os.setuid({OTHER})
"""
SPEAKS = """
os.umask(int(sys.argv[1], 8))
told = endpoint.describe("x", unix_ns=1)
speaks = publisher.Publisher(type("R", (), {"drain": lambda self: []})(), list, lambda: None, told)
threading.Thread(target=speaks.serve, daemon=True).start()
while not speaks.ready:
    time.sleep(0.01)
found = discovery.discover()
modes = {}
for folder, _, names in os.walk(tempfile.gettempdir()):
    modes |= {os.path.join(folder, name): stat.S_IMODE(os.lstat(os.path.join(folder, name)).st_mode) for name in names}
print(json.dumps([
    [each.nonce for each in found] == [told.nonce], found[0].endpoint, modes,
    discovery.refuses(gpumon.link.discovery.Path(found[0].endpoint.removeprefix("ipc://"))),
]))
"""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary directory for everybody; XDG_RUNTIME_DIR is unset, as in a container or a batch job."""
    folder = Path(tempfile.mkdtemp(prefix="gm"))
    folder.chmod(0o1777)
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield folder
    shutil.rmtree(folder)


def taken(path: Path, uid: int, how: str) -> None:
    """`uid` is first at `path`."""
    if how == "directory":
        path.mkdir(mode=0o700)
    elif how == "open directory":
        path.mkdir()
        path.chmod(0o777)
    elif how == "file":
        path.touch()
    else:
        target = path.with_name("target")
        target.mkdir()
        os.chown(target, os.geteuid(), -1)
        path.symlink_to(target)
    os.chown(path, uid, uid, follow_symlinks=False)


def as_other(code: str, *arguments: str) -> Any:
    ran = subprocess.run(
        [sys.executable, "-c", AS_OTHER + code, *arguments], capture_output=True, text=True, check=False, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout), ran.stderr


@needs_root
@pytest.mark.parametrize("how", ["directory", "open directory", "file", "link"])
def test_agent_and_viewer_meet_though_another_user_was_first(
    shared: Path, start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(shared))
    monkeypatch.setattr(tempfile, "tempdir", None)
    usual = shared / f"gpumon-{os.geteuid()}"
    taken(usual, OTHER, how)
    taken(shared / f"{usual.name}-1", OTHER, "open directory")
    taken(shared / f"{usual.name}-0123abcd", OTHER, "open directory")
    first, second = start(name="a"), start(name="b")
    assert [descriptor.name for descriptor in link.discover()] == ["a", "b"]
    assert link.resolve("a")[0].pid == first.pid
    place = first.socket.parent
    assert second.socket.parent == place
    assert (place.stat().st_uid, stat.S_IMODE(place.stat().st_mode)) == (os.geteuid(), 0o700)
    for agent in (first, second):
        said = agent.stderr().splitlines()
        assert len(said) == 1
        assert said[0].startswith(f"gpumon: {usual} ")
        assert said[0].endswith(f": {place} is used instead")
    if how != "file":
        assert list(usual.iterdir()) == []


@needs_root
def test_the_reports_of_an_out_of_memory_go_there_too(shared: Path) -> None:
    taken(shared / f"gpumon-{os.geteuid()}", OTHER, "directory")
    place, fd = report_file.ReportFile({}).directory()
    os.close(fd)
    assert place in report_file.directories()
    assert report_file.ReportFile({}).directory()[0] == place
    assert place.stat().st_uid == os.geteuid()


@needs_root
@pytest.mark.parametrize("how", ["nobody", "directory", "file"])
@pytest.mark.parametrize("umask", ["0", "022", "0777"])
def test_a_user_without_roots_rights_is_found_whatever_the_umask(shared: Path, umask: str, how: str) -> None:
    usual = shared / f"gpumon-{OTHER}"
    if how != "nobody":
        taken(usual, 0, how)
    (found, where, modes, refused), said = as_other(SPEAKS, umask)
    assert found
    assert not refused
    assert (Path(where.removeprefix("ipc://")).parent == usual) == (how == "nobody")
    assert len(said.splitlines()) == (how != "nobody")
    assert {mode for path, mode in modes.items() if path != str(usual)} == {0o600}


@needs_root
@pytest.mark.parametrize("umask", ["0", "0777"])
def test_a_report_can_be_read_whatever_the_umask(shared: Path, umask: str) -> None:
    code = """
os.umask(int(sys.argv[1], 8))
place, fd = report_file.ReportFile({}).directory()
report_file.put(fd, "oom-1.json", b"{}")
print(json.dumps((place / "oom-1.json").read_text()))
"""
    assert as_other(code, umask) == ("{}", "")


@needs_root
def test_a_directory_that_others_can_swap_is_no_place_at_all(shared: Path) -> None:
    shared.chmod(0o777)
    taken(shared / f"gpumon-{os.geteuid()}", OTHER, "directory")
    with pytest.raises(endpoint.Unavailable, match="can be changed by other users"):
        endpoint.claim(endpoint.describe("x"))
    assert len(list(shared.iterdir())) == 1


def test_a_usual_place_is_not_spoken_of(shared: Path) -> None:
    assert endpoint.claim(endpoint.describe("x")).instead == ""


def test_the_current_folder_is_no_temporary_directory(tmp_path: Path) -> None:
    """Python takes it where no temporary directory can be written to; a viewer would not look there."""
    code = """
import os, tempfile
os.environ.pop("XDG_RUNTIME_DIR", None)
for name in ("TMPDIR", "TEMP", "TMP"):
    os.environ.pop(name, None)
tempfile.tempdir = os.getcwd()  # what gettempdir() finds then
from gpumon_agent import endpoint
try:
    endpoint.claim(endpoint.describe("x"))
except endpoint.Unavailable as reason:
    print(reason)
"""
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ran.stdout == "no directory for temporary files can be written to\n"
    assert list(tmp_path.iterdir()) == []


def test_a_temporary_directory_is_found_from_inside_it() -> None:
    code = "from gpumon_agent import endpoint; print(*endpoint.candidates(), sep='\\n')"
    environment = {name: value for name, value in os.environ.items() if name not in ("TMPDIR", "TEMP", "TMP")}
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd="/tmp", env=environment, capture_output=True, text=True, check=True
    )
    assert f"/tmp/gpumon-{os.geteuid()}" in ran.stdout.splitlines()


@needs_root
@pytest.mark.parametrize(("option", "works"), [("noexec", True), ("ro", False)])
def test_a_mount_that_is_noexec_or_read_only(shared: Path, option: str, works: bool) -> None:
    code = """
import tempfile; tempfile.tempdir = None
from gpumon_agent import endpoint
try:
    print(endpoint.claim(endpoint.describe("x")).socket.parent)
except endpoint.Unavailable as reason:
    print("none:", reason)
"""
    script = f'mount -t tmpfs -o {option},mode=1777 none "$TMPDIR" && exec "$0" -c "$1"'
    ran = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, sys.executable, code], capture_output=True, text=True, check=False
    )
    if "mount" in ran.stderr or "unshare" in ran.stderr:
        pytest.skip("nothing can be mounted here")
    assert (str(shared) in ran.stdout) == works, ran.stdout
    assert ran.stderr == ""
