# same: cases=fork,fork_trains,wait,spawn,forkserver,fork_process,pool
"""Children of the training process, and what they do with the model."""

import multiprocessing
import os
import signal
import sys

import torch
from same import bits, case, tell, watch


def work(number):
    torch.manual_seed(number)
    model = torch.nn.Linear(4, 4)
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    print("child", number, bits(model.weight)[:8], flush=True)
    return bits(model.weight)


def main():
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch(model, optimizer)

    def step():
        loss = model(torch.ones(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item().hex()

    for _ in range(4):
        step()
    if case in ("fork", "fork_trains"):
        pid = os.fork()
        if pid == 0:
            if case == "fork_trains":
                print("child", [step() for _ in range(3)], flush=True)
            print("child ends", flush=True)
            sys.stdout.flush()
            os._exit(11)
        tell("ended", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        if os.fork() == 0:
            sys.exit(12)  # through the interpreter's end, atexit and all
        tell("ended", os.waitstatus_to_exitcode(os.wait()[1]))
    elif case == "wait":
        heard = []
        signal.signal(signal.SIGCHLD, lambda *_: heard.append(1))
        for _ in range(10):
            step()
        tell("children heard", heard)
        try:
            tell("waited", os.wait())
        except ChildProcessError as error:
            tell("no child", str(error))
        tell("children", multiprocessing.active_children())
    elif case == "pool":
        with multiprocessing.get_context("fork").Pool(2) as pool:
            tell("results", pool.map(work, range(3), chunksize=3))
    else:
        how = multiprocessing.get_context("fork" if case == "fork_process" else case)
        child = how.Process(target=work, args=(1,))
        child.start()
        child.join()
        tell("exit code", child.exitcode)
    tell("after", [step() for _ in range(3)])


if __name__ == "__main__":
    main()
