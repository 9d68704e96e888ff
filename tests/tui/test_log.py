"""The Log screen: what is in it, and what is not."""

from __future__ import annotations

from typing import Any

from gpumon_agent import wire


async def test_it_says_that_the_training_s_own_output_is_elsewhere(app_of: Any, new_run: Any, settled: Any) -> None:
    app = app_of(new_run().usual(3))
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        await pilot.press("7", "e")
        await settled(pilot)
        shown = "\n".join(strip.text for strip in app.screen._compositor.render_strips())
    assert "What the training prints is not here" in shown


async def test_y_copies_the_path_of_the_newest_snapshot_and_without_one_the_answer(
    app_of: Any, new_run: Any, reader_of: Any, settled: Any
) -> None:
    ranks = [new_run(rank=number, world_size=2, pid=5000 + number).usual(3) for number in range(2)]
    reader = reader_of(*ranks)
    app = app_of(reader=reader)
    async with app.run_test(size=(80, 24), notifications=True) as pilot:
        await settled(pilot)
        await pilot.press("7", "y")
        await settled(pilot)
        assert app.clipboard.startswith("OK")
        for run, path, newest in (
            (ranks[1], "/state/one.pickle", "/state/one.pickle"),
            (ranks[0], "/state/two.pickle", "/state/two.pickle"),
            (ranks[0], None, "/state/one.pickle"),
        ):
            run.t_ns += 10**9
            run.say(wire.Snapshot(run.t_ns, 3, path, 4096, None if path else "no snapshot on disk: it is full"))
            reader.add(run)
            await settled(pilot)
            await pilot.press("y")
            await settled(pilot)
            assert app.clipboard == newest
            assert f"Copied {newest}" in [each.message for each in app._notifications]


async def test_a_snapshot_that_a_logout_may_remove_says_so(app_of: Any, new_run: Any, settled: Any) -> None:
    why = "it may be gone after you log out, because there is no home directory"
    run = new_run().usual(3)
    path = f"/home/somebody/.local/state/{'long/' * 20}snapshot.pickle"
    run.say(wire.Snapshot(run.t_ns, 3, path, 4096, why))
    app = app_of(run)
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        await pilot.press("7")
        await settled(pilot)
        shown = "\n".join(strip.text for strip in app.screen._compositor.render_strips())
        assert why in " ".join(shown.split())
        assert path in "".join(shown.split())
