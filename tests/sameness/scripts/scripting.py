# same: cases=trace,script,freeze; on=cpu
"""torch.jit of a model that trains, with what it warns of."""

import io

import torch
from same import bits, case, tell, watch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
watch(model, optimizer)
x = torch.ones(4, 8)
for _ in range(4):
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
if case == "trace":
    made = torch.jit.trace(model, x)
elif case == "script":
    made = torch.jit.script(model)
else:
    made = torch.jit.freeze(torch.jit.script(model.eval()))
tell("graph", str(made.graph))
tell("output", bits(made(x)))
buffer = io.BytesIO()
torch.jit.save(made, buffer)
if case != "trace":  # a trace keeps each operation's stack, with torch's own frame `inner` of a hooked module
    tell("size", len(buffer.getvalue()))
for _ in range(2):
    made(x).square().mean()
    if case != "freeze":
        made(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
tell("after", bits(model(x)))
