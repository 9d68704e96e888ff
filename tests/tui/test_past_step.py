"""A past step of a live run: chosen with the keys of a replay or a click, shown by every panel, left for live again."""

from __future__ import annotations

import re

import msgspec
import pytest
from pictured import text_of
from textual.events import Key, MouseScrollUp
from watched import GIB, MIB, Run

from gpumon import link
from gpumon.analysis import Reporter
from gpumon.analysis.types import Finding
from gpumon.session.frame import Frame
from gpumon.session.moments import LEAK
from gpumon.session.store import SessionStore
from gpumon.tui.app import MonitorApp
from gpumon.tui.cursor import Cursor
from gpumon.tui.feed import Pace
from gpumon.tui.screens.help import FiguresScreen, FindingScreen
from gpumon.tui.view import choose
from gpumon.tui.widgets.device_bar import DeviceBar
from gpumon.tui.widgets.rank_rows import HEAT_STEPS, RankPage
from gpumon.tui.widgets.rank_table import RankTable
from gpumon.tui.widgets.timeline import Timeline
from gpumon_agent import wire

FIRST, LAST = 12_192, 12_431  # of a usual run


def step_of(app: MonitorApp) -> int:
    return app.view.rank.steps[-1].step


def answered(app: MonitorApp) -> str:
    return " ".join(text_of(app).split("\n cuda:0")[0].split())


