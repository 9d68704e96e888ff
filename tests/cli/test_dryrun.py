"""`gpumon dryrun`: a user's script on a device that is not there, and the verdict."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import jsonschema
import psutil
import pytest
from pty_of import in_pty

from gpumon.cli import checked
from gpumon.virtual_gpu import PROFILES

MIB = 2**20
SCHEMA = jsonschema.Draft202012Validator(
    json.loads((Path(__file__).parents[2] / "docs" / "json.schema.json").read_text(encoding="utf-8"))
)
PYTHON = os.environ.get("GPUMON_VIRTUAL_GPU_PYTHON", sys.executable)

TRAINS = """
    import itertools, sys
    import torch
    from torch import nn

    width, layers, steps = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)]).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for step in itertools.count():
        if step >= steps:
            break
        model(torch.randn(8, width, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


class Runner:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {**os.environ, "XDG_RUNTIME_DIR": str(folder)}

    def script(self, text: str) -> str:
        path = self.folder / "script.py"
        path.write_text(textwrap.dedent(text))
        return str(path)

    def command(self, *args: object) -> list[str]:
        return [PYTHON, "-m", "gpumon", "dryrun", *map(str, args)]

    def run(self, *args: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.command(*args), capture_output=True, text=True, env=self.env, timeout=300)

    def objects(self, *args: object) -> tuple[list[dict], subprocess.CompletedProcess[str]]:
        shown = self.run("--json", *args)
        found = [json.loads(line) for line in shown.stdout.splitlines()]
        for each in found:
            SCHEMA.validate(each)
        return found, shown


@pytest.fixture
def dryrun(virtual_gpu, tmp_path: Path) -> Runner:
    virtual_gpu()  # skips, or fails where it is required
    (tmp_path / "run").mkdir(mode=0o700)
    return Runner(tmp_path)


def stated(shown: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """The verdict's lines by their label."""
    lines: dict[str, str] = {}
    label = ""
    for line in shown.stdout[shown.stdout.index("\nanswer ") :].splitlines():
        label = line[:12].strip() or label
        lines[label] = f"{lines.get(label, '')} {line[14:]}".strip()
    return lines


def test_what_fits_says_so_with_the_peak_what_was_alive_and_the_margin(dryrun):
    objects, shown = dryrun.objects("--device", "1 GiB", dryrun.script(TRAINS), 1024, 8, 4)
    assert shown.returncode == 0, shown.stderr
    assert [o["type"] for o in objects if o["type"] in ("step", "goodbye", "verdict")] == [
        *["step"] * 4, "goodbye", "verdict",
    ]  # fmt: skip
    verdict = objects[-1]
    assert (verdict["fits"], verdict["ended"], verdict["exit_code"], verdict["steps"]) == (True, "finished", 0, 4)
    assert verdict["checked"] == checked.VIRTUAL_GPU
    (device,) = verdict["devices"]
    assert device["capacity"] == device["reserved"] + device["context"] + device["margin"] == 1024 * MIB
    assert device["context"] == 450 * MIB
    (peak,) = verdict["peaks"]
    steps = [o for o in objects if o["type"] == "step"]
    phases = [(p["allocated_peak"], s["step"], p["phase"]) for s in steps for p in s["phases"]]
    highest = max(figure for figure, _, _ in phases)
    assert (highest, peak["step"], peak["phase"]) in phases
    assert peak["allocated"] == highest
    assert peak["reserved"] == device["reserved"] == max(p["reserved_peak"] for s in steps for p in s["phases"])
    weights = 8 * 1024 * 1024 * 4
    assert (peak["ledger"]["weights"], peak["ledger"]["optimizer"]) == (weights, 2 * weights)


def test_what_does_not_fit_says_in_which_phase_and_what_was_asked_for(dryrun):
    shown = dryrun.run("--device", "16 GiB", "--no-screen", dryrun.script(TRAINS), 8192, 22, 3)
    assert shown.returncode == 1
    assert "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 256.00 MiB" in shown.stderr
    said = stated(shown)
    assert said["answer"].startswith("OUT OF MEMORY: it does not fit Virtual 16 GiB (16.0 GiB); ")
    assert said["failed"].startswith("step 0, optimizer, at script.py:")
    assert ": 256.0 MiB requested with 15." in said["failed"]
    assert "; Capacity: 256.00 MiB requested" in said["answer"]
    assert said["alive"].startswith("weights 5.50 GiB")


def test_a_model_too_large_to_load_does_not_fit_either(dryrun):
    objects, shown = dryrun.objects("--device", "1GiB", dryrun.script(TRAINS), 8192, 3, 1)
    assert shown.returncode == 1
    (failed,) = objects[-1]["failed"]
    assert (objects[-1]["fits"], failed["phase"], failed["requested"]) == (False, "load", 256 * MIB)
    assert objects[-1]["peaks"][0]["allocated"] == 2 * 256 * MIB


def test_an_error_that_the_script_survives_is_no_verdict(dryrun):
    script = """
        import torch
        from torch import nn

        model = nn.Linear(1024, 1024).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        for batch in (1 << 20, 8):
            try:
                model(torch.empty(batch, 1024, device="cuda")).sum().backward()
            except torch.OutOfMemoryError:
                continue
            optimizer.step()
    """
    objects, shown = dryrun.objects("--device", "2GiB", dryrun.script(script))
    assert shown.returncode == 0, shown.stderr
    assert objects[-1]["fits"] is True
    assert [failed["survived"] for failed in objects[-1]["failed"]] == [True]


@pytest.mark.parametrize(
    ("script", "code", "said"),
    [
        ("raise ValueError('no such data')", 1, "Traceback (most recent call last):"),
        ("import sys; sys.exit(7)", 7, ""),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
    ],
)
def test_a_script_that_fails_by_itself_keeps_its_words_and_leaves_the_question_open(dryrun, script, code, said):
    path = dryrun.script(script)
    shown = dryrun.run("--device", "t4", "--no-screen", path)
    alone = subprocess.run([PYTHON, path], capture_output=True, text=True, env=dryrun.env)
    assert shown.returncode == 3
    assert shown.stderr == alone.stderr
    assert said in shown.stderr
    how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
    assert stated(shown)["answer"] == "UNKNOWN: the script failed by itself, not for want of memory."
    assert stated(shown)["ended"].startswith(f"{how}, its own, after 0 steps")


def test_a_script_that_never_trains_is_told_what_it_loaded(dryrun):
    shown = dryrun.run(
        "--device", "t4", "--no-screen", dryrun.script("import torch\nx = torch.empty(1 << 28, device='cuda')")
    )
    assert shown.returncode == 3
    said = stated(shown)
    assert said["answer"] == "UNKNOWN: no training step was seen."
    assert "1.00 GiB reserved, 450.0 MiB context" in said["margin"]


def test_a_script_that_uses_no_gpu_leaves_the_question_open(dryrun):
    shown = dryrun.run("--device", "t4", "--no-screen", dryrun.script("import torch; print(torch.ones(1))"))
    assert shown.returncode == 3
    assert stated(shown)["answer"] == "UNKNOWN: the script used no GPU."


def test_what_fits_now_and_grows_will_not_fit(dryrun):
    script = TRAINS.replace("for step", "kept = []\n    for step", 1).replace(
        "optimizer.zero_grad()", "optimizer.zero_grad()\n        kept.append(torch.empty(2 << 20, device='cuda'))"
    )
    shown = dryrun.run("--device", "2GiB", "--no-screen", dryrun.script(script), 64, 1, 60)
    assert shown.returncode == 1, shown.stdout
    said = stated(shown)["answer"]
    assert said.startswith("LEAK: "), said
    assert "it will not fit Virtual 2GiB (2.00 GiB)" in said
    assert "; full in " in said


def test_after_so_many_steps_the_script_is_ended_politely(dryrun):
    script = TRAINS.replace("for step", "import atexit; atexit.register(print, 'cleaned up')\n    for step")
    objects, shown = dryrun.objects("--device", "t4", "--steps", 3, dryrun.script(script), 64, 1, "inf")
    assert shown.returncode == 0
    assert "Traceback" not in shown.stderr
    assert [o["step"] for o in objects if o["type"] == "step"] == [0, 1, 2]
    verdict = objects[-1]
    assert (verdict["fits"], verdict["ended"], verdict["exit_code"]) == (True, "steps", None)
    assert verdict["steps"] == 3  # and not one more: it waits there for its end
    goodbye = next(o for o in objects if o["type"] == "goodbye")
    assert goodbye["reason"] == "signal"  # the exit handlers ran: the agent's is one of them


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long), signal.SIGKILL]
)
def test_however_it_ends_the_script_ends_too(dryrun, number):
    command = dryrun.command("--device", "t4", "--json", dryrun.script(TRAINS), 64, 1, "inf")
    with subprocess.Popen(command, env=dryrun.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        assert run.stdout
        trains = psutil.Process(json.loads(run.stdout.readline())["pid"])
        if number == signal.SIGKILL:
            trains.suspend()  # the kernel kills it all the same
        run.send_signal(number)
        out, err = run.communicate(timeout=300)
        assert run.returncode == (-9 if number == signal.SIGKILL else 128 + number)
        assert "Traceback" not in err
        if number == signal.SIGINT:
            assert json.loads(out.splitlines()[-1])["type"] == "verdict"
    deadline = time.monotonic() + 120
    while trains.is_running() and trains.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


RANKS = """
    import os, sys, torch
    from torch import distributed, nn

    distributed.init_process_group("nccl")
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    model = nn.parallel.DistributedDataParallel(nn.Linear(2048, 2048).cuda(), device_ids=[rank])
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(int(sys.argv[1])):
        model(torch.randn(8, 2048, device="cuda")).sum().backward()
        optimizer.step()
    distributed.destroy_process_group()
"""
TORCHRUN = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]


