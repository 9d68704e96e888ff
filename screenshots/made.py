"""Makes every picture in this folder: real training on virtual GPUs, recorded, replayed, drawn by the app itself.

    python screenshots/made.py [NAME…]

For each scene a script is trained with the agent inside, `gpumon record` writes what is said, and the recording is
handed to the app, to its end or to some steps before it, at the picture's size. Nothing is drawn or retouched by hand.

Every step is sampled: a virtual GPU computes nothing, so that steps which would take a second take some milliseconds,
and the rule of 1 % of a step would leave a figure every few hundred steps.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from gpumon import link
from gpumon.tui.app import MonitorApp, Options
from gpumon_agent import wire
from gpumon_agent.endpoint import Descriptor

HERE = Path(__file__).parent
DEMO = HERE.parent / "gpumon" / "demo" / "train.py"
SCENARIOS = HERE.parent / "tests" / "scenarios"
PATIENCE_S = 180.0
LOOKS, LOOK_S = 12, 0.3  # so many steps before the end, each is drawn
LARGE, SMALL = (120, 40), (80, 24)
FRAME_S = 2.5  # of a film
FILM_STEP_S = 0.02  # between two steps of the recording, so that the app looks at them


@dataclass(frozen=True)
class Picture:
    """One file: NAME.svg."""

    name: str
    size: tuple[int, int] = LARGE
    keys: tuple[str, ...] = ()
    theme: str = "gpumon-dark"
    earlier: int = 0  # steps before the recording's end


@dataclass(frozen=True)
class Film:
    """One file, NAME.svg, that shows what one saw after so many steps, one after the other, and then with more keys."""

    name: str
    steps: tuple[int, ...]
    keys: tuple[tuple[str, ...], ...] = ()
    size: tuple[int, int] = SMALL


@dataclass(frozen=True)
class Scene:
    """One training run and the pictures of it."""

    command: tuple[str, ...]
    pictures: tuple[Picture | Film, ...]
    devices: tuple[str, ...] = ("-p", "h200")
    seconds: float | None = 25.0  # of recording; None: to the end of the training


EARLIER = 8
SCENES = (
    Scene(
        (str(HERE / "finetune.py"), "--keep"),
        (
            Picture("overview", earlier=EARLIER),
            Picture("overview-light", theme="gpumon-light", earlier=EARLIER),
            Picture("overview-80x24", SMALL, earlier=EARLIER),
            Picture("layers", keys=("3", "o", "o", "o", "o", "o", "o", *["down"] * 3, "enter"), earlier=EARLIER),
            Picture("layers-light", keys=("3", "slash", *"expand"), theme="gpumon-light", earlier=EARLIER),
            Picture("estimate", keys=("5", *["down"] * 4), earlier=EARLIER),
            Picture("estimate-light", keys=("5",), theme="gpumon-light", earlier=EARLIER),
            Picture("blocks", keys=("6", "f")),
            Picture("blocks-light", keys=("6", "right", "right"), theme="gpumon-light"),
            Picture("explain", keys=("5", *["down"] * 4, "e"), earlier=EARLIER),
            Picture("help", keys=("question_mark",), earlier=EARLIER),
            Picture("out-of-memory"),
            Picture("out-of-memory-80x24", SMALL),
            Picture("out-of-memory-in-full", keys=("o",)),
        ),
        ("-p", "a100-40"),
        seconds=None,
    ),
    Scene(
        (str(DEMO), "--workload", "leak"),
        (
            Picture("leaks", keys=("4",)),
            Picture("leaks-light", keys=("4",), theme="gpumon-light"),
            Film("attach-to-leak", steps=(2, 12, 30, 60, 150), keys=(("n",), ("escape", "4"))),
        ),
        seconds=45.0,  # until a second census tells what has grown
    ),
    Scene(
        ("torchrun", "--nproc-per-node", "4", "ddp.py", "--large", "--steps", "100000"),
        (Picture("ranks", keys=("2",)),),
        ("-n", "4", "-p", "a100-80"),
    ),
)


def record(scene: Scene, folder: Path) -> Path:
    """Trains and records; the recording."""
    os.environ.update(XDG_RUNTIME_DIR=str(folder), GPUMON_GOVERNOR="off")
    python, session = sys.executable, f"pictures-{folder.name}"
    on_devices = [python, "-m", "gpumon.virtual_gpu", "run", "-s", session, *scene.devices, "--"]
    words = [str(SCENARIOS / word) if word.endswith(".py") else word for word in scene.command]
    words[:1] = [str(Path(python).parent / "torchrun")] if words[0] == "torchrun" else words[:1]
    path = folder / "recording"
    train = subprocess.Popen([*on_devices, python, "-m", "gpumon", "run", *words], stdout=subprocess.DEVNULL)
    recorder = None
    try:
        deadline = time.monotonic() + PATIENCE_S
        ranks = int(scene.devices[1]) if scene.devices[0] == "-n" else 1
        while len(_agents(train.pid)) < ranks:
            if time.monotonic() > deadline or train.poll() is not None:
                raise SystemExit(f"{scene.command[0]} did not start")
            time.sleep(0.05)
        recorder = subprocess.Popen([*on_devices, python, "-m", "gpumon", "record", str(path), str(train.pid)])
        if scene.seconds is None:
            recorder.wait(PATIENCE_S)
        else:
            time.sleep(scene.seconds)
            recorder.send_signal(signal.SIGINT)
            recorder.wait(20)
        if not path.exists():
            raise SystemExit(f"{scene.command[0]} was not recorded")
    finally:
        if recorder is not None and recorder.poll() is None:
            recorder.kill()
            recorder.wait()
        if train.poll() is None:
            train.terminate()  # torchrun ends its ranks, which are in sessions of their own
        train.wait(PATIENCE_S)
    return path


def _agents(pid: int) -> tuple[Descriptor, ...]:
    """Of the process or of what it launched."""
    try:
        return link.resolve(str(pid))
    except link.NoJob:
        return ()


async def events_of(recording: Path, earlier: int) -> list[wire.Received]:
    """Its events, up to so many steps before its end."""
    events = [received async for received in link.replay(recording)]
    if not earlier:
        return events
    last = max(received.event.step for received in events if isinstance(received.event, wire.Step))
    end = next(i for i, r in enumerate(events) if isinstance(r.event, wire.Step) and r.event.step > last - earlier)
    return events[:end]


async def draw(recording: Path, picture: Picture) -> None:
    """Saves what one who watched saw as the last of the events arrived: findings open after some looks in a row."""
    events = await events_of(recording, picture.earlier)
    heard = asyncio.Event()

    steps = max(r.event.step for r in events if isinstance(r.event, wire.Step))

    async def feed() -> AsyncIterator[wire.Received]:
        for received in events:
            yield received
            if isinstance(received.event, wire.Step) and received.event.step > steps - LOOKS:
                await asyncio.sleep(LOOK_S)
        heard.set()
        await asyncio.Event().wait()

    now, options = events[-1].unix_ns, Options(picture.theme)
    app = MonitorApp(feed, clock=lambda: now, options=options, asker=link.Asker())  # the keys of a live session
    async with app.run_test(size=picture.size) as pilot:
        await heard.wait()
        await pilot.pause(1.0)
        for key in picture.keys:
            await pilot.press(key)
            await pilot.pause(0.2)
        await pilot.pause(0.6)
        (HERE / f"{picture.name}.svg").write_text(app.export_screenshot(title="gpumon"))
    print(f"{picture.name}.svg")


async def shoot(recording: Path, film: Film) -> None:
    """Plays the recording to the app, holds it at each of the film's steps, and saves all that was seen as one file."""
    events = await events_of(recording, 0)
    go_on, held = asyncio.Event(), asyncio.Event()
    now = events[0].unix_ns

    async def feed() -> AsyncIterator[wire.Received]:
        nonlocal now
        stops = list(film.steps)
        for received in events:
            now = max(now, received.unix_ns)
            yield received
            if isinstance(received.event, wire.Step):
                await asyncio.sleep(FILM_STEP_S)
                if stops and received.event.step >= stops[0]:
                    stops.pop(0)
                    held.set()
                    await go_on.wait()
                    go_on.clear()
        held.set()
        await asyncio.Event().wait()

    frames: list[str] = []
    app = MonitorApp(feed, clock=lambda: now, options=Options(), asker=link.Asker())
    async with app.run_test(size=film.size) as pilot:
        for keys in ((), *((),) * len(film.steps[1:]), *film.keys):
            if not keys:
                await held.wait()
                held.clear()
            for key in keys:
                await pilot.press(key)
            await pilot.pause(1.2)
            frames.append(app.export_screenshot(title="gpumon attach"))
            if not keys:
                go_on.set()
    (HERE / f"{film.name}.svg").write_text(animated(frames), encoding="utf-8")
    print(f"{film.name}.svg")


