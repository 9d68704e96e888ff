# same: cases=forward,submodule,forward_hook,pre_hook,backward,tensor_hook,module_backward_hook,grad_hook,step,closure,zero_grad,loss,worker,cause,context,notes,group,chained,anomaly,no_grad,twice
"""An exception that nobody catches: its traceback on stderr, and the exit code."""

import sys

import torch
from same import case, device, watch
from torch import nn


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("in a function's backward")


class Part(nn.Linear):
    def forward(self, x):
        if case == "submodule":
            raise ValueError("in a part's forward")
        return super().forward(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = Part(8, 8)

    def forward(self, x):
        if case == "forward":
            raise ValueError("in the model's forward")
        if case in ("cause", "context", "notes", "chained"):
            try:
                {}["missing"]
            except KeyError as error:
                if case == "cause":
                    raise RuntimeError("because of it") from error
                if case == "context":
                    raise RuntimeError("beside it")
                if case == "chained":
                    try:
                        raise ValueError("second") from error
                    except ValueError:
                        raise RuntimeError("third")
                if sys.version_info >= (3, 11):
                    error.add_note("a note")
                raise
        if case == "group" and sys.version_info >= (3, 11):
            raise ExceptionGroup("several", [ValueError("one"), TypeError("two")])
        if case == "anomaly":
            return torch.sqrt(self.part(x) * 0 - 1)
        return Fails.apply(self.part(x)) if case == "backward" else self.part(x)


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        if i == 5 and case == "worker":
            raise ValueError("in a worker")
        return torch.ones(8)


def fails(*_):
    raise ValueError("in a hook")


def main():
    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch(model, optimizer)
    torch.autograd.set_detect_anomaly(case == "anomaly")
    if case == "forward_hook":
        model.register_forward_hook(fails)
    elif case == "pre_hook":
        model.register_forward_pre_hook(fails)
    elif case == "module_backward_hook":
        model.part.register_full_backward_hook(fails)
    elif case == "grad_hook":
        model.part.weight.register_post_accumulate_grad_hook(fails)
    elif case == "step":
        optimizer.register_step_pre_hook(fails)
    loader = torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=1 if case == "worker" else 0)
    for x in loader:
        optimizer.zero_grad()
        output = model(x.to(device))
        if case == "tensor_hook":
            output.register_hook(fails)
        loss = output.square().mean() if case != "loss" else output.nothing()
        if case == "no_grad":
            loss = loss.detach()
        loss.backward()
        if case == "twice":
            loss.backward()
        optimizer.step(fails if case == "closure" else None)
    model.zero_grad(*([1, 2, 3] if case == "zero_grad" else []))


main()
