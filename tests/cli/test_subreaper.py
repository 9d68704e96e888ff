"""The subreaper: nothing that a command started outlives it or whoever asked for it, and its status comes through."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import psutil
import pytest

from gpumon.cli.subreaper import HELPER, under_subreaper
from gpumon_agent.transport.trainer import BOOTSTRAP

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a command is started as it is")
ORPHAN = "import subprocess, sys; p = subprocess.Popen(['sleep', '1000'], start_new_session=True); print(p.pid); "
STARTS = f"""
import subprocess, sys
from gpumon.cli.subreaper import under_subreaper
subprocess.Popen(under_subreaper([sys.executable, "-c", {ORPHAN + "sys.stdout.flush(); p.wait()"!r}])).wait()
"""


def ended(pid: int) -> bool:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("sys.exit(7)", 7),
        ("import os; os.kill(os.getpid(), 15)", -signal.SIGTERM),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("import os; os.abort()", -signal.SIGABRT),
    ],
)
def test_it_ends_as_the_command_did_and_takes_the_rest_along(code: str, status: int) -> None:
    command = [sys.executable, "-c", f"{ORPHAN} sys.stdout.flush(); {code}"]
    done = subprocess.run(under_subreaper(command), stdout=subprocess.PIPE, text=True, timeout=300, check=False)
    assert done.returncode == status
    assert ended(int(done.stdout))


def test_a_helper_may_say_its_last_words_and_nothing_else_may() -> None:
    says = "import time; time.sleep(1); print('said', flush=True)"
    start = "import subprocess, sys; [subprocess.Popen([sys.executable, '-c', code]) for code in sys.argv[1:]]"
    helper = f"import sys; {says}; sys.exit(gpumon_agent.transport)"
    assert HELPER.decode() in BOOTSTRAP
    for code, output in ((helper, "said\n"), (says, "")):
        done = subprocess.run(
            under_subreaper([sys.executable, "-c", start, code]), stdout=subprocess.PIPE, text=True, timeout=60,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (0, output)


def test_a_hard_end_of_who_asked_for_it_ends_the_whole_tree() -> None:
    with subprocess.Popen([sys.executable, "-c", STARTS], stdout=subprocess.PIPE, text=True) as asks:
        assert asks.stdout
        orphan = int(asks.stdout.readline())
        below = psutil.Process(asks.pid).children(recursive=True)
        assert orphan in {process.pid for process in below}
        asks.kill()
    assert all(ended(process.pid) for process in below)


def test_an_interrupt_is_the_commands() -> None:
    waits = "import time\ntry: print(flush=True), time.sleep(60)\nexcept KeyboardInterrupt: print('tidy'); raise"
    with subprocess.Popen(
        under_subreaper([sys.executable, "-c", waits]), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as subreaper:
        assert subreaper.stdout
        subreaper.stdout.readline()
        subreaper.send_signal(signal.SIGINT)
        assert subreaper.communicate(timeout=300)[0] == "tidy\n"
    assert subreaper.returncode == -signal.SIGINT


def test_a_command_that_is_not_there_is_one_sentence() -> None:
    done = subprocess.run(under_subreaper(["nosuch"]), capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (1, "Error: nosuch could not be started: No such file or directory.\n")
