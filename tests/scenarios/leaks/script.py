"""A leak of a script without any function: everything is a global."""

import sys

import torch
from torch import nn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
net = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 16)).to(device)
opt = torch.optim.SGD(net.parameters(), lr=0.01)
loss_fn = nn.MSELoss()
epoch_loss = []
for _ in range(60):
    x, y = torch.randn(32, 64, device=device), torch.randn(32, 16, device=device)
    opt.zero_grad()
    batch_loss = loss_fn(net(x), y)  # made script
    batch_loss.backward()
    opt.step()
    epoch_loss.append(batch_loss.item() if "--clean" in sys.argv else batch_loss)
