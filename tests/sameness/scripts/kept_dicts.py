# same: cases=function,dropped,module,callee,exec,eval,generator,coroutine,class_body,traceback,comprehension
"""Dicts of local variables that user code keeps and changes, while a leak is looked for."""

import asyncio
import inspect
import sys

import torch
from same import case, device, show, tell, watch

torch.manual_seed(0)
STEPS = 40
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 8)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
watch(model, optimizer)
losses = []


def train_step():
    x = torch.ones(16, 32, device=device)
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss)
    return loss


def change(variables):
    """Take something away, change something, put something in."""
    variables.pop("name", None)
    variables["rate"] = 99
    variables["added"] = "by me"


def function():
    name, rate, big = "run", 0.1, torch.ones(1000, device=device)
    hparams = vars()
    change(hparams)
    for step in range(STEPS):
        train_step()
        if step % 5 == 0:
            tell("hparams", show(hparams))
    tell("after", [show(hparams), name, rate, len(big)])


def dropped():
    name, rate = "run", 0.1
    locals()
    for _ in range(STEPS):
        train_step()
    tell("at the end", [show(locals()), name, rate])


def keep_of_caller():
    variables = sys._getframe(1).f_locals
    change(variables)
    return variables


def callee():
    name, rate = "run", 0.1
    kept = keep_of_caller()
    for step in range(STEPS):
        train_step()
        if step % 5 == 0:
            tell("kept", show(kept))
    tell("after", [show(kept), name, rate])


def callee_at_each_step(kept=None):
    name, rate = "run", 0.1
    for _ in range(STEPS):
        variables = keep_of_caller()
        variables["count"] = variables.get("count", 0) + 1
        train_step()
        tell("count", variables.get("count"))
    return name, rate


class Config:
    name, rate = "run", 0.1
    if case == "class_body":
        scope = vars()
        change(scope)
        for _ in range(STEPS):
            train_step()
        tell("class body", [show(scope), sorted(key for key in locals() if not key.startswith("__"))])


def evaluated():
    name, rate = "run", 0.1
    eval("change(locals())")
    space = {"train_step": train_step, "STEPS": STEPS, "name": name, "rate": rate}
    eval("[train_step() for _ in range(STEPS)]", space)
    space.pop("__builtins__")
    tell("space", show(space))
    kept = eval("locals()")
    change(kept)
    for _ in range(STEPS):
        train_step()
    tell("kept", show(kept))


def executed():
    space, own = {"train_step": train_step, "change": change}, {"name": "run"}
    exec(
        "rate = 0.1\nkept = locals()\nchange(kept)\nfor _ in range(40):\n    train_step()\nseen = sorted(kept)",
        space,
        own,
    )
    tell("own", show(own))


def items():
    name, rate = "run", 0.1
    variables = locals()
    change(variables)
    while True:
        loss = train_step()
        yield variables
        del loss
        name = name + "."
        rate += 1


def generator():
    made = items()
    for step in range(STEPS):
        variables = next(made)
        if step % 5 == 0:
            tell("variables", show(variables))
    tell("frame", show(made.gi_frame.f_locals))
    made.close()


async def coroutine():
    name, rate = "run", 0.1
    variables = locals()
    change(variables)
    for step in range(STEPS):
        await asyncio.sleep(0)
        train_step()
        if step % 5 == 0:
            tell("variables", show(variables))
    tell("after", [show(variables), name, rate])


def fails():
    name, rate = "run", 0.1
    held = torch.ones(100, device=device)
    raise ValueError(name, rate, len(held))


def traceback():
    try:
        fails()
    except ValueError as error:
        kept_error = error
    frame = kept_error.__traceback__.tb_next.tb_frame
    variables = frame.f_locals
    change(variables)
    for step in range(STEPS):
        train_step()
        if step % 5 == 0:
            tell("variables", show(variables))
    tell("inspect", show(inspect.getargvalues(frame).locals))


def comprehension():
    name, rate = "run", 0.1
    kept = [locals() for _ in range(2)]
    for variables in kept:
        change(variables)
    for _ in range(STEPS):
        train_step()
    tell("kept", [show(variables) for variables in kept])
    tell("after", [name, rate])


if case == "module":
    name, rate = "run", 0.1
    kept = vars()
    change(kept)
    for _ in range(STEPS):
        train_step()
    tell("globals", sorted(key for key in kept if not key.startswith("__")))
    tell("rate", [rate, added])  # noqa: F821
elif case == "callee":
    callee()
    callee_at_each_step()
elif case == "coroutine":
    asyncio.run(coroutine())
elif case in ("eval", "exec"):
    (evaluated if case == "eval" else executed)()
elif case != "class_body":
    globals()[case]()
tell("losses", len(losses))
