"""What user code took from torch and the standard library before training is what is there during training.

Not asked for: the few attributes that docs/what-is-replaced.md lists.
"""

import builtins
import gc
import os
import signal
import sys
import threading

import torch
import torch.utils.checkpoint
from same import device, tell, watch

NAMES = """torch.Tensor.backward torch.load torch.save torch.serialization.load torch.autograd.backward torch.autograd.grad
torch.nn.Module.__call__ torch.nn.Module.forward torch.nn.Module.state_dict
torch.nn.Module._call_impl torch.nn.Module.__init__ torch.nn.Module.__setattr__
torch.optim.Optimizer.step torch.optim.Optimizer.load_state_dict torch.optim.AdamW.step
torch.compile torch.cuda.memory_allocated torch.cuda.memory_stats torch.cuda.empty_cache torch.cuda.graph
torch.cuda.make_graphed_callables torch.utils.checkpoint.checkpoint torch.cuda.memory._snapshot
torch.cuda.memory._record_memory_history""".split()
BESIDE = {
    "sys.exit": lambda: sys.exit,
    "sys.excepthook": lambda: sys.excepthook,
    "sys.displayhook": lambda: sys.displayhook,
    "sys.unraisablehook": lambda: sys.unraisablehook,
    "threading.excepthook": lambda: threading.excepthook,
    "threading.Thread.start": lambda: threading.Thread.start,
    "type(exit).__call__": lambda: type(builtins.exit).__call__,
    "type(exit).__dict__": lambda: sorted(vars(type(builtins.exit))),
    "builtins.open": lambda: builtins.open,
    "builtins.__import__": lambda: builtins.__import__,
    "builtins.print": lambda: builtins.print,
    "os.fork": lambda: os.fork,
    "gc.collect": lambda: gc.collect,
    "signal.signal": lambda: signal.signal,
    "handlers": lambda: [signal.getsignal(n) for n in sorted(signal.valid_signals())],
    "gc.callbacks": lambda: list(gc.callbacks),
    "sys.meta_path": lambda: [each for each in sys.meta_path if type(each).__module__ != "sitecustomize"],
    "sys.path_hooks": lambda: list(sys.path_hooks),
    "warnings": lambda: sys.modules["warnings"].showwarning,
}


def find(name):
    value = torch
    for part in name.split(".")[1:]:
        value = getattr(value, part)
    return value


before = {name: find(name) for name in NAMES} | {name: get() for name, get in BESIDE.items()}
table = {torch.Tensor.backward: "backward", torch.Tensor.add: "add", torch.load: "load"}


class Recorded(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        tell("handled", table.get(function, getattr(function, "__name__", "?")))
        return super().__torch_function__(function, types, args, kwargs or {})


model = torch.nn.Linear(8, 8).to(device)
optimizer = torch.optim.AdamW(model.parameters())
watch(model, optimizer)
for step in range(6):
    loss = model(torch.ones(4, 8, device=device)).square().mean()
    if step == 3:
        during = {name: find(name) for name in NAMES} | {name: get() for name, get in BESIDE.items()}
        for name, value in during.items():
            same = value is before[name] or (name not in NAMES and value == before[name])
            tell(f"{name} is the same", same)
        tell("exit", [repr(exit), type(exit).__call__.__qualname__, sys.exit.__name__, repr(sys.exit)])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
special = torch.ones(3, requires_grad=True, device=device).as_subclass(Recorded)
special.sum().backward()
