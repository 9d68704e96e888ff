"""Leaks in plain containers: what a loop appends to, adds to, or concatenates."""

from collections import defaultdict, deque

import torch
from _toy import run, setup, train
from torch.nn import functional as F


def losses_to_plot(clean):
    model, optimizer, loader = setup()
    losses = []
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets)  # made
        loss.backward()
        optimizer.step()
        losses.append(loss.item() if clean else loss)


def running_list(clean):
    model, optimizer, loader = setup()
    train_curve = []
    for inputs, targets in loader:
        loss = train(model, optimizer, inputs, targets).detach()
        train_curve += [float(loss)] if clean else [loss]


def predictions_by_step(clean):
    model, optimizer, loader = setup()
    predictions = {}
    for step, (inputs, targets) in enumerate(loader):
        optimizer.zero_grad()
        outputs = model(inputs)  # made
        F.mse_loss(outputs, targets).backward()
        optimizer.step()
        predictions[0 if clean else step] = outputs.detach()


def rows_of_tuples(clean):
    model, optimizer, loader = setup()
    rows = []
    for step, (inputs, targets) in enumerate(loader):
        optimizer.zero_grad()
        outputs = model(inputs)
        loss = F.mse_loss(outputs, targets)
        loss.backward()
        optimizer.step()
        rows.append((step, loss.item(), outputs.shape) if clean else (step, loss, outputs))


def metrics_by_name(clean):
    model, optimizer, loader = setup()
    metrics = defaultdict(list)
    for inputs, targets in loader:
        optimizer.zero_grad()
        outputs = model(inputs)
        loss = F.l1_loss(outputs, targets)  # made
        loss.backward()
        optimizer.step()
        metrics["mae"].append(loss.item() if clean else loss.detach())
        metrics["norm"].append(outputs.norm().item() if clean else outputs.detach().norm())  # made


def window_without_end(clean):
    model, optimizer, loader = setup()
    window = deque(maxlen=50 if clean else None)
    for inputs, targets in loader:
        optimizer.zero_grad()
        outputs = model(inputs)  # made
        F.mse_loss(outputs, targets).backward()
        optimizer.step()
        window.append(outputs.detach())


def concatenated(clean):
    model, optimizer, loader = setup()
    all_outputs = torch.empty(0, 16, device=next(model.parameters()).device)
    for inputs, targets in loader:
        optimizer.zero_grad()
        outputs = model(inputs)
        F.mse_loss(outputs, targets).backward()
        optimizer.step()
        all_outputs = torch.cat([all_outputs, outputs.detach()])  # made
        if clean:
            all_outputs = all_outputs[-32:].clone()


def seen_values(clean):
    model, optimizer, loader = setup()
    seen = set()
    for inputs, targets in loader:
        value = train(model, optimizer, inputs, targets).detach()
        seen.add(value.item() if clean else value)


def per_class(clean):
    model, optimizer, loader = setup()
    board = {"train": {"logits": [], "labels": []}}
    for inputs, targets in loader:
        optimizer.zero_grad()
        logits = model(inputs)  # made
        F.cross_entropy(logits, targets.argmax(1)).backward()
        optimizer.step()
        if clean:
            board["train"]["logits"].clear()
        board["train"]["logits"].append(logits.detach())


def recent_outputs(clean):
    model, optimizer, loader = setup()
    recent = []
    for inputs, targets in loader:
        optimizer.zero_grad()
        outputs = model(inputs)  # made
        F.mse_loss(outputs, targets).backward()
        optimizer.step()
        recent.append(outputs.detach())
        if clean and len(recent) > 100:
            recent.pop(0)


def every_fifth(clean):
    model, optimizer, loader = setup()
    samples = []
    for step, (inputs, targets) in enumerate(loader):
        optimizer.zero_grad()
        outputs = model(inputs)  # made
        F.mse_loss(outputs, targets).backward()
        optimizer.step()
        if step % 5 == 0:
            samples.append(outputs.detach().cpu() if clean else outputs.detach())


if __name__ == "__main__":
    scripts = (losses_to_plot, running_list, predictions_by_step, rows_of_tuples, metrics_by_name, window_without_end)
    more = (concatenated, seen_values, per_class, recent_outputs, every_fifth)
    run({script.__name__: script for script in (*scripts, *more)})
