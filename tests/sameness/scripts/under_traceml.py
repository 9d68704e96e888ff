# same: needs=traceml_ai; cases=before,after
"""TraceML beside gpumon, started before or after it. Skipped where TraceML is not installed."""

import torch
import traceml_ai
from same import allocated, bits, case, device, tell, watch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)).to(device)
if case == "before":
    traceml_ai.init()
optimizer = torch.optim.AdamW(model.parameters())
watch(model, optimizer)
if case == "after":
    traceml_ai.init()
kept = []
for step in range(24):
    with traceml_ai.trace_step(model):
        loss = model(torch.randn(4, 8).to(device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        kept.append(loss.detach())
    tell("loss", bits(loss))
    tell("allocated", allocated())
tell("weights", bits(model[0].weight))
