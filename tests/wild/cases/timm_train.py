"""As timm's train.py: create_model, create_optimizer_v2, mixup, NativeScaler, ModelEmaV3; model and average validated."""

import _count
import timm
import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import AverageMeter, ModelEmaV3, NativeScaler, accuracy
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
device = torch.device("cuda")
model = timm.create_model(
    "vit_tiny_patch16_224", pretrained=False, num_classes=100, img_size=96, drop_path_rate=0.1
).to(device)
model_ema = ModelEmaV3(model, decay=0.999)
_count.root(model)
_count.root(model_ema.module, trained=False)
optimizer = create_optimizer_v2(model, opt="adamw", lr=5e-4, weight_decay=0.05)
scheduler = CosineLRScheduler(optimizer, t_initial=3, warmup_t=1, warmup_lr_init=1e-6)
mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=0.0, label_smoothing=0.1, num_classes=100)
train_loss, valid_loss = SoftTargetCrossEntropy(), torch.nn.CrossEntropyLoss()
scaler = NativeScaler()
images = TensorDataset(torch.randn(16 * 6, 3, 96, 96), torch.randint(100, (16 * 6,)))
train, valid = DataLoader(images, batch_size=16, shuffle=True), DataLoader(images, batch_size=32)


def validate(net, name):
    losses, top1 = AverageMeter(), AverageMeter()
    net.eval()
    with torch.inference_mode():
        for x, y in valid:
            x, y = x.to(device), y.to(device)
            with torch.autocast("cuda", torch.float16):
                output = net(x)
            losses.update(valid_loss(output, y).item(), len(x))
            top1.update(accuracy(output, y, topk=(1,))[0].item(), len(x))
    _count.said(f"{name}: {losses.avg:.4f}")


for epoch in range(3):
    model.train()
    for update, (x, y) in enumerate(train):
        x, y = mixup(x.to(device), y.to(device))
        with torch.autocast("cuda", torch.float16):
            loss = train_loss(model(x), y)
        scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
        optimizer.zero_grad()
        model_ema.update(model, step=epoch * len(train) + update)
    validate(model, f"epoch {epoch}")
    validate(model_ema.module, f"epoch {epoch}, average")
    scheduler.step(epoch + 1)
