"""Ray Train's TorchTrainer under `gpumon run`, as examples/ has it."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from library_examples import EXAMPLES, changed_lines, watched

pytestmark = [pytest.mark.integration, pytest.mark.long]  # Ray takes half a minute to start and end
if find_spec("ray") is None:
    pytest.skip("ray is not installed", allow_module_level=True)


def test_the_worker(virtual_gpu: Callable[..., Any], tmp_path: Path) -> None:
    assert changed_lines("ray_train") == 1
    run = watched(EXAMPLES / "ray_train.py", virtual_gpu, tmp_path / "run", "--gpu")
    assert run.steps == 12
    assert [run.phases[name] for name in ("forward", "backward", "optimizer")] == [12] * 3
    assert run.output.count("'gpumon/backward_peak_bytes': ") >= 3