def test_two_ranks_under_torchrun_have_a_device_each(dryrun):
    objects, shown = dryrun.objects("--device", "t4", "--devices", 2, *TORCHRUN, dryrun.script(RANKS), 3)
    assert shown.returncode == 0, shown.stderr
    verdict = objects[-1]
    assert verdict["fits"] is True
    assert [(peak["rank"], peak["device"]) for peak in verdict["peaks"]] == [(0, 0), (1, 1)]
    assert [device["context"] for device in verdict["devices"]] == [450 * MIB] * 2
    assert verdict["steps"] == 3


UNEVEN = RANKS.replace(
    "model = nn.parallel.DistributedDataParallel(nn.Linear(2048, 2048).cuda(), device_ids=[rank])",
    "import time; time.sleep(3 * rank)\n    {}\n    model = nn.Linear(2048, 2048).cuda()",
).replace("distributed.destroy_process_group()", "time.sleep(3 - 3 * rank); distributed.destroy_process_group()")


def test_a_slow_rank_is_waited_for_and_its_memory_counts(dryrun):
    """Rank 0 has done its steps, and waits, long before rank 1 needs more than its device has."""
    script = dryrun.script(UNEVEN.format("torch.empty(rank << 34, dtype=torch.uint8, device='cuda')"))
    objects, shown = dryrun.objects("--device", "t4", "--devices", 2, "--steps", 2, *TORCHRUN, script, 2)
    verdict = objects[-1]
    assert (verdict["fits"], shown.returncode) == (False, 1), shown.stderr
    assert [failed["rank"] for failed in verdict["failed"]] == [1]


