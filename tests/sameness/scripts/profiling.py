# same: cases=cpu,shapes,memory,schedule,emit,stacks
"""torch.profiler: names and counts of events, and what an observer sees."""

import collections
import json

import torch
from same import case, device, tell, watch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)).to(device)
optimizer = torch.optim.AdamW(model.parameters())
watch(model, optimizer)
kept = []


def step():
    with record_function("my step"):
        loss = model(torch.ones(4, 8, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        kept.append(loss)


for _ in range(4):
    step()
options = {
    "shapes": {"record_shapes": True, "with_flops": True},
    "memory": {"profile_memory": True},
    "schedule": {"schedule": schedule(wait=1, warmup=1, active=2, repeat=2)},
    "stacks": {"with_stack": True, "with_modules": True},
}.get(case, {})
if case == "emit":
    with torch.autograd.profiler.profile() as profiled:
        for _ in range(12):
            step()
    tell("events", sorted(collections.Counter(e.name for e in profiled.function_events).items()))
else:
    told = []

    def ready(p):
        told.append(sorted(collections.Counter(e.name for e in p.events()).items()))

    with profile(activities=[ProfilerActivity.CPU], on_trace_ready=ready, **options) as profiled:
        for _ in range(12):
            step()
            profiled.step()
    # of Python's functions, which `with_stack` records too, the script's own
    counted = collections.Counter(e.name for e in profiled.events() if case != "stacks" or "profiling.py(" in e.name)
    tell(
        "events",
        sorted((n, c) for n, c in counted.items() if case != "stacks" or not n.startswith(("<built-in", "nn.Module"))),
    )
    tell("traces", [len(each) for each in told] if case != "stacks" else None)
    if case == "shapes":
        shapes = [(e.key, str(e.input_shapes), e.count) for e in profiled.key_averages(group_by_input_shape=True)]
        tell("shapes", sorted(shapes))
        tell("flops", sum(e.flops for e in profiled.key_averages()))
    if case == "memory":
        tell(
            "memory",
            sorted((e.key, e.self_cpu_memory_usage, e.self_device_memory_usage) for e in profiled.key_averages()),
        )
    if case == "cpu":
        profiled.export_chrome_trace("trace.json")
        with open("trace.json") as file:
            events = json.load(file)["traceEvents"]
        tell("chrome", sorted(collections.Counter(str(e.get("cat")) for e in events).items()))
