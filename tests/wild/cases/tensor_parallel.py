"""A perceptron stack over two ranks by parallelize_module: columns, then rows; loss on every rank."""

import os

import _count
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl")
mesh = init_device_mesh("cuda", (int(os.environ["WORLD_SIZE"]),))
torch.manual_seed(0)


class MLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, width=512, depth=4):
        super().__init__()
        self.layers, self.head = nn.ModuleList(MLP(width) for _ in range(depth)), nn.Linear(width, 100)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


model = Stack().to(device)
_count.root(model)
for layer in model.layers:
    parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, foreach=False)
for _ in range(12):
    x, y = torch.randn(64, 512).to(device), torch.randint(100, (64,)).to(device)
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
if dist.get_rank() == 0:
    _count.said(f"loss {loss.item():.4f}")
dist.destroy_process_group()