def leaking(upto: int = 240) -> Run:
    """Grows by 300 MiB a step; at step 60 a census names the holder."""
    run = Run().hello().model()
    for step in range(upto):
        run.step(step, leak=step * 300 * MIB)
        if step in (60, 90):
            run.census(step, step // 30)
    return run.beat(upto, "forward").synced()


async def test_a_number_that_arrives_in_one_burst_is_read_whole(reader_of, app_of, settled, new_run) -> None:
    """As pasted, or over a slow connection: digits are keys of screens, too."""
    app = app_of(reader=reader_of(new_run().usual()))
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        for key in ("colon", *"12300", "enter"):
            app.post_message(Key(key, key if key.isdigit() else None))
        await settled(pilot)
        assert step_of(app) == 12_300
        assert app.current_mode == "overview"
        for key in ("colon", "enter"):  # no number
            app.post_message(Key(key, None))
        await settled(pilot)
        assert len(app.screen_stack) == 1


async def test_a_colon_can_be_typed_into_a_filter(reader_of, app_of, settled, new_run) -> None:
    app = app_of(reader=reader_of(new_run().usual()))
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        await pilot.press("3")
        await settled(pilot)
        await pilot.press("slash", "a", "colon")
        assert app.focused.value == "a:"


async def test_every_panel_shows_the_chosen_step_and_it_stays_while_new_ones_arrive(
    reader_of, app_of, settled, new_run
) -> None:
    run = new_run().usual()
    reader = reader_of(run)
    app = app_of(reader=reader)
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        assert "PAST" not in text_of(app)
        await pilot.press("colon", *"12300", "enter")
        await settled(pilot)
        shown = text_of(app)
        assert "· step 12,300 ·" in shown.splitlines()[0]
        assert "‖ past step" in shown.splitlines()[0]
        assert "● live" not in shown
        assert re.match(r".* ‖ PAST step 12,300 of 12,431, 4[01] s ago; Esc returns to live ", answered(app)), answered(
            app
        )
        assert "step 12,300 · batch [8, 1024]" in shown
        assert "\n then " in shown
        assert "┃" in shown
        peak = app.view.rank.steps[-1].peak(0)
        assert app.view.device.peak.allocated == peak
        assert f"{peak / GIB:.1f} of 139.8 GiB at the peak (backward)" in shown
        for step in range(LAST + 1, LAST + 6):
            run.step(step)
        reader.add(run)
        await settled(pilot)
        assert "step 12,300 of 12,436, " in answered(app)
        assert "step 12,300 · batch" in text_of(app)
        assert step_of(app) == 12_300
        await pilot.press("end")
        await settled(pilot)
        assert "step 12,436 · batch" in text_of(app)
        assert "● live" in text_of(app)
        assert "PAST" not in text_of(app)
        assert "┃" not in text_of(app)


async def test_it_is_what_a_viewer_of_then_saw(app_of, settled) -> None:
    app = app_of(leaking())
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        for step in (40, 130):
            await pilot.press("colon", *str(step), "enter")
            await settled(pilot)
            store = SessionStore()
            for received in leaking(upto=step + 1).events:
                store.apply(received)
            frame = store.frame(0)
            (report,) = Reporter().report(Frame(0, frame.ranks))
            assert tuple(app.view.rank.steps) == tuple(frame.ranks[0].steps)
            assert app.view.rank.censuses == frame.ranks[0].censuses
            (device,), (then,) = app.view.report.devices, report.devices
            assert (device.ledger, device.peak, device.highest) == (then.ledger, then.peak, then.highest)
            assert (device.forecast, device.growth, device.read) == (then.forecast, then.growth, then.read)
            assert app.view.report.findings == report.findings


async def test_keys_go_by_steps_by_columns_to_the_start_and_back_to_live(app_of, settled, new_run) -> None:
    app = app_of(new_run().usual())
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        for keys, to in (
            (["comma"], LAST - 1),
            (["comma", "comma"], LAST - 3),
            (["full_stop"], LAST - 2),
            (["home"], FIRST),
            (["comma"], FIRST),
            (["full_stop"], FIRST + 1),
        ):
            await pilot.press(*keys)
            await settled(pilot)
            assert (step_of(app), app.view.position.step) == (to, to)
        await pilot.press("escape")
        await settled(pilot)
        assert (app.view.now, app.current_mode, step_of(app)) == (None, "overview", LAST)
        await pilot.press("comma", "full_stop", "full_stop")
        await settled(pilot)
        assert (app.view.now, step_of(app)) == (None, LAST)
        columns = []
        for _ in range(3):
            await pilot.press("left")
            await settled(pilot)
            columns.append(text_of(app).splitlines()[20].index("┃"))
        assert [columns[0] - at for at in columns] == [0, 1, 2]
        assert LAST - 4 * 6 < step_of(app) <= LAST - 3 * 6
        for _ in range(4):
            await pilot.press("right")
        await settled(pilot)
        assert app.view.now is None


@pytest.mark.parametrize("key", ["3", "4", "5", "6", "7"])
async def test_other_screens_show_the_same_step_and_have_the_same_keys(app_of, settled, key: str) -> None:
    app = app_of(leaking())
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        await pilot.press("colon", *"100", "enter")
        await settled(pilot)
        await pilot.press(key)
        await settled(pilot)
        mode = app.current_mode
        assert step_of(app) == 100
        assert "PAST step 100 of 239" in answered(app)
        assert not app.screen.query("#replay")
        await pilot.press("comma")
        await settled(pilot)
        assert step_of(app) == 99
        assert "PAST step 99 of 239" in answered(app)
        await pilot.press("escape")
        await settled(pilot)
        assert (app.current_mode, step_of(app)) == (mode, 239)
        assert "PAST" not in text_of(app)
        await pilot.press("escape")
        await settled(pilot)
        assert app.current_mode == "overview"


async def test_the_ranks_of_then_are_compared_and_answered_for_as_then(app_of, settled) -> None:
    """Rank 1 leaks; rank 0 is shown. Its row, the heat strips and the answer are those of the chosen step."""
    runs = [
        Run(pid=100 + rank, rank=rank, world_size=2, extra=rank * GIB).hello().model() for rank in (0, 1)
    ]  # fmt: skip
    for rank, run in enumerate(runs):
        for step in range(240):
            run.step(step, leak=rank * step * 300 * MIB)
            if rank and step in (60, 90):
                run.census(step, step // 30)
        run.beat(240, "forward").synced()
    app = app_of(*runs)
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        await pilot.press("2")
        await settled(pilot)
        (newest,) = {row.step for row in ranks_of(app).rows}
        peaks = [row.peak for row in ranks_of(app).rows]
        assert newest == 239
        for step in (200, 100, 3):
            await pilot.press("colon", *str(step), "enter")
            await settled(pilot)
            assert app.current_mode == "ranks"
            assert f"PAST step {step} of 239" in answered(app)
            page = ranks_of(app)
            assert [row.step for row in page.rows] == [step, step]
            assert page.rows[1].peak - page.rows[0].peak == GIB + step * 300 * MIB
            assert page.rows[1].spread - page.rows[0].spread == GIB + step * 300 * MIB
            assert [len(row) for row in page.heat] == [min(step + 1, HEAT_STEPS)] * 2
            assert page.heat[1][-1] == page.rows[1].peak
            said = app.view.answer
            assert (said.state, said.who and said.who.rank) == (("leak", 1) if step > 3 else ("unknown", 0))
        await pilot.press("escape")
        await settled(pilot)
        page = ranks_of(app)
        assert [(row.step, row.peak) for row in page.rows] == [(239, peak) for peak in peaks]
        assert page.heat[1][-1] == peaks[1]


def ranks_of(app: MonitorApp) -> RankPage:
    return app.screen.query_one(RankTable).page


def test_many_ranks_are_analysed_in_turn_the_shown_one_first() -> None:
    store = SessionStore()
    for rank in range(4):
        for received in Run(pid=100 + rank, rank=rank, world_size=4).usual(20).events:
            store.apply(received)
    frame = store.frame(0)
    live = choose(frame, (), frame.ranks[2].source, None)
    cursor = Cursor(steps_at_once=40)
    cursor.shown(live)
    cursor.go(frame.ranks[2].steps[-1].step)
    known = [[report.source for report in cursor.shown(live).reports] for _ in range(3)]
    sources = [rank.source for rank in frame.ranks]
    assert known == [[sources[0], sources[2]], sources, sources]


async def test_the_log_of_a_past_step_ends_there(app_of, settled) -> None:
    run = Run().hello().model()
    for step in range(40):
        run.step(step)
        if step in (10, 30):
            run.notice(f"said at {step}")
    app = app_of(run.beat(40, "forward").synced())
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        await pilot.press("7")
        await settled(pilot)
        assert "listening to" in text_of(app)
        assert "said at 30" in text_of(app)
        await pilot.press("colon", *"20", "enter")
        await settled(pilot)
        assert "said at 10" in text_of(app)
        assert "said at 30" not in text_of(app)
        assert "listening to" not in text_of(app)


async def test_blocks_of_a_past_step_are_those_that_were_read_by_then(app_of, settled, asked) -> None:
    run = Run().hello().model()
    for step in range(40):
        run.step(step)
        if step == 20:
            run.segments(step)
    app = app_of(run.beat(40, "forward").synced(), asker=asked)
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        await pilot.press("colon", *"10", "enter")
        await settled(pilot)
        await pilot.press("6")
        await settled(pilot)
        assert "none can be requested: this is a past step" in " ".join(text_of(app).split())
        await pilot.press("b")
        await settled(pilot)
        assert asked.heard == []
        await pilot.press("colon", *"30", "enter")
        await settled(pilot)
        assert "a cell is" in text_of(app)
        assert asked.heard == []
        await pilot.press("escape")
        await settled(pilot)
        assert len(asked.heard) == 1


async def test_nothing_of_now_is_shown_as_of_a_past_step(app_of, settled, new_run) -> None:
    app = app_of(new_run().usual())
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        live = text_of(app)
        for now in ("83 %", "412/700 W", "RSS 3.20 GiB", "context 0.5", "▸ forward"):
            assert now in live
        await pilot.press("colon", *"12300", "enter")
        await settled(pilot)
        past = text_of(app)
        for now in ("83 %", "412/700 W", "RSS 3.20 GiB", "context", "▸ forward"):
            assert now not in past
        assert "Host at this step   RSS n/a" in past
        assert "no reading of the driver is kept for this step" in " ".join(past.split())
        assert "the driver's figures of this step are not kept" in past


async def test_no_phase_of_a_past_step_is_marked_as_running(app_of, settled, new_run) -> None:
    run = new_run().hello().model()
    for step in range(60):
        run.step(step).say(wire.Heartbeat(run.t_ns, step, "backward", 0, rss=3 * GIB, number=step))
    app = app_of(run.synced())
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        assert "▸ backward" in text_of(app)
        await pilot.press("comma")
        await settled(pilot)
        assert "RSS 3.00 GiB" in text_of(app)
        assert "▸ " not in text_of(app)


async def test_readings_of_then_are_shown_with_their_age(app_of, settled, new_run) -> None:
    run = new_run().hello().model().steps(0, 50).host(temperature_c=33).steps(50, 20).host().steps(70, 40).synced()
    app = app_of(run)
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        await pilot.press("colon", *"52", "enter")
        await settled(pilot)
        assert "Host at this step" in text_of(app)
        assert "33 °C" in text_of(app)
        await pilot.press("colon", *"68", "enter")
        await settled(pilot)
        assert "Host read 5 s before this step" in text_of(app)
        assert "33 °C" in text_of(app)
        assert "61 °C" not in text_of(app)


async def test_events_are_jumped_to_and_named(app_of, settled, new_run) -> None:
    app = app_of(leaking())
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        await pilot.press("left_square_bracket")
        await settled(pilot)
        assert "step 90 of 239, " in answered(app)
        assert "ago · leak found; Esc returns to live" in answered(app)
        assert "LEAK then" in answered(app)
        await pilot.press("left_square_bracket")
        await settled(pilot)
        assert "step 60 of 239, " in answered(app)
        assert "ago · growth; " in answered(app)
        await pilot.press("left_square_bracket")
        await settled(pilot)
        assert "No event before this step is known." in {each.message for each in app._notifications}
        await pilot.press("right_square_bracket")
        await settled(pilot)
        assert step_of(app) == 90


async def test_memory_ran_out_in_a_step_that_never_closed(app_of, settled, new_run) -> None:
    run = new_run()
    run.leaking()
    app = app_of(run)
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        await pilot.press("comma")
        await settled(pilot)
        assert step_of(app) == 12_431
        assert app.view.rank.oom is None
        assert "OUT OF MEMORY" not in text_of(app)
        await pilot.press("right_square_bracket", "right_square_bracket")
        await settled(pilot)
        assert app.view.position.step == 12_433
        assert "step 12,433 of 12,433, " in answered(app)
        assert "· out of memory; Esc returns" in answered(app)
        assert "OUT OF MEMORY then" in answered(app)


async def test_a_step_that_is_not_kept_any_more_is_not_another_one(app_of, settled, new_run) -> None:
    app = app_of(new_run().usual())
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        await pilot.press("colon", *"7", "enter")
        await settled(pilot)
        assert "The oldest step that is kept in full is 12,192." in {each.message for each in app._notifications}
        assert step_of(app) == FIRST
        await pilot.press("colon", *"99999", "enter")
        await settled(pilot)
        assert app.view.now is None


async def test_a_step_that_was_dropped_since_stays_as_it_was(reader_of, app_of, settled, monkeypatch) -> None:
    monkeypatch.setattr("gpumon.tui.app.STEPS_IN_ALL", 100)
    monkeypatch.setattr("gpumon.tui.app.STEPS_AT_LEAST", 100)
    run = Run().hello().model().steps(0, 100).synced()
    reader = reader_of(run)
    app = app_of(reader=reader)
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        await pilot.press("colon", *"20", "enter")
        reader.add(run.steps(100, 100))
        await settled(pilot)
        assert app._live.rank.steps[0].step > 20
        assert step_of(app) == 20
        assert "step 20 of 199, " in answered(app)


async def test_with_several_ranks_the_arrows_change_the_rank_and_the_step_stays(app_of, settled) -> None:
    runs = [Run(pid=100 + rank, rank=rank, world_size=2, extra=rank * GIB).usual(40) for rank in (0, 1)]
    app = app_of(*runs)
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        await pilot.press("colon", *"12400", "enter")
        await settled(pilot)
        assert (app.view.rank.hello.rank, step_of(app)) == (0, 12_400)
        assert "rank 0 of 2 · step 12,400" in text_of(app)
        await pilot.press("right")
        await settled(pilot)
        assert (app.view.rank.hello.rank, step_of(app)) == (1, 12_400)
        await pilot.press("shift+left")
        await settled(pilot)
        assert (app.view.rank.hello.rank, step_of(app)) == (1, 12_399)


async def test_a_restarted_job_is_shown_live(reader_of, app_of, settled, new_run) -> None:
    run = new_run().usual(20)
    reader = reader_of(run)
    app = app_of(reader=reader)
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        await pilot.press("comma")
        await settled(pilot)
        reader.add(run.goodbye("exception", LAST, "backward"))
        await settled(pilot)
        assert "; Esc returns to the last step" in answered(app)
        t_ns = 200_000_000_000
        clock = wire.Clock(t_ns, 1_790_000_000_000_000_000 + t_ns)
        reader.add(new_run(pid=50_001, t_ns=t_ns).hello(clock=clock).model().steps(LAST - 20, 40).synced())
        await settled(pilot)
        assert app.view.now is None
        assert step_of(app) == LAST + 19
        assert "pid 50001" in text_of(app)


# ------------------------------------------------------------------------------------------------- the mouse


async def test_a_click_on_the_plot_shows_that_column_s_step(app_of, settled, new_run) -> None:
    app = app_of(new_run().usual())
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        for x in (20, 40):
            await pilot.click("#timeline", offset=(x, 5))
            await settled(pilot)
            plot = app.screen.query_one(Timeline)
            row = text_of(app).splitlines()[plot.region.y + 5]
            assert row[plot.region.x + x] == "┃"
            assert FIRST < step_of(app) < LAST
        at = step_of(app)
        await pilot.click("#timeline", offset=(2, 5))
        await settled(pilot)
        assert step_of(app) == at


async def test_the_column_that_was_clicked_is_shown_by_its_highest_step(app_of, settled, new_run) -> None:
    run = new_run().hello().model().steps(0, 300)
    run.step(300, leak=5 * GIB)
    app = app_of(run.steps(301, 299).synced())
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        plot = app.screen.query_one(Timeline)
        await pilot.press("colon", *"300", "enter")
        await settled(pilot)
        x = text_of(app).splitlines()[plot.region.y + 5].index("┃") - plot.region.x
        await pilot.press("end")
        await settled(pilot)
        await pilot.click("#timeline", offset=(x, 5))
        await settled(pilot)
        assert step_of(app) == 300


async def test_the_plot_zooms_around_the_chosen_step(app_of, settled, new_run) -> None:
    app = app_of(new_run().usual())
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        await pilot.press("colon", *"12220", "enter")
        await settled(pilot)
        plot = app.screen.query_one(Timeline)
        for _ in range(2):
            plot.post_message(
                MouseScrollUp(plot, 5, 5, 0, 0, 0, shift=False, meta=False, ctrl=False, screen_x=5, screen_y=5)
            )
            await settled(pilot)
        assert app.view.span == 100
        assert "┃" in text_of(app)
        assert plot._slice.points[0].step <= 12_220 <= plot._slice.points[-1].step < LAST


async def test_a_click_on_the_plot_of_a_replay_goes_there(tmp_path, settled, new_run) -> None:
    path = tmp_path / "run.gpumon"
    with link.Recording(path) as recording:
        for received in new_run().hello().model().steps(0, 200).synced().events:
            recording.write(received)
    app = MonitorApp(recording=link.replay(path), pace=Pace(1.0))
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("end")
        for _ in range(200):
            await pilot.pause(0.02)
            if app.view.position.ended and app.view.rank is not None and step_of(app) == 199:
                break
        await pilot.pause(0.5)
        await pilot.click("#timeline", offset=(30, 5))
        for _ in range(200):
            await pilot.pause(0.02)
            if app.view.position.going_to is None and step_of(app) < 199:
                break
        assert 20 < step_of(app) < 180
        assert app.view.position.held
        assert app.view.now is None


async def test_a_click_on_what_leaks_opens_its_finding_and_on_another_owner_explains_it(app_of, settled) -> None:
    app = app_of(leaking())
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        bar = app.screen.query_one(DeviceBar)
        rows = text_of(app).splitlines()[bar.region.y : bar.region.bottom]
        row = next(at for at, text in enumerate(rows) if text.startswith(" now"))
        await pilot.click("#device", offset=(rows[row].index("L"), row))
        await settled(pilot)
        assert isinstance(app.screen, FindingScreen)
        assert "outputs[*]" in text_of(app)
        await pilot.press("escape")
        await pilot.click("#device", offset=(rows[row].index("█"), row))
        await settled(pilot)
        assert isinstance(app.screen, FiguresScreen)
        shown = text_of(app)
        assert f"12.1 GiB now = {round(12.1 * GIB):,} B" in shown
        assert "Parameters of the watched models" in shown
        await pilot.press("escape")
        legend = next(at for at, text in enumerate(rows) if "optimizer " in text and not text.startswith(" peak"))
        await pilot.click("#device", offset=(rows[legend].index("optimizer") + 3, legend))
        await settled(pilot)
        assert isinstance(app.screen, FiguresScreen)
        assert "State tensors of the optimizers" in text_of(app)
        await pilot.press("escape")
        await pilot.click("#device", offset=(2, 0))
        await settled(pilot)
        assert len(app.screen_stack) == 1


@pytest.mark.parametrize("size", [(120, 40), (80, 24), (60, 20), (46, 12), (20, 5)])
async def test_it_fits_and_is_ascii_where_asked(app_of, settled, new_run, size) -> None:
    app = app_of(new_run().usual(), ascii=True)
    async with app.run_test(size=size) as pilot:
        await settled(pilot)
        await pilot.press("left", "left", "comma")
        await settled(pilot)
        shown = text_of(app)
        assert shown.isascii() or size == (20, 5)  # which has a scroll bar
        assert app.view.now is not None
        assert "PAST" in shown
        if size[1] >= 20:
            assert "Esc returns to live" in answered(app)


async def test_keys_that_wait_cost_one_analysis(app_of, settled, new_run, monkeypatch) -> None:
    app = app_of(new_run().usual())
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        looked: list[int] = []
        look_back = app._cursor._look_back
        monkeypatch.setattr(
            app._cursor, "_look_back", lambda live, rank, step: (looked.append(step), look_back(live, rank, step))
        )
        for _ in range(30):
            app.simulate_key("comma")
        await settled(pilot)
        assert step_of(app) == LAST - 30
        assert looked[-1] == LAST - 30
        assert len(looked) <= 3


def test_the_steps_of_64_leaks_are_remembered() -> None:
    """Holders that are named anew in each step must not fill the viewer's memory in a long run."""
    cursor, store, run = Cursor(steps_at_once=1_000), SessionStore(), Run().hello().model()
    for step in range(70):
        run.step(step)
        for received in run.events:
            store.apply(received)
        run.events.clear()
        frame = store.frame(0)
        (report,) = Reporter().report(frame)
        leak = Finding("tensor-leak", "warning", step, "", holder=f"kept[{step}]")
        cursor.note(frame, (msgspec.structs.replace(report, findings=(leak,)),))
    cursor.shown(choose(frame, (report,), None, None))
    cursor.go(30)
    position = cursor.shown(choose(frame, (report,), None, None)).position
    assert [each.step for each in position.moments if each.kind == LEAK] == list(range(64))
