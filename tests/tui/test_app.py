"""The app under Textual's pilot: what keys do, what it says when the process goes, and names that try to be markup."""

from __future__ import annotations

from datetime import datetime
from itertools import pairwise

import pytest
from pictured import text_of
from textual.events import MouseScrollDown, MouseScrollUp

from gpumon.link.errors import NotGpumon
from gpumon.tui.app import MonitorApp
from gpumon.tui.feed import Pace
from gpumon.tui.screens.help import HelpScreen, keys_of
from gpumon.tui.themes import NAMES
from gpumon_agent import wire


async def test_the_overview_answers_what_is_where_and_whether_it_fits(app_of, new_run, settled) -> None:
    app = app_of(new_run().usual())
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        shown = text_of(app)
    for words in ("train.py · pid 41873 · step 12,431", "61.0 of 139.8 GiB at the peak (backward)", "✓ fits", "● live"):
        assert words in shown


async def test_a_process_that_dies_leaves_its_last_picture(reader_of, app_of, new_run, settled) -> None:
    run = new_run().usual()
    reader = reader_of(run)
    app = app_of(reader=reader)
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        reader.add(run.goodbye("lost", 12_432, "backward", "killed"))
        await settled(pilot)
        shown = text_of(app)
    assert "■ ended" in shown
    assert "in backward, step 12,432" in shown
    assert "weights 12.1" in shown


async def test_a_restarted_job_is_picked_up_again(reader_of, app_of, new_run, settled) -> None:
    run = new_run().usual()
    reader = reader_of(run)
    app = app_of(reader=reader)
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        reader.add(run.goodbye("exception", 12_432, "backward"))
        await settled(pilot)
        again = new_run(pid=50_001, t_ns=200_000_000_000).hello(clock=_later()).model().steps(0, 3).synced()
        reader.add(again)
        await settled(pilot)
        shown = text_of(app)
    assert "pid 50001" in shown
    assert "● live" in shown


def _later():
    from gpumon_agent import wire

    return wire.Clock(200_000_000_000, 1_790_000_000_000_000_000 + 200_000_000_000)


async def test_of_a_stopped_process_the_last_message_s_time_is_said(reader_of, app_of, new_run, settled) -> None:
    reader = reader_of(new_run().usual())
    app = app_of(reader=reader)
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        heard = datetime.fromtimestamp(app.view.rank.heard_unix_ns / 1e9).strftime("%H:%M:%S")
        reader.now_ns += 12_000_000_000
        await settled(pilot)
        shown = text_of(app)
    assert "◌ silent" in shown
    assert "UNKNOWN  the process sends nothing" in shown
    assert f"its last message came at {heard}" in " ".join(shown.split())


async def test_pause_holds_the_picture_and_lets_go_again(reader_of, app_of, new_run, settled) -> None:
    run = new_run().usual()
    reader = reader_of(run)
    app = app_of(reader=reader)
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        await pilot.press("space")
        reader.add(run.step(12_432))
        await settled(pilot)
        assert "step 12,431" in text_of(app)
        assert "paused" in text_of(app)
        await pilot.press("space")
        await settled(pilot)
        assert "step 12,432" in text_of(app)


@pytest.mark.parametrize("name", ["a[/]b", "[red]x[/red]", "\x1b[31mred\x1b[0m", "\x9b2J", "\u202egnp.exe"])
async def test_names_are_drawn_as_they_are_and_never_as_markup_or_escapes(app_of, new_run, name, settled) -> None:
    run = new_run(name=name).usual(20).goodbye("exception", 3, name, f"ValueError: {name}")
    app = app_of(run)
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        for key in ("7", "1", "question_mark"):
            shown = text_of(app)
            assert not any(c in shown for c in "\x1b\x9b\u202e")
            await pilot.press(key)
            await settled(pilot)
        if name.isprintable():
            await pilot.press("escape")
            await settled(pilot)
            assert name in text_of(app)


async def test_no_bytes_of_colour_leave_with_no_color(app_of, new_run, monkeypatch, settled) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    app = app_of(new_run().usual())
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        colours = {
            color
            for strip in app.screen._compositor.render_strips()
            for segment in strip.apply_filter(app._filters[-1], app.screen.background_colors[1])
            if segment.style
            for color in (segment.style.color, segment.style.bgcolor)
            if color is not None and not color.is_default
        }
    assert not colours


