"""The report on disk: capped in number and size, whole or not at all, and nobody else's files are touched."""

from __future__ import annotations

import json
import os
import pickle
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hostile
import msgspec
import pytest
from click.testing import CliRunner

from gpumon.cli import main
from gpumon_agent import wire
from gpumon_agent.oom import report_file
from gpumon_agent.oom.report_file import Parameter, Report, ReportFile

REPORT = Report(
    unix=1_700_000_000.0, host="here", pid=4711, rank=3, name="train.py",
    argv=("train.py",), torch="2.15.0", backend="cuda", settings={}, device=0, device_total=1 << 30, step=12,
    phase="forward", requested=1 << 28, total=1 << 30, free=1 << 20, allocated=1 << 29, reserved=1 << 29,
    message="CUDA out of memory.", where="train.py:7", module="layers.3", stack=("train.py:7 in main",),
    ledger={"weights": 5}, ledger_step=11,
    ledger_phase="optimizer", optimizers=(), parameters={"w": Parameter((3, 4))},
)  # fmt: skip

HELLO = wire.Hello((wire.PROTOCOL_MAJOR, 0), "0", "ab", "train.py", "here", 4711, 0, "", (), "3", wire.Clock(0, 0))
OUTLOOK = wire.Outlook(5, 0, 2, 20, 19, 21, "backward", wire.OOM_AHEAD, -3)


def box(folder: Path) -> ReportFile:
    return ReportFile({report_file.VARIABLE: str(folder)})


def at(second: int, pid: int = 4711) -> Report:
    return msgspec.structs.replace(REPORT, unix=1_700_000_000.0 + second, pid=pid)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path, problem = box(tmp_path).write(REPORT)
    assert problem is None
    assert path is not None
    assert report_file.load(Path(path)) == REPORT
    assert Path(path).stat().st_mode & 0o777 == 0o600
    text = Path(path).with_suffix(".txt").read_text()
    assert "step 12, forward, in layers.3" in text
    assert "rank 3" in text


def test_of_one_process_the_first_seven_and_the_last_stay(tmp_path: Path) -> None:
    writer = box(tmp_path)
    for second in range(30):
        writer.write(at(second))
    kept = sorted(report_file.load(path).unix - 1_700_000_000 for path in tmp_path.glob("*.json"))  # type: ignore[union-attr]
    assert kept == [*range(7), 29]


def test_of_all_processes_the_newest_stay_and_other_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "oom-notes.txt").write_text("mine")
    for second in range(30):
        box(tmp_path).write(at(second, pid=1000 + second))
    kept = sorted(path.name for path in tmp_path.glob("oom-1*.json"))
    assert len(kept) == report_file.REPORTS_MAX
    assert kept[-1] == "oom-1700000029000-1029-0.json"
    assert (tmp_path / "oom-notes.txt").read_text() == "mine"
    found = report_file.newest([tmp_path])
    assert found is not None
    assert found[1].pid == 1029
    assert len(list(tmp_path.iterdir())) == 2 * report_file.REPORTS_MAX + 1


