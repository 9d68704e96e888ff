# same: cases=itimer,thread; on=cpu
"""A handler that raises at any moment: each alarm must reach the user, once, and from their own code only."""

import os
import signal
import threading
import time
import traceback

import torch
from same import case, device, tell, watch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
watch(model, optimizer)


class TimeIsUp(Exception):
    pass


raised = 0


def stop(number, frame):
    global raised
    raised += 1
    raise TimeIsUp


def step():
    model(torch.ones(4, 8, device=device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def attempt(seconds):
    """Train until the alarm; only what leaves this function counts."""
    try:
        if case == "thread":
            timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGALRM))
            timer.start()
        else:
            signal.setitimer(signal.ITIMER_REAL, seconds)
        until = time.monotonic() + 1
        while time.monotonic() < until:
            step()
    except TimeIsUp as error:
        torch.set_grad_enabled(True)  # torch's optimizer leaves it off where the exception meets its `finally`
        files = {frame.filename for frame in traceback.extract_tb(error.__traceback__)}
        return "reached", sorted(name.partition("gpumon")[2] for name in files if "gpumon_agent" in name)
    return "lost", []


signal.signal(signal.SIGALRM, stop)
for _ in range(5):
    step()
results = [attempt(0.004 + 0.0007 * i) for i in range(25)]
tell("reached", [what for what, _ in results].count("reached"))
tell("frames of others", sorted({name for _, names in results for name in names}))
tell("raised", raised)
signal.signal(signal.SIGALRM, signal.SIG_DFL)
step()