def test_a_rank_that_closed_no_step_leaves_the_question_open(dryrun):
    script = dryrun.script(UNEVEN.format("sys.exit() if rank else None"))
    shown = dryrun.run("--device", "t4", "--devices", 2, "--no-screen", *TORCHRUN, script, 2)
    assert (stated(shown)["answer"], shown.returncode) == ("UNKNOWN: rank 1 closed no step.", 3), shown.stdout


MISSED = RANKS.replace(
    "for _ in range(int(sys.argv[1])):", "import time\n    for step in range(int(sys.argv[1])):"
).replace("optimizer.step()", "optimizer.step(); distributed.barrier()\n        if step and rank: {}")


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("os._exit(0)", "rank 1 ended while other ranks waited for it, and they went on without it"),
        ("time.sleep(10)", "rank 1 did not reach a collective within 3 s, and the others went on without it"),
    ],
)
def test_a_rank_that_does_not_come_to_a_collective_is_named_and_nobody_hangs(dryrun, does, said):
    script = dryrun.script(MISSED.format(does))
    began = time.monotonic()
    shown = dryrun.run("--device", "t4", "--devices", 2, "--wait", 3, "--no-screen", *TORCHRUN, script, 4)
    assert (stated(shown)["answer"], shown.returncode) == (f"UNKNOWN: {said}.", 3), shown.stdout + shown.stderr
    assert time.monotonic() - began < 150


def test_objects_are_sent_between_the_ranks_of_a_dry_run(dryrun):
    sends = RANKS.replace(
        "for _ in range",
        """found = [None, None]
    distributed.all_gather_object(found, "x" * 100 * rank)
    assert found == ["", "x" * 100], found
    for _ in range""",
    )
    shown = dryrun.run("--device", "t4", "--devices", 2, "--no-screen", *TORCHRUN, dryrun.script(sends), 3)
    assert (stated(shown)["answer"].split()[0], shown.returncode) == ("OK:", 0), shown.stdout + shown.stderr


