"""Makes every picture in this folder: real training on virtual GPUs, recorded, replayed, drawn by the app itself.

    python screenshots/made.py [NAME…]

For each scene a script of tests/scenarios is trained with the agent inside, `gpumon record` writes what is said, and
the recording is played to the app at the picture's size. Nothing is drawn or retouched by hand.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from gpumon import link
from gpumon.tui.app import MonitorApp, Options
from gpumon.tui.feed import Pace
from gpumon_agent.endpoint import Descriptor

HERE = Path(__file__).parent
SCENARIOS = HERE.parent / "tests" / "scenarios"
PATIENCE_S = 180.0
LARGE, SMALL = (120, 40), (80, 24)


@dataclass(frozen=True)
class Picture:
    """One file: NAME.svg."""

    name: str
    size: tuple[int, int] = LARGE
    keys: tuple[str, ...] = ()
    theme: str = "gpumon-dark"


@dataclass(frozen=True)
class Scene:
    """One training run and the pictures of it."""

    command: tuple[str, ...]
    pictures: tuple[Picture, ...]
    devices: tuple[str, ...] = ("-p", "h200")
    seconds: float | None = 25.0  # of recording; None: to the end of the training


GPT = ("gpt.py", "--precision", "bf16", "--layers", "24", "--width", "2048", "--steps", "100000")
SCENES = (
    Scene(
        GPT,
        (
            Picture("overview"),
            Picture("overview-light", theme="gpumon-light"),
            Picture("overview-80x24", SMALL),
            Picture("explain", keys=("tab", "e")),
            Picture("help", keys=("question_mark",)),
        ),
    ),
    Scene(
        ("torchrun", "--nproc-per-node", "4", "ddp.py", "--large", "--steps", "100000"),
        (Picture("ranks", keys=("2",)),),
        ("-n", "4", "-p", "a100-80"),
    ),
    Scene(
        ("oom_ahead.py", "--steps", "1000"), (Picture("out-of-memory"),), ("-p", "a100-40", "-m", "1GiB"), seconds=None
    ),
)


def record(scene: Scene, folder: Path) -> Path:
    """Trains and records; the recording."""
    os.environ["XDG_RUNTIME_DIR"] = str(folder)
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


async def draw(recording: Path, picture: Picture) -> None:
    """Plays the recording to its end and saves what stands on the screen, in a live run's words."""
    app = MonitorApp(lambda: link.replay(recording), pace=Pace(0), options=Options(picture.theme))
    async with app.run_test(size=picture.size) as pilot:
        while not any("end" in said.text or "damaged" in said.text for said in app.view.said):
            await pilot.pause(0.2)
        await pilot.pause(0.6)
        await pilot.press(*picture.keys)
        await pilot.pause(0.6)
        (HERE / f"{picture.name}.svg").write_text(app.export_screenshot(title="gpumon"))
    print(f"{picture.name}.svg")


def main() -> int:
    wanted = set(sys.argv[1:])
    for scene in SCENES:
        pictures = [p for p in scene.pictures if not wanted or p.name in wanted]
        if not pictures:
            continue
        with tempfile.TemporaryDirectory() as folder:
            recording = record(scene, Path(folder))
            for picture in pictures:
                asyncio.run(draw(recording, picture))
    return 0


if __name__ == "__main__":
    sys.exit(main())
