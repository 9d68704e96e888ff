"""A physics-informed network with LBFGS: the closure differentiates the output by its input, several times a step."""

import _count
import torch
from torch import nn

torch.manual_seed(0)
device = "cuda"
net = nn.Sequential(
    nn.Linear(2, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 1)
).to(device)
_count.root(net)
optimizer = torch.optim.LBFGS(
    net.parameters(), lr=0.1, max_iter=4, history_size=5, tolerance_grad=0, tolerance_change=-1
)
inside = torch.rand(1024, 2).to(device).requires_grad_()
edge, value = torch.rand(128, 2).to(device), torch.zeros(128, 1).to(device)


def closure():
    optimizer.zero_grad()
    u = net(inside)
    (du,) = torch.autograd.grad(u.sum(), inside, create_graph=True)
    (ddu,) = torch.autograd.grad(du[:, 1].sum(), inside, create_graph=True)
    residual = du[:, 0] + u[:, 0] * du[:, 1] - 0.01 * ddu[:, 1]
    loss = residual.pow(2).mean() + (net(edge) - value).pow(2).mean()
    loss.backward()
    return loss


for step in range(10):
    loss = optimizer.step(closure)
    _count.said(f"{step}: {loss.item():.4f}")
