"""Each script on the virtual GPU: watched, it prints, raises, warns, returns and sees what it does bare."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import virtual
from sameness.runs import Runs, Script, each

from gpumon import virtual_gpu as vgpu

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def runs(native_build: tuple[Path | None, str]) -> Iterator[Runs]:
    environment = virtual.environment(sys.executable, memory="2GiB")
    with tempfile.TemporaryDirectory(prefix="gm") as folder:  # a socket's path: 107 bytes
        runs = Runs("cuda", environment, Path(folder), native_build[0])
        yield runs
        runs.close()
    vgpu.remove_session(environment["VGPU_SESSION"])


@pytest.mark.parametrize(("script", "mode"), each("cuda"))
def test_watched_as_bare(runs: Runs, script: Script, mode: str) -> None:
    runs.compare(script, mode)
