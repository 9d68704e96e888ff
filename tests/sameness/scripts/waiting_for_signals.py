# same: cases=sigwait,sigtimedwait,wakeup_fd,faulthandler,mask,siginterrupt
"""Signals that are blocked and waited for, as pre-emption code does it; wakeup descriptors; faulthandler."""

import faulthandler
import os
import select
import signal
import threading

import torch
from same import case, device, tell, watch

if case in ("sigwait", "sigtimedwait", "mask"):
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGUSR2})
model = torch.nn.Linear(8, 8).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
watch(model, optimizer)


def step():
    model(torch.ones(4, 8, device=device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


for _ in range(5):
    step()
if case == "sigwait":
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGUSR1):
        os.kill(os.getpid(), number)
        step()
        tell("pending", sorted(map(int, signal.sigpending())))
        tell("got", signal.sigwait({signal.SIGUSR1, signal.SIGUSR2}))
elif case == "sigtimedwait":
    # blocked after the agent came, as a library would
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGHUP})
    for number in (signal.SIGTERM, signal.SIGHUP):
        os.kill(os.getpid(), number)
        step()
        tell("got", signal.sigtimedwait({signal.SIGTERM, signal.SIGHUP}, 20).si_signo)
elif case == "mask":
    tell("mask", sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))))
    thread = threading.Thread(target=lambda: tell("thread", sorted(map(int, signal.pthread_sigmask(0, ())))))
    thread.start()
    thread.join()
elif case == "wakeup_fd":
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.signal(signal.SIGUSR1, lambda *_: None)
    signal.set_wakeup_fd(writer)
    for _ in range(10):
        os.kill(os.getpid(), signal.SIGUSR1)
        step()
        assert select.select([reader], [], [], 20)[0]
        tell("byte", list(os.read(reader, 100)))
    tell("descriptor", signal.set_wakeup_fd(-1) == writer)
elif case == "siginterrupt":
    signal.signal(signal.SIGUSR1, lambda *_: tell("handled", threading.current_thread() is threading.main_thread()))
    for _ in range(5):
        os.kill(os.getpid(), signal.SIGUSR1)
        step()
    tell("timer", signal.getitimer(signal.ITIMER_REAL))
else:
    tell("enabled", faulthandler.is_enabled())
    faulthandler.enable(all_threads=False)
    faulthandler.register(signal.SIGUSR1, chain=False, all_threads=False)
    os.kill(os.getpid(), signal.SIGUSR1)
    step()
    faulthandler.dump_traceback(all_threads=False)
    faulthandler.disable()
