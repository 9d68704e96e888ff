"""Each script on the CPU: watched, it prints, raises, warns, returns and sees what it does bare."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from sameness.runs import Runs, Script, each

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def runs(native_build: tuple[Path | None, str]) -> Iterator[Runs]:
    with tempfile.TemporaryDirectory(prefix="gm") as folder:  # a socket's path: 107 bytes
        runs = Runs("cpu", os.environ, Path(folder), native_build[0])
        yield runs
        runs.close()


@pytest.mark.parametrize(("script", "mode"), each("cpu"))
def test_watched_as_bare(runs: Runs, script: Script, mode: str) -> None:
    runs.compare(script, mode)
