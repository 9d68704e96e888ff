# same: cases=uncaught,leak,handled; on=cuda
"""Memory runs out: the message and the traceback are torch's and the script's own."""

import torch
from same import case, device, tell, watch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).to(device)
optimizer = torch.optim.AdamW(model.parameters())
watch(model, optimizer)
kept = []


def train():
    for step in range(400):
        output = model(torch.ones(4096 if case != "leak" else 20000, 256, device=device))
        output.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if case == "leak":
            kept.append(output.detach() * 2)
        elif step == 10:
            model(torch.ones(1 << 22, 256, device=device))


if case == "handled":
    try:
        train()
    except torch.cuda.OutOfMemoryError as error:
        tell("message", str(error))
        tell("allocated", torch.cuda.memory_allocated())
    torch.cuda.empty_cache()
    tell("stats", torch.cuda.memory_stats())
else:
    train()
