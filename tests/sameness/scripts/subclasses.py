# same: cases=function,dispatch,parameter
"""Tensor subclasses that record what is done to them: parameters, inputs, activations."""

import collections

import torch
from same import case, device, tell, watch
from torch.utils._pytree import tree_map

torch.manual_seed(0)
seen = collections.Counter()


class Named(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        seen[getattr(function, "__qualname__", str(function))] += 1
        return super().__torch_function__(function, types, args, kwargs or {})


class Wrapped(torch.Tensor):
    """Holds a tensor; has no storage of its own."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device, requires_grad=inner.requires_grad
        )

    def __init__(self, inner):
        self.inner = inner

    def __repr__(self):
        seen["__repr__"] += 1
        return "Wrapped"

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        seen[str(function)] += 1
        bare = lambda t: t.inner if isinstance(t, Wrapped) else t  # noqa: E731
        output = function(*tree_map(bare, args), **tree_map(bare, kwargs or {}))
        return tree_map(lambda t: Wrapped(t) if isinstance(t, torch.Tensor) else t, output)


model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)).to(device)
if case == "parameter":
    model[0].weight = torch.nn.Parameter(model[0].weight.detach().as_subclass(Named))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
watch(model, optimizer)
kept = []
for step in range(40):
    x = torch.ones(4, 8, device=device)
    x = {"function": lambda: x.as_subclass(Named), "dispatch": lambda: Wrapped(x)}.get(case, lambda: x)()
    output = model(x)
    loss = output.square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    kept.append(output.detach())
    if step % 8 == 7 or step < 3:
        tell(f"in step {step}", sorted(seen.items()))
        tell("types", [type(output).__name__, type(loss).__name__, type(model[0].weight.grad).__name__])
    seen.clear()
