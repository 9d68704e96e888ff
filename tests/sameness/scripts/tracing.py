# same: cases=settrace,setprofile,monitoring,cprofile,tracemalloc,trace_module,line_counts
"""The user's tracers and profilers: what they see of the user's own code."""

import collections
import cProfile
import pstats
import sys
import threading
import tracemalloc

import torch
from same import case, device, tell, watch

torch.manual_seed(0)
seen = collections.Counter()
OWN = __file__


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)

    def forward(self, x):
        x = self.a(x)
        x = torch.relu(x)
        return self.b(x)


def tracer(frame, event, arg):
    if frame.f_code.co_filename != OWN:
        return None
    seen[f"{event} {frame.f_code.co_name}:{frame.f_lineno}"] += 1
    return tracer


def profiler(frame, event, arg):
    if frame.f_code.co_filename == OWN:
        name = getattr(arg, "__name__", "") if event.startswith("c_") else ""
        seen[f"{event} {frame.f_code.co_name}:{frame.f_lineno} {name}"] += 1


def train(steps):
    for _ in range(steps):
        loss = model(torch.ones(4, 8, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        kept.append(loss)


kept = []
model = Net().to(device)
optimizer = torch.optim.AdamW(model.parameters())
watch(model, optimizer)
train(3)
tell("before", [sys.gettrace(), sys.getprofile(), threading.gettrace() if hasattr(threading, "gettrace") else None])
if case == "settrace":
    sys.settrace(tracer)
    train(30)
    tell("still mine", sys.gettrace() is tracer)
    sys.settrace(None)
elif case == "setprofile":
    sys.setprofile(profiler)
    train(30)
    tell("still mine", sys.getprofile() is profiler)
    sys.setprofile(None)
elif case == "monitoring" and sys.version_info >= (3, 12):
    monitoring = sys.monitoring
    tell("tools", [monitoring.get_tool(i) for i in range(6)])
    monitoring.use_tool_id(2, "mine")

    def at(code, line):
        if code.co_filename == OWN:
            seen[f"{code.co_name}:{line}"] += 1

    monitoring.register_callback(2, monitoring.events.LINE, at)
    monitoring.set_events(2, monitoring.events.LINE)
    train(30)
    tell("events", monitoring.get_events(2))
    monitoring.set_events(2, 0)
    monitoring.free_tool_id(2)
elif case == "cprofile":
    profile = cProfile.Profile()
    profile.enable()
    train(30)
    profile.disable()
    for (file, line, name), (_, calls, *_rest) in pstats.Stats(profile).stats.items():
        if file == OWN:
            seen[f"{name}:{line}"] = calls
elif case == "tracemalloc":
    tracemalloc.start()
    before = tracemalloc.take_snapshot()
    train(30)
    own = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, OWN)])
    for stat in own.compare_to(before.filter_traces([tracemalloc.Filter(True, OWN)]), "lineno"):
        line = stat.traceback[0].lineno
        if "kept.append" in open(OWN).read().splitlines()[line - 1]:
            tell("kept", stat.count_diff)
    tell("tracing", [tracemalloc.is_tracing(), tracemalloc.get_traceback_limit()])
    tracemalloc.stop()
elif case == "trace_module":
    import trace

    counter = trace.Trace(count=1, trace=0)
    counter.runfunc(train, 10)
    for (file, line), count in counter.results().counts.items():
        if file == OWN:
            seen[str(line)] = count
else:
    import bdb

    class Counts(bdb.Bdb):
        def user_line(self, frame):
            if frame.f_code.co_filename == OWN:
                seen[f"{frame.f_lineno}"] += 1

    counts = Counts()
    counts.runcall(train, 5)
tell("seen", sorted(seen.items()))
tell("after", [sys.gettrace() is None, sys.getprofile() is None])
