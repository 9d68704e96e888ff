"""A ResNet with channels_last, bf16 autocast, label smoothing and an average of its weights that is validated too."""

import _count
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset


class Basic(nn.Module):
    def __init__(self, a, b, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b)
        self.conv2, self.bn2 = nn.Conv2d(b, b, 3, 1, 1, bias=False), nn.BatchNorm2d(b)
        self.short = nn.Identity()
        if stride > 1 or a != b:
            self.short = nn.Sequential(nn.Conv2d(a, b, 1, stride, bias=False), nn.BatchNorm2d(b))

    def forward(self, x):
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + self.short(x))


class ResNet(nn.Module):
    def __init__(self, classes=100):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        blocks, before = [], 64
        for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            blocks += [Basic(before, width, stride), Basic(width, width, 1)]
            before = width
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(512, classes)

    def forward(self, x):
        return self.fc(self.blocks(self.stem(x)).mean((2, 3)))


torch.manual_seed(0)
device = "cuda"
model = ResNet().to(device, memory_format=torch.channels_last)
ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999), use_buffers=True)
_count.root(model)
_count.root(ema, trained=False)
decay = [p for p in model.parameters() if p.dim() > 1]
rest = [p for p in model.parameters() if p.dim() <= 1]
optimizer = torch.optim.SGD(
    [{"params": decay, "weight_decay": 5e-5}, {"params": rest, "weight_decay": 0.0}],
    lr=0.5,
    momentum=0.9,
    nesterov=True,
)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 18)
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
images = TensorDataset(torch.randn(6 * 16, 3, 128, 128), torch.randint(100, (6 * 16,)))
train = DataLoader(images, batch_size=16, shuffle=True, drop_last=True)
valid = DataLoader(images, batch_size=32)


@torch.inference_mode()
def validate(net, name):
    net.eval()
    right = 0
    for x, y in valid:
        x, y = x.to(device, memory_format=torch.channels_last), y.to(device)
        with torch.autocast("cuda", torch.bfloat16):
            right += (net(x).argmax(1) == y).sum().item()
    _count.said(f"{name}: {right}")


for epoch in range(3):
    model.train()
    for x, y in train:
        x = x.to(device, memory_format=torch.channels_last, non_blocking=True)
        y = y.to(device, non_blocking=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = criterion(model(x), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        scheduler.step()
        ema.update_parameters(model)
    validate(model, f"epoch {epoch}")
    validate(ema, f"epoch {epoch}, average")
    _count.said(f"epoch {epoch}: loss {loss.item():.4f}")
