"""Every screen as it looks, at the sizes it promises; each picture was looked at before it was kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from textual.pilot import Pilot

from gpumon_agent import wire

LARGE, SMALL = (120, 40), (80, 24)
GIB = 1 << 30

Settle = Callable[..., Any]


@pytest.fixture
def pressing(settled: Settle) -> Callable[..., Settle]:
    """Presses keys once everything is drawn, and waits again."""

    def keys(*pressed: str) -> Settle:
        async def run(pilot: Pilot[Any]) -> None:
            await settled(pilot)
            for key in pressed:
                await pilot.press(key)
                await pilot.pause(0.1)
            await settled(pilot)

        return run

    return keys


@pytest.mark.parametrize("theme", ["gpumon-dark", "gpumon-light", "gpumon-ansi"])
@pytest.mark.parametrize("size", [LARGE, SMALL], ids=["120x40", "80x24"])
def test_overview(snap_compare, app_of, new_run, size, theme, settled) -> None:
    assert snap_compare(app_of(new_run().usual(), theme=theme), terminal_size=size, run_before=settled)


@pytest.mark.parametrize("size", [LARGE, SMALL], ids=["120x40", "80x24"])
def test_overview_with_what_gpumon_costs(snap_compare, app_of, new_run, size, settled) -> None:
    run = new_run().usual()
    run.say(wire.Heartbeat(run.t_ns, 12_432, "forward", 0, rss=3 * GIB, cost=4_100, cost_error=1_900))
    assert snap_compare(app_of(run), terminal_size=size, run_before=settled)


def test_overview_in_ascii(snap_compare, app_of, new_run, settled) -> None:
    assert snap_compare(app_of(new_run().usual(), ascii=True), terminal_size=SMALL, run_before=settled)


def test_overview_without_colour(snap_compare, app_of, new_run, monkeypatch, settled) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert snap_compare(app_of(new_run().usual()), terminal_size=LARGE, run_before=settled)


@pytest.mark.parametrize("size", [(20, 5), (46, 14), (60, 30), (200, 60)], ids=lambda size: f"{size[0]}x{size[1]}")
def test_overview_at_other_sizes(snap_compare, app_of, new_run, size, settled) -> None:
    assert snap_compare(app_of(new_run().usual()), terminal_size=size, run_before=settled)


def test_nothing_heard_yet(snap_compare, app_of, settled) -> None:
    assert snap_compare(app_of(), terminal_size=LARGE, run_before=settled)


def test_before_the_first_step(snap_compare, app_of, new_run, settled) -> None:
    assert snap_compare(app_of(new_run().hello().model().synced()), terminal_size=LARGE, run_before=settled)


def test_an_exception_ended_it(snap_compare, app_of, new_run, settled) -> None:
    run = new_run().usual()
    run.goodbye("exception", 12_432, "backward", "RuntimeError: shapes do not match")
    assert snap_compare(app_of(run), terminal_size=LARGE, run_before=settled)


@pytest.mark.parametrize("size", [LARGE, SMALL], ids=["120x40", "80x24"])
def test_a_leak_and_an_oom(snap_compare, app_of, new_run, size, settled) -> None:
    assert snap_compare(app_of(new_run().leaking()), terminal_size=size, run_before=settled)


def test_an_oom_read_in_full(snap_compare, app_of, new_run, pressing) -> None:
    assert snap_compare(app_of(new_run().leaking()), terminal_size=LARGE, run_before=pressing("o"))


@pytest.mark.parametrize("size", [LARGE, SMALL], ids=["120x40", "80x24"])
def test_ranks(snap_compare, app_of, new_run, size, pressing) -> None:
    runs = [new_run(rank=i, world_size=8, pid=5000 + i, extra=(i == 5) * 3 * GIB).usual(60) for i in range(8)]
    assert snap_compare(app_of(*runs), terminal_size=size, run_before=pressing("2", "down", "down"))


def in_detail(new_run) -> Any:
    """A run whose modules are known, and what they kept in its newest step."""
    run = new_run().hello().modules().steps(12_192, 239).host().step(12_431).layers(12_431)
    return run.beat(12_432, "forward").synced().host()


@pytest.mark.parametrize("theme", ["gpumon-dark", "gpumon-light"])
@pytest.mark.parametrize("size", [LARGE, SMALL], ids=["120x40", "80x24"])
def test_layers(snap_compare, app_of, new_run, size, theme, pressing) -> None:
    app = app_of(in_detail(new_run), theme=theme)
    assert snap_compare(app, terminal_size=size, run_before=pressing("3", "down", "down", "down", "down", "enter"))


def test_layers_flat_by_activations(snap_compare, app_of, new_run, pressing) -> None:
    keys = ("3", "f", *"oooooo")
    assert snap_compare(app_of(in_detail(new_run)), terminal_size=LARGE, run_before=pressing(*keys))


def test_layers_filtered(snap_compare, app_of, new_run, pressing) -> None:
    keys = ("3", "slash", *"attention")
    assert snap_compare(app_of(in_detail(new_run)), terminal_size=LARGE, run_before=pressing(*keys))


def test_layers_in_ascii(snap_compare, app_of, new_run, pressing) -> None:
    assert snap_compare(app_of(in_detail(new_run), ascii=True), terminal_size=SMALL, run_before=pressing("3"))


def test_layers_before_a_step_was_sampled(snap_compare, app_of, new_run, pressing) -> None:
    run = new_run().hello().modules().steps(0, 5, sampled=False).synced()
    assert snap_compare(app_of(run), terminal_size=LARGE, run_before=pressing("3"))


@pytest.mark.parametrize("theme", ["gpumon-dark", "gpumon-ansi"])
@pytest.mark.parametrize("size", [LARGE, SMALL], ids=["120x40", "80x24"])
def test_estimate(snap_compare, app_of, new_run, size, theme, pressing) -> None:
    app = app_of(new_run().usual(), theme=theme)
    assert snap_compare(app, terminal_size=size, run_before=pressing("5", "down", "down"))


def test_estimate_without_colour(snap_compare, app_of, new_run, monkeypatch, pressing) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert snap_compare(app_of(new_run().usual()), terminal_size=LARGE, run_before=pressing("5"))


def test_an_estimated_line_explained(snap_compare, app_of, new_run, pressing) -> None:
    keys = ("5", *["down"] * 6, "e")
    assert snap_compare(app_of(new_run().usual()), terminal_size=LARGE, run_before=pressing(*keys))


def growing(new_run) -> Any:
    """A run that keeps its outputs, found by two censuses, and a checkpoint that nobody let go."""
    run = new_run().hello().model()
    for step in range(12_192, 12_432):
        run.step(step, leak=(step - 12_192) * 40 * (1 << 20))
    run.host().census(12_300, 0, 600).census(12_431, 1).checkpoint().segments(12_431)
    return run.beat(12_432, "forward").synced().host()


@pytest.mark.parametrize("theme", ["gpumon-dark", "gpumon-light"])
@pytest.mark.parametrize("size", [LARGE, SMALL], ids=["120x40", "80x24"])
def test_leaks(snap_compare, app_of, new_run, size, theme, pressing, asked) -> None:
    app = app_of(growing(new_run), theme=theme, asker=asked)
    assert snap_compare(app, terminal_size=size, run_before=pressing("4", "down", "down"))


def test_leaks_in_ascii_without_colour(snap_compare, app_of, new_run, monkeypatch, pressing, asked) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    app = app_of(growing(new_run), ascii=True, asker=asked)
    assert snap_compare(app, terminal_size=LARGE, run_before=pressing("4"))


def test_nothing_grows_and_no_census(snap_compare, app_of, new_run, pressing, asked) -> None:
    assert snap_compare(app_of(new_run().usual(), asker=asked), terminal_size=LARGE, run_before=pressing("4"))


@pytest.mark.parametrize("theme", ["gpumon-dark", "gpumon-light"])
@pytest.mark.parametrize("size", [LARGE, SMALL], ids=["120x40", "80x24"])
def test_blocks(snap_compare, app_of, new_run, size, theme, pressing, asked) -> None:
    app = app_of(growing(new_run), theme=theme, asker=asked)
    assert snap_compare(app, terminal_size=size, run_before=pressing("6", "right", "right", "right"))


def test_blocks_in_ascii_without_colour(snap_compare, app_of, new_run, monkeypatch, pressing, asked) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    app = app_of(growing(new_run), ascii=True, asker=asked)
    assert snap_compare(app, terminal_size=LARGE, run_before=pressing("6"))


def test_blocks_when_memory_ran_out(snap_compare, app_of, new_run, pressing, asked) -> None:
    run = new_run().leaking().segments(12_433, "oom", "backward")
    assert snap_compare(app_of(run, asker=asked), terminal_size=LARGE, run_before=pressing("6", "f"))


def test_blocks_before_anybody_asked(snap_compare, app_of, new_run, pressing, asked) -> None:
    assert snap_compare(app_of(new_run().usual(), asker=asked), terminal_size=SMALL, run_before=pressing("6"))


@pytest.mark.parametrize("key", ["4", "6"])
@pytest.mark.parametrize("size", [(40, 12), (20, 5)], ids=lambda size: f"{size[0]}x{size[1]}")
def test_small_terminals_with_evidence(snap_compare, app_of, new_run, size, key, pressing, asked) -> None:
    app = app_of(growing(new_run), asker=asked)
    assert snap_compare(app, terminal_size=size, run_before=pressing(key, "down", "end"))


@pytest.mark.parametrize("key", ["1", "3", "5", "7"])
@pytest.mark.parametrize("size", [(40, 12), (20, 5)], ids=lambda size: f"{size[0]}x{size[1]}")
def test_small_terminals(snap_compare, app_of, new_run, size, key, pressing) -> None:
    assert snap_compare(app_of(in_detail(new_run)), terminal_size=size, run_before=pressing(key, "down", "end"))


def test_log(snap_compare, app_of, new_run, pressing) -> None:
    run = new_run().usual().notice("torch.compile graphs replay: phases inside cannot be seen")
    run.goodbye("finished", 12_432, "optimizer")
    assert snap_compare(app_of(run), terminal_size=LARGE, run_before=pressing("7"))


@pytest.mark.parametrize("size", [LARGE, SMALL], ids=["120x40", "80x24"])
def test_help(snap_compare, app_of, new_run, size, pressing) -> None:
    assert snap_compare(app_of(new_run().usual()), terminal_size=size, run_before=pressing("question_mark"))


def test_explanation_of_the_device(snap_compare, app_of, new_run, pressing) -> None:
    assert snap_compare(app_of(new_run().usual()), terminal_size=LARGE, run_before=pressing("tab", "e"))


def test_a_small_run_on_a_large_device(snap_compare, app_of, new_run, settled) -> None:
    assert snap_compare(app_of(new_run(shrink=64).usual()), terminal_size=LARGE, run_before=settled)
