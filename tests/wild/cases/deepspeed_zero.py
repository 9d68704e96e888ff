"""DeepSpeed's engine, stage 1, 2 or 3, in fp16, bf16 or fp32."""

import argparse
import os

import _count
import deepspeed
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--stage", type=int, default=1)
args = parser.parse_args()
rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local)
deepspeed.init_distributed("nccl")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 2048), nn.GELU(), nn.Linear(2048, 512))
_count.root(model)
config = {
    "train_micro_batch_size_per_gpu": 16,
    "gradient_accumulation_steps": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": args.stage,
        "reduce_bucket_size": 2_000_000,
        "stage3_param_persistence_threshold": 0,
    },
    "gradient_clipping": 1.0,
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for step in range(12):
    x = torch.randn(16, 512).to(engine.device, torch.bfloat16)
    loss = engine(x).float().pow(2).mean()
    engine.backward(loss)
    engine.step()
if rank == 0:
    _count.said(f"loss {loss.item():.4f}")
