"""The text of a user's line is sent if it is the line that runs, and is never worth a long wait or a wrong one."""

from __future__ import annotations

import linecache
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpumon_agent import source_lines, wire
from gpumon_agent.frames import Place
from gpumon_agent.registry import REGISTRY

MIB = 1 << 20
PATH = {"PYTHONPATH": str(Path(__file__).parents[2] / "agent")}


@pytest.fixture(autouse=True)
def _nothing_is_known() -> Iterator[None]:
    REGISTRY.source_files.clear()
    REGISTRY.source_texts.clear()
    yield
    REGISTRY.source_files.clear()
    REGISTRY.source_texts.clear()


def old(path: Path, data: str | bytes) -> str:
    """A file that is older than this process."""
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    os.utime(path, (1e9, 1e9))
    return str(path)


def text(path: str, line: int = 1) -> str | None:
    return source_lines.text(Place(path, line))


def test_a_line_is_given_without_its_indentation_and_by_its_number(tmp_path: Path) -> None:
    path = old(tmp_path / "train.py", "import torch\r\n\f\n    cache.append(y[:, :512])  \r\nx = '\u2028'")
    shown = [None, "import torch", None, "cache.append(y[:, :512])", "x = '\N{REPLACEMENT CHARACTER}'", None]
    assert [text(path, line) for line in range(6)] == shown


CHANGED = """
import os, pathlib, sys
from gpumon_agent import source_lines
from gpumon_agent.frames import Place
script = pathlib.Path(sys.argv[0])
if sys.argv[1] == "changed":
    script.write_text("# one more\\n" + script.read_text())
elif sys.argv[1] == "deleted":
    script.unlink()
print(source_lines.text(Place(str(script), 10)))  # this one
"""


@pytest.mark.parametrize("how", ["as it was", "changed", "deleted"])
def test_a_script_that_was_changed_or_deleted_while_it_ran_gives_no_line(tmp_path: Path, how: str) -> None:
    """Written the moment before it begins: as a script that another made."""
    script = tmp_path / "train.py"
    script.write_text(CHANGED)
    done = subprocess.run(
        [sys.executable, str(script), how], env={**os.environ, **PATH}, capture_output=True, text=True, check=True
    )
    same = "print(source_lines.text(Place(str(script), 10)))  # this one"
    assert done.stdout == (f"{same}\n" if how == "as it was" else "None\n")


def test_a_line_that_was_read_stays_when_the_file_changes_and_no_file_is_read_twice(tmp_path: Path) -> None:
    path = old(tmp_path / "train.py", "first()\nsecond()")
    assert text(path) == "first()"
    old(tmp_path / "train.py", "other()\nthird()")
    assert (text(path), text(path, 2)) == ("first()", "second()")


def test_what_could_not_be_read_is_not_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    assert text(str(path)) is None
    old(path, "first()")
    assert text(str(path), 1) is None
    assert text(str(path), 2) is None


@pytest.mark.parametrize("size", [MIB, MIB + 1])
def test_files_of_one_mib_together_are_read(tmp_path: Path, size: int) -> None:
    """That they are read at all is worth a millisecond."""
    large = old(tmp_path / "large.py", "x = 1\n" + "#" * (size - 6))
    assert text(large) == ("x = 1" if size == MIB else None)
    small = old(tmp_path / "small.py", "y = 1")
    assert text(small) == (None if size == MIB else "y = 1")


def test_a_line_of_10_mb_costs_no_time(tmp_path: Path) -> None:
    path = old(tmp_path / "data.py", "x = '" + "a" * 10_000_000 + "'")
    began = time.perf_counter()
    assert text(path) is None
    assert time.perf_counter() - began < 1  # 10 s if it were searched for secrets


def test_a_long_line_is_cut_after_200_characters(tmp_path: Path) -> None:
    """That is two rows of a terminal; what is longer is data."""
    path = old(tmp_path / "data.py", f"{'a' * 200}\n{'b' * 201}\n{'c' * 900_000}")
    assert [text(path, line) for line in (1, 2, 3)] == ["a" * 200, "b" * 199 + "…", "c" * 199 + "…"]


