"""`gpumon snapshot --setting, --device`: what it prints of a replayed trace, and its exit codes."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
import virtual
from click.testing import CliRunner
from snapshot_files import block, content, event, segment, write
from traces import made

from gpumon.cli import main
from gpumon.cli.snapshot_replay import show_replay
from gpumon.snapshots.trace import ALLOC, FREE_COMPLETED, FREE_REQUESTED, SEGMENT_FREE, Figures

pytestmark = pytest.mark.torch
MIB = 1 << 20
CONTEXT = 450 * MIB
RESERVED_MIB = range(60, 90, 2)
"""Sizes of blocks, each freed, and too small for the next one."""
EXPANDABLE = "expandable_segments:True"


def growing() -> Any:
    return made(
        *(
            event
            for n in RESERVED_MIB
            for event in ((ALLOC, n, n * MIB), (FREE_REQUESTED, n, n * MIB), (FREE_COMPLETED, n, n * MIB))
        ),
        (ALLOC, 0, 512),
    )


@pytest.fixture(scope="module")
def device() -> None:
    virtual.environment(sys.executable)


def test_text_begins_with_what_helps_most(device: None, capsys: pytest.CaptureFixture[str]) -> None:
    recorded = Figures(88 * MIB, 512, 512, 42 * MIB, 1122 * MIB, 1122 * MIB, 17)
    assert show_replay(msgspec.structs.replace(growing(), recorded=recorded), (), None, as_json=False) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"It needs 1.09 GiB, with {EXPANDABLE} 102.0 MiB."
    assert [line.split() for line in lines[2:7]] == [
        ["requested", "reserved", "difference", "retries"],
        ["as", "recorded", "88.0", "MiB", "1.09", "GiB", "0"],
        [EXPANDABLE, "88.0", "MiB", "102.0", "MiB", "−1,010.0", "MiB", "0"],
        ["roundup_power2_divisions:16", "88.0", "MiB", "656.0", "MiB", "−456.0", "MiB", "0"],
        ["large_segment_size_mb:64", "88.0", "MiB", "1.09", "GiB", "0", "B", "0"],
    ]
    assert lines[7].startswith("  max_split_size_mb:64 ")
    assert lines[10:] == [
        "The device had reserved 1.10 GiB: the replay has −10.0 MiB (0.9 %).",
        "The device had 42.0 MiB of free cache before. The trace does not describe it: not replayed.",
    ]


def test_a_device_that_is_too_small(device: None, capsys: pytest.CaptureFixture[str]) -> None:
    """Half of a freed segment is in use as the last block comes: only a segment that grows has room for it."""
    trace = made(
        (ALLOC, 1, 60 * MIB), (ALLOC, 2, 62 * MIB), (ALLOC, 3, 64 * MIB),
        (FREE_COMPLETED, 1, 60 * MIB), (ALLOC, 4, 10 * MIB), (ALLOC, 5, 66 * MIB),
    )  # fmt: skip
    size = f"{CONTEXT + 250 * MIB}B"
    assert show_replay(trace, (), size, as_json=False) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"It does not fit {size}; with {EXPANDABLE} it does."
    assert lines[3].endswith("does not fit: 66.0 MiB fail at event 5 of 6")
    assert lines[4].startswith(f"  {EXPANDABLE} ")
    assert lines[-1] == "450.0 MiB of the device are the process's context, which is an assumption."
    assert show_replay(trace, (EXPANDABLE,), size, as_json=False) == 0
    capsys.readouterr()
    assert show_replay(trace, ("roundup_power2_divisions:16",), size, as_json=False) == 1
    assert capsys.readouterr().out.startswith(f"It does not fit {size}; nor with this setting.\n")
    assert show_replay(trace, ("backend:native", "roundup_power2_divisions:16"), size, as_json=True) == 1
    stated = json.loads(capsys.readouterr().out)
    assert (stated["type"], stated["device_bytes"], stated["events"]) == ("snapshot_replay", CONTEXT + 250 * MIB, 6)
    assert (stated["recorded"], stated["unknown_cache"]) == (None, None)
    plain, chosen = stated["replays"]
    assert (plain["settings"], chosen["settings"]) == ({}, {"backend": "native", "roundup_power2_divisions": "16"})
    assert plain["oom"] == {"event": 5, "requested": 66 * MIB}
    assert (plain["fits"], plain["saved"], plain["requested_peak"]) == (False, None, 186 * MIB)


def test_json_has_the_figures_of_each_replay(device: None, capsys: pytest.CaptureFixture[str]) -> None:
    recorded = Figures(88 * MIB, 512, 512, 42 * MIB, 1112 * MIB, 1112 * MIB, 17)
    trace = msgspec.structs.replace(growing(), recorded=recorded)
    assert show_replay(trace, (EXPANDABLE,), None, as_json=True) == 0
    stated = json.loads(capsys.readouterr().out)
    assert stated["recorded"] == msgspec.structs.asdict(recorded)
    assert stated["unknown_cache"] == 42 * MIB
    plain, expandable = stated["replays"]
    assert plain == {
        "settings": {}, "fits": True, "oom": None, "retries": 0, "saved": 0, "requested_peak": 88 * MIB,
        "requested_end": 512, "allocated_end": 512, "reserved_start": 0, "reserved_peak": 1112 * MIB,
        "reserved_end": 1112 * MIB, "segments_end": 16,
    }  # fmt: skip
    assert (expandable["saved"], expandable["segments_end"]) == (1010 * MIB, 0)


def test_what_cannot_be_replayed_is_said_in_one_sentence(device: None) -> None:
    fine, wrong = made((SEGMENT_FREE, -1, 0)), made((FREE_COMPLETED, 1, 512))
    for trace, settings, name, code in (
        (fine, ("expandable_segments",), None, 2),
        (fine, ("a:\x1b]0;x\a",), None, 2),
        (fine, (), "a500", 2),
        (fine, ("no_such_setting:1",), None, 3),
        (fine, (), "100MiB", 3),
        (wrong, (), None, 3),
    ):
        with pytest.raises(click.ClickException) as refused:
            show_replay(trace, settings, name, as_json=False)
        assert refused.value.exit_code == code
        assert refused.value.message.isprintable()


def test_the_verb_replays_the_events_of_a_file(device: None, tmp_path: Path) -> None:
    blocks = [block(size) for size in (60 * MIB, 62 * MIB)]
    events = [event("alloc", each["address"], each["size"]) for each in segment(*blocks)["blocks"]]
    one = write(tmp_path / "one.pickle", content([segment(*blocks)], events))
    done = CliRunner().invoke(main, ["snapshot", str(one), "--device", "1GiB", "--setting", EXPANDABLE])
    assert done.exit_code == 0
    assert done.output.startswith("It fits 1GiB: it needs 122.0 MiB, and with this setting no less.\n")
    done = CliRunner().invoke(main, ["snapshot", str(one), "--device", "500MiB", "--setting", EXPANDABLE, "--json"])
    assert done.exit_code == 1
    assert [each["oom"]["requested"] for each in json.loads(done.output)["replays"]] == [60 * MIB] * 2


@pytest.mark.parametrize(
    ("arguments", "code", "why"),
    [
        (("plain.pickle", "--replay"), 3, "plain.pickle has no events to replay"),
        (("two.pickle", "--device", "24GiB"), 2, "has events of 2 devices: choose one with --device-index"),
        (("two.pickle", "plain.pickle", "--setting", EXPANDABLE), 2, "a replay is of one file"),
        (("two.pickle", "--setting", "nonsense", "--device-index", "1"), 2, "is not a setting of the allocator"),
        (("none.pickle", "--replay"), 1, "No such file"),
    ],
)
def test_what_has_no_events_or_too_many_devices_is_not_replayed(
    tmp_path: Path, arguments: tuple[str, ...], code: int, why: str
) -> None:
    made_of = segment(block(MIB))
    events = [event("alloc", made_of["blocks"][0]["address"], MIB)]
    write(tmp_path / "plain.pickle", content([made_of]))
    write(tmp_path / "two.pickle", content([made_of, {**made_of, "device": 1}], events, copy.deepcopy(events)))
    named = [str(tmp_path / each) if each.endswith(".pickle") else each for each in arguments]
    done = CliRunner().invoke(main, ["snapshot", *named])
    assert (done.exit_code, why in done.output) == (code, True), done.output
