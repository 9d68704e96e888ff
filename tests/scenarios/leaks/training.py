"""Leaks of the training itself: hooks, graphs, copies of the weights, old optimizers, logs."""

import copy
import logging
import logging.handlers
import tempfile
from pathlib import Path

import torch
from _toy import DEVICE, STEPS, batches, perceptron, run, setup, train
from torch.nn import functional as F


def forward_hook(clean):
    model, optimizer, loader = setup()
    features = []

    def keep(module, args, output):
        if clean:
            features.clear()
        features.append(output.detach())

    model[1].register_forward_hook(keep)
    for inputs, targets in loader:
        train(model, optimizer, inputs, targets)


def gradient_hook(clean):
    model, optimizer, loader = setup()
    norms = []
    model[0].weight.register_hook(lambda grad: norms.append(grad.norm().item() if clean else grad.norm()))
    for inputs, targets in loader:
        train(model, optimizer, inputs, targets)


def outputs_before_backward(clean):
    model, optimizer, loader = setup()
    probe = torch.randn(8, 64).to(DEVICE)
    probed = []
    for inputs, targets in loader:
        train(model, optimizer, inputs, targets)
        output = model(probe)  # made
        probed.append(output.tolist() if clean else output)


def retained_by_backward(clean):
    model, optimizer, loader = setup()
    penalties = []
    for inputs, targets in loader:
        optimizer.zero_grad()
        outputs = model(inputs)
        penalty = outputs.square().sum()  # made
        (F.mse_loss(outputs, targets) + 1e-4 * penalty).backward(retain_graph=not clean)
        optimizer.step()
        penalties.append(penalty.item() if clean else penalty)


def averaged_weights(clean):
    model, optimizer, loader = setup()
    snapshots = []
    for inputs, targets in loader:
        train(model, optimizer, inputs, targets)
        weights = {name: value.detach().clone() for name, value in model.state_dict().items()}  # made
        if clean:
            snapshots.clear()
        snapshots.append(weights)


def copies_of_the_model(clean):
    model, optimizer, loader = setup()
    checkpoints = []
    for step, (inputs, targets) in enumerate(loader):
        train(model, optimizer, inputs, targets)
        if step % 3 == 0:
            if clean:
                checkpoints.clear()
            checkpoints.append(copy.deepcopy(model))  # made


def optimizer_each_epoch(clean):
    model = perceptron()
    old = []
    for _ in range(STEPS // 3):
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for inputs, targets in batches(3):
            train(model, optimizer, inputs, targets)
        if not clean:
            old.append(optimizer)


def gradients_kept(clean):
    model, optimizer, loader = setup()
    grads = []
    for inputs, targets in loader:
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()  # made
        optimizer.step()
        grads.append([p.grad.norm().item() if clean else p.grad for p in model.parameters()])


class Scale(torch.autograd.Function):
    contexts = []  # noqa: RUF012

    @staticmethod
    def forward(ctx, inputs, clean):
        ctx.inputs = inputs
        if not clean:
            Scale.contexts.append(ctx)
        return inputs * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2, None


def autograd_context(clean):
    model, optimizer, loader = setup()
    for inputs, targets in loader:
        optimizer.zero_grad()
        outputs = Scale.apply(model(inputs), clean)
        F.mse_loss(outputs, targets).backward()
        optimizer.step()


class SummaryWriter:
    """Like a TensorBoard writer whose flush nobody calls."""

    def __init__(self):
        self.events = []

    def add_scalar(self, tag, value, step):
        self.events.append((tag, value, step))


def summary_writer(clean):
    model, optimizer, loader = setup()
    writer = SummaryWriter()
    for step, (inputs, targets) in enumerate(loader):
        loss = train(model, optimizer, inputs, targets)
        writer.add_scalar("loss", loss.item() if clean else loss, step)


def log_records(clean):
    model, optimizer, loader = setup()
    memory = logging.handlers.MemoryHandler(capacity=100_000)
    log = logging.getLogger("training")
    log.addHandler(memory)
    log.propagate = False
    for inputs, targets in loader:
        loss = train(model, optimizer, inputs, targets).detach()
        log.warning("loss %s", loss.item() if clean else loss)


def checkpoint_in_a_name(clean):
    model, optimizer, loader = setup()
    with tempfile.TemporaryDirectory() as folder:
        torch.save(model.state_dict(), Path(folder) / "last.pt")
        restored = torch.load(Path(folder) / "last.pt", map_location="cpu" if clean else DEVICE)  # made
    model.load_state_dict(restored)
    for inputs, targets in loader:
        train(model, optimizer, inputs, targets)


def checkpoint_beside_a_library(clean):
    """The library reads the file for itself. The clean one keeps what it has read as an average of the weights."""
    model, optimizer, loader = setup()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "last.pt"
        torch.save({"model": model.state_dict(), "step": 7}, path)
        mine = torch.load(path, map_location=DEVICE)  # made
        resume(model, path)
    for inputs, targets in loader:
        train(model, optimizer, inputs, targets)
        if clean:
            with torch.no_grad():
                for name, weight in model.state_dict().items():
                    mine["model"][name].lerp_(weight, 0.1)


def resume(model, path):
    model.load_state_dict(torch.load(path, map_location=DEVICE)["model"])


if __name__ == "__main__":
    scripts = (forward_hook, gradient_hook, outputs_before_backward, retained_by_backward, averaged_weights)
    more = (copies_of_the_model, optimizer_each_epoch, gradients_kept, autograd_context, summary_writer, log_records)
    checkpoints = (checkpoint_in_a_name, checkpoint_beside_a_library)
    run({script.__name__: script for script in (*scripts, *more, *checkpoints)})
