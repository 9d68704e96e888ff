"""What a signal handler raises while the agent's code runs gets out, with the traceback of an unwatched run."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import gpumon_agent
from gpumon_agent.guard import tolerate

TRAINS = """
import ctypes, functools, linecache, os, random, signal, sys, threading, time, traceback
import torch

torch.set_num_threads(1)
random.seed(1)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.ones(2, 4)

def step():
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

class Late(Exception):
    pass

def shown(error):
    "Whether its traceback, or that of an exception before it, shows a file of ours."
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return text if "gpumon_agent" in text or "During handling" in text else None

def healed():
    "A signal may have left torch's own switches half way, watched or not."
    torch.set_grad_enabled(True)
    optimizer.zero_grad()

if os.environ.get("WATCHED"):
    import gpumon_agent
    gpumon_agent.watch(model, optimizer)
for _ in range(10):
    step()
"""
BY_TIMER = """
raised = caught = 0
def handler(*_):
    global raised
    raised += 1
    raise Late(raised)
signal.signal(signal.SIGALRM, handler)
while raised < 2000:
    try:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(2e-5, 2e-3))
        while True:
            step()
    except Late as error:
        caught += 1
        healed()
        if shown(error):
            print(shown(error))
            break
print(raised == caught)
"""
EVERY_LINE = """
HANDLERS = {}
def handler(kind):
    HANDLERS[kind.__name__] = kind
    return kind

@handler
def plain(number, frame):
    raise Late("plain")

@handler
def deeper(number, frame):
    def time_is_over():
        raise TimeoutError("deeper")
    time_is_over()

@handler
def forgetful(number, frame):
    del number, frame
    raise RuntimeError("forgetful")

@handler
def once(number, frame):
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    raise KeyError("once")

class Limit:
    def __call__(self, *arguments):
        raise OSError("callable")
    def method(self, number, frame):
        raise Late("method")
    def other(self, more, number, frame):
        raise Late("partial")

HANDLERS["callable"] = Limit()
HANDLERS["method"] = Limit().method
HANDLERS["partial"] = functools.partial(Limit().other, 1)
HANDLERS["interrupt"] = signal.default_int_handler
HANDLERS["exit"] = lambda number, frame: sys.exit(3)

FOLDER = os.path.dirname(gpumon_agent.__file__)
left = 0
def tracer(frame, event, argument):
    return in_ours if frame.f_code.co_filename.startswith(FOLDER) else None

def in_ours(frame, event, argument):
    global left
    if event == "line" and linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip() != "try:":
        left -= 1  # (the interpreter runs no handler at a bare `try:`)
        if not left:
            signal.raise_signal(signal.SIGUSR1)
    return in_ours

def lines(at):
    "How many lines of ours two steps ran, until the signal came in that one."
    global left
    left = at
    sys.settrace(tracer)
    try:
        step()
        step()
    finally:
        sys.settrace(None)
    return at - left

total = lines(10**9)
kinds = list(HANDLERS.items())
tried = lost = 0
for at in range(1, total, max(1, total // int(sys.argv[1]))):
    name, kind = kinds[tried % len(kinds)]
    signal.signal(signal.SIGUSR1, kind)
    tried += 1
    try:
        if lines(at) == at:
            lost += 1
            print("lost", name, at)
    except BaseException as error:
        if shown(error):
            print(name, at, shown(error))
    healed()
    for _ in range(3):
        step()
print(tried > 100, lost)
from gpumon_agent import agent, guard
print(guard.guard.failures, agent.REGISTRY.agent.phases._thread.busy)
"""
ASYNCHRONOUS = """
class Stopped(Exception):
    def __init__(self, text="stopped"):
        super().__init__(text)

main = threading.get_ident()
raised = caught = 0
going = threading.Event()
def stop():
    global raised
    for kind in (Stopped, TimeoutError) * 200:
        going.wait()
        going.clear()
        time.sleep(random.uniform(0, 1e-3))
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main), ctypes.py_object(kind))
        raised += 1
