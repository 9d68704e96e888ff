# same: cases=interrupt,caught,default_term,handled_term
"""Ctrl-C and SIGTERM in a training loop."""

import os
import signal
import sys
import threading
import time

import torch
from same import case, device, tell, watch

signal.signal(signal.SIGINT, signal.default_int_handler)
model = torch.nn.Linear(8, 8).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
watch(model, optimizer)
asked = []


def on_term(number, frame):
    asked.append(number)


def step():
    model(torch.ones(4, 8, device=device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


for _ in range(5):
    step()
tell("handlers", [str(signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD)])
if case == "handled_term":
    signal.signal(signal.SIGTERM, on_term)
    os.kill(os.getpid(), signal.SIGTERM)
    while not asked:
        step()
    tell("asked", asked)
    sys.exit(143)
if case == "default_term":
    print("before", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
if case == "caught":
    caught = 0
    for i in range(25):
        until = time.monotonic() + 20
        try:
            threading.Timer(0.003 + 0.0005 * i, os.kill, (os.getpid(), signal.SIGINT)).start()
            while time.monotonic() < until:
                step()
        except KeyboardInterrupt:
            caught += 1
    tell("caught", caught)


def forward_that_is_interrupted():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)


model.register_forward_hook(lambda *_: forward_that_is_interrupted())
step()
