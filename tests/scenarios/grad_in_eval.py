"""Evaluation without no_grad(): every activation is saved for a backward that never comes."""

import contextlib

import torch
from _mlp import batch, perceptron
from _report import Report, arguments
from torch.nn import functional as F


def main() -> None:
    args = arguments(__doc__, steps=10, twin="evaluate under inference_mode").parse_args()
    report = Report(args)
    model = perceptron().to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    report("load")
    for _ in range(args.steps):
        inputs, targets = batch(args.device)
        report("between")
        outputs = model(inputs)
        report("forward")
        loss = F.mse_loss(outputs, targets)
        loss.backward()
        report("backward")
        optimizer.step()
        report("optimizer")
        optimizer.zero_grad()
        del inputs, targets, outputs, loss
        model.eval()
        held_out, _ = batch(args.device)
        with torch.inference_mode() if args.clean else contextlib.nullcontext():
            predictions = model(held_out)
        report("eval")
        model.train()
        del held_out, predictions
    report.done()


if __name__ == "__main__":
    main()
