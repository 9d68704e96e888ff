"""The screen in a real pty: it comes, it goes, it leaves the terminal as it was, and never outlives it."""

from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpumon.link import Recording
from gpumon_agent import wire

ESCAPES = re.compile(r"\x1b\[[0-9;?>=<]*[a-zA-Z$]|\x1b[=>]")
ALTERNATE, BACK = "\x1b[?1049h", "\x1b[?1049l"


@dataclass
class Terminal:
    """A process whose terminal we hold the other end of; that terminal does not control it, so no SIGHUP comes."""

    process: subprocess.Popen[bytes]
    master: int
    output: str = ""

    def read_until(self, *wanted: str, seconds: float = 120.0) -> str:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if all(word in ESCAPES.sub("", self.output) or word in self.output for word in wanted):
                return self.output
            if select.select([self.master], [], [], 0.2)[0]:
                try:
                    self.output += os.read(self.master, 65536).decode(errors="replace")
                except OSError:
                    break
            elif self.process.poll() is not None:
                break
        raise AssertionError(f"{wanted} never came; the end of what did: {ESCAPES.sub('', self.output)[-600:]!r}")

    def press(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def ended(self, seconds: float = 60.0) -> int:
        deadline = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < deadline:
            if self.master >= 0 and select.select([self.master], [], [], 0.1)[0]:
                try:
                    self.output += os.read(self.master, 65536).decode(errors="replace")
                except OSError:
                    time.sleep(0.1)
            elif self.master < 0:
                time.sleep(0.1)
        return self.process.wait(0.1)


@pytest.fixture
def recording(tmp_path: Path, new_run) -> Path:
    path = tmp_path / "run.gpumon"
    with Recording(path) as file:
        for received in new_run().usual().events:
            file.write(received)
            if isinstance(received.event, wire.Step):
                file.flush()
    return path


@pytest.fixture
def in_terminal() -> Iterator[object]:
    started: list[Terminal] = []

    def run(*arguments: str, size: tuple[int, int] = (120, 40), **environment: str) -> Terminal:
        master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
        process = subprocess.Popen(
            [sys.executable, "-m", "gpumon", *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8", **environment},
        )
        os.close(slave)
        started.append(Terminal(process, master))
        return started[-1]

    yield run
    for terminal in started:
        if terminal.process.poll() is None:
            terminal.process.kill()
        terminal.process.wait()
        if terminal.master >= 0:
            os.close(terminal.master)


def test_q_leaves_the_terminal_as_it_was(in_terminal, recording) -> None:
    terminal = in_terminal("replay", str(recording), "--speed", "0")
    terminal.read_until("61.0 of 139.8 GiB at the peak")
    terminal.press("q")
    assert terminal.ended() == 0
    assert terminal.output.index(ALTERNATE) < terminal.output.rindex(BACK)


def test_ctrl_c_quits_like_q(in_terminal, recording) -> None:
    terminal = in_terminal("replay", str(recording), "--speed", "0")
    terminal.read_until("61.0 of 139.8 GiB")
    terminal.press("\x03")
    assert terminal.ended() == 0


def test_a_terminal_that_vanishes_takes_the_viewer_with_it(in_terminal, recording) -> None:
    terminal = in_terminal("replay", str(recording), "--speed", "0")
    terminal.read_until("61.0 of 139.8 GiB")
    os.close(terminal.master)
    terminal.master = -1
    assert terminal.ended() != 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_end_restores_the_terminal(in_terminal, recording, number) -> None:
    terminal = in_terminal("replay", str(recording), "--speed", "0")
    terminal.read_until("61.0 of 139.8 GiB")
    terminal.process.send_signal(number)
    assert terminal.ended() == 128 + number
    assert BACK in terminal.output


def test_a_tiny_terminal_is_harmless(in_terminal, recording) -> None:
    terminal = in_terminal("replay", str(recording), "--speed", "0", size=(20, 5))
    terminal.read_until("train.py", "cuda:0")
    terminal.press("q")
    assert terminal.ended() == 0


def test_a_terminal_that_changes_its_size_is_followed(in_terminal, recording) -> None:
    terminal = in_terminal("replay", str(recording), "--speed", "0", size=(80, 24))
    terminal.read_until("61.0 of 139.8 GiB")
    for columns, rows in ((20, 5), (1, 1), (200, 60)):
        fcntl.ioctl(terminal.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        terminal.process.send_signal(signal.SIGWINCH)
        time.sleep(0.4)
    terminal.output = ""
    terminal.read_until("H200")
    terminal.press("q")
    assert terminal.ended() == 0


def test_no_color_writes_no_colour(in_terminal, recording) -> None:
    terminal = in_terminal("replay", str(recording), "--speed", "0", NO_COLOR="1")
    terminal.read_until("61.0 of 139.8 GiB")
    terminal.press("q")
    terminal.ended()
    codes = [part for sgr in re.findall(r"\x1b\[([0-9;]*)m", terminal.output) for part in sgr.split(";")]
    assert not [code for code in codes if re.fullmatch(r"[34][0-8]|9[0-7]|10[0-7]", code)]


def test_a_console_without_utf8_gets_ascii(in_terminal, recording) -> None:
    terminal = in_terminal("replay", str(recording), "--speed", "0", PYTHONIOENCODING="ascii:replace", PYTHONUTF8="0")
    terminal.read_until("61.0 of 139.8 GiB", "W weights")


def test_a_truncated_recording_is_played_as_far_as_it_goes_and_the_log_says_so(in_terminal, recording) -> None:
    whole = recording.read_bytes()
    recording.write_bytes(whole[: len(whole) * 2 // 3])
    terminal = in_terminal("replay", str(recording), "--speed", "0")
    terminal.read_until("cuda:0")
    terminal.press("7")
    terminal.read_until("damaged", "replayed,")  # words: the path decides where the line is broken


def test_a_picture_as_text_goes_into_a_pipe(recording) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gpumon", "replay", str(recording), "--once"],
        capture_output=True, text=True, timeout=300, env={**os.environ, "COLUMNS": "110", "PYTHONIOENCODING": "utf-8"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "61.0 of 139.8 GiB at the peak (backward)" in done.stdout
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize("arguments", [("nosuch.py",), ("--once",), ("--json",), ("4194999",)], ids=" ".join)
def test_attach_names_what_is_wrong_and_what_to_do(in_terminal, tmp_path, arguments) -> None:
    tmp_path.chmod(0o700)
    terminal = in_terminal("attach", *arguments, XDG_RUNTIME_DIR=str(tmp_path), TMPDIR=str(tmp_path))
    assert terminal.ended() == 1
    assert "Error: no " in terminal.output
    assert ("gpumon ls" if arguments[0].isdecimal() else "gpumon run train.py") in terminal.output


def test_attach_without_a_job_waits_on_the_home_screen_and_shows_one_that_starts(in_terminal, tmp_path) -> None:
    tmp_path.chmod(0o700)
    here = {"XDG_RUNTIME_DIR": str(tmp_path), "TMPDIR": str(tmp_path)}
    terminal = in_terminal("attach", **here)
    terminal.read_until("0 jobs run", "no job with an agent runs here")
    training = "import time, gpumon_agent, torch\ngpumon_agent.watch(torch.nn.Linear(2, 2))\ntime.sleep(600)"
    environment = {**os.environ, **here, "GPUMON_NAME": "late-comer"}
    with subprocess.Popen([sys.executable, "-c", training], env=environment, stderr=subprocess.DEVNULL) as job:
        try:
            terminal.read_until("1 job runs", "late-comer")
            terminal.press("\r")
            terminal.read_until(f"pid {job.pid}", "Overview")
            terminal.press("q")
            assert terminal.ended() == 0
        finally:
            job.kill()


def test_the_log_of_the_demo_and_of_a_dry_run_shows_what_they_print(in_terminal, tmp_path: Path, virtual_gpu) -> None:
    tmp_path.chmod(0o700)
    virtual_gpu()  # skips, or fails, where there is none
    here = {"XDG_RUNTIME_DIR": str(tmp_path), "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    for arguments, name in ((("demo",), "gpumon demo"), (("demo", "--device", "8GiB"), "gpumon dryrun")):
        terminal = in_terminal(*arguments, **here)
        terminal.read_until("step ", seconds=200)
        terminal.press("7")
        terminal.read_until(f"the training that `{name}` started", ": loss ")
        terminal.press("q")
        assert terminal.ended() in (0, 1, 3)


def test_first_picture_needs_neither_psutil_nor_nvml_nor_torch_nor_openssl() -> None:
    code = (
        "import sys; from gpumon.cli import screen; screen.import_asyncio(); "
        "import gpumon.cli.attach, gpumon.tui.app, gpumon.link.subscription; "
        "heavy = 'psutil', 'pynvml', 'torch', 'numpy', '_ssl', 'gpumon.host.sampler'; "
        "print([m for m in heavy if m in sys.modules]); import ssl; print(ssl.HAS_TLSv1_3)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["[]", "True"]


@pytest.fixture
def detailed(tmp_path: Path, new_run) -> Path:
    """A recording whose modules are known."""
    run = new_run().hello().modules().steps(12_400, 31).host().step(12_431).layers(12_431).beat(12_432).synced().host()
    path = tmp_path / "detailed.gpumon"
    with Recording(path) as file:
        for received in run.events:
            file.write(received)
    return path


def test_layers_are_sorted_filtered_and_explained_by_hand(in_terminal, detailed) -> None:
    terminal = in_terminal("replay", str(detailed), "--speed", "0")
    terminal.read_until("61.0 of 139.8 GiB")
    terminal.press("3")
    terminal.read_until("222 modules", "read at step 12,431")
    terminal.press("o")
    terminal.read_until("parameters▾")
    terminal.press("/")
    terminal.press("qkv")
    terminal.read_until("24 of 222 modules", "Drop")
    terminal.output = ""
    terminal.press("\r")
    terminal.read_until("Flat")
    terminal.press("e")
    terminal.read_until("all modules below")
    terminal.press("q")  # closes the page alone
    time.sleep(0.3)
    terminal.press("q")
    assert terminal.ended() == 0


def test_the_estimate_is_read_line_by_line(in_terminal, detailed) -> None:
    terminal = in_terminal("replay", str(detailed), "--speed", "0", size=(80, 24))
    terminal.read_until("61.0 of 139.8 GiB")
    terminal.press("5")
    terminal.read_until("Estimate vs measured", "Step's end, GiB")
    terminal.press("\x1b[F")  # end
    terminal.read_until("measured: read")
    terminal.press("q")
    assert terminal.ended() == 0


@pytest.mark.parametrize("key", ["3", "5"])
def test_the_new_screens_survive_every_size(in_terminal, detailed, key) -> None:
    terminal = in_terminal("replay", str(detailed), "--speed", "0")
    terminal.read_until("61.0 of 139.8 GiB")
    terminal.press(key)
    for columns, rows in ((40, 12), (20, 5), (1, 1), (200, 60)):
        fcntl.ioctl(terminal.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        terminal.process.send_signal(signal.SIGWINCH)
        time.sleep(0.4)
        terminal.press("\x1b[B")
    terminal.output = ""
    terminal.read_until("weights")
    terminal.press("q")
    assert terminal.ended() == 0


def test_garbage_is_looked_for_after_ten_thousand_new_objects(tmp_path: Path) -> None:
    """With many ranks the screen makes thousands a second, which go by themselves."""
    script = tmp_path / "making.py"
    script.write_text("""
import gc
from gpumon.cli.attach import run
from gpumon.tui.app import MonitorApp

class Making(MonitorApp):
    def run(self):
        made, looked = [], []
        gc.callbacks.append(lambda phase, _: looked.append(len(made)))
        for _ in range(200_000):
            made.append([])
        print(looked[0])

run(Making())
""")
    made = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, timeout=300).stdout
    assert 9_000 < int(made) < 11_000