def test_control_characters_do_not_pass(tmp_path: Path) -> None:
    path = old(tmp_path / "evil.py", 'print("\x1b]52;c;cm0=\x07")\tx\u202e')
    assert text(path) == 'print("\ufffd]52;c;cm0=\ufffd") x\ufffd'


@pytest.mark.parametrize(
    "data", [b"\x7fELF\0\0x", b"\xff\xfe\xfa\xfb", b"# coding: no-such\nx = 1", b"# coding: utf-8\nx = '\xe9'"]
)
def test_what_is_no_source_gives_no_line(tmp_path: Path, data: bytes) -> None:
    assert text(old(tmp_path / "train.so", data)) is None


def test_a_source_in_its_own_encoding_is_read(tmp_path: Path) -> None:
    assert text(old(tmp_path / "train.py", b"# coding: latin-1\nx = '\xe9'"), 2) == "x = 'é'"


def test_no_pipe_no_device_no_folder_and_no_relative_path_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe.py")
    old(tmp_path / "train.py", "x = 1")
    monkeypatch.chdir(tmp_path)  # a script may change its folder: the name would mean another file
    for path in (str(tmp_path / "pipe.py"), "/dev/zero", str(tmp_path), "train.py", "<stdin>", "<string>", "", "/\0"):
        assert text(path) is None, path


def test_what_waits_in_a_pipe_is_left_there(tmp_path: Path) -> None:
    path = tmp_path / "pipe.py"
    os.mkfifo(path)
    pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    try:
        os.write(pipe, b"x = 1")
        os.utime(path, (1e9, 1e9))
        assert text(str(path)) is None
        assert os.read(pipe, 5) == b"x = 1"
    finally:
        os.close(pipe)


def test_a_notebooks_cell_is_read_from_where_ipython_keeps_it(tmp_path: Path) -> None:
    """Under a name of a file that does not exist, or in brackets; without a time, which a file's entry has."""
    for path in ("<ipython-input-3-0123456789ab>", str(tmp_path / "ipykernel_7" / "1234.py")):
        assert text(path) is None
        REGISTRY.source_texts.clear()
        linecache.cache[path] = (20, None, ["for x in data:\n", "    kept.append(x)\n"], path)
        try:
            assert text(path, 2) == "kept.append(x)"
        finally:
            del linecache.cache[path]


def test_what_linecache_says_of_a_file_is_not_taken_nor_is_it_changed(tmp_path: Path) -> None:
    path = old(tmp_path / "train.py", "x = 1")
    linecache.cache[path] = (5, 1.0, ["y = 2\n"], path)
    lazy = str(tmp_path / "lazy.py")
    linecache.cache[lazy] = (lambda: "z = 3",)  # type: ignore[assignment]
    before = dict(linecache.cache)
    try:
        assert (text(path), text(lazy)) == ("x = 1", None)
        assert linecache.cache == before
    finally:
        del linecache.cache[path], linecache.cache[lazy]


def test_a_secret_in_the_line_is_not_sent(tmp_path: Path) -> None:
    path = old(tmp_path / "train.py", 'run = wandb.login(key="hf_Jq3vX9secretvalue")')
    assert text(path) == 'run = wandb.login(key="***")'


@pytest.mark.parametrize(
    "message",
    [
        wire.Oom(3, "forward", 0, 0, 10, source_line="a\x1bb"),
        wire.Checkpoint(0, 0, 0, 0, "torch.load", source_line="a\x1bb"),
        wire.Unclaimed("train.py:3", 1, 10, 0, "a\x1bb"),
        wire.Group((1,), "float32", 0, 1, 4, source_line="a\x1bb"),
        wire.Holder("kept", "global", source_line="a\x1bb"),
    ],
)
def test_a_viewer_cleans_it_again(message: Any) -> None:
    assert message.source_line == "a\N{REPLACEMENT CHARACTER}b"
