"""Per-sample gradients by torch.func (vmap of grad), clipped and averaged as DP-SGD does, given to an optimizer."""

import _count
import torch
from torch import nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn import functional as F

torch.manual_seed(0)
device = "cuda"
net = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)).to(device)
_count.root(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def loss_of(parameters, x, y):
    return F.cross_entropy(functional_call(net, parameters, (x[None],)), y[None])


per_sample = vmap(grad_and_value(loss_of), in_dims=(None, 0, 0))
for step in range(12):
    x, y = torch.randn(32, 256).to(device), torch.randint(10, (32,)).to(device)
    parameters = {name: p.detach() for name, p in net.named_parameters()}
    grads, losses = per_sample(parameters, x, y)
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)
    scale = (1.0 / (norms + 1e-6)).clamp(max=1.0)
    for name, p in net.named_parameters():
        p.grad = torch.einsum("b,b...->...", scale, grads[name]) / len(x)
    optimizer.step()
    optimizer.zero_grad()
    _count.said(f"{step}: {losses.mean().item():.4f}")
