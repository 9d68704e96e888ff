"""Leaks in objects: attributes, class variables, records, singletons."""

import dataclasses
from collections import namedtuple
from typing import Any, NamedTuple

import torch
from _toy import perceptron, run, setup, train
from torch import nn
from torch.nn import functional as F


class Trainer:
    def __init__(self, clean):
        self.model, self.optimizer, self.loader = setup()
        self.history = []
        self.clean = clean

    def step(self, inputs, targets):
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(inputs), targets)  # made trainer_history
        loss.backward()
        self.optimizer.step()
        self.history.append(loss.item() if self.clean else loss)

    def fit(self):
        for inputs, targets in self.loader:
            self.step(inputs, targets)


def trainer_history(clean):
    trainer = Trainer(clean)
    trainer.fit()


class Meter:
    readings = []  # noqa: RUF012

    def update(self, value):
        self.readings.append(value)


def shared_meter(clean):
    model, optimizer, loader = setup()
    meter = Meter()
    for inputs, targets in loader:
        loss = train(model, optimizer, inputs, targets)
        meter.update(loss.item() if clean else loss.detach())


class Accuracy:
    """Keeps what it needs until compute()."""

    def __init__(self):
        self.preds, self.target = [], []

    def update(self, preds, target):
        self.preds.append(preds)
        self.target.append(target)

    def compute(self):
        return (torch.cat(self.preds) == torch.cat(self.target)).float().mean()

    def reset(self):
        self.preds, self.target = [], []


def metric_never_reset(clean):
    model, optimizer, loader = setup()
    accuracy = Accuracy()
    for step, (inputs, targets) in enumerate(loader):
        optimizer.zero_grad()
        logits = model(inputs)
        F.cross_entropy(logits, targets.argmax(1)).backward()
        optimizer.step()
        accuracy.update(logits.detach().argmax(1), targets.argmax(1))
        if clean and step % 10 == 9:
            accuracy.compute()
            accuracy.reset()


class ReplayBuffer:
    def __init__(self, capacity=None):
        self.capacity = capacity
        self.transitions = []

    def push(self, *transition):
        self.transitions.append(transition)
        if self.capacity and len(self.transitions) > self.capacity:
            self.transitions.pop(0)


def replay_buffer(clean):
    policy, optimizer, loader = setup()
    replay = ReplayBuffer(capacity=12 if clean else None)
    for states, returns in loader:
        optimizer.zero_grad()
        actions = policy(states)
        F.mse_loss(actions, returns).backward()
        optimizer.step()
        replay.push(states, actions.detach(), returns)


@dataclasses.dataclass
class Summary:
    epoch: int = 0
    values: list[Any] = dataclasses.field(default_factory=list)


def dataclass_field(clean):
    model, optimizer, loader = setup()
    summary = Summary()
    for inputs, targets in loader:
        loss = train(model, optimizer, inputs, targets)
        summary.values.append(float(loss) if clean else loss)


Record = namedtuple("Record", ["step", "prediction"])


def named_tuples(clean):
    model, optimizer, loader = setup()
    journal = []
    for step, (inputs, targets) in enumerate(loader):
        optimizer.zero_grad()
        prediction = model(inputs)  # made
        F.mse_loss(prediction, targets).backward()
        optimizer.step()
        journal.append(Record(step, None if clean else prediction.detach()))


class Registry:
    _instance = None

    def __init__(self):
        self.store = {}

    @classmethod
    def get(cls):
        if cls._instance is None:
            cls._instance = cls()
        return cls._instance


def singleton(clean):
    model, optimizer, loader = setup()
    for step, (inputs, targets) in enumerate(loader):
        loss = train(model, optimizer, inputs, targets).detach()
        Registry.get().store["last" if clean else f"loss/{step}"] = loss


class Encoder(nn.Module):
    """Remembers its hidden activations, to be looked at."""

    def __init__(self, clean):
        super().__init__()
        self.body = perceptron()
        self.remembered = []
        self.clean = clean

    def forward(self, inputs):
        hidden = self.body[:2](inputs)  # made module_attribute
        if self.clean:
            self.remembered.clear()
        self.remembered.append(hidden.detach())
        return self.body[2](hidden)


def module_attribute(clean):
    _, _, loader = setup()
    encoder = Encoder(clean).to("cuda" if torch.cuda.is_available() else "cpu")
    optimizer = torch.optim.SGD(encoder.parameters(), lr=1e-2, momentum=0.9)
    for inputs, targets in loader:
        train(encoder, optimizer, inputs, targets)


class Contrast(nn.Module):
    """Compares with what it saw before: a bank of keys, in a buffer."""

    def __init__(self, clean):
        super().__init__()
        self.body = perceptron()
        self.register_buffer("bank", torch.empty(0, 16))
        self.clean = clean

    def forward(self, inputs):
        keys = self.body(inputs)
        self.bank = torch.cat([self.bank, keys.detach()])
        if self.clean:
            self.bank = self.bank[-64:].clone()
        return keys


def memory_bank(clean):
    _, _, loader = setup()
    model = Contrast(clean).to("cuda" if torch.cuda.is_available() else "cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    for inputs, targets in loader:
        train(model, optimizer, inputs, targets)


class State:
    __slots__ = ("logs", "step")

    def __init__(self):
        self.logs = {"train": [], "eval": []}
        self.step = 0


class Engine:
    def __init__(self):
        self.state = State()


def nested_attributes(clean):
    model, optimizer, loader = setup()
    engine = Engine()
    for inputs, targets in loader:
        loss = train(model, optimizer, inputs, targets)
        engine.state.logs["train"].append(loss.item() if clean else loss.detach())


class Frame:
    """Columns of a table, as a data frame would keep them."""

    def __init__(self, *names):
        self.columns = {name: [] for name in names}

    def append(self, **row):
        for name, value in row.items():
            self.columns[name].append(value)


RESULTS = Frame("step", "output")


def table_in_a_global(clean):
    model, optimizer, loader = setup()
    for step, (inputs, targets) in enumerate(loader):
        optimizer.zero_grad()
        output = model(inputs)  # made
        F.mse_loss(output, targets).backward()
        optimizer.step()
        RESULTS.append(step=step, output=output.mean().item() if clean else output.detach())


class Sample(NamedTuple):
    inputs: Any
    error: Any


class Hardest:
    """Meant to keep the worst samples, keeps all of them."""

    def __init__(self, keep):
        self.keep = keep
        self.worst = []

    def offer(self, sample):
        self.worst.append(sample)
        self.worst.sort(key=lambda each: -each.error)
        if self.keep:
            del self.worst[self.keep :]


def hard_examples(clean):
    model, optimizer, loader = setup()
    mining = Hardest(keep=8 if clean else None)
    for inputs, targets in loader:
        loss = train(model, optimizer, inputs, targets)
        mining.offer(Sample(inputs, loss.item()))


if __name__ == "__main__":
    scripts = (
        trainer_history,
        shared_meter,
        metric_never_reset,
        replay_buffer,
        dataclass_field,
        named_tuples,
        singleton,
    )
    more = (module_attribute, memory_bank, nested_attributes, table_in_a_global, hard_examples)
    run({script.__name__: script for script in (*scripts, *more)})
