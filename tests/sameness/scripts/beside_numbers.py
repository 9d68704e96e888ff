# same: cases=warnings,fused,exports,breaks,tables; on=cpu
"""What a script can see of torch beside its numbers: warnings, fused paths, exports, graph breaks, tables."""

import copy
import hashlib
import io
import os
import pickle
import warnings

import torch
from same import case, watch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

BACKWARD, LOAD, TABLE = torch.Tensor.backward, torch.load, {torch.Tensor.backward}
torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.b(self.a(x).relu())


x = torch.randn(3, 4)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
watch(model, optimizer)
for _ in range(2):
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

if case == "warnings":

    def warned(what, call):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                call()
            except Exception as error:
                print(what, "raised", type(error).__name__)
        for each in caught:
            if "deprecated" not in str(each.message) or "mine" in str(each.message):
                print(what, each.filename.rpartition("/")[2], each.lineno, each.category.__name__)

    class Warns(nn.Linear):
        def forward(self, x):
            # a root's own call has one more frame of torch's, for its hooks
            warnings.warn("mine: forward", stacklevel=2)
            return super().forward(x)

        def load_state_dict(self, *a, **k):
            warnings.warn("mine: state", stacklevel=2)
            return super().load_state_dict(*a, **k)

        def __setstate__(self, state):
            warnings.warn("mine: unpickled", stacklevel=2)
            super().__setstate__(state)

    class Stepper(torch.optim.SGD):
        def __init__(self, *a, **k):
            super().__init__(*a, **k)
            warnings.warn("mine: built", stacklevel=2)

        def add_param_group(self, group):
            warnings.warn("mine: group", stacklevel=3)  # the caller of Optimizer.__init__
            super().add_param_group(group)

        def step(self, closure=None):
            warnings.warn("mine: step", stacklevel=2)
            warnings.warn("mine: step, far", stacklevel=3)
            return super().step(closure)

        def load_state_dict(self, state):
            warnings.warn("mine: optimizer's state", stacklevel=2)
            super().load_state_dict(state)

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            warnings.warn("mine: backward", stacklevel=2)
            return g

    class Pickled:
        def __reduce__(self):
            return unpickled, ()

    def unpickled():
        warnings.warn("mine: loads", stacklevel=2)
        return 1

    class Loads(nn.Linear):
        def _load_from_state_dict(self, *a, **k):
            for level in range(2, 8):
                warnings.warn(f"mine: level {level}", stacklevel=level)
            super()._load_from_state_dict(*a, **k)

    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = Warns(4, 4)
            self.weight = self.layer.weight

        def forward(self, x):
            return self.layer(x)

    layer = Around()
    stepper = Stepper(layer.parameters(), lr=0.1)
    warned("built", lambda: Stepper(layer.parameters(), lr=0.1))
    warned("forward", lambda: layer(x))
    warned("backward", lambda: Backward.apply(layer(x)).sum().backward())
    warned("grad", lambda: torch.autograd.grad(Backward.apply(layer(x)).sum(), layer.weight))
    warned("far", lambda: torch.autograd.backward(layer(x).sum(), grad_tensors=torch.tensor(1.0)))
    warned("variables", lambda: torch.autograd.backward(layer(x).sum(), grad_variables=torch.tensor(1.0)))
    warned("step", stepper.step)
    warned("state", lambda: layer.load_state_dict(layer.state_dict()))
    warned("states", lambda: stepper.load_state_dict(stepper.state_dict()))
    warned("levels", lambda: nn.Sequential(Loads(4, 4)).load_state_dict(nn.Sequential(Loads(4, 4)).state_dict()))
    buffer = io.BytesIO()
    torch.save([Pickled(), layer], buffer)
    buffer.seek(0)
    warned("load", lambda: torch.load(buffer, weights_only=False))
    warned("checkpoint", lambda: checkpoint(layer, x).sum().backward())
    warned("reentrant", lambda: checkpoint(layer, x, use_reentrant=True).sum().backward())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)

    def scaled():
        scaler.scale(layer(x).sum()).backward()
        scaler.step(stepper)
        scaler.update()

    warned("scaler", scaled)
    warned("scheduler", lambda: torch.optim.lr_scheduler.StepLR(torch.optim.SGD(layer.parameters(), lr=1.0), 1).step())
    compiled = Around()
    watch(compiled)
    compiled._compiled_call_impl = compiled._call_impl
    if os.environ["SAME_WATCH"] == "1":
        from gpumon_agent.registry import REGISTRY

        REGISTRY.agent.hooks._compiled(compiled)
    warned("compiled", lambda: compiled(x))
    print(buffer.tell() > 0)
elif case == "fused":
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    encoder = nn.TransformerEncoder(copy.deepcopy(layer), 2, enable_nested_tensor=False).eval()
    watch(layer)
    watch(encoder)
    watch(encoder.layers[0])
    seen = []

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    data = torch.randn(2, 5, 16)
    for module in (layer, encoder):
        with torch.no_grad(), Operators():
            out = module(data)
        print(seen, hashlib.sha256(out.numpy().tobytes()).hexdigest())
        seen.clear()
        hook = module.register_forward_hook(lambda *_: None)
        for name in ("_forward_hooks", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"):
            hooks = getattr(module, name)
            print(
                len(hooks),
                bool(hooks),
                len(list(hooks)),
                len(hooks.items()),
                len(hooks.keys()),
                len(hooks.values()),
                hooks == {},
                hooks == copy.copy(hooks),
                len(dict(hooks)),
                len({**hooks}),
                len(copy.deepcopy(hooks)),
            )
        hook.remove()
        module._forward_hooks.clear()
        print(dict(module._forward_hooks), repr(module._forward_hooks)[-4:])
    print(len(layer._forward_hooks), layer._forward_hooks == {}, not layer._forward_hooks)
elif case == "exports":
    batch = (x,)
    for strict in (True, False):
        exported = torch.export.export(model, batch, strict=strict)
        print([str(node) + str(node.target) for node in exported.graph.nodes], exported.module()(x))
    print(torch.jit.trace(model, batch).graph)
    print(torch.jit.script(model).graph)
    print(torch.fx.symbolic_trace(model).code)
    print(torch.compile(model, backend="eager", fullgraph=True)(x))
    print(torch.func.functional_call(model, dict(model.named_parameters()), batch))
    print(copy.deepcopy(model)(x), pickle.loads(pickle.dumps(model))(x))
elif case == "breaks":
    import torch._dynamo
    from torch._dynamo.utils import counters

    def step(x):
        loss = model(x).sum()
        loss.backward()
        return loss.detach() + 1

    explained = torch._dynamo.explain(step)(x)
    print(explained.graph_count, [(each.reason, str(each.user_stack)) for each in explained.break_reasons])
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(step, backend="eager")
    for size in (2, 2, 3):
        print(repr(compiled(torch.ones(size, 4)).item()))

    def grad(x):
        return torch.autograd.grad(model(x).sum(), model.a.weight)[0].sum()

    compiled = torch.compile(grad, backend="eager")
    print(repr(compiled(torch.ones(2, 4)).item()))
    for name in ("frames", "graph_break", "stats", "unimplemented"):
        print(name, dict(counters[name]))
elif case == "tables":

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func in TABLE:
                print("in the table")
            return func(*args, **(kwargs or {}))

    with Mode():
        model(x).sum().backward()
    print(torch.Tensor.backward is BACKWARD, torch.load is LOAD, torch.load is torch.serialization.load)
    print(pickle.dumps([torch.load, torch.compile, torch.save, torch.autograd.backward]))
