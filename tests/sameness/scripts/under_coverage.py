# same: needs=coverage; command=-m coverage run --data-file=own.coverage
"""A training script under `coverage run`: which lines it says ran."""

import atexit
import os
import sys

import torch
from same import device, tell, watch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(8, 8)

    def forward(self, x):
        if x.dim() == 1:
            return None
        return self.a(x)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def train():
    kept = []
    for _ in range(30):
        loss = Double.apply(model(torch.ones(4, 8, device=device))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        kept.append(loss)
    return kept


@atexit.register
def say():
    import coverage

    data = coverage.Coverage.current().get_data()
    tell("lines", sorted(data.lines(__file__) or ()))
    tell(
        "files",
        sorted(os.path.basename(f) for f in data.measured_files() if os.path.dirname(f) == os.path.dirname(__file__)),
    )
    tell("tracer", type(sys.gettrace()).__name__)


model = Net().to(device)
optimizer = torch.optim.AdamW(model.parameters())
watch(model, optimizer)
train()
if device == "nowhere":
    print("never")
raise ValueError("at the end")