async def test_themes_take_turns(app_of, new_run, settled) -> None:
    app = app_of(new_run().usual(20))
    async with app.run_test(size=(120, 40)) as pilot:
        seen = []
        for _ in NAMES:
            seen.append(app.theme)
            await pilot.press("t")
            await settled(pilot)
        assert seen == list(NAMES)
        assert app.theme == NAMES[0]


async def test_zoom_changes_how_many_steps_are_shown(app_of, new_run, settled) -> None:
    app = app_of(new_run().usual())
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        assert " 240 steps" in text_of(app)  # the whole run
        await pilot.press("plus", "plus")
        await settled(pilot)
        assert " 100 steps" in text_of(app)
        await pilot.press("minus")
        await settled(pilot)
        assert " 200 steps" in text_of(app)
        app.screen.query_one("#timeline").post_message(scrolled(MouseScrollUp))
        await settled(pilot)
        assert " 100 steps" in text_of(app)
        app.screen.query_one("#timeline").post_message(scrolled(MouseScrollDown))
        await settled(pilot)
        assert " 200 steps" in text_of(app)


def scrolled(kind: type[MouseScrollUp | MouseScrollDown]) -> MouseScrollUp | MouseScrollDown:
    return kind(None, 5, 5, 0, 0, 0, False, False, False)


@pytest.mark.parametrize(("size", "rows"), [((120, 40), 5), ((80, 24), 2)])
async def test_many_findings_leave_room_for_the_panels(app_of, new_run, settled, size, rows: int) -> None:
    """The most severe are shown, and how many there are."""
    run = new_run().usual(20)
    off = tuple(
        wire.PartOff(part, "KeyError: 7", "phases.py:12", 3)
        for part in ("census", "peak", "outlook", "ledger", "oom", "step", "scaler")
    )
    run.say(wire.Heartbeat(run.t_ns, 12_432, "forward", 0, off=off))
    app = app_of(run)
    async with app.run_test(size=size) as pilot:
        await settled(pilot)
        assert text_of(app).count("▲ agent-part-off") == rows
        assert f"7, 1 to {rows} shown" in text_of(app)


async def test_each_span_of_the_timeline_is_about_twice_the_former(app_of, new_run) -> None:
    app = app_of(new_run().usual(20))
    async with app.run_test():
        titles = [command.title for command in app.get_system_commands(app.screen)]
    *spans, whole = [title.split(maxsplit=1)[1] for title in titles if title.startswith("Timeline: ")]
    assert whole == "the whole run"
    spans = [int(span.split()[0]) for span in spans]
    assert (len(spans), spans[-1]) == (7, 2000)  # of 2,240 that are kept
    assert all(2 <= more / fewer <= 2.5 for fewer, more in pairwise(spans))


async def test_enter_on_a_rank_opens_it_on_the_overview(app_of, new_run, settled) -> None:
    app = app_of(*(new_run(rank=i, world_size=3, pid=600 + i).usual(20) for i in range(3)))
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        await pilot.press("2", "down", "down", "enter")
        await settled(pilot)
        assert "pid 602 · rank 2 of 3" in text_of(app)
        await pilot.press("left")
        await settled(pilot)
        assert "pid 601 · rank 1 of 3" in text_of(app)


async def test_a_leak_of_another_rank_is_seen_and_opened_from_here(app_of, new_run, settled) -> None:
    leaking = new_run(rank=2, world_size=3, pid=602).leaking()
    leaking.events = [each for each in leaking.events if not isinstance(each.event, wire.Oom)]
    app = app_of(*(new_run(rank=i, world_size=3, pid=600 + i).usual(60) for i in (0, 1)), leaking)
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        text = text_of(app)
        assert "pid 600 · rank 0 of 3" in text
        (line,) = (each for each in text.splitlines() if "tensor-leak" in each)
        assert "rank 2" in line
        app.screen.query_one("#findings").focus()
        await pilot.press("enter")
        await settled(pilot)
        assert "What to do here" in text_of(app)
        await pilot.press("d")
        await settled(pilot)
        assert app.current_mode == "leaks"
        assert "rank 2 of 3" in text_of(app)


