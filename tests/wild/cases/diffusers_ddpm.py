"""Diffusers' unconditional training: a UNet, a noise scheduler, EMA of the weights, samples at the end of an epoch."""

import _count
import torch
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from diffusers.training_utils import EMAModel
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
device = "cuda"
model = UNet2DModel(
    sample_size=32, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(64, 128, 128),
    down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
).to(device)  # fmt: skip
_count.root(model)
ema = EMAModel(model.parameters(), decay=0.999, use_ema_warmup=True, model_cls=UNet2DModel, model_config=model.config)
ema.to(device)
noise_scheduler = DDPMScheduler(num_train_timesteps=1000)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
lr_scheduler = get_cosine_schedule_with_warmup(optimizer, 2, 16)
loader = DataLoader(TensorDataset(torch.randn(8 * 8, 3, 32, 32)), batch_size=8, shuffle=True)
for epoch in range(2):
    model.train()
    for (images,) in loader:
        images = images.to(device)
        noise = torch.randn_like(images)
        timesteps = torch.randint(0, 1000, (len(images),), device=device).long()
        noisy = noise_scheduler.add_noise(images, noise, timesteps)
        loss = F.mse_loss(model(noisy, timesteps, return_dict=False)[0], noise)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
        ema.step(model.parameters())
    model.eval()
    ema.store(model.parameters())
    ema.copy_to(model.parameters())
    sample = torch.randn(4, 3, 32, 32).to(device)
    noise_scheduler.set_timesteps(5)
    with torch.no_grad():
        for t in noise_scheduler.timesteps:
            sample = noise_scheduler.step(model(sample, t).sample, t, sample).prev_sample
    ema.restore(model.parameters())
    _count.said(f"epoch {epoch}: {loss.item():.4f}, {tuple(sample.shape)}")
