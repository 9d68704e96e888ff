"""Out of memory on a 1 GiB device, in forward (activations), backward (gradients) or optimizer (its state)."""

import torch
from _report import Report, arguments
from torch import nn

SIZES = {
    "forward": (1024, 65_536, 4096),
    "backward": (8192, 64, 10_240),
    "optimizer": (8192, 64, 4608),
}
"""Inputs, batch and outputs of one linear layer, so that it fails there and not earlier."""


def main() -> None:
    parser = arguments(__doc__, steps=3, twin="a batch and a layer that fit")
    parser.add_argument("--where", choices=SIZES, default="forward")
    args = parser.parse_args()
    report = Report(args)
    inputs_count, batch, outputs_count = (256, 64, 256) if args.clean else SIZES[args.where]
    with torch.device(args.device):
        model = nn.Linear(inputs_count, outputs_count, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    report("load")
    for _ in range(args.steps):
        inputs = torch.empty(batch, inputs_count, device=args.device).normal_()
        report("between")
        outputs = model(inputs)
        report("forward")
        loss = outputs.mean()
        loss.backward()
        report("backward")
        optimizer.step()
        report("optimizer")
        optimizer.zero_grad()
        del inputs, outputs, loss
    report.done()


if __name__ == "__main__":
    main()
