"""A loop on DeepSpeed's engine that gives gpumon's figures to its monitor, as examples/ has it."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from library_examples import EXAMPLES, PEAKS, changed_lines, watched

pytestmark = pytest.mark.integration
if find_spec("deepspeed") is None:  # to import it is to look for compilers
    pytest.skip("deepspeed is not installed", allow_module_level=True)


def test_the_engine(virtual_gpu: Callable[..., Any], tmp_path: Path) -> None:
    assert changed_lines("deepspeed_engine") == 2
    run = watched(EXAMPLES / "deepspeed_engine.py", virtual_gpu, tmp_path / "run")
    assert run.steps == 12
    assert [run.phases[name] for name in ("forward", "backward", "optimizer")] == [12] * 3
    for name in PEAKS:
        (path,) = run.folder.glob(f"logs/**/{name.replace('/', '_')}.csv")
        assert [line.split(",")[0] for line in path.read_text().split()] == ["step", "64", "128", "192"]
