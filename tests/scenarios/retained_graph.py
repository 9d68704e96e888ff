"""Tensors kept with their graph: a kept loss costs 512 bytes a step, an output without backward its whole graph."""

import torch
from _mlp import batch, perceptron
from _report import Report, arguments


def main() -> None:
    parser = arguments(__doc__, steps=50, twin="detach() what is kept and overwrite it")
    parser.add_argument("--keep", choices=["loss", "output"], default="loss")
    args = parser.parse_args()
    report = Report(args)
    model = perceptron().to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    probe, _ = batch(args.device)
    history = []
    report("load")
    for _ in range(args.steps):
        inputs, targets = batch(args.device)
        report("between")
        outputs = model(inputs)
        report("forward")
        loss = (outputs - targets).square().mean()
        loss.backward()
        report("backward")
        optimizer.step()
        report("optimizer")
        optimizer.zero_grad()
        kept = loss if args.keep == "loss" else model(probe)
        if args.clean:
            history = [kept.detach()]
        else:
            history.append(kept)
        del inputs, targets, outputs, loss, kept
    report.done()


if __name__ == "__main__":
    main()
