"""Which processes of a launched command the agent wakes in: those that train, and no others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TRAINS = """
import torch
from torch import nn

def train(steps=2):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    before = seen()
    for _ in range(steps):
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
    return before, model
"""


def test_the_model_is_found_before_its_first_forward(commands):
    done = commands.watched(commands.script(TRAINS + "print(train()[0], '|', seen())"))
    assert done.stdout == "watched Sequential | watched Sequential\n", done.stderr
    assert done.stderr == ""


def test_a_process_that_only_imports_torch_stays_unwatched(commands):
    script = commands.script(
        "import torch, sys\nprint(seen(), [m for m in sys.modules if m.startswith(('zmq', 'msgs'))])"
    )
    assert commands.watched(script).stdout == "unwatched []\n"


def test_stop_ends_the_search_too(commands):
    script = commands.script(
        TRAINS
        + """
import gpumon_agent
init = torch.optim.Optimizer.__init__
gpumon_agent.stop()
print(torch.optim.Optimizer.__init__ is init, train()[0])
"""
    )
    assert commands.watched(script).stdout == "False unwatched\n"


def test_a_run_that_takes_a_device_is_seen_before_it_has_a_model(commands, virtual_gpu):
    script = commands.script("import torch\nprint(seen())\ntorch.cuda.init()\nprint(seen())")
    here = {"XDG_RUNTIME_DIR": commands.environment["XDG_RUNTIME_DIR"]}
    done = commands.watched(script, **{**virtual_gpu().environment, **here})
    assert done.stdout == "unwatched\nwatched \n", done.stderr


def test_every_rank_of_torchrun_is_reached_and_torchrun_itself_is_not(commands):
    script = commands.script(
        TRAINS
        + """
import os, pathlib, sys, torch.distributed as dist
dist.init_process_group("gloo")
ddp = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
ddp(torch.randn(2, 4)).sum().backward()
optimizer.step()
agent = sys.modules["gpumon_agent.registry"].REGISTRY.agent
model = next(m for m in agent.picture() if type(m).__name__ == "Model")
agent.transport.wait_ready(60)
dist.barrier()
folder = pathlib.Path(os.environ["XDG_RUNTIME_DIR"]) / "gpumon"
found = len(list(folder.glob("*.json")))
spread = model.parallel
line = f"rank {dist.get_rank()}: {spread.kind} of {spread.world_size}, {found} descriptors\\n"
os.write(1, line.encode())  # whole, beside the other rank's
dist.barrier()
dist.destroy_process_group()
"""
    )
    done = commands.watched("torchrun", "--standalone", "--nproc-per-node", "2", script)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "rank 0: ddp of 2, 2 descriptors",
        "rank 1: ddp of 2, 2 descriptors",
    ]


@pytest.mark.torch
def test_a_rank_that_fails_gives_torchruns_own_exit_code(commands):
    script = commands.script("import sys; sys.exit(3)")
    words = ["torchrun", "--standalone", "--nproc-per-node", "1", script]
    assert commands.watched(*words).returncode == commands.plain(*words).returncode == 1


def test_accelerate_launch_is_reached(commands):
    script = commands.script(
        TRAINS
        + """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
accelerator.backward(model(torch.randn(2, 4)).sum())
optimizer.step()
print(seen())
"""
    )
    done = commands.watched("accelerate", "launch", "--cpu", "--num_processes", "1", script)
    assert done.stdout == "watched Sequential\n", done.stderr


def test_spawned_children_that_train_are_watched_and_their_parent_is_not(commands):
    script = commands.script(
        TRAINS
        + """
def child(index):
    print(index, train()[0], flush=True)

if __name__ == "__main__":
    torch.multiprocessing.spawn(child, nprocs=2)
    print("parent", seen())
"""
    )
    done = commands.watched(script)
    assert sorted(done.stdout.splitlines()) == ["0 watched Sequential", "1 watched Sequential", "parent unwatched"]


def test_ranks_that_only_init_process_group_knows_are_one_job(commands):
    script = commands.script(
        TRAINS
        + """
import torch.distributed as dist

def child(index, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=index, world_size=2)
    train()
    dist.barrier()
    if index == 0:
        from gpumon.link.discovery import discover, jobs
        from time import monotonic, sleep
        end = monotonic() + 120
        while None in (found := [d.rank for job in jobs(discover())[:1] for d in job.descriptors]) or len(found) < 2:
            assert monotonic() < end, found
            sleep(0.05)
        print(found, flush=True)
    dist.barrier()

if __name__ == "__main__":
    torch.multiprocessing.spawn(child, (__file__ + ".store",), nprocs=2)
"""
    )
    done = commands.watched(script)
    assert done.stdout == "[0, 1]\n", done.stderr


def test_dataloader_workers_stay_unwatched_however_they_are_started(commands):
    script = commands.script(
        TRAINS
        + """
import warnings
warnings.simplefilter("ignore")
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, index):
        inner = nn.Sequential(nn.Linear(2, 2))
        torch.optim.SGD(inner.parameters(), 0.1)  # even one that builds an optimizer
        agent = __import__("sys").modules.get("gpumon_agent.agent")
        running = agent and agent.REGISTRY.agent
        mine = running is not None and running.pid == __import__("os").getpid()
        return int(mine)

if __name__ == "__main__":
    _, model = train()
    for context in ("fork", "spawn", "forkserver"):
        loader = torch.utils.data.DataLoader(Rows(), num_workers=1, multiprocessing_context=context)
        print(context, [int(row) for row in loader])
    print(seen())
"""
    )
    done = commands.watched(script)
    expected = ["fork [0, 0]", "spawn [0, 0]", "forkserver [0, 0]", "watched Sequential"]
    assert done.stdout.splitlines() == expected, done.stderr


def test_a_fork_of_the_training_says_nothing_and_training_goes_on(commands):
    script = commands.script(
        TRAINS
        + """
import os, sys
_, model = train()
pid = os.fork()
agent = sys.modules["gpumon_agent.registry"].REGISTRY.agent
before = agent.recorder.last_seq
if pid == 0:
    model(torch.randn(2, 4)).sum().backward()
    os._exit(int(agent.recorder.last_seq != before))
print("child", os.waitpid(pid, 0)[1])
model(torch.randn(2, 4)).sum().backward()
print("parent", agent.recorder.last_seq > before)
"""
    )
    assert commands.watched(script).stdout == "child 0\nparent True\n"


def test_pyzmq_missing_there_is_one_line_and_training_runs(commands):
    environment = commands.folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True, timeout=300)
    python = environment / "bin" / "python"
    [there] = environment.glob("lib/python3*/site-packages")
    for here in {Path(p) for p in sys.path if p.endswith("site-packages")}:
        for entry in here.iterdir():  # all that torch may need, but not what the agent needs
            if not entry.name.lower().startswith(("zmq", "pyzmq", "gpumon", "torch_gpumon", "_torch_gpumon")):
                (there / entry.name).symlink_to(entry)
    script = commands.script(TRAINS + "print(train()[0])")
    for words in ([str(python), script], ["torchrun", "--standalone", "--nproc-per-node", "2", script]):
        if words[0] == "torchrun":
            words = [str(python), "-m", "torch.distributed.run", *words[1:]]
        done = commands.watched(*words)
        assert set(done.stdout.replace("unwatched", "unwatched ").split()) == {"unwatched"}, done.stderr  # ranks glue
        ours = [line for line in done.stderr.splitlines() if line.startswith("gpumon")]
        assert len(ours) == 1
        assert "pyzmq not found" in ours[0]
