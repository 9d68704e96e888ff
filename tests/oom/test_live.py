"""An out-of-memory as it happens: last words to a viewer, a report on disk without one, training that goes on."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from synthetic import GIB, Run, rank_of

from gpumon.analysis.diagnosis.live import of_rank
from gpumon.session.store import SessionStore
from gpumon_agent import wire
from gpumon_agent.oom import report_file

from .conftest import SCENARIO, Place

MIB = 1 << 20
CALLS = {
    "forward": ("outputs = model(inputs)", 1024),
    "backward": ("loss.backward()", 320),
    "optimizer": ("optimizer.step()", 144),
}
"""Where each fails: the line that asks, and the MiB it asks for."""


def line_of(call: str) -> str:
    number = next(n for n, line in enumerate(SCENARIO.read_text().splitlines(), 1) if line.strip() == call)
    return f"oom.py:{number}"


@pytest.mark.parametrize("where", CALLS)
def test_the_last_words_reach_a_viewer_and_the_disk(place: Place, where: str) -> None:
    training = subprocess.Popen(
        place.command(SCENARIO, "--where", where, "--device", "cuda"),
        env={**place.gpu.environment, **place.environment, "GPUMON_AWAIT_VIEWER": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    attached = _attached(place, training.pid)
    _, raised = training.communicate(timeout=300)
    call, mebibytes = CALLS[where]
    (oom,) = [each for each in attached if each["type"] == "oom"]
    assert (oom["phase"], oom["step"], oom["requested"]) == (where, 0, mebibytes * MIB)
    assert (oom["where"], oom["source_line"]) == (line_of(call), call)
    assert oom["module"] == (None if where == "optimizer" else "Linear")
    assert oom["verdict"] == "capacity"
    assert oom["remedies"]
    assert oom["ledger"]["weights"]
    assert oom["ledger"]["reserved"] == oom["ledger"]["allocated"] + oom["ledger"]["slack"]
    # torch's own message, which comes after, has the same figures
    said = oom["message"].split(" Of the allocated")[1]
    assert said in raised
    assert Path(oom["report"]).parent == place.reports
    kept = report_file.load(Path(oom["report"]))
    assert kept is not None
    assert (kept.phase, kept.requested, kept.where) == (where, mebibytes * MIB, line_of(call))
    assert kept.source_line == call
    assert f"requested at {line_of(call)}  {call}\n" in Path(oom["report"]).with_suffix(".txt").read_text()
    explained = place.gpumon("explain", "--last", GPUMON_OOM_DIR=str(place.reports)).stdout
    assert f"Requested at {line_of(call)}  {call}\n" in explained
    ran = {"forward": "The module that ran: Linear\n", "backward": "The module whose backward ran: Linear\n"}.get(where)
    assert ran in explained if ran else "ran: " not in explained
    (weight,) = kept.parameters.values()
    assert weight.shape == (weight.shape[0], weight.shape[1])


def _attached(place: Place, pid: int) -> list[dict[str, Any]]:
    """What `gpumon attach --json` prints from before the failure to the end."""
    done = place.gpumon("attach", pid, "--wait", "--json")
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_without_a_viewer_the_report_stays_and_explains_itself(place: Place) -> None:
    done = place.train(SCENARIO, "--where", "optimizer", "--device", "cuda")
    assert "OutOfMemoryError" in done.stderr
    (written,) = place.reports.glob("*.txt")
    text = written.read_text()
    assert text.startswith("CUDA out of memory. Tried to allocate 144.00 MiB.")
    assert "step 0, optimizer" in text
    assert "_init_group" in text
    assert place.reports.stat().st_mode & 0o777 == 0o700
    explained = place.gpumon("explain", "--last")
    assert explained.returncode == 0, explained.stderr
    assert explained.stdout.startswith("OUT OF MEMORY: Capacity: 144.00 MiB requested, ")
    assert "One more copy of weight (4,608 × 8,192, fp32, 144.00 MiB): its second moment" in " ".join(
        explained.stdout.split()
    )


def test_where_the_training_is_process_1_the_report_is_written_before_all_else_is_killed(
    place: Place, as_init: list[str]
) -> None:
    """As process 1 of a container ends, the kernel kills what else runs in it: a helper may be too late."""
    done = subprocess.run(
        [*as_init, *place.command(SCENARIO, "--where", "optimizer", "--device", "cuda")],
        env={**place.gpu.environment, **place.environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "OutOfMemoryError" in done.stderr
    (written,) = place.reports.glob("*.json")
    report = report_file.load(written)
    assert report is not None
    assert (report.pid, report.phase) == (1, "optimizer")


def caught(times: int) -> None:
    """Runs out of memory again and again, goes on each time, and tells what is allocated and what was learnt."""
    import torch
    from torch import nn

    torch.manual_seed(1)
    model = nn.Linear(1024, 1024).cuda()
    model.register_parameter("apart", nn.Parameter(torch.zeros(8, device="cuda")))
    optimizer = torch.optim.SGD([{"params": [model.bias]}, {"params": [model.weight], "lr": 0.2}], lr=0.1)
    for step in range(times):
        model(torch.ones(8, 1024, device="cuda")).sum().backward()
        try:
            kept = [torch.empty(64 << 20, device="cuda") for _ in range(8 + step % 2)]
        except torch.OutOfMemoryError:
            kept = [torch.empty(0)]
        assert kept
        optimizer.step()
        optimizer.zero_grad()
        print(step, torch.cuda.memory_allocated(), torch.cuda.memory_stats()["num_ooms"], torch.initial_seed())


def test_who_catches_it_trains_on_with_the_same_bytes(place: Place) -> None:
    watched = place.train(caught, 20)
    assert watched.returncode == 0, watched.stderr
    plain = place.gpu.run(caught, 20)
    assert watched.stdout == plain.stdout
    assert "gpumon" not in watched.stderr
    kept = sorted(place.reports.glob("*.json"))
    assert len(kept) == report_file.OF_ONE_PROCESS_MAX
    numbers = [int(path.stem.rsplit("-", 1)[1]) for path in kept]
    assert numbers == [*range(report_file.OF_ONE_PROCESS_MAX - 1), 19]  # the first ones, and always the last
    reports = [report for path in kept if (report := report_file.load(path)) is not None]
    assert reports[-1].step == 19
    assert {name: each.group for name, each in reports[-1].parameters.items()} == {
        "bias": 0,
        "weight": 1,
        "apart": None,
    }


def test_a_folder_the_user_names_is_used_and_off_writes_none(place: Place, tmp_path: Path) -> None:
    mine = tmp_path / "mine" / "reports"
    place.train(SCENARIO, "--where", "forward", "--device", "cuda", GPUMON_OOM_DIR=str(mine))
    assert {path.suffix for path in mine.iterdir()} - {report_file.RECORDING} == {".json", ".txt"}
    assert not place.reports.exists()
    place.train(SCENARIO, "--where", "forward", "--device", "cuda", GPUMON_OOM_DIR="off")
    assert not place.reports.exists()
    assert place.gpumon("explain", "--last", GPUMON_OOM_DIR=str(mine)).returncode == 0
    none = place.gpumon("explain", "--last")
    assert none.returncode == 1
    assert none.stderr.startswith(f"Error: no report in {place.reports}")


def test_a_folder_that_cannot_be_written_to_changes_nothing_for_the_training(place: Place, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    watched = place.train(caught, 3, GPUMON_OOM_DIR=str(tmp_path / "file"))
    assert (watched.returncode, watched.stdout) == (0, place.gpu.run(caught, 3).stdout)


def recorded(out: str) -> None:
    """A training under `gpumon record`, for its session to be explained."""
    import os
    import subprocess
    import sys
    import time

    import torch
    from torch import nn

    import gpumon_agent

    model = nn.Sequential(nn.Linear(1024, 8192), nn.ReLU(), nn.Linear(8192, 1024)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    gpumon_agent.watch(model, optimizer)
    recorder = subprocess.Popen([sys.executable, "-m", "gpumon", "record", out, str(os.getpid())])
    for step in range(400):
        batch = 64 if step < 380 else 65_536
        model(torch.zeros(batch, 1024, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)
        if step == 380:
            recorder.kill()


def test_a_recording_with_one_is_explained(place: Place, tmp_path: Path) -> None:
    file = tmp_path / "run.gpumon"
    done = subprocess.run(
        place.gpu.command(recorded, str(file)),
        env={**place.gpu.environment, **place.environment},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert "OutOfMemoryError" in done.stderr
    explained = place.gpumon("explain", "--session", file, "--json")
    assert explained.returncode == 0, explained.stderr
    told = json.loads(explained.stdout)
    assert (told["phase"], told["step"], told["verdict"]) == ("forward", 380, "oversized")
    assert told["module"] == "0"
    lines = (tmp_path / "recorded.py").read_text().splitlines()
    asked = next(n for n, line in enumerate(lines, 1) if "model(torch.zeros" in line)
    assert told["where"] == f"recorded.py:{asked}"


def test_a_ddp_bucket_of_that_size_is_named_where_ddp_makes_them() -> None:
    run = Run(parallel=wire.Parallel("ddp", 2, (25 * MIB, 40 * MIB), True, False))
    for phase, named in (("forward", ["DDP's bucket 1"]), ("optimizer", [])):
        event = wire.Oom(1, phase, 0, 9, 40 * MIB, run.total, MIB, run.total - 9 * MIB, run.total - 8 * MIB)
        rank = replace(rank_of(run, 2), oom=event)
        report = of_rank(rank)
        assert report is not None
        assert [each.tensor.name for each in report.suspects] == named


def leaks(bytes_a_step: int) -> None:
    """Keeps an output each step until memory is full."""
    import time

    import torch
    from torch import nn

    model = nn.Linear(256, 256).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cache = []
    for _ in range(1000):
        loss = model(torch.ones(8, 256, device="cuda")).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        cache.append(torch.empty(bytes_a_step, dtype=torch.uint8, device="cuda"))
        time.sleep(0.01)


def test_who_explains_it_later_is_told_of_the_leak_as_a_viewer_would_have_been(place: Place) -> None:
    done = place.train(leaks, 4 * MIB)
    assert "OutOfMemoryError" in done.stderr
    (report,) = place.reports.glob("*.json")
    explained = json.loads(place.gpumon("explain", "--last", "--json").stdout)
    assert explained["verdict"] == "leak"
    assert "held by `cache[*] in leaks()`" in explained["sentence"]
    (from_session,) = [
        json.loads(line)
        for line in place.gpumon("explain", "--session", report.with_suffix(".gpumon"), "--json").stdout.splitlines()
    ]
    assert from_session["sentence"] == explained["sentence"]
    assert place.gpumon("explain", "--last").stdout.startswith("OUT OF MEMORY: A leak: 4.00 MiB more stay allocated")
    report.with_suffix(".gpumon").unlink()  # as where the helper was killed with its container
    assert json.loads(place.gpumon("explain", "--last", "--json").stdout)["verdict"] == "capacity"
    shutil.rmtree(place.reports)  # as by a logout
    copied = json.loads(place.gpumon("explain", "--last", "--json").stdout)
    assert copied["sentence"] == explained["sentence"]


def test_what_changed_since_the_last_step_that_fitted() -> None:
    run, store = Run(kept=lambda step: 547 * MIB if step == 30 else 0), SessionStore()
    for received in run.stream(30):
        store.apply(received)
    for event in run.step_events(30):
        store.apply(run.received(event, 30))
        if isinstance(event, wire.Phase) and event.phase == wire.BETWEEN:
            break
    shapes = ((22, 512),)
    ahead = wire.Outlook(30, 0, run.time_ns(30), GIB, GIB, GIB, "backward", wire.FITS, None, 22 * 512, shapes)
    failed = wire.Oom(30, "forward", 0, run.time_ns(30), GIB, 40 * GIB, GIB, 30 * GIB, 31 * GIB)
    for said in (ahead, failed):
        store.apply(run.received(said, 30))
    rank = store.rank(run.nonce, 0)
    assert rank is not None
    report = of_rank(rank)
    assert report is not None
    batch, allocated = report.reasons[:2]
    assert batch == "The batch is 22×512; in step 29, the last that fitted, it was 8×8192."
    assert allocated == "When its forward began, 547.0 MiB more was allocated than in step 29, the last that fitted."
