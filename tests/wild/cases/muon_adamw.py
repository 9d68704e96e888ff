"""Two optimizers on one model: Muon for its matrices, AdamW for the rest, both after one backward."""

import _count
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
device = "cuda"


class Net(nn.Module):
    def __init__(self, width=512, depth=6, vocabulary=4096):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True) for _ in range(depth)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, tokens):
        x = self.embed(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=x.device)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))


model = Net().to(device)
_count.root(model)
matrices = [p for n, p in model.layers.named_parameters() if p.dim() == 2]
chosen = {id(p) for p in matrices}
others = [p for p in model.parameters() if id(p) not in chosen]
optimizers = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=3e-4)]
for step in range(12):
    tokens = torch.randint(4096, (8, 129)).to(device)
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    for optimizer in optimizers:
        optimizer.zero_grad()
    _count.said(f"{step}: {loss.item():.4f}")
