"""A checkpoint loaded to the device and still held while training goes on: one more copy of the weights."""

import tempfile
from pathlib import Path

import torch
from _mlp import batch, perceptron
from _report import Report, arguments
from torch.nn import functional as F


def main() -> None:
    args = arguments(__doc__, steps=50, twin="let go of it after load_state_dict").parse_args()
    report = Report(args)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pt"
        torch.save({"model": perceptron().state_dict(), "step": 1000}, path)
        model = perceptron().to(args.device)
        checkpoint = torch.load(path, map_location=args.device, weights_only=True)
    model.load_state_dict(checkpoint["model"])
    if args.clean:
        del checkpoint
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
    report.done()


if __name__ == "__main__":
    main()
