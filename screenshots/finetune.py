"""What the pictures show: a GPT trained on texts of changing length, evaluated now and then; it may keep what it logs.

python screenshots/finetune.py [--steps N] [--keep] [--layers N] [--width N] [--batch N] [--pause S]
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "scenarios"))
from _gpt import GPT, GPTConfig, batch, next_token_loss

EVAL_EVERY = 40
KEPT_EVERY = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--keep", action="store_true", help="keep every fourth step's outputs, as a careless log does")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1536)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--pause", type=float, default=0.05, help="seconds that the data of a step take")
    args = parser.parse_args()
    device = torch.device("cuda")
    config = GPTConfig(vocabulary=32_768, length=1024, layers=args.layers, width=args.width, heads=12)
    with device:
        model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    lengths = random.Random(7)
    logged = []
    for step in range(args.steps):
        time.sleep(args.pause)
        length = min(config.length, round(lengths.lognormvariate(6.1, 0.35)))
        tokens, targets = batch(config, args.batch, device, length)
        with torch.autocast("cuda", torch.bfloat16):
            outputs = model(tokens)
            loss = next_token_loss(outputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if args.keep and step % KEPT_EVERY == 0:
            logged.append(outputs.detach())
        if step % EVAL_EVERY == EVAL_EVERY - 1:
            model.eval()
            with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
                for _ in range(2):
                    model(batch(config, 2 * args.batch, device, config.length)[0])
            model.train()
        del tokens, targets, outputs, loss


if __name__ == "__main__":
    main()
