"""Viewers come, go, are stopped and are killed: the training and the other viewers do not notice."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
SOAK = Path(__file__).with_name("soak.py")


def test_nobody_dies_of_viewers_that_come_and_go() -> None:
    """A short one; `python tests/e2e/soak.py --viewers 5000` is the long one."""
    command = [sys.executable, str(SOAK), "--viewers", "25", "--steps", "300", "--at-once", "6"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
