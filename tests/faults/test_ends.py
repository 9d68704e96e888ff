"""Every way in which a training process can end, and what it becomes: its code and its words stay its own."""

from __future__ import annotations

import os
import signal
import time

import pytest
from faults.training import Begin, Same

pytestmark = pytest.mark.torch
ENDINGS = {
    "returns": "",
    "exit code 0": "sys.exit(0)",
    "exit code 3": "sys.exit(3)",
    "exit code 255": "sys.exit(255)",
    "exit code -1": "sys.exit(-1)",
    "exit with words": "sys.exit('no data')",
    "exit in a handler": "signal.signal(signal.SIGALRM, lambda *_: sys.exit(7)); signal.alarm(1); time.sleep(30)",
    "os._exit": "os._exit(5)",
    "abort": "os.abort()",
    "segfault": "ctypes.string_at(0)",
    "SIGKILL": "os.kill(os.getpid(), signal.SIGKILL)",
    "SIGTERM": "os.kill(os.getpid(), signal.SIGTERM)",
    "SIGINT": "os.kill(os.getpid(), signal.SIGINT); time.sleep(30)",
    "SIGQUIT": "os.kill(os.getpid(), signal.SIGQUIT)",
    "SIGXCPU": "os.kill(os.getpid(), signal.SIGXCPU)",
    "exception": "raise ValueError('mine')",
    "exception group of a thread": "threading.Thread(target=lambda: 1 / 0).start()",
    "MemoryError": "raise MemoryError",
    "exec": "os.execv('/bin/echo', ['echo', 'another program'])",
    "exec that fails": "os.execv('/nowhere', ['nowhere'])",
    "atexit that raises": "import atexit; atexit.register(lambda: 1 / 0)",
    "atexit that trains": "import atexit; atexit.register(train)",
    "atexit that ends": "import atexit; atexit.register(os._exit, 9)",
    "a thread that trains on": "threading.Thread(target=lambda: (time.sleep(0.3), train())).start()",
    "a daemon that steps on": """
def steps_on():
    while True: model(torch.ones(2, 16)).sum().backward()
threading.Thread(target=steps_on, daemon=True).start()
time.sleep(0.1)""",
    "an object that trains as it goes": """
class Last:
    def __del__(self): os.write(1, b"gone")
last = Last(); last.itself = last
""",
    "modules that are taken apart": "del sys.modules['os'], sys.modules['time']",
    "streams that are closed": "sys.stdout.close(); os.close(2)",
    "no builtins left": "import builtins; builtins.open = None",
}


ORDERS = {
    "its function was registered before ours": ("atexit.register(train)\nwatch()", ""),
    "its function was registered after ours": ("watch()", "atexit.register(train)"),
    "a thread outlives the main one": (
        "watch()",
        "threading.Thread(target=lambda: (threading.main_thread().join(), train(20))).start()",
    ),
    "as modules are taken apart": (  # torch itself cannot train any more then
        "watch()",
        "class Last:\n    def __del__(self, write=os.write): write(1, b'trained')\nlast = Last(); last.itself = last",
    ),
}


@pytest.mark.parametrize("how", ORDERS)
def test_an_order_in_which_the_interpreter_ends(same: Same, how: str) -> None:
    """The training trains on as it ends: before, after, and beside what the agent does then."""
    before, after = ORDERS[how]
    ran = same(f"{before}\ntrain()\n{after}", whole=True)
    assert ran.out.count("trained") == 2, ran


@pytest.mark.parametrize("how", ENDINGS)
def test_an_end(same: Same, how: str) -> None:
    same(f"watch()\ntrain()\n{ENDINGS[how]}", whole=True)


@pytest.mark.parametrize("how", ["exit code 3", "SIGKILL", "os._exit", "exec"])
def test_an_end_at_once(same: Same, how: str) -> None:
    """While the helper starts."""
    same(f"train()\nwatch(awaited=False)\n{ENDINGS[how]}", whole=True)


@pytest.mark.parametrize("times", [40, pytest.param(100, marks=pytest.mark.long)])
def test_killed_again_and_again(begin: Begin, times: int) -> None:
    """At any moment of its first 0.2 s; no helper is left, which `begin` checks."""
    for turn in range(times):
        training = begin("train()\nwatch(awaited=False)\nprint('pid=%d' % os.getpid(), flush=True)\ntrain(10**6)")
        pid = training.asked("pid")
        time.sleep(0.2 * turn / times)
        os.kill(pid, signal.SIGKILL)
        assert training.result().code == -signal.SIGKILL


