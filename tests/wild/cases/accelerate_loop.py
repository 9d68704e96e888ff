"""Accelerate's own loop: prepare, accumulate, mixed precision, clipping, gathered metrics, a saved state."""

import argparse

import _count
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--precision", default="no")
parser.add_argument("--accumulate", type=int, default=1)
args = parser.parse_args()
accelerator = Accelerator(mixed_precision=args.precision, gradient_accumulation_steps=args.accumulate)
set_seed(0)


class Classifier(nn.Module):
    def __init__(self, width=384):
        super().__init__()
        self.embed = nn.Embedding(2048, width)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(width, 6, 4 * width, batch_first=True) for _ in range(4))
        self.head = nn.Linear(width, 20)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


model = Classifier()
_count.root(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=24)
rows = 16 * 12 * args.accumulate * accelerator.num_processes
train = DataLoader(
    TensorDataset(torch.randint(2048, (rows, 64)), torch.randint(20, (rows,))), batch_size=16, shuffle=True
)
valid = DataLoader(TensorDataset(torch.randint(2048, (64, 64)), torch.randint(20, (64,))), batch_size=16)
model, optimizer, train, valid, scheduler = accelerator.prepare(model, optimizer, train, valid, scheduler)
criterion = nn.CrossEntropyLoss()
for epoch in range(2):
    model.train()
    for tokens, labels in train:
        with accelerator.accumulate(model):
            loss = criterion(model(tokens), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    model.eval()
    right = 0
    for tokens, labels in valid:
        with torch.inference_mode():
            logits = model(tokens)
        predictions, references = accelerator.gather_for_metrics((logits.argmax(-1), labels))
        right += int((predictions == references).sum())
    if accelerator.is_main_process:
        _count.said(f"epoch {epoch}: {loss.item():.4f}, {right}")
accelerator.end_training()
