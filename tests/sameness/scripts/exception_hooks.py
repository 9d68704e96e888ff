# same: cases=before,after,between,rich_like,ipython_like,restored,unraisable; on=cpu
"""The user's sys.excepthook, set before or after the agent comes."""

import sys
import traceback

import torch
from same import case, device, tell, watch

original = sys.excepthook
tell("at first", [sys.excepthook is sys.__excepthook__])


def mine(kind, error, tb):
    print("mine:", kind.__name__, error, [f"{f.name}:{f.lineno}" for f in traceback.extract_tb(tb)])
    tell("mine", [kind.__name__, tb is error.__traceback__])


def chained(previous):
    def hook(kind, error, tb):
        print("first mine, then", getattr(previous, "__name__", previous))
        previous(kind, error, tb)

    return hook


if case == "before":
    sys.excepthook = mine
elif case == "between":
    sys.excepthook = chained(sys.excepthook)
model = torch.nn.Linear(8, 8).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
watch(model, optimizer)
for _ in range(5):
    model(torch.ones(4, 8, device=device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
tell("same hook", [sys.excepthook is original, sys.excepthook is sys.__excepthook__])
if case == "after":
    sys.excepthook = mine
elif case == "between":
    sys.excepthook = chained(sys.excepthook)
elif case == "rich_like":
    previous, sys.excepthook = sys.excepthook, mine
    tell("previous", previous is sys.__excepthook__)
elif case == "ipython_like":

    def hook(kind, error, tb):
        tell("stack", [f"{f.name}:{f.lineno}" for f in traceback.extract_stack()][-2:])
        sys.__excepthook__(kind, error, tb)

    sys.excepthook = hook
elif case == "restored":
    sys.excepthook = mine
    sys.excepthook = sys.__excepthook__
elif case == "unraisable":

    class Fails:
        def __del__(self):
            raise ValueError("in __del__")

    Fails()


def main():
    raise ValueError("at the end")


main()