def test_its_whole_group_is_interrupted(begin: Begin) -> None:
    """Ctrl-C in a terminal, `timeout`, `kill -- -PGID`."""
    script = """
os.setpgid(0, 0)
watch()
print("pid=%d" % os.getpid(), flush=True)
try:
    time.sleep(60)
except KeyboardInterrupt:
    train(50)
    print("helper", transport()._answer.ready, os.path.exists("/proc/%d" % helper()))
"""
    training = begin(script)
    os.killpg(training.asked("pid"), signal.SIGINT)
    ran = training.result()
    assert (ran.code, ran.err) == (0, "")
    assert "helper True True" in ran.out


FORKS = {
    "fork": "pid = os.fork()\nif pid == 0:\n    train(2); os._exit(3)\nprint(os.waitpid(pid, 0)[1])",
    "fork that exits as Python does": """
pid = os.fork()
if pid == 0:
    train(2); sys.exit(4)
print(os.waitpid(pid, 0)[1])""",
    "fork that is watched anew": """
pid = os.fork()
if pid == 0:
    watch(); train(2); sys.exit(4)
print(os.waitpid(pid, 0)[1])""",
    "fork of a fork": """
pid = os.fork()
if pid == 0:
    inner = os.fork()
    if inner == 0:
        train(1); os._exit(0)
    os.waitpid(inner, 0); train(1); os._exit(0)
print(os.waitpid(pid, 0)[1])""",
    "the parent ends first": """
r, w = os.pipe()
if os.fork():
    os.close(w); os.read(r, 1); os._exit(0)  # as soon as no other process has `w`
train(5)""",
    "daemon": """
r, w = os.pipe()
if os.fork():
    os.close(w); os.wait(); os.read(r, 1); os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
train(5)
time.sleep(0.2)""",
    "vfork and exec": "import subprocess; print(subprocess.run(['/bin/echo', 'x'], capture_output=True))",
    "multiprocessing": """
import multiprocessing
child = multiprocessing.get_context("fork").Process(target=train, args=(2,))
child.start(); child.join(); print(child.exitcode)""",
    "a pool": """
import multiprocessing
with multiprocessing.get_context("fork").Pool(2) as pool: print(pool.map(abs, range(9)))""",
    "workers of a loader": """
data = torch.utils.data.DataLoader(list(range(8)), num_workers=2)
print([int(each) for each in data])""",
    "fork in a thread": """
def forks():
    pid = os.fork()
    if pid == 0: os._exit(6)
    print(os.waitpid(pid, 0)[1])
t = threading.Thread(target=forks); t.start(); t.join()""",
    "os.wait in a loop": """
for code in range(5):
    if os.fork() == 0: os._exit(code)
codes = []
try:
    while True: codes.append(os.wait()[1])
except ChildProcessError: print("none is left", sorted(codes))""",
}


@pytest.mark.parametrize("how", FORKS)
def test_a_fork(same: Same, how: str) -> None:
    same(f"watch()\ntrain()\n{FORKS[how]}\ntrain()", whole="sys.exit" in FORKS[how])


@pytest.mark.parametrize("times", [300, pytest.param(1000, marks=pytest.mark.long)])
def test_fork_after_fork(same: Same, times: int) -> None:
    """None leaves a descriptor."""
    same(
        f"""
watch()
train()
resource.setrlimit(resource.RLIMIT_NOFILE, (200, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
for turn in range({times}):
    pid = os.fork()
    if pid == 0:
        os._exit(turn % 7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == turn % 7
    if not turn % 100:
        train(1)
"""
    )


@pytest.mark.parametrize("steps", ["watched twice", "two models", "stopped and begun", "stopped twice"])
def test_two_agents(same: Same, steps: str) -> None:
    text = {
        "watched twice": "watch(); watch(); train()",
        "two models": "watch()\nother = torch.nn.Linear(2, 2)\nif WATCHED: gpumon_agent.watch(other)\ntrain()",
        "stopped and begun": "for _ in range(5):\n    watch(); train()\n    if WATCHED: gpumon_agent.stop()\ntrain()",
        "stopped twice": "watch(); train()\nif WATCHED: gpumon_agent.stop(); gpumon_agent.stop()\ntrain()",
    }
    same(text[steps], whole=True)


@pytest.mark.parametrize("ranks", [8, pytest.param(64, marks=pytest.mark.long)])
def test_many_ranks(same: Same, ranks: int) -> None:
    """Of one job, on one machine: forked ones, each with an agent and a helper of its own."""
    ran = same(
        f"""
children = []
for rank in range({ranks}):
    pid = os.fork()
    if pid == 0:
        os.environ.update(RANK=str(rank), WORLD_SIZE="{ranks}", LOCAL_RANK=str(rank))
        sys.stdout = open(os.devnull, "w")
        watch(awaited=False)
        train(20)
        time.sleep(1)
        train(20)
        sys.exit(0)
    children.append(pid)
print([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children])
train()
"""
    )
    assert ran.own == []