def test_a_batch_that_would_not_fit_is_written_at_most_once_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a run that is always short of memory every step has one, and the disk may be far away."""
    writer = box(tmp_path)
    seen = []
    for now in (100.0, 100.9, 101.1):
        monkeypatch.setattr("gpumon_agent.oom.report_file.time.time", lambda now=now: now)
        writer.write_ahead(HELLO, OUTLOOK)
        seen += [json.loads(path.read_bytes())["unix"] for path in tmp_path.glob("ahead-*.json")]
    assert seen == [100.0, 100.0, 101.1]


def test_a_model_of_many_parameters_is_cut_to_its_largest(tmp_path: Path) -> None:
    parameters = {f"layers.{n}.weight": Parameter((n + 1, 8)) for n in range(20_000)}
    path, _ = box(tmp_path).write(msgspec.structs.replace(REPORT, parameters=parameters))
    assert path is not None
    assert Path(path).stat().st_size <= report_file.REPORT_BYTES_MAX
    report = report_file.load(Path(path))
    assert report is not None
    assert "layers.19999.weight" in report.parameters
    assert "layers.0.weight" not in report.parameters
    assert report.parameters_left_out == 20_000 - len(report.parameters)


def test_a_stack_beyond_reason_goes_before_the_figures(tmp_path: Path) -> None:
    path, _ = box(tmp_path).write(msgspec.structs.replace(REPORT, stack=("x" * 9_000,) * 20))
    assert path is not None
    report = report_file.load(Path(path))
    assert report is not None
    assert (report.stack, report.requested) == ((), REPORT.requested)


def test_a_full_disk_is_one_sentence_and_leaves_no_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpumon_agent.oom.report_file.os.rename", _full)
    path, problem = box(tmp_path).write(REPORT)
    assert path is None
    assert problem == f"no report of the out-of-memory in {tmp_path}: No space left on device"
    assert list(tmp_path.iterdir()) == []


def _full(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"version": 1}', b"\xff" * 100])
def test_what_is_no_report_is_passed_over(tmp_path: Path, content: bytes) -> None:
    box(tmp_path).write(REPORT)
    (tmp_path / "oom-1900000000000-1-0.json").write_bytes(content)
    found = report_file.newest([tmp_path])
    assert found is not None
    assert found[1] == REPORT


def test_a_link_in_the_runtime_directory_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "gpumon").mkdir(mode=0o700)
    (tmp_path / "gpumon" / "oom").symlink_to(elsewhere)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    path, problem = ReportFile({}).write(REPORT)
    assert path is None
    assert problem is not None
    assert list(elsewhere.iterdir()) == []


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Where every user may write, as in a shared folder of reports."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
def test_a_report_of_another_user_is_not_read_and_why_is_said(
    open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(report_file.VARIABLE, str(open_folder))
    mine, _ = box(open_folder).write(REPORT)
    child = os.fork()
    if not child:
        os.setuid(65534)  # nobody
        os._exit(0 if box(open_folder).write(at(60))[0] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    refused: list[str] = []
    found = report_file.newest(refused=refused)
    assert found is not None
    assert str(found[0]) == mine
    (said,) = refused
    assert said.endswith("belongs to another user (uid 65534), so it is not read")
    assert said in CliRunner().invoke(main, ["explain", "--last"]).output
    Path(mine or "").unlink()
    done = CliRunner().invoke(main, ["explain", "--last"])
    assert done.exit_code == 1
    assert done.output == f"Error: {said}; run gpumon as the user who trained\n"


def test_a_link_and_a_pipe_in_place_of_a_report_are_not_read(tmp_path: Path) -> None:
    path, _ = box(tmp_path).write(REPORT)
    (tmp_path / "oom-1900000000000-1-0.json").symlink_to(path or "")
    os.mkfifo(tmp_path / "oom-1900000000001-1-0.json")
    refused: list[str] = []
    found = report_file.newest([tmp_path], refused)
    assert found is not None
    assert str(found[0]) == path
    assert [said.split(" is ", 1)[1] for said in refused] == [
        "no regular file, so it is not read",
        "a symbolic link, so it is not read",
    ]


HARM = "\x1b]52;c;aGk=\x07\x9b31m\u202e"


@pytest.mark.parametrize(
    "change",
    [
        {"unix": 1e300}, {"requested": 10**30}, {"step": 10**30}, {"parameters": {"w": {"shape": [10**30]}}},
        {"ledger": {"weights": -1}}, {"rank": -5}, {"settings": dict.fromkeys(map(str, range(999)), "")},
    ],
)  # fmt: skip
def test_a_report_with_figures_that_cannot_be_is_passed_over(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "oom-1900000000000-1-0.json"
    path.write_text(json.dumps({**msgspec.to_builtins(REPORT), **change}))
    assert report_file.load(path) is None


def test_the_texts_of_a_report_are_printable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(report_file.VARIABLE, str(tmp_path))
    texts = dict.fromkeys(("host", "name", "message", "where", "module", "torch", "backend"), HARM)
    report = msgspec.structs.replace(REPORT, **texts, stack=(HARM,), argv=(HARM,), parameters={HARM: Parameter((3, 4))})
    path, _ = box(tmp_path).write(report)
    loaded = report_file.load(Path(path or ""))
    assert loaded is not None
    assert hostile.harm_in(repr(loaded)) == []
    assert hostile.harm_in(json.dumps(msgspec.to_builtins(loaded), ensure_ascii=False)) == []
    done = CliRunner().invoke(main, ["explain", "--last"])
    assert done.exit_code == 0
    assert hostile.harm_in(done.output) == []


def test_off_writes_nothing_and_says_nothing(tmp_path: Path) -> None:
    assert ReportFile({report_file.VARIABLE: report_file.OFF}).write(REPORT) == (None, None)


def test_doctor_shows_the_newest_report_and_how_to_read_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpumon.cli import doctor

    monkeypatch.setenv(report_file.VARIABLE, str(tmp_path))
    assert list(doctor._out_of_memory()) == []
    box(tmp_path).write(REPORT)
    (seen,) = doctor._out_of_memory()
    assert (seen.verdict, seen.subject) == ("note", "last OOM")
    assert seen.text.startswith(f"{REPORT.name}, step {REPORT.step}, {REPORT.phase}, 2023-11-1")
    assert seen.text.endswith("gpumon explain --last")


def runs_out() -> None:
    import torch

    from gpumon_agent import agent as agents

    agent = agents.REGISTRY.agent = agents.Agent("test", publish=False)
    model = torch.nn.Linear(1024, 1024).cuda()
    agent.adopt(model, torch.optim.SGD(model.parameters()))
    model(torch.ones(1, 1024, device="cuda"))
    try:
        torch.empty(1 << 40, device="cuda")
    except torch.cuda.OutOfMemoryError:
        agent.leave("stopped")
    assert not [failed for failed in agent.guard.failures.items() if failed[1]]


def test_a_snapshot_stands_beside_the_report_where_it_is_wanted(virtual_gpu: Any, tmp_path: Path) -> None:
    gpu = virtual_gpu()
    for wanted in ("", "1"):
        folder = tmp_path / f"left{wanted}"
        gpu.run(runs_out, env={report_file.VARIABLE: str(folder), "GPUMON_OOM_SNAPSHOT": wanted})
        assert len([*folder.glob("oom-*.json")]) == 1
        snapshots = [*folder.glob("snapshot-*.pickle")]
        assert bool(snapshots) == bool(wanted)
    (path,) = snapshots
    with path.open("rb") as file:
        held = pickle.load(file)  # our own
    sizes = [b["requested_size"] for s in held["segments"] for b in s["blocks"] if b["state"] == "active_allocated"]
    assert 1024 * 1024 * 4 in sizes
    (beside,) = folder.glob("oom-*.json")
    oom = json.loads(beside.read_text())
    assert held["gpumon"] == {"step": oom["step"], "phase": oom["phase"]}
