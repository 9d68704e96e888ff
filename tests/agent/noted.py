"""Trains on a virtual GPU: random things happen between and within steps. Prints what the agent told, and what torch
answered. `notes`, `calls`: whether hooks take notes, or call the state machine; what is told must be the same. `bare`:
nothing is watched; what torch answers must be the same.

`python noted.py notes|calls|bare SEED STEPS [WHAT HAPPENS …]`
"""

from __future__ import annotations

import gc
import json
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gpumon_agent
from gpumon_agent import wire
from gpumon_agent.governor import Governor
from gpumon_agent.hooks.native_hooks import NativeMark
from gpumon_agent.hooks.phases import Phases
from gpumon_agent.registry import REGISTRY

FAR = 1 << 62
COUNTED = Counter[str]()


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("backward")


class Calls(torch.autograd.Function):
    """Its backward, of a tensor on the CPU, runs in the thread that trains."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: Callable[[], object]) -> torch.Tensor:
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        with torch.enable_grad():
            ctx.call()
        return gradients[0], None


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 256), nn.Linear(256, 64)
        self.raises: type[BaseException] | None = None
        self.within: Any = None
        self.recomputes = False

    def forward(self, x: torch.Tensor, scale: float = 1.0, more: torch.Tensor | None = None) -> torch.Tensor:
        x = (checkpoint(self.first, x, use_reentrant=False) if self.recomputes else self.first(x)).relu()
        if self.within is not None:
            within, self.within = self.within, None
            within()
        if self.raises is not None:
            raises, self.raises = self.raises, None
            raise raises("forward")
        return self.second(x) * scale if more is None else self.second(x) + more


class Heard:
    def __init__(self) -> None:
        self.events: list[list[Any]] = []

    def drained(self, events: list[tuple[int, wire.NumberedEvent]]) -> None:
        for _, event in events:
            if isinstance(event, (wire.Phase, wire.Step)):
                fields = msgspec.structs.asdict(event)
                if isinstance(event, wire.Phase):
                    fields["flags"] &= ~wire.SAMPLED  # when depends on time
                del fields["t_ns"], fields["duration_ns"]
                self.events.append([fields.pop("step"), fields])


class Trainer:
    def __init__(self, *, wrapped: bool, recomputes: bool, watched: bool) -> None:
        self.inner = Model().cuda()
        self.inner.recomputes = recomputes
        self.model: Any = self.inner
        if wrapped and watched:  # both are
            gpumon_agent.watch(self.inner)
        if wrapped:
            self.model = nn.DataParallel(self.inner, device_ids=[0])
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.other = torch.optim.SGD([self.inner.first.bias], lr=0.0)
        self.answers: list[int] = []
        self.kept: list[torch.Tensor] = []
        if watched:
            gpumon_agent.watch(self.model, self.optimizer)

    def batch(self, rows: int = 32) -> torch.Tensor:
        return torch.ones(rows, 64, device="cuda")

    def step(self, **kwargs: Any) -> None:
        self.model(self.batch(), **kwargs).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    # ------------------------------------------------------------------------------- what may happen beside plain steps

    def accumulates(self) -> None:
        self.model(self.batch()).sum().backward()
        self.step()

    def has_new_shapes(self) -> None:
        self.model(self.batch(random_rows())).sum().backward()
        self.step()

    def has_more_inputs(self) -> None:
        self.step(scale=2.0, more=self.batch())

    def has_two_forwards(self) -> None:
        (self.model(self.batch()) + self.model(self.batch())).sum().backward()
        self.optimizer.step()

    def evaluates(self) -> None:
        with torch.no_grad():
            self.model(self.batch())
        self.step()

    def evaluates_with_a_graph(self) -> None:
        self.model.eval()
        self.model(self.batch())
        self.model.train()
        self.step()

    def tunes(self) -> None:
        self.model.eval()
        self.step()
        self.model.train()

    def forward_raises(self) -> None:
        self.inner.raises = ValueError
        try:
            self.model(self.batch())
        except ValueError:
            COUNTED["caught"] += 1
        self.step()

    def forward_is_interrupted(self) -> None:
        self.inner.raises = KeyboardInterrupt
        try:
            self.model(self.batch())
        except KeyboardInterrupt:
            COUNTED["caught"] += 1
        self.step()

    def backward_raises(self) -> None:
        try:
            Fails.apply(self.model(self.batch())).sum().backward()
        except RuntimeError:
            COUNTED["caught"] += 1
        engine_frees()
        self.step()

    def optimizer_raises(self) -> None:
        def closure() -> float:
            raise ValueError("optimizer")

        self.model(self.batch()).sum().backward()
        try:
            self.optimizer.step(closure)
        except ValueError:
            COUNTED["caught"] += 1
        self.step()

    def trains_in_a_closure(self) -> None:
        def closure() -> Any:
            self.optimizer.zero_grad()
            loss = self.model(self.batch()).sum()
            loss.backward()
            return loss

        self.optimizer.step(closure)

    def resets_peaks(self) -> None:
        held = torch.empty(1 << 20, device="cuda")
        del held
        self.answers.append(torch.cuda.max_memory_allocated())
        self.inner.within = torch.cuda.reset_peak_memory_stats
        loss = self.model(self.batch()).sum()
        self.answers.append(torch.cuda.max_memory_allocated())
        loss.backward()
        torch.cuda.reset_peak_memory_stats()
        self.answers.append(torch.cuda.max_memory_allocated())
        self.optimizer.step()
        self.answers.append(torch.cuda.max_memory_allocated())
        self.step()
        self.answers.append(torch.cuda.max_memory_allocated())

    def reads_peaks(self) -> None:
        self.inner.within = lambda: self.answers.append(torch.cuda.max_memory_reserved())
        self.step()
        self.answers.append(torch.cuda.max_memory_allocated())

    def names_a_phase(self) -> None:
        with gpumon_agent.phase("mine"):
            held = torch.empty(1 << 18, device="cuda")
        del held
        self.step()

    def has_another_optimizer(self) -> None:
        self.model(self.batch()).sum().backward()
        self.other.step()
        self.optimizer.step()

    def goes_backward_twice(self) -> None:
        loss = self.model(self.batch()).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        self.optimizer.step()

    def asks_for_gradients(self) -> None:
        torch.autograd.grad(self.model(self.batch()).sum(), list(self.model.parameters()))
        engine_frees()
        self.step()

    def recomputes(self) -> None:
        made = checkpoint(lambda output: output * 2, self.model(self.batch()), use_reentrant=True)
        made.sum().backward()
        self.optimizer.step()

    def calls_the_model_in_its_backward(self) -> None:
        loss = self.model(self.batch()).sum().cpu()
        Calls.apply(loss, lambda: self.model(self.batch())).backward()
        self.optimizer.step()

    def recomputes_always(self) -> None:
        """In every step, from the first on."""
        self.step()

    def goes_backward_in_the_forward(self) -> None:
        def within() -> None:
            x = torch.ones(4, device="cuda", requires_grad=True)
            x.square().sum().backward()

        self.inner.within = within
        self.step()

    def goes_backward_alone(self) -> None:
        x = torch.ones(4, device="cuda", requires_grad=True)
        x.square().sum().backward()
        self.step()

    def runs_in_a_thread(self) -> None:
        thread = threading.Thread(target=lambda: self.model(self.batch()))
        thread.start()
        thread.join()
        self.step()
        self.step()

    def has_a_hook(self) -> None:
        handle = self.model.register_forward_hook(lambda *_: COUNTED.update(("hook",)))
        self.step()
        handle.remove()
        handle = self.model.register_forward_pre_hook(lambda *_: COUNTED.update(("hook",)))
        self.step()
        handle.remove()

    def runs_out(self) -> None:
        def within() -> None:
            torch.empty(1 << 45, dtype=torch.uint8, device="cuda")

        self.inner.within = within
        try:
            self.model(self.batch())
        except torch.OutOfMemoryError:
            COUNTED["caught"] += 1
        self.step()

    def allocates(self) -> None:
        self.kept.append(torch.empty(1 << 22, device="cuda"))
        self.step()


ENDS_NOTES = ("names_a_phase", "has_another_optimizer", "recomputes_always")
"""With these every step calls the state machine."""
_OTHERS = ("__init__", "batch", "step", *ENDS_NOTES)
HAPPENS = [name for name, each in vars(Trainer).items() if callable(each) and name not in _OTHERS]
ROWS = random.Random(7)


def engine_frees() -> None:
    """Autograd's threads may still hold what they computed as the call returns."""
    time.sleep(0.01)


