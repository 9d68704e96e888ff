"""Which names of a census can explain a growth: each share from both sides of it."""

from __future__ import annotations

import pytest

from gpumon.analysis.leak_identity import LeakNames
from gpumon.analysis.suspects import explaining
from gpumon.analysis.types import Growth
from gpumon_agent import wire

MIB = 1 << 20


def holds(
    count: int, name: str = "kept[*]", *, each: int = 512, grown: int | None = None, graph: int = 0
) -> wire.Group:
    """So many tensors of so many bytes that one variable leads to."""
    holder = wire.Holder(name, "local", "train.py:12", count)
    return wire.Group(
        (8,), "float32", 0, count, each * count, bool(graph), grown=grown, graph_bytes=graph, holders=(holder,)
    )


def named(
    *groups: wire.Group, blocks: float | None = None, bytes_: float | None = None, cut: bool = False
) -> list[str]:
    """Who explains a growth that has gone on for 100 steps."""
    census = wire.Census(100, 0, 0, "growth", groups, cut=cut)
    found = explaining(census, 0, since=1, blocks_per_step=blocks, bytes_per_step=bytes_)
    return [each.holder.variable for each in found if each.holder is not None]


@pytest.mark.parametrize(
    ("blocks", "least"),
    [
        (1.6, 40),  # a quarter of the blocks that were added: a tensor may bring others that are not Python's
        (8.0, 50),  # or one for every other step: its graph keeps all the rest of the blocks
        (0.1, 3),  # but never fewer than three, which is chance
    ],
)
def test_as_many_tensors_as_explain_the_blocks_that_were_added(blocks: float, least: int) -> None:
    assert named(holds(least), blocks=blocks)
    assert not named(holds(least - 1), blocks=blocks)


def test_of_a_census_that_ended_early_five_will_do() -> None:
    assert named(holds(5), blocks=1.0, cut=True)
    assert not named(holds(4), blocks=1.0, cut=True)


def test_four_times_as_many_as_were_added_were_there_before() -> None:
    assert named(holds(400), blocks=1.0)
    assert not named(holds(401), blocks=1.0)
    assert named(holds(401, grown=1), blocks=1.0)  # a second census saw them grow


def test_one_tensor_of_half_of_the_bytes_to_four_times_as_many() -> None:
    for held, explains in ((49, False), (50, True), (400, True), (401, False)):
        assert bool(named(holds(1, each=held * MIB), bytes_=MIB)) == explains


def test_one_graph_of_three_steps_growth() -> None:
    """Only its newest part may have been measured, but what one step makes is every step's."""
    for steps, explains in ((2, False), (3, True)):
        assert bool(named(holds(1, each=512, graph=steps * MIB), bytes_=MIB, blocks=1.0)) == explains


def test_who_holds_less_than_a_quarter_of_the_best_is_there_anyway() -> None:
    assert named(holds(200, "many[*]"), holds(50, "few[*]"), blocks=1.0) == ["many", "few"]
    assert named(holds(212, "many[*]"), holds(50, "few[*]"), blocks=1.0) == ["many"]


def test_a_number_takes_a_block_of_512_bytes() -> None:
    census = wire.Census(100, 0, 0, "growth", (holds(100, each=4),))
    (found,) = explaining(census, 0, since=1, blocks_per_step=1.0, bytes_per_step=None)
    assert found.held == 100 * 512


def test_where_blocks_alone_grow_each_is_512_bytes_at_least() -> None:
    leak = LeakNames().leak((), 0, (Growth("blocks", True, 2, 3.0, 3.0, 3.0, 300),))
    assert leak is not None
    assert leak.per_step == 3 * 512
