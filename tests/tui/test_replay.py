"""A replay's line and keys: position, speed, backwards, to a step, to events. Real recordings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from pictured import text_of
from synthetic import MIB, Run
from textual.pilot import Pilot

from gpumon import link
from gpumon.session.store import SessionStore
from gpumon.tui.app import MonitorApp
from gpumon.tui.feed import Pace
from gpumon.tui.playback import NEAR, Playback
from gpumon.tui.position import Moment, Position
from gpumon.tui.styles import ASCII, UNICODE
from gpumon.tui.text_layout import width
from gpumon.tui.widgets.replay_line import clock, pace_of, replay_line
from gpumon_agent import wire

STEPS = 400
LOADED, OOM = 120, 300


def beside(step: int) -> tuple[wire.Event, ...]:
    if step == LOADED:
        return (wire.Checkpoint(0, 0, step, 1, "torch.load"), wire.Checkpoint(0, 1, step, 1, "torch.load"))
    return (wire.Oom(step, "forward", 0, 1, 1 << 30),) if step == OOM else ()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("replay") / "run.gpumon"
    with link.Recording(path) as recording:
        for received in Run(beside=beside, activations=lambda step: (300 + step) * MIB).stream(STEPS):
            recording.write(received)
    return path


@pytest.fixture
def app(recorded: Path) -> MonitorApp:
    return MonitorApp(recording=link.replay(recorded), pace=Pace(1.0))


async def until(pilot: Pilot[int], condition: Callable[[], bool]) -> None:
    for _ in range(2_000):
        if condition():
            await pilot.pause(0.05)
            return
        await pilot.pause(0.02)
    raise AssertionError(text_of(pilot.app))


def line_of(app: MonitorApp) -> str:
    return next(line for line in text_of(app).splitlines() if " of 0:20" in line)


def step_of(app: MonitorApp) -> int:
    return app.view.rank.steps[-1].step if app.view.rank and app.view.rank.steps else -1


async def test_the_line_has_time_step_and_speed_and_stands_above_the_keys(app: MonitorApp) -> None:
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: " of 0:20" in text_of(app) and step_of(app) >= 0)
        await pilot.press("space")
        await until(pilot, lambda: app.view.paused)
        held = step_of(app)
        assert f"step {held:,} of {STEPS - 1}" in line_of(app)
        assert line_of(app).startswith(" ‖ ×1  0:0")
        rows = text_of(app).splitlines()
        assert "q Quit" in rows[rows.index(line_of(app)) + 1]
        assert "</> Speed" in rows[-1]
        await pilot.press("greater_than_sign", "greater_than_sign", "greater_than_sign")
        await until(pilot, lambda: "×8" in line_of(app))
        await pilot.press("less_than_sign", "less_than_sign", "less_than_sign", "less_than_sign")
        await until(pilot, lambda: "×1/2" in line_of(app))
        await pilot.pause(0.5)
        assert step_of(app) == held
        await pilot.press("space")
        await until(pilot, lambda: step_of(app) > held)


async def test_steps_forwards_and_backwards_and_it_stays_there(app: MonitorApp, recorded: Path) -> None:
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: step_of(app) >= 2)
        await pilot.press("space")
        await until(pilot, lambda: app.view.paused)
        at = step_of(app)
        for key, to in (("full_stop", at + 1), ("full_stop", at + 2), ("comma", at + 1), ("comma", at)):
            await pilot.press(key)
            await until(pilot, lambda to=to: step_of(app) == to and app.view.position.going_to is None)
        await pilot.press("right", "right")
        await until(pilot, lambda: step_of(app) == at + 200)
        whole = SessionStore()
        for received in link.replay(recorded):
            whole.apply(received)
        assert app.view.rank.steps[-1] == whole.frame(0).ranks[0].steps[at + 200]
        await pilot.press("left")
        await until(pilot, lambda: step_of(app) == at + 100)
        assert app.view.rank.lost_events == 0
        await pilot.press("home", "comma", "comma")
        await until(pilot, lambda: step_of(app) == 0 and app.view.position.going_to is None)


async def test_back_by_one_passes_steps_that_were_not_read(tmp_path: Path) -> None:
    path = tmp_path / "quiet.gpumon"
    with link.Recording(path) as recording:
        for received in Run().stream(200):
            event = received.event
            if getattr(event, "step", 0) % 10:
                continue
            if isinstance(event, wire.Step) and event.step:
                event = msgspec.structs.replace(event, quiet=9)
            recording.write(msgspec.structs.replace(received, event=event, seq=-1))
    app = MonitorApp(recording=link.replay(path), pace=Pace(1.0))
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("end")
        await until(pilot, lambda: step_of(app) == 190)
        for to in (180, 170, 160):
            await pilot.press("comma")
            await until(pilot, lambda to=to: step_of(app) == to and app.view.position.going_to is None)
        await pilot.press("full_stop")
        await until(pilot, lambda: step_of(app) == 170)


async def test_events_are_jumped_to_and_named(app: MonitorApp) -> None:
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: " of 0:20" in text_of(app))
        await pilot.press("right_square_bracket")
        await until(pilot, lambda: f"step {LOADED} of 399 · checkpoint" in text_of(app))
        assert app.view.rank.oom is None
        await pilot.press("right_square_bracket")
        await until(pilot, lambda: f"step {OOM} of 399 · out of memory" in text_of(app))
        assert app.view.rank.oom is not None
        await pilot.press("right_square_bracket")
        await until(
            pilot, lambda: "No event after this step is known." in {each.message for each in app._notifications}
        )
        await pilot.press("left_square_bracket")
        await until(pilot, lambda: step_of(app) == LOADED)
        assert app.view.rank.oom is None
        assert "OUT OF MEMORY" not in text_of(app)


async def test_a_number_goes_to_that_step_and_anything_else_nowhere(app: MonitorApp) -> None:
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: " of 0:20" in text_of(app))
        await pilot.press("colon", *"250", "enter")
        await until(pilot, lambda: step_of(app) == 250)
        assert app.view.paused
        await pilot.press("colon", *"17", "escape")
        await pilot.press("colon", "enter")
        await pilot.press("colon", *"99999", "enter")
        await until(pilot, lambda: app.view.position.ended)
        assert step_of(app) == STEPS - 1
        assert "■ ×1  0:20 of 0:20" in text_of(app)
        await pilot.press("full_stop")
        await pilot.pause(0.1)
        assert step_of(app) == STEPS - 1
        await pilot.press("comma")
        await until(pilot, lambda: step_of(app) == STEPS - 2)


async def test_the_end_key_shows_the_last_step_and_says_if_the_file_was_cut(recorded: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.gpumon"
    path.write_bytes(recorded.read_bytes()[:-40])
    recording = link.replay(path)
    app = MonitorApp(recording=recording, pace=Pace(1.0))
    app.ending = lambda: recording.cut
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: step_of(app) >= 0)
        await pilot.press("end")
        await until(pilot, lambda: step_of(app) == STEPS - 1 and app.view.position.ended)
        assert "■ ×1  0:20 of 0:20" in text_of(app)
        await pilot.press("7")
        await until(pilot, lambda: "is damaged or cut off" in " ".join(text_of(app).split()))


async def test_a_live_job_has_no_such_line_and_no_speed(app_of, new_run) -> None:
    app = app_of(new_run().usual(20))
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause(0.5)
        assert not app.check_action("speed", (2,))
        assert not app.check_action("finish", ())
        await pilot.press("comma")
        await pilot.pause(0.5)
        assert not app.screen.query("#replay")


async def test_it_reads_on_for_5000_steps_and_jumps_beyond() -> None:
    jumps: list[int] = []

    class Recorded:
        cut = None
        index = None

        def __iter__(self):
            return self.near(0)

        def near(self, step):
            jumps.append(step)
            yield from (wire.Received("a", 1, wire.Step(number, 1, 1), number, True) for number in range(20_000))

    for to, jumped in ((NEAR + 19, 1), (NEAR + 20, 2)):
        assert NEAR == 5_000
        jumps.clear()
        playback = Playback(Recorded(), Pace(1.0))  # type: ignore[arg-type]
        playback.go(0)
        shown: list[int] = []

        def show(store: SessionStore, playback=playback, shown=shown, to=to) -> None:
            shown.append(playback.step)
            if len(shown) == 1:
                playback.go(19)
            elif len(shown) == 2:
                playback.go(to)
            else:
                playback.pace.hold(True)
                raise KeyError

        with pytest.raises(KeyError):
            await playback.run(SessionStore(), SessionStore, show, lambda: None)
        assert shown == [0, 19, to]
        assert jumps[1:] == [to] * (jumped - 1)


# ------------------------------------------------------------------------------------------------- the line


def written(at: Position, room: int = 80, ascii: bool = False) -> str:
    line = replay_line(at, room, ASCII if ascii else UNICODE)
    assert width(line) <= room
    return "".join(text for text, _ in line)


BEGAN = 10**18
HALF = Position(BEGAN + 760 * 10**9, 1_234, BEGAN, BEGAN + 1_867 * 10**9, 5_000, 8.0)


def test_times_and_speeds_in_words() -> None:
    assert [clock(s * 10**9) for s in (0, 7, 760, 3_723)] == ["0:00", "0:07", "12:40", "1:02:03"]
    assert [pace_of(s) for s in (0, 1, 8, 0.25, 4096.0)] == ["at once", "×1", "×8", "×1/4", "×4096"]


@pytest.mark.parametrize("room", [20, 46, 80, 120, 200])
def test_the_line_fits_and_the_bar_goes_first(room: int) -> None:
    text = written(HALF, room)
    assert text.startswith(" ▸ ×8  12:40 of 31:")
    if room >= 80:
        assert text.endswith("step 1,234 of 5,000")
        bar = text.split("  ")[2]
        assert abs(bar.count("━") / len(bar) - 760 / 1_867) < 2 / len(bar)
    assert ("━" in text) == (room > 46 or (room == 46 and len(text) > 60))


def test_a_bar_has_at_least_ten_cells() -> None:
    bars = [written(HALF, room).count("━") + written(HALF, room).count("─") for room in range(40, 90)]
    assert min(bar for bar in bars if bar) == 10
    assert 0 in bars


def test_what_stands_before_the_speed() -> None:
    from msgspec.structs import replace

    assert written(replace(HALF, held=True)).startswith(" ‖ ×8")
    assert written(replace(HALF, held=True, ended=True)).startswith(" ■ ×8")
    assert "going to step 4,000" in written(replace(HALF, going_to=4_000))
    assert written(Position()) == " ▸ ×1  0:00  step none"
    assert written(HALF, ascii=True).isascii()
    assert written(replace(HALF, going_to=4_000), ascii=True).isascii()


def test_events_are_on_the_bar_and_the_worst_is_on_top() -> None:
    from msgspec.structs import replace

    at = BEGAN + 1_000 * 10**9
    marked = replace(HALF, moments=(Moment("out of memory", 9, at), Moment("checkpoint", 9, at)))
    assert written(marked).count("▲") == 1
    assert "•" not in written(marked)
    assert written(replace(marked, step=8, ended=True)).endswith("· checkpoint")
