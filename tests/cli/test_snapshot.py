"""`gpumon snapshot`: text, JSON, exit codes, and files that are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hostile
import pytest
from click.testing import CliRunner, Result
from snapshot_files import BASE, MIB, block, content, event, frame, segment, write

from gpumon.cli import main
from gpumon_agent.oom import memory_viz

HARM = "\x1b]52;c;aGk=\x07\u202e"


def call(*arguments: object) -> Result:
    done = CliRunner().invoke(main, ["snapshot", *map(str, arguments)])
    assert hostile.harm_in(done.output) == []
    return done


def snapshot(path: Path, *sizes: int, device: int = 0, events: bool = True, file: str = "/my/train.py") -> Path:
    """Blocks of these sizes, each from its own line."""
    blocks = [block(size, frames=[frame(file, line)]) for line, size in enumerate(sizes, 1)]
    parts = [segment(*blocks, device=device)]
    made = [event("alloc", each["address"], each["size"], frames=each["frames"]) for each in blocks if events]
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    return write(path, content(parts, *[[]] * device, made, allocator_settings=settings))


def test_the_answer_comes_first_then_the_peak_the_end_and_what_is_reserved(tmp_path: Path) -> None:
    done = call(snapshot(tmp_path / "a.pickle", 3 * MIB, MIB))
    assert done.exit_code == 0
    answer, *rest = done.output.splitlines()
    assert answer == "Peak 4.00 MiB requested of 4.00 MiB reserved, at event 1 of 2; 75 % from train.py:1 forward."
    titles = [line.partition("  ")[0] for line in rest if line[:1].strip()]
    assert titles == [
        "Peak, by source line",
        "Peak, by size of the block",
        "Reserved − requested at the peak: 0 B (0 %), free blocks and rounding",
        "In use at the end, by source line",
        "Largest blocks at the end",
        "Oldest recorded blocks at the end",
        "Reserved at the end: 4.00 MiB in 1 segment",
        "Allocator settings: max_split_size_mb:64",
    ]
    assert max(map(len, rest)) <= 80


def test_eight_rows_are_shown(tmp_path: Path) -> None:
    output = call(snapshot(tmp_path / "a.pickle", *range(MIB, MIB + 10))).output
    table = output.partition("by source line")[2].partition("\n\n")[0]
    assert table.count("/my/train.py") == 8
    assert table.endswith("  and 2 more")


def test_without_events_one_sentence_says_so(tmp_path: Path) -> None:
    done = call(snapshot(tmp_path / "a.pickle", MIB, events=False))
    assert done.exit_code == 0
    assert "The file has no events: record them with torch.cuda.memory._record_memory_history()." in done.output
    assert "Peak," not in done.output
    assert "In use at the end, by source line" in done.output
    assert "In use at the end, by size of the block" in done.output
    plain = call(write(tmp_path / "b.pickle", content([segment(block(MIB))]))).output
    assert "by source line" not in plain  # there is none
    assert "In use at the end, by size of the block" in plain


def test_one_of_several_devices_can_be_chosen(tmp_path: Path) -> None:
    parts = [segment(block(MIB, frames=[]), device=each, address=BASE + each * 64 * MIB) for each in (0, 2)]
    path = write(tmp_path / "a.pickle", content(parts))
    lines = call(path).output.splitlines()
    assert [line for line in lines if line.startswith("Device ")] == ["Device 0", "Device 2"]
    assert [each["index"] for each in json.loads(call(path, "--device-index", 2, "--json").output)["devices"]] == [2]
    done = call(path, "--device-index", 1)
    assert (done.exit_code, done.output) == (1, f"Error: {path} has nothing of device 1; it has 0, 2\n")


def test_json_has_every_figure(tmp_path: Path) -> None:
    path = snapshot(tmp_path / "a.pickle", 3 * MIB, MIB)
    found = json.loads(call(path, "--json").output)
    (device,) = found.pop("devices")
    assert found == {
        "type": "snapshot",
        "file": str(path),
        "settings": {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"},
        "taken": None,
    }
    lines = [
        {"name": "/my/train.py:1 forward", "bytes": 3 * MIB, "blocks": 1},
        {"name": "/my/train.py:2 forward", "bytes": MIB, "blocks": 1},
    ]
    sizes = [{"name": "1 to 10 MiB", "bytes": 3 * MIB, "blocks": 1}, {"name": "up to 1 MiB", "bytes": MIB, "blocks": 1}]
    alike = [
        {"bytes": 3 * MIB, "line": "/my/train.py:1 forward", "blocks": 1, "event": 0},
        {"bytes": MIB, "line": "/my/train.py:2 forward", "blocks": 1, "event": 1},
    ]
    moment = {"requested": 4 * MIB, "reserved": 4 * MIB, "by_line": lines, "by_size": sizes, "by_mark": []}
    assert device == {
        "index": 0,
        "answer": "Peak 4.00 MiB requested of 4.00 MiB reserved, at event 1 of 2; 75 % from train.py:1 forward.",
        "events": 2,
        "peak": {**moment, "event": 1},
        "end": moment,
        "largest": alike,
        "oldest": alike,
        "totals": {
            "reserved": 4 * MIB,
            "allocated": 4 * MIB,
            "waiting": 0,
            "inactive_split": 0,
            "unused": 0,
            "largest_free": 0,
            "segments": 1,
            "blocks": 2,
        },
        "pinned": [],
        "failed": [],
        "lost": 0,
    }


def test_a_snapshot_of_gpumons_says_in_which_step_and_phase(tmp_path: Path) -> None:
    made = content([segment(block(MIB))])
    path = write(tmp_path / "a.pickle", {**made, **memory_viz.moment(1234, "backward")})
    assert call(path).output.endswith("\n\nTaken by gpumon in step 1,234, backward\n")
    assert json.loads(call(path, "--json").output)["taken"] == {"step": 1234, "phase": "backward"}


def test_two_files_are_compared(tmp_path: Path) -> None:
    a, b = snapshot(tmp_path / "a.pickle", 3 * MIB, MIB), snapshot(tmp_path / "b.pickle", 5 * MIB, MIB)
    done = call(a, b)
    assert done.exit_code == 0
    answer, *rest = done.output.splitlines()
    assert answer == (
        "Requested at the peak is 50 % higher in B: 4.00 MiB → 6.00 MiB; most: train.py:1 forward (+2.00 MiB)"
    )
    (row,) = {line for line in rest if "train.py:1" in line}
    assert row.split() == ["/my/train.py:1", "forward", "grew", "3.00", "MiB", "+2.00", "MiB", "0"]
    assert max(map(len, rest)) <= 80
    found = json.loads(call(a, b, "--json").output)
    assert (found["type"], found["files"]) == ("snapshot_comparison", [str(a), str(b)])
    (device,) = found["devices"]
    assert device["peak"]["requested"] == [4 * MIB, 6 * MIB]
    assert device["end"]["changes"][0] == {
        "kind": "size",
        "name": "5,242,880 B",
        "what": "new",
        "before": {"bytes": 0, "blocks": 0},
        "after": {"bytes": 5 * MIB, "blocks": 1},
        "bytes": 5 * MIB,
        "blocks": 1,
    }
    assert "nothing differs" in call(a, a).output
    without = snapshot(tmp_path / "c.pickle", MIB, events=False)
    assert "At least one of the files has no events" in call(a, without).output


def test_files_of_different_devices_cannot_be_compared(tmp_path: Path) -> None:
    a, b = snapshot(tmp_path / "a.pickle", MIB), snapshot(tmp_path / "b.pickle", MIB, device=1)
    done = call(a, b)
    assert (done.exit_code, done.output) == (1, f"Error: {a} and {b} have no device in common\n")


@pytest.mark.parametrize("other", [False, True])
def test_what_cannot_be_read_is_one_sentence_and_exit_code_1(tmp_path: Path, other: bool) -> None:
    bad = tmp_path / "bad.pickle"
    bad.write_text("no pickle")
    good = [snapshot(tmp_path / "a.pickle", MIB)] if other else []
    done = call(*good, bad)
    assert done.exit_code == 1
    assert done.output.startswith(f"Error: {bad} is not a memory snapshot: ")
    assert done.output.count("\n") == 1


def test_names_from_a_file_do_not_reach_the_terminal_as_they_are(tmp_path: Path) -> None:
    path = snapshot(tmp_path / "a.pickle", MIB, file=f"/my/{HARM}.py")
    done = call(path)
    assert done.exit_code == 0
    assert "\N{REPLACEMENT CHARACTER}" in done.output
    found: Any = json.loads(call(path, "--json").output)
    assert HARM in found["devices"][0]["end"]["by_line"][0]["name"]
    other = snapshot(tmp_path / "b.pickle", 2 * MIB, file=f"/my/{HARM}.py")
    assert call(path, other).exit_code == 0


def test_the_screen_needs_a_terminal_and_one_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.pickle", content([segment(block(MIB))], [event("alloc", BASE, MIB)]))
    for words, code, why in (
        ((path,), 1, "--screen needs a terminal; without it the same is printed."),
        ((path, path), 2, "--screen is for one file, and without --json"),
        ((path, "--json"), 2, "--screen is for one file, and without --json"),
    ):
        done = call(*words, "--screen")
        assert done.exit_code == code
        assert why in done.output
