# same: on=cuda; cases=lines,peaks,stats,leak
"""The allocator's figures after each line of a training step."""

import torch
from same import case, device, tell, watch

torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(4))).to(device)
optimizer = torch.optim.AdamW(model.parameters())
watch(model, optimizer)
kept = []


def figures(name):
    if case == "stats":
        tell(name, sorted(torch.cuda.memory_stats().items()))
        return
    tell(name, [torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), torch.cuda.max_memory_allocated()])
    if case == "peaks":
        tell(name, [torch.cuda.max_memory_reserved(), sorted(torch.cuda.memory_stats().items())])
        tell(name, torch.accelerator.memory_stats() if hasattr(torch.accelerator, "memory_stats") else None)
        tell(name, [torch.cuda.mem_get_info()])


for step in range(30 if case == "leak" else 12):
    x = torch.ones(64, 128, device=device)
    figures("x")
    output = model(x)
    figures("forward")
    loss = output.square().mean()
    figures("loss")
    if case == "peaks" and step % 3 == 1:
        torch.cuda.reset_peak_memory_stats()
        figures("reset before backward")
    loss.backward()
    figures("backward")
    del output
    figures("del output")
    optimizer.step()
    figures("step")
    if case == "peaks" and step % 4 == 2:
        torch.cuda.reset_peak_memory_stats()
    optimizer.zero_grad()
    figures("zero_grad")
    if case == "leak":
        kept.append(loss)
    del x, loss
    figures("del")
    if case == "peaks" and step % 5 == 4:
        torch.cuda.empty_cache()
        torch.cuda.reset_accumulated_memory_stats()
        figures("emptied")
tell("summary", torch.cuda.memory_summary())
