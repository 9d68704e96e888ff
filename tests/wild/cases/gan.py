"""A DCGAN: two networks and two optimizers that take turns on one batch; a sheet of samples every few steps."""

import _count
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

nz, ngf, ndf, nc = 100, 64, 64, 3


def weights_init(module):
    if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)
        nn.init.zeros_(module.bias)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        layers, before = [], nz
        for i, width in enumerate((ngf * 8, ngf * 4, ngf * 2, ngf)):
            stride, pad = (1, 0) if i == 0 else (2, 1)
            layers += [
                nn.ConvTranspose2d(before, width, 4, stride, pad, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(True),
            ]
            before = width
        self.main = nn.Sequential(*layers, nn.ConvTranspose2d(before, nc, 4, 2, 1, bias=False), nn.Tanh())

    def forward(self, z):
        return self.main(z)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        layers, before = [], nc
        for width in (ndf, ndf * 2, ndf * 4, ndf * 8):
            layers += [nn.Conv2d(before, width, 4, 2, 1, bias=False), nn.BatchNorm2d(width), nn.LeakyReLU(0.2, True)]
            before = width
        self.main = nn.Sequential(*layers, nn.Conv2d(before, 1, 4, 1, 0, bias=False))

    def forward(self, x):
        return self.main(x).view(-1)


torch.manual_seed(0)
device = torch.device("cuda")
netG, netD = Generator().to(device), Discriminator().to(device)
netG.apply(weights_init)
netD.apply(weights_init)
_count.root(netG, netD)
criterion = nn.BCEWithLogitsLoss()
optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
loader = DataLoader(TensorDataset(torch.randn(32 * 10, nc, 64, 64)), batch_size=32, shuffle=True)
fixed_noise = torch.randn(16, nz, 1, 1, device=device)
for i, (images,) in enumerate(loader):
    netD.zero_grad()
    real = images.to(device)
    label = torch.full((real.size(0),), 1.0, device=device)
    errD_real = criterion(netD(real), label)
    errD_real.backward()
    fake = netG(torch.randn(real.size(0), nz, 1, 1, device=device))
    label.fill_(0.0)
    errD_fake = criterion(netD(fake.detach()), label)
    errD_fake.backward()
    optimizerD.step()
    netG.zero_grad()
    label.fill_(1.0)
    errG = criterion(netD(fake), label)
    errG.backward()
    optimizerG.step()
    if i % 5 == 4:
        with torch.no_grad():
            sheet = netG(fixed_noise).cpu()
        _count.said(f"sheet {tuple(sheet.shape)}")
    _count.said(f"{i}: D {(errD_real + errD_fake).item():.4f} G {errG.item():.4f}")
