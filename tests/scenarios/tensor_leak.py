"""Every step's outputs are kept, detached but on the device: 32 KiB a step, held in one of many ways (--holder)."""

import collections
import functools
import traceback

import torch
from _mlp import batch, perceptron
from _report import Report, arguments
from torch.nn import functional as F

HISTORY = []


class Meter:
    """Keeps what it is given, as an attribute."""

    def __init__(self) -> None:
        self.values = ()

    def add(self, value):
        self.values = (*self.values, value)


def keep_in_closure():
    kept = []

    def keep(value):
        kept.append(value)

    return keep


def keep_in_generator():
    kept = []
    while True:
        kept.append((yield))


def keep_in_traceback(errors, value):
    try:
        raise RuntimeError(f"a loss of shape {tuple(value.shape)} looked odd")
    except RuntimeError as error:
        errors.append(error)  # its traceback holds this frame, and the frame holds `value`
        traceback.format_exc()


def keeper(holder):
    """A function that keeps a tensor in the way that was asked for."""
    if holder == "list":
        outputs_so_far = []
        return outputs_so_far.append
    if holder == "dict":
        outputs_by_step = {}
        return lambda value: outputs_by_step.setdefault(len(outputs_by_step), value)
    if holder == "deque":
        return collections.deque().append
    if holder == "global":
        return HISTORY.append
    if holder == "attribute":
        return Meter().add
    if holder == "closure":
        return keep_in_closure()
    if holder == "lru_cache":
        return functools.lru_cache(maxsize=None)(torch.Tensor.detach)
    if holder == "generator":
        generator = keep_in_generator()
        next(generator)
        return generator.send
    return functools.partial(keep_in_traceback, [])


HOLDERS = ("list", "dict", "deque", "global", "attribute", "closure", "lru_cache", "generator", "traceback")


def main() -> None:
    parser = arguments(__doc__, steps=50, twin="keep the shapes, not the tensors")
    parser.add_argument("--holder", choices=HOLDERS, default="list")
    args = parser.parse_args()
    report = Report(args)
    model = perceptron().to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    keep = [].append if args.clean else keeper(args.holder)
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
        keep(outputs.shape if args.clean else outputs.detach())
        del inputs, targets, outputs, loss
    report.done()


if __name__ == "__main__":
    main()
