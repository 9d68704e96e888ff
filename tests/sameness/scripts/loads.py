# same: cases=load,strict,file,assign,mmap,failing
"""Checkpoints that are loaded: results, errors, memory."""

import io
import traceback

import torch
from same import allocated, bits, case, device, tell, watch
from torch import nn

torch.manual_seed(0)


def make():
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)).to(device)


model = make()
optimizer = torch.optim.AdamW(model.parameters())
watch(model, optimizer)


def step():
    loss = model(torch.ones(4, 64, device=device)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


for _ in range(4):
    step()
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 4}, "last.pt")
tell("saved", allocated())
for turn in range(3):
    if case == "load":
        state = torch.load("last.pt", map_location=device)
        tell("loaded", [sorted(state), type(state["model"]).__name__, allocated()])
        tell("returned", str(model.load_state_dict(state["model"])))
        tell("optimizer", str(optimizer.load_state_dict(state["optimizer"])))
        del state
        tell("dropped", allocated())
    elif case == "strict":
        state = model.state_dict()
        state["more"] = state.pop("0.weight")
        tell("returned", str(model.load_state_dict(state, strict=False)))
        try:
            model.load_state_dict(state)
        except RuntimeError as error:
            tell("error", str(error))
            traceback.print_exc()
    elif case == "file":
        with open("last.pt", "rb") as file:
            state = torch.load(file, map_location=device, weights_only=True)
            tell("position", file.tell())
        buffer = io.BytesIO()
        torch.save(state, buffer)
        buffer.seek(0)
        tell("again", len(torch.load(buffer, map_location="cpu")))
    elif case == "assign":
        fresh = make()
        tell("returned", str(fresh.load_state_dict(torch.load("last.pt", map_location=device)["model"], assign=True)))
        tell("weights", bits(fresh[0].weight))
    elif case == "mmap":
        state = torch.load("last.pt", mmap=True, map_location="cpu")
        tell("mapped", bits(state["model"]["0.weight"].cpu()) if device == "cpu" else None)
    else:
        try:
            torch.load("missing.pt")
        except FileNotFoundError:
            traceback.print_exc()
        with open("bad.pt", "wb") as file:
            file.write(b"nothing of use")
        try:
            torch.load("bad.pt")
        except Exception as error:
            tell("error", type(error).__name__)
            traceback.print_exc()
    for _ in range(8):
        step()
        tell("allocated", allocated())
