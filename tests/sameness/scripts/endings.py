# same: whole; cases=returns,exit3,exit_text,system_exit,exit_builtin,quit,os_exit,abort,atexit_raises,nested,in_thread,stdout_closed; on=cpu
"""How a script ends: exit codes, the order of atexit, what is printed last."""

import atexit
import os
import sys
import threading
import weakref

import torch
from same import case, device, watch

atexit.register(print, "atexit: registered first")
model = torch.nn.Linear(8, 8).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
watch(model, optimizer)
atexit.register(print, "atexit: registered second")
weakref.finalize(model, print, "finalizer of the model")


class Last:
    def __del__(self):
        sys.stdout.write("deleted last\n")


last = Last()
for _ in range(6):
    model(torch.ones(4, 8, device=device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@atexit.register
def train_on():
    """A hook of the user's that trains, at the very end."""
    model(torch.ones(4, 8, device=device)).square().mean().backward()
    print("atexit: trained, gradient", model.weight.grad is not None)


print("the script's last line", flush=True)
if case == "exit3":
    sys.exit(3)
elif case == "exit_text":
    sys.exit("no more data")
elif case == "system_exit":
    raise SystemExit(4)
elif case == "exit_builtin":
    exit(5)
elif case == "quit":
    quit()
elif case == "os_exit":
    os._exit(6)
elif case == "abort":
    os.abort()
elif case == "atexit_raises":

    @atexit.register
    def fails():
        raise RuntimeError("in atexit")

elif case == "nested":
    try:
        try:
            sys.exit(7)
        finally:
            print("finally")
    except SystemExit as error:
        print("caught", error.code, error.args, vars(error), error.__traceback__.tb_next is None)
    try:
        exit(8)
    except SystemExit as error:
        print("caught", error.code, vars(error))
    sys.exit(9)
elif case == "in_thread":
    thread = threading.Thread(target=sys.exit, args=(3,))
    thread.start()
    thread.join()
elif case == "stdout_closed":
    sys.stderr.write("closing\n")
    os.close(1)
