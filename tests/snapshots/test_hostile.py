"""Files that attack their reader: each is refused in one sentence, quickly, and nothing of it is executed."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import hostile
import pytest
from hypothesis import given
from hypothesis import strategies as st
from snapshot_files import BASE, MIB, block, content, event, frame, freed, segment, write

from gpumon.snapshots import reading
from gpumon.snapshots.parsing import Malformed, parse
from gpumon.snapshots.reading import Unreadable, read
from gpumon.snapshots.summary import summarize

REAL = content(
    [segment(block(MIB, frames=[frame("/home/me/train.py", 3)]), block(MIB, state="inactive"))],
    [event("segment_alloc", BASE, 2 * MIB), event("alloc", BASE + MIB, 5), *freed(BASE + MIB, 5), event("oom", 0, 7)],
    allocator_settings={"PYTORCH_CUDA_ALLOC_CONF": ""},
    external_annotations=[{"device": 0, "name": "step", "stage": "START", "time_us": 3}],
)


class _Runs:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


class _Elsewhere(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return "elsewhere" if obj == "?" else None


def refused(path: Path) -> str:
    with hostile.within(60), pytest.raises(Unreadable) as told:
        read(path)
    assert "\n" not in str(told.value)
    return str(told.value)


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_nothing_is_executed(tmp_path: Path, protocol: int) -> None:
    made, path = tmp_path / "made", tmp_path / "x.pickle"
    path.write_bytes(pickle.dumps(content([segment(block(MIB))], extra=_Runs(made)), protocol))
    assert "asks to run posix.mkdir; " in refused(path)
    assert not made.exists()
    pickle.loads(path.read_bytes())  # the file does what it is said to do
    assert made.exists()


def test_an_object_outside_of_the_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.pickle"
    with path.open("wb") as file:
        _Elsewhere(file, 2).dump({"segments": "?"})
    assert "asks to run an object outside of the file" in refused(path)


def test_half_characters_and_line_ends_do_no_harm(tmp_path: Path) -> None:
    path = write(
        tmp_path / "x.pickle",
        content(
            [segment(block(MIB, frames=[frame("/my/\ud800.py")]))],
            [event("alloc", BASE, MIB, frames=[frame("/my/\ud800.py")], user_metadata="\udfff")],
            allocator_settings={"\ud800": "\ud800"},
            gpumon={"step": 1, "phase": "\ud800"},
        ),
    )
    snapshot = read(path)
    assert (snapshot.lines, snapshot.marks) == (("/my/?.py:1 forward",), ("?",))
    assert (snapshot.settings, snapshot.taken) == ({"?": "?"}, (1, "?"))
    path.write_bytes(b"\x80\x04\x8c\x05o\n\xed\xa0\x80\x8c\x01b\x93.")
    assert "asks to run o ?.b; " in refused(path)


OTHERS = {
    "empty": (b"", "is empty"),
    "text": (b"Traceback (most recent call last):\n", "writes a pickle, and this is none"),
    "zip": (b"PK\x03\x04" + bytes(100), "writes a pickle, and this is none"),
    "protocol 0": (b"(dp0\n.", "writes a pickle, and this is none"),
    "one byte": (b"\x80", "writes a pickle, and this is none"),
    "unknown protocol": (b"\x80\x7f}.", "its pickle is broken"),
    "no opcode": (b"\x80\x04\xff\xff", "its pickle is broken"),
    "stack underflow": (b"\x80\x02aaaa.", "its pickle is broken"),
    "another type": (b"\x80\x02]}b.", "its pickle is broken"),
    "no list": (b"\x80\x02K\x01K\x02a.", "its pickle is broken"),
    "memo": (b"\x80\x02h\x07.", "its pickle is broken"),
    "extension": (b"\x80\x02\x82\x01.", "its pickle is broken"),
    "utf-8": (b"\x80\x02X\x02\x00\x00\x00\xff\xff.", "its pickle is broken"),
    "a number": (b"\x80\x02K\x01.", "it has no segments"),
    "2 GiB of memo": (b"\x80\x02]r" + struct.pack("<I", 0x7FFF_FFFF) + b".", "more memory or time"),
    "an exabyte of bytes": (b"\x80\x04\x8e" + struct.pack("<Q", 1 << 60) + b"abc.", "more memory or time"),
    "a terabyte of text": (b"\x80\x04\x8d" + struct.pack("<Q", 1 << 40) + b"abc.", "more memory or time"),
    "deep": (b"\x80\x02" + b"]" * 1_000_000 + b"a" * 999_999 + b".", "a segment: a dict is expected"),
    "a deep key": (b"\x80\x02})" + b"\x85" * 1_000_000 + b"K\x01s.", "more memory or time"),
    "a deep size": (
        pickle.dumps({"segments": [{**segment(), "total_size": "?"}]}, 2).replace(
            b"X\x01\x00\x00\x00?", b")" + b"\x85" * 200_000
        ),
        "total_size is no number of bytes",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_snapshot_is_one_sentence(tmp_path: Path, name: str) -> None:
    data, why = OTHERS[name]
    path = tmp_path / "x.pickle"
    path.write_bytes(data)
    assert why in refused(path)


def test_a_key_whose_hash_takes_for_ever_ends_with_the_processor_time(tmp_path: Path) -> None:
    path = tmp_path / "x.pickle"
    path.write_bytes(b"\x80\x02})" + b"2\x86" * 64 + b"K\x01s.")  # a pair of a pair with itself, 64 times
    assert "more memory or time" in refused(path)
    assert reading.TIME_BASE_S == 5, "a small file must not keep its reader for longer"


def test_the_same_list_many_times_is_not_read_many_times(tmp_path: Path) -> None:
    events = [event("snapshot", 0, 0)] * 100_000
    path = write(tmp_path / "x.pickle", content([segment(block(MIB))], *[events] * 1000))
    assert path.stat().st_size < MIB
    assert "it has more entries than bytes" in refused(path)


def test_a_few_bytes_a_time_of_memory_are_enough_for_a_real_file_and_no_more(tmp_path: Path) -> None:
    """Events without stacks take the most memory for their bytes."""
    events = [
        event("alloc", BASE + n, 1 << 20, time_us=1 << 50, pool_id=(0, 0), user_metadata="") for n in range(400_000)
    ]
    path = write(tmp_path / "x.pickle", content([segment(block(MIB))], events))
    (device,) = read(path).devices
    assert device.trace is not None
    assert len(device.trace.codes) == 400_000
    # lists that hold nothing: 64 bytes each, 21 for each byte of the file
    path.write_bytes(b"\x80\x02]" + b"]a]aN0" * 8_000_000 + b".")
    assert "more memory or time" in refused(path)


def test_no_file_is_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path, why in (
        (tmp_path / "fifo", "is not a regular file"),
        (Path("/dev/zero"), "is not a regular file"),
        (tmp_path, "Is a directory"),
        (tmp_path / "none", "No such file or directory"),
    ):
        assert why in refused(path)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    data = pickle.dumps(REAL, 4)
    path = tmp_path / "x.pickle"
    for length in range(2, len(data), 37):
        path.write_bytes(data[:length])
        assert "is cut off: its end is missing" in refused(path)


def test_the_current_folder_is_not_imported_from(tmp_path: Path) -> None:
    (tmp_path / "msgspec.py").write_text("raise SystemExit(77)")
    path = write(tmp_path / "x.pickle", REAL)
    code = "import sys; sys.path.remove(''); from gpumon.snapshots.reading import read; read(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, path], cwd=tmp_path, check=True)


VALUES = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.integers(-3, 3)
    | st.floats()
    | st.text(max_size=3)
    | st.sampled_from([[], {}, (), b"", [[]], [{}], {"size": 1}, BASE, BASE + MIB, "alloc", "oom", "free_completed"])
)


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, each in inside for place in _places(each, (*path, key)))]


PLACES = _places(REAL)[1:]


@given(st.lists(st.tuples(st.sampled_from(PLACES), VALUES), min_size=1, max_size=3))
@hostile.examples(400)
def test_anything_in_any_place_is_summarized_or_refused(changes: list[tuple[tuple[Any, ...], Any]]) -> None:
    root = copy.deepcopy(REAL)
    for place, value in changes:
        at: Any = root
        for key in place[:-1]:
            try:
                at = at[key]
            except (KeyError, IndexError, TypeError):  # an earlier change took it away
                break
        else:
            if isinstance(at, dict) or (isinstance(at, list) and place[-1] < len(at)):
                at[place[-1]] = value
    with contextlib.suppress(Malformed):
        for summary in summarize(parse(root, 1000)):
            assert summary.answer
