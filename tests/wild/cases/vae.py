"""A convolutional VAE with a KL weight that warms up, a scheduler, and a validation pass after each epoch."""

import _count
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class VAE(nn.Module):
    def __init__(self, latent=128):
        super().__init__()
        widths = (3, 64, 128, 256)
        down = [
            nn.Sequential(nn.Conv2d(a, b, 4, 2, 1), nn.GroupNorm(8, b), nn.SiLU())
            for a, b in zip(widths, widths[1:], strict=False)
        ]
        up = [
            nn.Sequential(nn.ConvTranspose2d(b, a, 4, 2, 1), nn.SiLU() if a > 3 else nn.Sigmoid())
            for a, b in reversed(list(zip(widths, widths[1:], strict=False)))
        ]
        self.encoder, self.decoder = nn.Sequential(*down), nn.Sequential(*up)
        self.to_mu, self.to_logvar = nn.Linear(256 * 64, latent), nn.Linear(256 * 64, latent)
        self.from_latent = nn.Linear(latent, 256 * 64)

    def forward(self, x):
        hidden = self.encoder(x).flatten(1)
        mu, logvar = self.to_mu(hidden), self.to_logvar(hidden)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        return self.decoder(self.from_latent(z).view(-1, 256, 8, 8)), mu, logvar


def loss_of(out, x, beta):
    reconstruction, mu, logvar = out
    kl = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp(), dim=1).mean()
    return F.mse_loss(reconstruction, x, reduction="sum") / len(x) + beta * kl


torch.manual_seed(0)
device = "cuda"
model = VAE().to(device)
_count.root(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=24)
train = DataLoader(TensorDataset(torch.rand(8 * 32, 3, 64, 64)), batch_size=32, shuffle=True)
valid = DataLoader(TensorDataset(torch.rand(2 * 32, 3, 64, 64)), batch_size=32)
step = 0
for epoch in range(3):
    model.train()
    for (x,) in train:
        x = x.to(device)
        optimizer.zero_grad()
        loss = loss_of(model(x), x, beta=min(1.0, step / 10))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        step += 1
    model.eval()
    total = 0.0
    with torch.no_grad():
        for (x,) in valid:
            x = x.to(device)
            total += loss_of(model(x), x, 1.0).item() * len(x)
    _count.said(f"epoch {epoch}: {total / 64:.4f}")
