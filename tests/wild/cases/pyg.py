"""PyG: a graph convolution on the whole of one graph, each epoch one step, with a test pass after it."""

import _count
import torch
from torch.nn import functional as F
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GCNConv

torch.manual_seed(0)
device = "cuda"
nodes, edges = 5000, 40_000
mask = torch.zeros(nodes, dtype=torch.bool)
mask[:1000] = True
data = Data(
    x=torch.randn(nodes, 500),
    edge_index=torch.randint(nodes, (2, edges)),
    y=torch.randint(7, (nodes,)),
    train_mask=mask,
).to(device)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = (
            GCNConv(500, 256, add_self_loops=False),
            GATConv(256, 64, heads=4, add_self_loops=False),
        )
        self.out = torch.nn.Linear(256, 7)

    def forward(self, x, edge_index):
        x = F.dropout(F.relu(self.conv1(x, edge_index)), 0.5, self.training)
        return self.out(F.elu(self.conv2(x, edge_index)))


model = Net().to(device)
_count.root(model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
for epoch in range(12):
    model.train()
    optimizer.zero_grad()
    out = model(data.x, data.edge_index)
    loss = F.cross_entropy(out[:1000], data.y[:1000])
    loss.backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        prediction = model(data.x, data.edge_index).argmax(dim=-1)
    _count.said(f"epoch {epoch}: {loss.item():.4f} {tuple(prediction.shape)}")
