"""Each parameter has an optimizer of its own, which acts as soon as its gradient is there and drops it."""

import _count
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
device = "cuda"
model = nn.Sequential(
    nn.Embedding(4096, 512),
    *(nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True) for _ in range(4)),
    nn.Linear(512, 4096),
).to(device)
_count.root(model)
optimizers = {p: torch.optim.AdamW([p], lr=3e-4) for p in model.parameters()}


def act(parameter):
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()


for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(act)
for step in range(12):
    tokens = torch.randint(4096, (8, 128)).to(device)
    loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    _count.step()
    _count.said(f"{step}: {loss.item():.4f}")
