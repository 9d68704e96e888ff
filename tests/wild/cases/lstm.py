"""A language model with LSTM cells written by hand: truncated backpropagation, the state carried from batch to batch."""

import math

import _count
import torch
from torch import nn

vocabulary, width, layers, bptt, batch_size = 10_000, 512, 2, 35, 20


class Cell(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.x, self.h = nn.Linear(size, 4 * size), nn.Linear(size, 4 * size, bias=False)

    def forward(self, x, state):
        h, c = state
        i, f, g, o = (self.x(x) + self.h(h)).chunk(4, dim=-1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c


class RNNModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop, self.encoder = nn.Dropout(0.5), nn.Embedding(vocabulary, width)
        self.cells = nn.ModuleList(Cell(width) for _ in range(layers))
        self.decoder = nn.Linear(width, vocabulary)
        self.decoder.weight = self.encoder.weight

    def forward(self, tokens, hidden):
        steps = self.drop(self.encoder(tokens)).unbind(0)
        after = []
        for cell, state in zip(self.cells, hidden, strict=True):
            outputs = []
            for x in steps:
                state = cell(x, state)
                outputs.append(state[0])
            steps = [self.drop(x) for x in outputs]
            after.append(state)
        return self.decoder(torch.stack(list(steps))), after

    def init_hidden(self, size):
        weight = self.encoder.weight
        return [(weight.new_zeros(size, width), weight.new_zeros(size, width)) for _ in range(layers)]


def repackage_hidden(hidden):
    return [tuple(one.detach() for one in state) for state in hidden]


torch.manual_seed(0)
device = "cuda"
train_data = torch.randint(vocabulary, (bptt * 12 + 1, batch_size)).to(device)
val_data = torch.randint(vocabulary, (bptt * 2 + 1, 10)).to(device)
model = RNNModel().to(device)
_count.root(model)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=20)


def get_batch(source, i):
    return source[i : i + bptt], source[i + 1 : i + 1 + bptt].reshape(-1)


def evaluate():
    model.eval()
    total, hidden = 0.0, model.init_hidden(10)
    with torch.no_grad():
        for i in range(0, val_data.size(0) - 1, bptt):
            data, targets = get_batch(val_data, i)
            output, hidden = model(data, hidden)
            total += criterion(output.view(-1, vocabulary), targets).item()
    return total


for epoch in range(2):
    model.train()
    total_loss, hidden = 0.0, model.init_hidden(batch_size)
    for i in range(0, train_data.size(0) - 1, bptt):
        data, targets = get_batch(train_data, i)
        hidden = repackage_hidden(hidden)
        optimizer.zero_grad()
        output, hidden = model(data, hidden)
        loss = criterion(output.view(-1, vocabulary), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        total_loss += loss.item()
    _count.said(f"epoch {epoch}: {math.exp(min(total_loss, 20)):.2f}, valid {evaluate():.2f}")