async def test_the_first_rank_is_shown_whichever_is_heard_first(app_of, new_run, settled) -> None:
    app = app_of(*(new_run(rank=i, world_size=3, pid=600 + i).usual(20) for i in (2, 0, 1)))
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        assert "pid 600 · rank 0 of 3" in text_of(app)


async def test_one_rank_has_no_ranks_screen(app_of, new_run, settled) -> None:
    app = app_of(new_run().usual(20))
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        await pilot.press("2")
        assert app.current_mode == "overview"
        assert "Ranks" not in text_of(app)


async def test_help_lists_every_key_that_acts_and_says_what_it_does(app_of, new_run, settled) -> None:
    app = app_of(new_run().usual(20))
    async with app.run_test(size=(120, 60)) as pilot:
        await settled(pilot)
        acting = {
            b.binding.tooltip for b in app.screen.active_bindings.values() if b.binding.id and b.enabled
        }  # the app's and the screen's own
        listed = {what for _, _, what in keys_of(app)}
        assert acting - {""} <= listed
        await pilot.press("question_mark")
        assert isinstance(app.screen, HelpScreen)
        await pilot.press("q")
        assert not isinstance(app.screen, HelpScreen)


async def test_every_binding_has_an_id_and_a_tooltip() -> None:
    from gpumon.tui.screens import help, home, overview  # noqa: F401 (their classes)
    from gpumon.tui.screens.base import MonitorScreen
    from gpumon.tui.widgets.panel import Panel

    kinds: list[type] = [MonitorApp, Panel, MonitorScreen]
    for kind in kinds:
        kinds += kind.__subclasses__()
        for binding in vars(kind).get("BINDINGS", ()):
            assert binding.id, binding
            assert binding.tooltip, binding


async def test_the_explanation_has_the_figures_to_the_byte(app_of, new_run, settled) -> None:
    app = app_of(new_run().usual(20))
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        await pilot.press("e")
        await settled(pilot)
        ledger = app.view.device.ledger
        assert f"reserved {ledger.reserved:,} B = allocated {ledger.allocated:,}" in text_of(app)


async def test_an_endpoint_that_is_no_gpumon_ends_the_app_with_its_sentence() -> None:
    async def feed():
        raise NotGpumon("what listens there is no gpumon agent", "`gpumon ls` lists the jobs")
        yield

    app = MonitorApp(feed)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause(0.3)
    assert app.return_value == 1
    assert "no gpumon agent" in app.failure


async def test_a_recording_plays_at_its_pace_and_ends_at_once_on_demand(reader_of, new_run) -> None:
    run = new_run().hello().model().steps(0, 200)
    events = list(run.events)

    async def feed():
        for received in events:
            yield received

    app = MonitorApp(feed, pace=Pace(1.0))
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause(1.3)
        assert app.view.rank.steps[-1].step < 20
        assert "replay" in text_of(app)
        await pilot.press("end")
        await pilot.pause(0.8)
        assert app.view.rank.steps[-1].step == 199


async def test_unchanged_slices_draw_nothing(app_of, new_run) -> None:
    from gpumon.tui.widgets.panel import Panel

    app = app_of(new_run().usual(20))
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause(0.8)
        drawn: list[str] = []
        for panel in app.screen.query(Panel):
            original = panel.draw
            panel.draw = lambda *a, p=panel, o=original: (drawn.append(type(p).__name__), o(*a))[1]
        await pilot.pause(0.8)
        assert drawn == []


async def test_a_live_run_is_drawn_once_a_second(app_of, new_run, settled, monkeypatch) -> None:
    """Nobody reads figures that change more often. Until there is a step to show, each tick draws what there is."""
    app = app_of(new_run().hello())
    drawn: list[int] = []
    async with app.run_test(size=(120, 40)) as pilot:
        app._timer.stop()
        await settled(pilot)
        monkeypatch.setattr(app, "_show", lambda: drawn.append(app._ticks))
        for _ in range(3):
            app.tick()
        assert len(drawn) == 3
        drawn.clear()
        monkeypatch.undo()
        run = new_run().hello().steps(0, 3)
        for received in run.events:
            app._store.apply(received)
        app.redraw()
        monkeypatch.setattr(app, "_show", lambda: drawn.append(app._ticks))
        for _ in range(16):
            app.tick()
        assert [tick % 4 for tick in drawn] == [0] * 4
