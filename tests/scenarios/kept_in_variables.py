"""Tensors that only variables hold: an average of the weights as a list, data on the device, a normalised batch."""

import torch
from _mlp import INPUTS, OUTPUTS, perceptron
from _report import Report, arguments
from torch.nn import functional as F

SAMPLES, BATCH = 4096, 512


class Average:
    """As diffusers' EMAModel: the averages are a list."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.decay = 0.999
        self.shadow_params = [parameter.detach().clone() for parameter in model.parameters()]

    @torch.no_grad()
    def step(self, model: torch.nn.Module) -> None:
        for kept, current in zip(self.shadow_params, model.parameters(), strict=True):
            kept.lerp_(current, 1 - self.decay)


def in_a_list(report: Report, model: torch.nn.Module, steps: int) -> None:
    average = Average(model)
    train(report, model, steps, average)


def on_the_device(report: Report, model: torch.nn.Module, steps: int) -> None:
    data = {"inputs": torch.randn(SAMPLES, INPUTS, device=report.device)}
    targets = [torch.randn(BATCH, OUTPUTS, device=report.device) for _ in range(SAMPLES // BATCH)]
    train(report, model, steps, data=data["inputs"].split(BATCH), targets=targets)
    del data


def preprocessed(report: Report, model: torch.nn.Module, steps: int) -> None:
    train(report, model, steps, normalises=True)


def train(report, model, steps, average=None, data=None, targets=None, normalises=False) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    report("load")
    for step in range(steps):
        if data is None:
            pixels = torch.randn(BATCH, INPUTS).to(report.device)
            batch = {"pixels": pixels, "normalised": (pixels - 0.5) / 0.5} if normalises else {"normalised": pixels}
            del pixels
            inputs, wanted = batch["normalised"].flip(1), torch.randn(BATCH, OUTPUTS).to(report.device)
        else:
            inputs, wanted = data[step % len(data)], targets[step % len(targets)]
        report("between")
        outputs = model(inputs)
        report("forward")
        loss = F.mse_loss(outputs, wanted)
        loss.backward()
        report("backward")
        optimizer.step()
        report("optimizer")
        optimizer.zero_grad()
        if average is not None:
            average.step(model)


def main() -> None:
    parser = arguments(__doc__, steps=5)
    parser.add_argument("--what", choices=tuple(WAYS), default="list", help="what is kept (list)")
    args = parser.parse_args()
    report = Report(args)
    WAYS[args.what](report, perceptron().to(args.device), args.steps)
    report.done()


WAYS = {"list": in_a_list, "data": on_the_device, "batch": preprocessed}


if __name__ == "__main__":
    main()
