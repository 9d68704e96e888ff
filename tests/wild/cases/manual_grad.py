"""MAML by hand: autograd.grad for the inner step, parameters by functional_call, and an optimizer for the outer one."""

import _count
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

torch.manual_seed(0)
device = "cuda"
net = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 5)).to(device)
_count.root(net)
outer = torch.optim.Adam(net.parameters(), lr=1e-3)
for step in range(10):
    outer.zero_grad()
    for _ in range(2):
        xs, ys = torch.randn(25, 256).to(device), torch.randint(5, (25,)).to(device)
        xq, yq = torch.randn(75, 256).to(device), torch.randint(5, (75,)).to(device)
        fast = dict(net.named_parameters())
        for _ in range(2):
            inner = F.cross_entropy(functional_call(net, fast, (xs,)), ys)
            grads = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
            fast = {name: p - 0.01 * g for (name, p), g in zip(fast.items(), grads, strict=True)}
        loss = F.cross_entropy(functional_call(net, fast, (xq,)), yq) / 2
        loss.backward()
    outer.step()
    _count.said(f"{step}: {loss.item():.4f}")
