"""Interpreters that people tune, trace, or start in unusual ways."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from faults.training import PRELUDE, Same

pytestmark = pytest.mark.torch
SETTINGS = {
    "no garbage collection": "import gc; gc.disable()",
    "frozen objects": "import gc; gc.collect(); gc.freeze()",
    "collected all the time": "import gc; gc.set_threshold(1, 1, 1)",
    "traced": "sys.settrace(lambda *_: None)",
    "profiled": "sys.setprofile(lambda *_: None)",
    "memory traced": "import tracemalloc; tracemalloc.start(10)",
    "faults told": "import faulthandler; faulthandler.enable(open(os.devnull, 'w'))",
    "switched often": "sys.setswitchinterval(1e-6); threading.Thread(target=time.sleep, args=(2,)).start()",
    "audited": "sys.addaudithook(lambda *_: None)",
    "warnings are errors": "import warnings; warnings.simplefilter('error')",
    "signals come all the time": "signal.signal(signal.SIGVTALRM, lambda *_: None); signal.setitimer(1, 0.001, 0.001)",
    "signals are blocked": "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())",
    "SIGCHLD is ignored": "signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
    "SIGPIPE ends": "signal.signal(signal.SIGPIPE, signal.SIG_DFL)",
    "a subreaper": "ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)",
    "one core": "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})",
    "lowest priority": "os.nice(19)",
    "no new privileges": "ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)",
    "not dumpable": "ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)",
    "no environment": "for name in set(os.environ) - {'HELPERS'}: del os.environ[name]",
    "another name": "ctypes.CDLL(None).prctl(15, b'my train: [1]', 0, 0, 0)",
    "memory locked": "ctypes.CDLL(None).mlockall(1)",
    "time is odd": "time.time = lambda: -1.0",
    "random is seeded": "import random; random.seed(0); os.urandom = lambda n: bytes(n)",
    "streams are none": "kept = sys.stdout; sys.stderr = sys.stdin = None",
    "encoding is ASCII": "sys.stdout.reconfigure(encoding='ascii'); sys.argv = ['tr\\xe4in.py']",
    "argv is empty": "sys.argv = []",
    "many threads": "[threading.Thread(target=time.sleep, args=(3,), daemon=True).start() for _ in range(200)]",
    "another folder": "os.chdir('/')",
    "another root": "if os.geteuid() == 0: os.chroot('/')",
    "another user": "os.setgroups([]) if os.geteuid() == 0 else 0\nif os.geteuid() == 0: os.setresuid(0, 0, 0)",
}


@pytest.mark.parametrize("what", SETTINGS)
def test_an_interpreter(same: Same, what: str) -> None:
    same(f"import gpumon_agent.transport.trainer\n{SETTINGS[what]}\nwatch()\ntrain(20)\nsignal.setitimer(1, 0)")


STEPPED = """
ahead = 0
real = {name: getattr(time, name) for name in ("time", "monotonic", "perf_counter")}

def stepped(name, unit):
    return lambda: type(unit)((real[name]() + ahead) * unit)

clocks = {id(getattr(time, name)): stepped(name, 1.0) for name in real}
clocks |= {id(getattr(time, f"{name}_ns")): stepped(name, 10**9) for name in real}
for module in list(sys.modules.values()):
    for name, value in list(vars(module).items()):
        if id(value) in clocks and value is not real.get(name):
            setattr(module, name, clocks[id(value)])
watch()
train(5)
for seconds in (STEPS):
    ahead += seconds
    train(10)
"""
"""All clocks that Python code reads, as libraries for tests do it: in each module that imported one."""


@pytest.mark.parametrize("steps", ["3600,", "-3600,", "-1e9, 2e9", "0.5, -0.4, -10, 1e6, -1e6"])
def test_the_clock_is_stepped(same: Same, steps: str) -> None:
    same(STEPPED.replace("STEPS", steps))


STARTS = {
    "dev mode": ["-X", "dev"],
    "dev mode, warnings are errors": ["-X", "dev", "-W", "error"],
    "optimized": ["-O"],
    "without docstrings": ["-OO"],
    "isolated": ["-I"],
    "no user site": ["-s", "-E"],
    "unbuffered": ["-u"],
    "no bytecode": ["-B"],
    "import times": ["-X", "frozen_modules=off"],
    "bytes are not text": ["-bb"],
}


OF_ANOTHER = ("dev mode", "optimized", "no user site")
"""What another start does, too."""


@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=pytest.mark.long if how in OF_ANOTHER else ()) for how in STARTS]
)
def test_a_start(how: str, tmp_path: Path) -> None:
    said = []
    for watched in "01":
        script = tmp_path / "train.py"
        script.write_text("import warnings\n" + PRELUDE + "watch()\ntrain(10)")
        helpers = tmp_path / watched
        helpers.mkdir()
        environment = {**os.environ, "WATCHED": watched, "HELPERS": str(helpers)}
        ran = subprocess.run(
            [sys.executable, *STARTS[how], str(script)], env=environment, capture_output=True, text=True, timeout=300
        )
        said.append((ran.returncode, ran.stdout, ran.stderr))
    bare, watched_ = said
    assert bare[0] == 0, bare
    assert watched_ == bare


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PYTHONMALLOC", "debug"), ("MALLOC_PERTURB_", "165"), ("PYTHONHASHSEED", "0"), ("PYTHONUTF8", "0"),
        ("PYTHONASYNCIODEBUG", "1"), ("LC_ALL", "C"), ("LD_BIND_NOW", "1"), ("PYTHONNODEBUGRANGES", "1"),
    ],
)  # fmt: skip
def test_a_variable(same: Same, name: str, value: str) -> None:
    assert same("watch()\ntrain(10)", **{name: value}).own == []
