# same: cases=forward,backward,step,oom,retry
"""Exceptions that the loop catches and prints, and goes on."""

import traceback

import torch
from same import allocated, case, device, tell, watch
from torch import nn

torch.manual_seed(0)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("in backward")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 64), nn.Linear(64, 8)
        self.fails = False

    def forward(self, x):
        x = self.a(x)
        if self.fails and case == "forward":
            raise ValueError("in forward")
        return self.b(Fails.apply(x) if self.fails and case == "backward" else x)


def fails(*_):
    raise ValueError("in step")


model = Net().to(device)
optimizer = torch.optim.AdamW(model.parameters())
watch(model, optimizer)
for step in range(24):
    model.fails = step % 4 == 3
    handle = optimizer.register_step_pre_hook(fails) if model.fails and case == "step" else None
    try:
        loss = model(torch.ones(4, 8, device=device)).square().mean()
        loss.backward()
        if model.fails and case in ("oom", "retry"):
            kept = torch.empty(1 << 44, dtype=torch.uint8, device=device)
        optimizer.step()
    except (ValueError, RuntimeError) as error:
        traceback.print_exc()
        tell("error", [type(error).__name__, str(error).partition(" Of the")[0]])
        tell(
            "frames",
            [f"{f.name}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__) if "scripts" in f.filename],
        )
        tell("depth", len(traceback.extract_tb(error.__traceback__)))
        tell("state", [repr(error.__context__), repr(error.__cause__), sorted(vars(error))])
        if case != "backward":
            tell("held", allocated())
        error.__traceback__ = None
        loss = None
    finally:
        if handle:
            handle.remove()
    optimizer.zero_grad()
    if case != "backward":  # autograd's thread may let go of the last tensors after its caller is back
        tell("allocated", allocated())
