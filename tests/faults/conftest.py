"""Training processes that faults are done to, each beside a run without gpumon."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.training import ENDS_WITHIN_S, Begin, Ran, Same, Training, is_helper
from forks import Forks


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    made = Forks(sys.executable)
    yield made
    made.close()


@pytest.fixture
def begin(forks: Forks, tmp_path: Path) -> Iterator[Begin]:
    """Starts a training: `begin(script, **environment)`; without gpumon where `watched` is False. One at a time.

    `whole`: it also takes torch's modules apart as it ends, which takes two seconds.

    None of their helpers may outlive them.
    """
    helpers = tmp_path / "helpers"
    helpers.mkdir(mode=0o777)
    helpers.chmod(0o777)
    numbers = iter(range(1000))

    def begin(text: str, *, watched: bool = True, whole: bool = False, **environment: str) -> Training:
        known = {**os.environ, "WATCHED": "01"[watched], "HELPERS": str(helpers), "OMP_NUM_THREADS": "1"}
        known |= environment
        return Training(forks, tmp_path / f"training{next(numbers)}", text, known, whole=whole)

    yield begin
    left = {int(each.name) for each in helpers.iterdir()}
    until = time.monotonic() + ENDS_WITHIN_S
    while (left := {pid for pid in left if is_helper(pid)}) and time.monotonic() < until:
        time.sleep(0.02)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, "a helper did not end with its training"


@pytest.fixture
def same(begin: Begin) -> Same:
    """Runs a script without gpumon and with it: both end the same, say and print the same. Returns the watched one.

    gpumon may say `lines` lines more on the standard error, no more.
    """

    def same(text: str, *, lines: int = 0, whole: bool = False, **environment: str) -> Ran:
        bare = begin(text, watched=False, whole=whole, **environment).result()
        watched = begin(text, whole=whole, **environment).result()
        assert watched.its == bare.its, (watched, bare)
        assert len(watched.own) <= lines, watched.own
        assert "trained" in watched.out, watched
        return watched

    return same