def test_a_dry_run_killed_hard_leaves_no_rank(dryrun):
    command = dryrun.command("--device", "t4", "--devices", 2, "--json", *TORCHRUN, dryrun.script(RANKS), 10**9)
    with subprocess.Popen(command, env=dryrun.env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as run:
        assert run.stdout
        ranks: set[int] = set()
        while len(ranks) < 2:
            ranks.add(json.loads(run.stdout.readline())["pid"])
        below = psutil.Process(run.pid).children(recursive=True)
        assert ranks < {process.pid for process in below}
        psutil.Process(min(ranks)).suspend()
        run.kill()
    _, left = psutil.wait_procs(below, timeout=120)
    assert not [process for process in left if process.status() != psutil.STATUS_ZOMBIE]


def test_what_torch_has_pinned_of_the_host_is_told_where_it_tells(dryrun, tmp_path):
    script = """
        import pathlib, sys, time
        import torch
        pathlib.Path(sys.argv[1]).write_text(str(hasattr(torch._C, "_cuda_hostMemoryStats")))
        batches = [torch.empty(3 << 20, dtype=torch.uint8, pin_memory=True)]  # torch takes 4 MiB for it
        model = torch.nn.Linear(8, 8).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(80):
            time.sleep(0.05)
            model(torch.randn(8, 8, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    """
    tells = tmp_path / "tells"
    objects, _ = dryrun.objects("--device", "t4", dryrun.script(script), tells)
    last = [each for each in objects if each["type"] == "host"][-1]
    assert last["pinned"] == (4 << 20 if tells.read_text() == "True" else None)


def test_a_wrong_name_is_told_all_the_right_ones(dryrun):
    shown = dryrun.run("--device", "abacus", "--no-screen", dryrun.script(""))
    assert shown.returncode == 2
    assert all(name in shown.stderr for name in PROFILES)
    for wrong in (("--device", "16"), ("--device", "t4", "--context", "much")):
        shown = dryrun.run(*wrong, "--no-screen", dryrun.script(""))
        assert (shown.returncode, "Traceback" in shown.stderr) == (2, False)


def test_a_missing_script_is_said_before_anything_starts(dryrun):
    shown = dryrun.run("--device", "t4", "--no-screen", "nosuch.py")
    assert shown.returncode == 2
    assert "nosuch.py: no such file" in shown.stderr


def test_a_torch_without_cuda_is_one_sentence(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.13.0+cpu'\ncuda = None\n")
    runner = Runner(tmp_path)
    runner.env["PYTHONPATH"] = str(tmp_path)
    shown = runner.run("--device", "t4", "--no-screen", runner.script(""))
    assert shown.returncode == 3
    assert "needs a PyTorch built for CUDA" in shown.stderr
    assert len(shown.stderr.splitlines()) == 1


def test_without_a_terminal_the_script_s_own_output_and_the_verdict_are_printed(dryrun):
    script = dryrun.script(TRAINS.replace("optimizer.step()", "optimizer.step(); print('own', step)"))
    shown = dryrun.run("--device", "t4", script, 64, 1, 2)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("own 0\nown 1\n\nanswer        OK: it fits ")
    assert shown.stderr == ""
    plain = dryrun.run("--device", "t4", "--ascii", script, 64, 1, 2)
    assert (plain.returncode, plain.stdout.isascii()) == (0, True), plain.stdout


def test_a_dumb_terminal_is_none(dryrun):
    command = dryrun.command("--device", "t4", dryrun.script(TRAINS), 64, 1, 2)
    code, _, shown = in_pty(command, {**dryrun.env, "TERM": "dumb"})
    assert (code, "\x1b" in shown, "answer        OK: it fits " in shown) == (0, False, True), shown


def test_the_build_of_the_virtual_gpu_is_told_on_a_terminal_alone(dryrun):
    command = dryrun.command("--device", "t4", "--no-screen", dryrun.script(TRAINS), 64, 1, 2)
    empty = {"TERM": "xterm", "XDG_CACHE_HOME": str(dryrun.folder / "cache")}
    code, out, shown = in_pty(command, {**dryrun.env, **empty}, stdout=subprocess.PIPE)
    assert (code, "building" in out) == (0, False), out
    assert shown == "\r\x1b[2Kbuilding the virtual GPU …\r\x1b[2K"


def test_an_option_that_does_not_exist_is_answered_by_gpumon(tmp_path):
    runner = Runner(tmp_path)
    shown = runner.run("--device", "t4", "--no-scren", runner.script(""))
    assert shown.returncode == 2
    assert shown.stderr.endswith("Error: No such option '--no-scren'. Did you mean '--no-screen'?\n")
