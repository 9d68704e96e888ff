# same: cases=listed,joined,training_in_a_thread,not_daemon,excepthook,profile,locals,executor
"""The user's threads: what threading shows, who is joined, where exceptions go."""

import concurrent.futures
import threading

import torch
from same import bits, case, device, tell, watch

torch.manual_seed(0)
tell("at first", [t.name for t in threading.enumerate()])
calls = []
if case == "profile":
    threading.setprofile(lambda frame, event, arg: calls.append(frame.f_code.co_filename))
model = torch.nn.Linear(8, 8).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
watch(model, optimizer)


def train(steps=6):
    for _ in range(steps):
        loss = model(torch.ones(4, 8, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss


def others():
    return [t for t in threading.enumerate() if t is not threading.main_thread()]


train()
tell("threads", [(t.name, t.daemon) for t in others()])
tell("count", threading.active_count())
if case == "joined":
    for thread in others():
        thread.join(30)
        tell("joined", not thread.is_alive())
elif case == "training_in_a_thread":
    result = []
    thread = threading.Thread(target=lambda: result.append(train()))
    thread.start()
    thread.join()
    tell("loss", bits(result[0]))
    tell("names", [thread.name, threading.Thread().name])
elif case == "not_daemon":

    def late():
        threading.main_thread().join()
        train(3)
        print("the thread ends last", flush=True)
        tell("late", [t.name for t in others() if t is not threading.current_thread()])

    threading.Thread(target=late).start()
elif case == "excepthook":

    def fails():
        train(2)
        raise ValueError("in a thread")

    for hook in (threading.excepthook, lambda args: tell("mine", [args.exc_type.__name__, str(args.exc_value)])):
        threading.excepthook = hook
        thread = threading.Thread(target=fails, name="worker")
        thread.start()
        thread.join()
elif case == "profile":
    threading.setprofile(None)
    tell("profiled", sorted({name.rpartition("/")[2] for name in calls}))
elif case == "locals":
    local = threading.local()
    local.value = 1
    train()
    tell("local", vars(local))
    tell("stack size", threading.stack_size())
else:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        tell("loss", bits(pool.submit(train).result()))
    tell("after", [(t.name, t.daemon) for t in others()])
train()
if case != "not_daemon":
    tell("at the end", threading.active_count())
