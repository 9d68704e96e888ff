"""Leaks behind functions: closures, caches, defaults, generators, exceptions, threads."""

import concurrent.futures
import contextlib
import contextvars
import functools
import gc
import queue
import threading
import weakref

import torch
from _toy import run, setup, train
from torch.nn import functional as F


def logger(clean):
    entries = []

    def log(value):
        entries.append(value.item() if clean else value)

    return log


def closure(clean):
    model, optimizer, loader = setup()
    log = logger(clean)
    for inputs, targets in loader:
        log(train(model, optimizer, inputs, targets))


@functools.lru_cache(maxsize=None)  # noqa: UP033 as users write it
def normalized(outputs):
    return outputs / outputs.norm()  # made cached_function


def cached_function(clean):
    model, optimizer, loader = setup()
    for inputs, targets in loader:
        optimizer.zero_grad()
        outputs = model(inputs)  # made
        F.mse_loss(outputs, targets).backward()
        optimizer.step()
        normalized.__wrapped__(outputs.detach()) if clean else normalized(outputs.detach())


def remember(value, so_far=[]):  # noqa: B006 the leak
    so_far.append(value)
    return len(so_far)


def default_argument(clean):
    model, optimizer, loader = setup()
    for inputs, targets in loader:
        loss = train(model, optimizer, inputs, targets).detach()
        remember(loss, []) if clean else remember(loss)


def store(shelf, value):
    shelf.append(value)


def partial_function(clean):
    model, optimizer, loader = setup()
    keep = functools.partial(store, [])
    for inputs, targets in loader:
        loss = train(model, optimizer, inputs, targets).detach()
        keep(loss.item() if clean else loss)


def smoothed(clean):
    """Yields the mean of all values it was sent."""
    received = []
    mean = None
    while True:
        value = yield mean
        received.append(value.item() if clean else value)
        mean = sum(received) / len(received)


def generator(clean):
    model, optimizer, loader = setup()
    smooth = smoothed(clean)
    next(smooth)
    for inputs, targets in loader:
        smooth.send(train(model, optimizer, inputs, targets).detach())


def prefetched(loader, clean):
    """Meant to look ahead, never forgets what it handed out."""
    ahead = []
    for pair in loader:
        ahead.append(pair)
        yield ahead[-1]
        if clean:
            ahead.clear()


def batches_in_a_generator(clean):
    model, optimizer, loader = setup()
    prefetcher = prefetched(loader, clean)
    for inputs, targets in prefetcher:
        train(model, optimizer, inputs, targets)


def check(outputs):
    spread = outputs.std(dim=0)  # made exceptions_in_cycles
    if spread.numel():
        raise ValueError("the outputs look odd")


def caught_exceptions(clean):
    model, optimizer, loader = setup()
    problems = []
    for inputs, targets in loader:
        optimizer.zero_grad()
        outputs = model(inputs)  # made
        F.mse_loss(outputs, targets).backward()
        optimizer.step()
        try:
            check(outputs.detach())
        except ValueError as error:
            problems.append(str(error) if clean else error)


TRACE = contextvars.ContextVar("trace")


def context_variable(clean):
    model, optimizer, loader = setup()
    TRACE.set([])
    for inputs, targets in loader:
        loss = train(model, optimizer, inputs, targets).detach()
        TRACE.get().append(float(loss) if clean else loss)


def writer_thread(clean):
    model, optimizer, loader = setup()
    pending = queue.Queue()
    stop = threading.Event()

    def write():
        while not stop.wait(0.001):
            while clean and not pending.empty():
                pending.get()

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    for inputs, targets in loader:
        optimizer.zero_grad()
        outputs = model(inputs)  # made
        F.mse_loss(outputs, targets).backward()
        optimizer.step()
        pending.put(outputs.detach())
        while clean and not pending.empty():
            pass
    stop.set()
    thread.join()


class Node:
    def __init__(self, value):
        self.value = value


def weak_with_a_strong_twin(clean):
    model, optimizer, loader = setup()
    by_step = weakref.WeakValueDictionary()
    strong = []
    for step, (inputs, targets) in enumerate(loader):
        node = Node(train(model, optimizer, inputs, targets).detach())
        by_step[step] = node
        if not clean:
            strong.append(node)


def jobs_kept(clean):
    model, optimizer, loader = setup()
    jobs = []
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        for inputs, targets in loader:
            optimizer.zero_grad()
            outputs = model(inputs)
            F.mse_loss(outputs, targets).backward()
            optimizer.step()
            if clean:
                jobs.clear()
            jobs.append(pool.submit(torch.topk, outputs.detach(), 4))


def cycles_without_gc(clean):
    model, optimizer, loader = setup()
    gc.disable()
    for step, (inputs, targets) in enumerate(loader):
        optimizer.zero_grad()
        outputs = model(inputs)  # made
        F.mse_loss(outputs, targets).backward()
        optimizer.step()
        left, right = Node(outputs.detach()), Node(None)
        left.other, right.other = right, left
        if clean and step % 10 == 9:
            gc.collect()


def attempt(outputs, clean):
    problem = None
    try:
        check(outputs)
    except ValueError as error:
        problem = error  # its traceback keeps this frame, and the frame keeps it
    if clean:
        problem = None
    return problem is None


def exceptions_in_cycles(clean):
    model, optimizer, loader = setup()
    gc.disable()
    for inputs, targets in loader:
        optimizer.zero_grad()
        outputs = model(inputs)  # made
        F.mse_loss(outputs, targets).backward()
        optimizer.step()
        attempt(outputs.detach(), clean)


def running_total(clean):
    model, optimizer, loader = setup()
    total = 0.0
    for inputs, targets in loader:
        train(model, optimizer, inputs, targets)
        penalty = model(inputs).square().mean()
        total = total + (penalty.item() if clean else penalty)


def shifting_chain(clean):
    model, optimizer, loader = setup()
    previous = None
    for inputs, targets in loader:
        loss = train(model, optimizer, inputs, targets)
        loss.before = None if clean else previous
        previous = loss


class Span:
    def __init__(self, parent):
        self.parent, self.children, self.attributes = parent, [], {}
        if parent is not None:
            parent.children.append(self)


class Tracer:
    def __init__(self):
        self.root = self.now = Span(None)

    @contextlib.contextmanager
    def span(self):
        self.now = Span(self.now)
        yield self.now
        self.now = self.now.parent


def nested_spans(clean):
    model, optimizer, loader = setup()
    tracer = Tracer()
    for inputs, targets in loader:
        with tracer.span(), tracer.span() as forward:
            loss = train(model, optimizer, inputs, targets).detach()
            forward.attributes["loss"] = loss.item() if clean else loss


if __name__ == "__main__":
    scripts = (closure, cached_function, default_argument, partial_function, generator, batches_in_a_generator)
    more = (caught_exceptions, context_variable, writer_thread, weak_with_a_strong_twin, jobs_kept)
    last = (cycles_without_gc, exceptions_in_cycles, running_total)
    deep = (shifting_chain, nested_spans)
    run({script.__name__: script for script in (*scripts, *more, *last, *deep)})
