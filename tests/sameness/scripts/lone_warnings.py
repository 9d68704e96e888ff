# same: cases=forward,backward,step,load,zero_grad
"""A warning that the filter makes an error comes out where it is raised, with its traceback."""

import warnings

import torch
from same import case, device, watch

warnings.filterwarnings("error", message="mine")


class Net(torch.nn.Linear):
    def forward(self, x):
        if case == "forward":
            warnings.warn("mine", stacklevel=2)
        return super().forward(x)


def raise_it(*_):
    warnings.warn("mine", UserWarning, stacklevel=2)


model = Net(8, 8).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
watch(model, optimizer)
for _ in range(5):
    output = model(torch.ones(4, 8, device=device))
    if case == "backward":
        output.register_hook(raise_it)
    output.sum().backward()
    if case == "step":
        optimizer.register_step_post_hook(raise_it)
    optimizer.step()
    if case == "load":
        model.register_load_state_dict_post_hook(raise_it)
        model.load_state_dict(model.state_dict())
    optimizer.zero_grad()
    if case == "zero_grad":
        raise_it()
