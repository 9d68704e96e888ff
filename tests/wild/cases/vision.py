"""torchvision's reference loop: a ResNet or a segmentation network with its auxiliary loss."""

import argparse

import _count
import torch
import torchvision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--task", choices=["classify", "segment"], default="classify")
args = parser.parse_args()
torch.manual_seed(0)
device = "cuda"
if args.task == "classify":
    model = torchvision.models.resnet18(weights=None, num_classes=100)
    data = TensorDataset(torch.randn(48, 3, 128, 128), torch.randint(100, (48,)))
else:
    model = torchvision.models.segmentation.fcn_resnet50(
        weights=None, weights_backbone=None, num_classes=21, aux_loss=True
    )
    data = TensorDataset(torch.randn(24, 3, 64, 64), torch.randint(21, (24, 64, 64)))
model.to(device)
_count.root(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=18, power=0.9)
scaler = torch.amp.GradScaler("cuda")


def loss_of(output, y):
    if args.task == "classify":
        return nn.functional.cross_entropy(output, y, label_smoothing=0.1)
    return nn.functional.cross_entropy(output["out"], y) + 0.5 * nn.functional.cross_entropy(output["aux"], y)


for epoch in range(3):
    model.train()
    for x, y in DataLoader(data, batch_size=len(data) // 6, shuffle=True):
        x, y = x.to(device), y.to(device)
        with torch.autocast("cuda", torch.float16):
            loss = loss_of(model(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
    model.eval()
    with torch.inference_mode():
        for x, y in DataLoader(data, batch_size=len(data) // 3):
            total = loss_of(model(x.to(device)), y.to(device)).item()
    _count.said(f"epoch {epoch}: {loss.item():.4f} {total:.4f}")
