"""Folders and files that are missing, full, or somebody else's."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from faults.training import Same

pytestmark = pytest.mark.torch


def test_no_runtime_folder(same: Same, tmp_path: Path) -> None:
    same("watch()\ntrain()", XDG_RUNTIME_DIR=str(tmp_path / "missing"), lines=1)


def test_a_file_where_the_runtime_folder_should_be(same: Same, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    same("watch()\ntrain()", XDG_RUNTIME_DIR=str(tmp_path / "file"), lines=1)


def test_a_link_where_gpumons_folder_should_be(same: Same, tmp_path: Path) -> None:
    """Somebody else may have laid it: nothing is written through it."""
    aside = tmp_path / "aside"
    aside.mkdir()
    (tmp_path / "gpumon").symlink_to(aside)
    same("watch()\ntrain()", XDG_RUNTIME_DIR=str(tmp_path), lines=1)
    assert not list(aside.iterdir())


def test_the_runtime_folder_goes_while_it_trains(same: Same, tmp_path: Path) -> None:
    """As at a logout."""
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    same(
        f"import shutil\nwatch()\ntrain()\nshutil.rmtree({str(folder)!r}, ignore_errors=True)\ntime.sleep(1)\ntrain()",
        XDG_RUNTIME_DIR=str(folder),
        lines=1,
    )


@pytest.fixture
def tmpfs(tmp_path: Path) -> Any:
    """A file system of one page."""
    folder = tmp_path / "small"
    folder.mkdir()
    if (
        os.geteuid()
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", folder], check=False).returncode
    ):
        pytest.skip("mounting needs root")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.parametrize("variable", ["XDG_RUNTIME_DIR", "GPUMON_OOM_DIR", "TMPDIR", "HOME"])
@pytest.mark.parametrize("how", ["full", "read-only"])
def test_a_file_system(same: Same, tmpfs: Path, variable: str, how: str) -> None:
    tmpfs.chmod(0o700)
    (tmpfs / "filling").write_bytes(b"\0" * 4096)
    if how == "read-only":
        subprocess.run(["mount", "-o", "remount,ro", tmpfs], check=True)
    same("watch()\ntrain(5)", **{variable: str(tmpfs)}, lines=1)


@pytest.mark.parametrize("how", ["full", "missing"])
def test_dev_shm(same: Same, how: str) -> None:
    """A container's has 64 MB, or there is none. In a mount namespace of the training's own."""
    if os.geteuid():
        pytest.skip("mounting needs root")
    ran = same(
        f"""
libc = ctypes.CDLL(None, use_errno=True)
folder = b"/dev/shm" if {how!r} == "full" else b"/dev"
assert libc.unshare(0x20000) == 0, os.strerror(ctypes.get_errno())
assert libc.mount(b"none", b"/", None, 0x44000, None) == 0
null = os.open("/dev/null", os.O_RDWR)
assert libc.mount(b"tmpfs", folder, b"tmpfs", 0, b"size=8k") == 0
if folder == b"/dev/shm":
    try:
        Path("/dev/shm/filling").write_bytes(bytes(1 << 20))
    except OSError as error:
        print(error.strerror)
else:
    os.mknod("/dev/null", 0o20666, os.fstat(null).st_rdev)
    os.mknod("/dev/urandom", 0o20666, os.makedev(1, 9))
    assert not os.path.exists("/dev/shm")
watch()
train(20)
assert not WATCHED or helper()
"""
    )
    assert ran.own == []


@pytest.mark.parametrize("home", ["", "/nowhere", "/proc/1/root", "relative"])
def test_home(same: Same, home: str) -> None:
    same("watch()\ntrain()", HOME=home, XDG_RUNTIME_DIR="", lines=1)


@pytest.mark.parametrize("umask", [0, 0o777])
def test_umask(same: Same, umask: int, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    ran = same(
        f"""
os.umask({umask})
watch()
train()
if WATCHED:
    for each in Path(os.environ["XDG_RUNTIME_DIR"]).rglob("*"):
        mode = each.stat().st_mode & 0o777
        assert mode == (0o700 if each.is_dir() else 0o600), (each, oct(mode))
    assert list(Path(os.environ["XDG_RUNTIME_DIR"], "gpumon").iterdir())
assert os.umask(0) == {umask}
""",
        XDG_RUNTIME_DIR=str(folder),
    )
    assert ran.own == []


def test_the_working_directory_is_gone(same: Same) -> None:
    same("folder = Path('gone').resolve(); folder.mkdir(); os.chdir(folder); folder.rmdir()\nwatch()\ntrain()")


def test_modules_of_the_standard_library_are_shadowed(same: Same) -> None:
    """By files beside the script: `json.py`, as people call theirs. Some of torch's come too late for it."""
    same(
        """
for name in ("json", "struct", "select", "signal", "msgspec", "zmq", "resource"):
    Path(name + ".py").write_text("raise RuntimeError('shadowed')")
watch(awaited=False)
train()
time.sleep(1)
train()
""",
        lines=1,
    )


def test_gpumon_is_removed_while_it_trains(same: Same, tmp_path: Path) -> None:
    """As by an upgrade: what is not imported yet is not there."""
    import gpumon_agent

    copy = tmp_path / "site" / "gpumon_agent"
    shutil.copytree(Path(gpumon_agent.__file__).parent, copy)
    same(
        f"""
if WATCHED:
    for name in [each for each in sys.modules if each.split(".")[0] == "gpumon_agent"]:
        del sys.modules[name]
    sys.path.insert(0, {str(copy.parent)!r})
    import gpumon_agent.agent
    assert gpumon_agent.agent.__file__.startswith({str(copy)!r})
watch()
train(2)
import shutil
if WATCHED: shutil.rmtree({str(copy)!r})
train(120)
""",
        lines=4,
    )
