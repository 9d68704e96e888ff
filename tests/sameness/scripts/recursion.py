# same: cases=small,deep; on=cpu
"""Recursion: a small limit and deep models. A hooked module takes one more level, for torch's own frame `inner`."""

import sys

import torch
from same import bits, case, device, tell, watch

torch.manual_seed(0)


class Nested(torch.nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.inner = Nested(depth - 1) if depth else None

    def forward(self, x):
        x = torch.tanh(self.linear(x))
        return x if self.inner is None else self.inner(x)


model = Nested(40 if case == "deep" else 5).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
watch(model, optimizer)


def step():
    loss = model(torch.ones(2, 4, device=device)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return bits(loss)


step()
if case == "small":
    sys.setrecursionlimit(len_now := 120)
    for _ in range(12):
        tell("loss", step())
    tell("limit", [sys.getrecursionlimit(), len_now])
else:
    for _ in range(6):
        tell("loss", step())
    sys.setrecursionlimit(150)
    try:
        step()
    except RecursionError as error:
        tell("error", str(error))
