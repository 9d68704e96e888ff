# same: cases=function,dispatch,python_key
"""What the user's TorchFunctionMode and TorchDispatchMode see while a model trains."""

import collections

import torch
from same import case, device, tell, watch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

torch.manual_seed(0)
seen = collections.Counter()
order = []


def name_of(function):
    return getattr(function, "__qualname__", None) or getattr(function, "__name__", None) or str(function)


class Functions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        seen[name_of(function)] += 1
        order.append(name_of(function))
        return function(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        seen[str(function)] += 1
        order.append(str(function))
        return function(*args, **(kwargs or {}))


model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 4)).to(device)
optimizer = torch.optim.AdamW(model.parameters())
watch(model, optimizer)
kept = []
mode = Functions if case == "function" else Operators
for step in range(40):
    x = torch.ones(4, 8, device=device)
    with mode():
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    kept.append(loss)
    if step % 8 == 7 or step < 3:
        tell(f"in step {step}", sorted(seen.items()))
        tell(f"order in step {step}", order)
    seen.clear()
    order.clear()
if case == "python_key":
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled, Functions():
        model(torch.ones(4, 8, device=device))
    tell("names", sorted(collections.Counter(event.name for event in profiled.events()).items()))
    tell("functions", sorted(seen.items()))
