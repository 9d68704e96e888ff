"""A checkpoint every tenth step: badly, as a copy that stays on the device, or (--clean) written to a file."""

import copy
import tempfile
from pathlib import Path

import torch
from _mlp import batch, perceptron
from _report import Report, arguments
from torch.nn import functional as F


def main() -> None:
    parser = arguments(__doc__, steps=50, twin="torch.save to a file")
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints (10)")
    args = parser.parse_args()
    report = Report(args)
    model = perceptron().to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    checkpoints = []
    report("load")
    with tempfile.TemporaryDirectory() as folder:
        for step in range(1, args.steps + 1):
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
            if step % args.every == 0:
                if args.clean:
                    torch.save({"model": model.state_dict(), "step": step}, Path(folder) / "last.pt")
                else:
                    checkpoints.append(copy.deepcopy(model.state_dict()))
            del inputs, targets, outputs, loss
    report.done()


if __name__ == "__main__":
    main()
