"""A signal handler raises wherever the interpreter runs one in the trainer's end: the next boundary is as any other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
RAISES = """
import atexit, dis, linecache, os, signal, sys, time
from trains import Trains
import gpumon_agent
from gpumon_agent import wire
from gpumon_agent.transport import messages
from gpumon_agent import endpoint
from gpumon_agent.transport.memory import ANSWER, CALLED
from gpumon_agent.transport.pages import Pages

class Late(Exception):
    pass

FOLDER = os.path.dirname(gpumon_agent.__file__)
NOT = ("transport/spawn.py", "wire/masking.py", "endpoint.py")  # test_spawn.py does the first
RUNS_HANDLERS = ("CALL", "RESUME", "JUMP_BACKWARD", "JUMP_ABSOLUTE")  # of the interpreter: after these
left = 0
after = {}

def places(code):
    "Where an exception of a handler comes: at the instruction after a call, a jump back, a function's beginning."
    if code not in after:
        known = list(dis.get_instructions(code))
        after[code] = {b.offset for a, b in zip(known, known[1:]) if a.opname.startswith(RUNS_HANDLERS)}
    return after[code]

def tracer(frame, event, argument):
    name = frame.f_code.co_filename
    if not name.startswith(FOLDER) or name.endswith(NOT):
        return None
    frame.f_trace_opcodes, frame.f_trace_lines = True, False
    return step

def step(frame, event, argument):
    global left
    if event == "opcode" and frame.f_lasti in places(frame.f_code):
        left -= 1
        if not left:
            line = linecache.getline(name := frame.f_code.co_filename, frame.f_lineno).strip()
            where.append(f"{os.path.basename(name)}:{frame.f_lineno}: {line}")
            raise Late
    return step

where = []

def until(at, call):
    "Whether a handler raised at that place, and its exception came out."
    global left
    left = at
    sys.settrace(tracer)
    try:
        call()
    except Late:
        return True
    finally:
        sys.settrace(None)
    assert left > 0, ("lost", where[-1])
    return False

def opened():
    return sorted(os.listdir("/proc/self/fd"))

def between():
    "Whether it came while a new memory was in nobody's hands: a call returned it, or passed it on."
    returns = ("memory = Memory.create()", "memory = old.copied()", ": try:")  # the last: `_begin` begins
    return where[-1].startswith("memory.py") or any(each in where[-1] for each in returns)

def told(trains, number):
    "What the helper, which is stopped, would have written."
    request = wire.Request(wire.CENSUS, trains.descriptor.nonce)
    answer = messages.FromHelper(True, requests=((number, request),))
    Pages(trains.transport._memory, ANSWER).write(messages.encode(answer))
    trains.transport._memory.words[CALLED] = number

def started():
    trains = Trains(modules=20)
    trains.transport.start()
    return trains

def kill(trains):
    try:
        os.kill(trains.transport._helper, signal.SIGKILL)
    except ProcessLookupError:
        pass

def is_well(trains, number):
    "Events go out and requests come in."
    ring = trains.transport._events
    before = ring.number
    told(trains, number)
    taken = len(trains.taken)
    trains.steps(2)
    assert trains.transport.running and ring.number >= before + 8, where[-1]
    assert len(trains.taken) == taken + 1, where[-1]
    for _ in range(50):
        trains.transport.flush()
    assert not trains.transport._waiting, where[-1]

"""
WORKS = """
trains = started()
assert trains.transport.wait_ready(60)
os.kill(trains.transport._helper, signal.SIGSTOP)
atexit.register(kill, trains)  # it would stay for ever
memory = trains.transport._memory
from gpumon_agent.transport.ring import LongReader
reader = LongReader(memory)

def kinds():
    "Of what is described since the last call."
    events = [each for kind, raw in reader.take() if kind == messages.LONG for each in messages.decode_events(raw)]
    return [wire.kind(bytes(each)) for each in events]

said = False

def work():
    global said
    trains.transport.say(trains.picture())
    said = True
    trains.transport.announce(trains.descriptor)
    trains.transport.write_file([b"piece"], 1, 1)
    for _ in range(3):
        trains.steps(1)

for _ in range(50): trains.transport.flush()
at, number = 0, 0
while True:
    at, number = at + 1, number + 2
    kinds()
    said = False
    told(trains, number)
    raised = until(at, work)
    is_well(trains, number + 1)
    described = kinds()
    if not raised:
        break
    assert not said or ("hello" in described and described.count("module") >= 20), (where[-1], described)
kill(trains)
print(at > 300 or at)
"""
STARTS = """
import gc
Trains().transport.start()  # what is made once
before = opened()
at = 0
while True:
    at += 1
    trains = Trains(modules=3)
    raised = until(at, trains.transport.start)
    assert opened() == before or between(), where[-1]
    before = opened()
    if trains.transport.running:
        trains.steps(1)
        trains.transport.close(exits=False)
    trains.steps(1)
    trains.transport.close(exits=False)
    if trains.transport._helper:
        kill(trains)
    if not raised:
        break
try:
    print(os.wait())
except ChildProcessError:
    print(at > 100 or at)
"""
RESTARTS = """
from gpumon_agent.transport import trainer
trainer._SILENT_NS = 0
before = opened()
at = 0
while True:
    at += 3  # every third place: each takes two helpers
    trains = started()
    transport = trains.transport
    kill(trains)
    while endpoint.start_time(transport._helper) is not None:
        time.sleep(0.001)
    raised = until(at, transport.flush)
    old = transport._helper
    trains.steps(3)  # a handler's exception costs one look at most
    assert transport.running and endpoint.start_time(transport._helper), (at, where[-1])
    assert opened() == before or between(), where[-1]
    before = opened()
    kill(trains)
    transport.close(exits=False)
    if not raised:
        break
print(at > 100 or at)
"""
CLOSES = """
before = opened()
at = 0
while True:
    at += 1
    trains = started()
    kill(trains)
    trains.recorder.append(wire.Goodbye("stopped", 1, 1))
    raised = until(at, lambda: trains.transport.close(exits=False))
    trains.steps(1)
    trains.transport.close(exits=False)
    assert not trains.transport.running and opened() == before, where[-1]
    if not raised:
        break
print(at > 50 or at)
"""


@pytest.mark.parametrize(
    "what", [WORKS, STARTS, RESTARTS, CLOSES], ids=["a boundary", "a start", "another helper", "the end"]
)
def test_a_handler_may_raise_anywhere(what: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RAISES + what], capture_output=True, text=True, timeout=240, cwd=HERE, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


ASKS = """
trains = started()
assert trains.transport.wait_ready(60)
os.kill(trains.transport._helper, signal.SIGSTOP)
atexit.register(kill, trains)
transport, asked = trains.transport, []
while transport.asked:
    transport.flush()
told(trains, 2)
asked.append(transport.asked)
transport.flush()
asked.append(transport.asked)
transport.say(trains.picture())
asked.append(transport.asked)
while transport.asked:
    transport.flush()
print(asked, trains.taken)
"""


def test_it_is_asked_for_while_it_has_a_request_to_hear_or_a_description_to_send() -> None:
    done = subprocess.run(
        [sys.executable, "-c", RAISES + ASKS], capture_output=True, text=True, timeout=120, cwd=HERE, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[True, False, True] ['census']\n", "")
