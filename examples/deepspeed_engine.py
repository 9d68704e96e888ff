"""A loop on DeepSpeed's engine: `gpumon run deepspeed examples/deepspeed_engine.py`.

The last line of the loop adds figures to DeepSpeed's own monitor.
"""

import os

os.environ.setdefault("RANK", "0")  # alone, without the launcher
os.environ.setdefault("LOCAL_RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "0")

import deepspeed
import torch
from torch import nn

import gpumon_agent

torch.manual_seed(0)
deepspeed.init_distributed()
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
config = {
    "train_micro_batch_size_per_gpu": 16,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
    "csv_monitor": {"enabled": True, "output_path": "logs", "job_name": "example"},
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for epoch in range(3):
    for _ in range(4):
        x = torch.randn(16, 64, device=engine.device)
        loss = engine(x).pow(2).mean()
        engine.backward(loss)
        engine.step()
    print(epoch, loss.item())
    engine.monitor.write_events([(*figure, engine.global_samples) for figure in gpumon_agent.figures().items()])
torch.distributed.destroy_process_group()