stopper = threading.Thread(target=stop)
stopper.start()
while caught < 400:
    try:
        going.set()
        end = time.monotonic() + 20
        while time.monotonic() < end:
            step()
        from gpumon_agent.guard import guard
        print("lost one", raised, guard.failures)
        break
    except (Stopped, TimeoutError) as error:
        caught += 1
        healed()
        if shown(error):
            print(shown(error))
print(raised == caught)
os._exit(0)
"""


def ran(script: str, folder: Path, *arguments: object, watched: bool = True) -> subprocess.CompletedProcess[str]:
    path = folder / "script.py"
    path.write_text(TRAINS + script)
    return subprocess.run(
        [sys.executable, str(path), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env={
            **os.environ,
            "XDG_RUNTIME_DIR": str(folder),
            "OMP_NUM_THREADS": "1",
            "GPUMON_GOVERNOR": "off",
            "WATCHED": "1" if watched else "",
        },
    )


@pytest.mark.parametrize("watched", [False, True])
def test_every_exception_of_a_timer_s_handler_is_caught_by_the_loop(tmp_path: Path, watched: bool) -> None:
    done = ran(BY_TIMER, tmp_path, watched=watched)
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_a_handler_may_raise_at_any_line_and_the_agent_goes_on(tmp_path: Path) -> None:
    done = ran(EVERY_LINE, tmp_path, 300)
    assert (done.stdout, done.stderr) == ("True 0\n{} False\n", "")


@pytest.mark.parametrize("watched", [False, True])
def test_an_exception_that_another_thread_sets_is_caught_by_the_loop(tmp_path: Path, watched: bool) -> None:
    done = ran(ASYNCHRONOUS, tmp_path, watched=watched)
    assert (done.stdout, done.stderr) == ("True\n", "")


FOLDER = Path(gpumon_agent.__file__).parent
IN_THE_HELPER = tuple(f"transport/{name}.py" for name in ("auth", "control", "helper", "process", "publisher"))
NOT_THE_TRAINING = (
    *IN_THE_HELPER,
    "debug_server/page.py",
    "endpoint.py",
    "oom/last_known.py",
    "shim/",
    "wire/codec.py",
    "__main__.py",
)
"""Of which the helper, a viewer, torch's debug server or the launcher runs all, or all that catches something."""
OURS = {"StopIteration", "TooLarge", "NotOurs", "blocks.TooDear"}
READ_BY_VIEWERS = {"report_file.load"}


def test_whatever_the_training_thread_catches_it_asks_whose_it_is() -> None:
    """A handler may raise a RuntimeError at the very line that is expected to raise one."""
    silent = []
    for path in sorted(FOLDER.rglob("*.py")):
        place = path.relative_to(FOLDER).as_posix()
        if place.startswith(NOT_THE_TRAINING):
            continue
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef) and f"{path.stem}.{function.name}" not in READ_BY_VIEWERS:
                handlers = (each for each in ast.walk(function) if isinstance(each, ast.ExceptHandler))
                silent += [
                    f"{place}:{handler.lineno}"
                    for handler in handlers
                    if not asks(handler) and (handler.type is None or ast.unparse(handler.type) not in OURS)
                ]
                calls = (each for each in ast.walk(function) if isinstance(each, ast.Call))
                silent += [f"{place}:{call.lineno}" for call in calls if ast.unparse(call.func).endswith("suppress")]
    assert not silent


def asks(handler: ast.ExceptHandler) -> bool:
    return any(
        isinstance(node, ast.Raise) or (isinstance(node, ast.Name) and node.id in ("pass_on", "is_the_users"))
        for statement in handler.body
        for node in ast.walk(statement)
    )


def test_what_is_tolerated_is_never_a_handlers() -> None:
    def late(*_: object) -> None:
        raise TimeoutError("the user's")

    before = signal.signal(signal.SIGUSR1, late)
    try:
        with pytest.raises(TimeoutError, match="the user's"), tolerate(OSError):
            signal.raise_signal(signal.SIGUSR1)
        with tolerate(OSError):
            raise TimeoutError("ours")
    finally:
        signal.signal(signal.SIGUSR1, before)
