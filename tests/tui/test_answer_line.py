"""The answer line in ten situations at 80 columns: it alone says what is wrong, who it is, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from leaking import census, group, leaking
from synthetic import GIB, MIB, Run, side_by_side

from gpumon.analysis import Reporter
from gpumon.analysis.answer import Answer, answer
from gpumon.session.store import SessionStore
from gpumon.tui.styles import UNICODE
from gpumon.tui.text_layout import plain, width
from gpumon.tui.widgets.answer_line import MOST_ROWS, Stated, answer_lines, stated
from gpumon_agent import wire


def said_of(*runs: Run, steps: int = 60, more: Callable[[Run], wire.Event] | None = None) -> Answer:
    store = SessionStore()
    for run in runs:
        for received in run.stream(steps, host_every=1):
            store.apply(received)
        if more is not None:
            store.apply(run.received(more(run), steps))
    frame = store.frame(runs[0].unix_ns(steps))
    return answer(frame, Reporter().report(frame))


def leak(bytes_a_step: int, **how: object) -> Run:
    return leaking(bytes_a_step, census(25, group(24, bytes=24 * bytes_a_step)), **how)


def healthy() -> Answer:
    return said_of(Run(total=40 * GIB))


def a_leak() -> Answer:
    return said_of(leak(4 * MIB, total=2 * GIB))


def slow_leak() -> Answer:
    return said_of(leak(4096))


def noisy_leak() -> Answer:
    noise = Random(1)
    return said_of(leak(4 * MIB, total=2 * GIB, activations=lambda step: (300 + noise.randrange(40)) * MIB))


def monster_batch() -> Answer:
    def ahead(run: Run) -> wire.Event:
        return wire.Outlook(60, 0, run.time_ns(60), 50 * GIB, 50 * GIB, 50 * GIB, "backward", wire.OOM_AHEAD, -10 * GIB)

    return said_of(Run(total=40 * GIB), more=ahead)


def fragmentation() -> Answer:
    run = Run(slack=0, total=40 * GIB)
    run.reserved = lambda step: run.peak(0) + 200 * MIB * min(step, 6)  # type: ignore[method-assign]
    return said_of(run, steps=12)


def retained_checkpoint() -> Answer:
    holder = wire.Holder("ckpt['model'][*]", "local", "train.py:31", 12)
    kept = wire.Checkpoint(
        0, 0, 0, 0, "torch.load", "model.pt", "train.py:31", 100 * MIB, 12, 100 * MIB, 8, 0, holders=(holder,)
    )
    return said_of(Run(total=40 * GIB, beside=lambda step: (kept,) if step == 8 else ()), steps=14)


def out_of_memory_at_step_1() -> Answer:
    def failed(run: Run) -> wire.Event:
        return wire.Oom(2, "backward", 0, run.time_ns(2), 3 * GIB, run.total, 0, run.peak(1), run.reserved(1))

    return said_of(Run(total=GIB), steps=2, more=failed)


def rank_3_of_4_leaks() -> Answer:
    ranks = [Run(total=2 * GIB, rank=n, world_size=4, pid=4000 + n, nonce=f"ab1{n}") for n in range(3)]
    return said_of(*ranks, leak(4 * MIB, total=2 * GIB, rank=3, world_size=4, pid=4003, nonce="ab13"))


def stray_context() -> Answer:
    return of_strays_on(0)


def of_strays_on(device: int) -> Answer:
    """Four ranks, each on a device of its own; the other three hold a context on this one too, from step 20 on.

    What lies on a device is confirmed by several looks, as a screen takes them.
    """
    pids = tuple(4000 + n for n in range(4))
    ranks = [
        Run(total=40 * GIB, rank=n, world_size=4, pid=pid, nonce=f"ab1{n}", uuid=f"GPU-{n}")
        for n, pid in enumerate(pids)
    ]
    ranks[device].strays = lambda step: tuple(p for p in pids if p != pids[device]) if step >= 20 else ()
    store, reporter, said = SessionStore(), Reporter(), None
    for received in side_by_side(ranks, 60):
        store.apply(received)
        if received.source == ranks[-1].nonce and isinstance(received.event, wire.Step):
            frame = store.frame(received.unix_ns)
            said = answer(frame, reporter.report(frame), said)
    assert said is not None
    return said


SITUATIONS: tuple[tuple[Callable[[], Answer], str, str, str], ...] = (
    (healthy, "✓ OK", "is left", ""),
    (a_leak, "▲ LEAK", "`losses[*]` grows by 4.00 MiB a step", "bound `losses`|store numbers in `losses`"),
    (slow_leak, "▲ LEAK", "(train.py:57)", "`losses`"),
    (noisy_leak, "▲ LEAK", "(train.py:57)", "`losses`"),
    (monster_batch, "▲ WILL NOT FIT", "step 60 needs 50.0 GiB in backward, 10.0 GiB more", "skip or cut such a batch"),
    (fragmentation, "✓ OK", "fragmentation:", "expandable_segments:True"),
    (retained_checkpoint, "✓ OK", "retained-checkpoint: `ckpt['model'][*]` 100.0 MiB", "del ckpt"),
    (out_of_memory_at_step_1, "■ OUT OF MEMORY", "3.00 GiB", "do"),
    (
        stray_context,
        "✓ OK · rank 0",
        "ranks 1, 2, 3 hold a CUDA context (1.32 GiB",
        "torch.cuda.set_device(local_rank)",
    ),
    (rank_3_of_4_leaks, "▲ LEAK · rank 3", "(train.py:57)", "`losses`"),
)


@pytest.mark.parametrize("at", range(len(SITUATIONS)), ids=[each[0].__name__ for each in SITUATIONS])
def test_at_80_columns_the_answer_alone_says_state_culprit_and_way_out(at: int) -> None:
    make, state, culprit, do = SITUATIONS[at]
    lines = answer_lines(stated(make()), 80, MOST_ROWS, UNICODE)
    text = " ".join(plain(lines).split())
    assert text.startswith(state)
    assert culprit in text
    assert any(each in text for each in do.split("|"))
    assert "and more" not in text
    assert max(map(width, lines)) <= 80


def test_contexts_on_another_rank_s_device_are_named_though_that_rank_is_as_ok_as_the_first() -> None:
    (text, rest) = plain(answer_lines(stated(of_strays_on(2)), 80, MOST_ROWS, UNICODE)).split("   do  ")
    assert text.startswith(" ✓ OK · rank 2")
    assert "ranks 0, 1, 3 hold a CUDA context (1.32 GiB in all) on rank 2's device" in " ".join(text.split())
    assert "map_location in torch.load" in " ".join(rest.split())


def test_what_to_do_begins_a_row_and_further_rows_stand_below_it() -> None:
    said = Stated("leak", "LEAK · rank 3", "one two three four five six seven eight", "bound it, or keep it elsewhere")
    assert plain(answer_lines(said, 34, 9, UNICODE)).splitlines() == [
        " ▲ LEAK · rank 3  one two three",
        "       four five six seven eight",
        "   do  bound it, or keep it",
        "       elsewhere",
    ]


def test_without_room_the_last_row_says_that_there_is_more() -> None:
    said = Stated("leak", "LEAK", "`cache[*]` grows by 4.00 MiB a step", "bound `cache`")
    (row,) = plain(answer_lines(said, 60, 1, UNICODE)).splitlines()
    assert row == " ▲ LEAK  `cache[*]` grows by 4.00 MiB a step and more"


def test_the_longest_known_answer_fits() -> None:
    """An out-of-memory that a leak has caused, with its remedy: MOST_ROWS is for that."""
    what = "out of memory in backward at step 12,431: 1.50 GiB were requested and 12.0 MiB were free; "
    what += "the leak `Trainer.outputs['val'][*]` holds 61.2 GiB, without it this fitted (train.py:80)"
    do = "bound `outputs` (clear it each epoch, deque(maxlen=…)), or keep on the host what you need: .cpu()"
    said = Stated("out-of-memory", "OUT OF MEMORY · rank 3", what, do)
    assert len(answer_lines(said, 80, 99, UNICODE)) == MOST_ROWS
