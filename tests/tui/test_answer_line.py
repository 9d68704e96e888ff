"""The answer line in ten situations at 80 columns: it alone says what is wrong, who it is, and what to do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from situations import (
    SITUATIONS,
    Scene,
    a_leak,
    fragmentation,
    healthy,
    monster_batch,
    noisy_leak,
    of_strays_on,
    out_of_memory_at_step_1,
    rank_3_of_4_leaks,
    retained_checkpoint,
    slow_leak,
    stray_context,
)

from gpumon.analysis import Reporter
from gpumon.session.store import SessionStore
from gpumon.tui.styles import UNICODE
from gpumon.tui.text_layout import plain, width
from gpumon.tui.widgets.answer_line import MOST_ROWS, Stated, answer_lines, stated

SAID: tuple[tuple[Callable[[], Scene], str, str, str], ...] = (
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


def test_every_situation_has_its_sentence() -> None:
    assert {each[0] for each in SAID} == set(SITUATIONS)


@pytest.mark.parametrize("at", range(len(SAID)), ids=[each[0].__name__ for each in SAID])
def test_at_80_columns_the_answer_alone_says_state_culprit_and_way_out(at: int) -> None:
    make, state, culprit, do = SAID[at]
    lines = answer_lines(stated(make().answer()), 80, MOST_ROWS, UNICODE)
    text = " ".join(plain(lines).split())
    assert text.startswith(state)
    assert culprit in text
    assert any(each in text for each in do.split("|"))
    assert "and more" not in text
    assert max(map(width, lines)) <= 80


def test_contexts_on_another_rank_s_device_are_named_though_that_rank_is_as_ok_as_the_first() -> None:
    (text, rest) = plain(answer_lines(stated(of_strays_on(2).answer()), 80, MOST_ROWS, UNICODE)).split("   do  ")
    assert text.startswith(" ✓ OK · rank 2")
    assert "ranks 0, 1, 3 hold a CUDA context (1.32 GiB in all) on rank 2's device" in " ".join(text.split())
    assert "map_location in torch.load" in " ".join(rest.split())


@pytest.mark.parametrize("make", [a_leak, fragmentation, monster_batch, retained_checkpoint])
def test_only_what_leaks_has_grown_by_so_many_bytes_so_far(make: Callable[[], Scene]) -> None:
    """The bytes of other findings are what is left, is too much, or lies unused."""
    scene, store, reporter = make(), SessionStore(), Reporter()
    for received in scene.received:
        store.apply(received)
    found = {each.code: each for each in reporter.report(store.frame(scene.unix_ns))[0].findings}
    assert found
    for code, each in found.items():
        assert (each.so_far is not None) == (code == "tensor-leak"), each


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
