"""Ten situations in which somebody looks at a run, as the messages of its ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random

from leaking import census, group, leaking
from synthetic import GIB, MIB, Run, side_by_side

from gpumon.analysis import Reporter
from gpumon.analysis.answer import Answer, answer
from gpumon.session.store import SessionStore
from gpumon_agent import wire


@dataclass(frozen=True)
class Scene:
    """`unix_ns`: when somebody looks at all of it."""

    received: tuple[wire.Received, ...]
    unix_ns: int

    def answer(self) -> Answer:
        """Of a viewer that looks at each step: what lies on a device is confirmed by several looks."""
        store, reporter, said = SessionStore(), Reporter(), None
        for received in self.received:
            store.apply(received)
            if isinstance(received.event, wire.Step):
                frame = store.frame(received.unix_ns)
                said = answer(frame, reporter.report(frame), said)
        frame = store.frame(self.unix_ns)
        return answer(frame, reporter.report(frame), said)


def scene(*runs: Run, steps: int = 60, more: Callable[[Run], wire.Event] | None = None) -> Scene:
    def told() -> Iterable[wire.Received]:
        for run in runs:
            yield from run.stream(steps, host_every=1)
            if more is not None:
                yield run.received(more(run), steps)

    return Scene(tuple(told()), runs[0].unix_ns(steps))


def leak(bytes_a_step: int, **how: object) -> Run:
    return leaking(bytes_a_step, census(25, group(24, bytes=24 * bytes_a_step)), **how)


def healthy() -> Scene:
    return scene(Run(total=40 * GIB))


def a_leak() -> Scene:
    return scene(leak(4 * MIB, total=2 * GIB))


def slow_leak() -> Scene:
    return scene(leak(4096))


def noisy_leak() -> Scene:
    noise = Random(1)
    return scene(leak(4 * MIB, total=2 * GIB, activations=lambda step: (300 + noise.randrange(40)) * MIB))


def monster_batch() -> Scene:
    def ahead(run: Run) -> wire.Event:
        return wire.Outlook(60, 0, run.time_ns(60), 50 * GIB, 50 * GIB, 50 * GIB, "backward", wire.OOM_AHEAD, -10 * GIB)

    return scene(Run(total=40 * GIB), more=ahead)


def fragmentation() -> Scene:
    run = Run(slack=0, total=40 * GIB)
    run.reserved = lambda step: run.peak(0) + 200 * MIB * min(step, 6)  # type: ignore[method-assign]
    return scene(run, steps=12)


def retained_checkpoint() -> Scene:
    holder = wire.Holder("ckpt['model'][*]", "local", "train.py:31", 12)
    kept = wire.Checkpoint(
        0, 0, 0, 0, "torch.load", "model.pt", "train.py:31", 100 * MIB, 12, 100 * MIB, 8, 0, holders=(holder,)
    )
    return scene(Run(total=40 * GIB, beside=lambda step: (kept,) if step == 8 else ()), steps=14)


def out_of_memory_at_step_1() -> Scene:
    def failed(run: Run) -> wire.Event:
        return wire.Oom(2, "backward", 0, run.time_ns(2), 3 * GIB, run.total, 0, run.peak(1), run.reserved(1))

    return scene(Run(total=GIB), steps=2, more=failed)


def rank_3_of_4_leaks() -> Scene:
    ranks = [Run(total=2 * GIB, rank=n, world_size=4, pid=4000 + n, nonce=f"ab1{n}") for n in range(3)]
    return scene(*ranks, leak(4 * MIB, total=2 * GIB, rank=3, world_size=4, pid=4003, nonce="ab13"))


def stray_context() -> Scene:
    return of_strays_on(0)


def of_strays_on(device: int) -> Scene:
    """Four ranks, each on a device of its own; the other three hold a context on this one too, from step 20 on."""
    pids = tuple(4000 + n for n in range(4))
    ranks = [
        Run(total=40 * GIB, rank=n, world_size=4, pid=pid, nonce=f"ab1{n}", uuid=f"GPU-{n}")
        for n, pid in enumerate(pids)
    ]
    ranks[device].strays = lambda step: tuple(p for p in pids if p != pids[device]) if step >= 20 else ()
    return Scene(tuple(side_by_side(ranks, 60)), ranks[0].unix_ns(60))


SITUATIONS: tuple[Callable[[], Scene], ...] = (
    healthy,
    a_leak,
    slow_leak,
    noisy_leak,
    monster_batch,
    fragmentation,
    retained_checkpoint,
    out_of_memory_at_step_1,
    stray_context,
    rank_3_of_4_leaks,
)