def animated(frames: list[str]) -> str:
    """One SVG that shows the frames in turns. Where motion is not wanted, the last one stands."""
    box = frames[0].split('viewBox="')[1].split('"')[0]
    whole = FRAME_S * len(frames)
    shown = []
    for at, frame in enumerate(frames):
        inner = frame[frame.index(">", frame.index("<svg")) + 1 : frame.rindex("</svg>")]
        last = " last" if at == len(frames) - 1 else ""
        shown.append(f'<g class="frame{last}" style="animation-delay:{at * FRAME_S:g}s">{inner}</g>')
    style = (
        f".frame {{ visibility: hidden; animation: show {whole:g}s step-end infinite; }}\n"
        f"@keyframes show {{ 0% {{ visibility: visible; }} {100 / len(frames):.3f}% {{ visibility: hidden; }} }}\n"
        "@media (prefers-reduced-motion) { .frame { animation: none; } .last { visibility: visible; } }"
    )
    return (
        f'<svg viewBox="{box}" xmlns="http://www.w3.org/2000/svg">\n<style>{style}</style>\n{"".join(shown)}\n</svg>\n'
    )


def main() -> int:
    wanted = set(sys.argv[1:])
    for scene in SCENES:
        pictures = [p for p in scene.pictures if not wanted or p.name in wanted]
        if not pictures:
            continue
        with tempfile.TemporaryDirectory() as folder:
            recording = record(scene, Path(folder))
            for picture in pictures:
                asyncio.run(shoot(recording, picture) if isinstance(picture, Film) else draw(recording, picture))
    return 0


if __name__ == "__main__":
    sys.exit(main())