def random_rows() -> int:
    return ROWS.choice((8, 16, 48, 80))


def count(owner: Any, name: str) -> None:
    function = getattr(owner, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        COUNTED[name] += 1
        return function(*args, **kwargs)

    setattr(owner, name, counted)


def read_everything() -> None:
    """From here on the governor lets every step be read, without owners, in runs of some length."""
    agent = REGISTRY.agent
    governor = agent.governor
    ahead = random.Random(1)
    Governor._decide = lambda _: None  # type: ignore[method-assign]
    Governor.reads_ahead = property(lambda _: ahead.choice((1, 2, 5, 40)))  # type: ignore[assignment]
    governor.read_every, governor._ledger_at, governor._ledger_until_ns, governor.ledger = 1, FAR, FAR, False
    agent.phases.read_soon()


def main() -> None:
    how, seed, steps, *only = sys.argv[1:]
    gc.disable()
    if how == "calls":
        NativeMark.can_note = lambda _: False  # type: ignore[method-assign]
    count(NativeMark, "begin_notes")
    count(Phases, "leave_notes")
    count(Phases, "_do_noted")
    count(Phases, "_close_noted")
    chance = random.Random(int(seed))
    wrapped, recomputes = int(seed) % 2 == 1, "recomputes_always" in only
    trainer = Trainer(wrapped=wrapped, recomputes=recomputes, watched=how != "bare")
    agent: Any = REGISTRY.agent
    heard = Heard()
    REGISTRY.followers.add(heard)
    for _ in range(120):
        trainer.step()
    if agent is not None:
        read_everything()
    trainer.step()
    trainer.step()
    if agent is not None:
        agent.flush()
        heard.events.clear()
        begins = agent.phases.step
    for _ in range(int(steps)):
        if agent is not None:
            agent.phases._left = 0
        for _ in range(chance.choice((1, 1, 2, 7))):
            trainer.step()
        getattr(trainer, chance.choice(only or HAPPENS))()
        gc.collect()
    failures = []
    if agent is not None:
        agent.flush()
        failures = [part for part, many in agent.guard.failures.items() if many]
    for event in heard.events:
        event[0] -= begins
    print(json.dumps([heard.events, trainer.answers, failures, COUNTED]))


if __name__ == "__main__":
    main()
