"""Ray Train's TorchTrainer under `gpumon run`, as examples/ has it."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from library_examples import alone, changed_lines, text_of, watched, without_gpumon

pytestmark = pytest.mark.integration
if find_spec("ray") is None:
    pytest.skip("ray is not installed", allow_module_level=True)

REPORT = re.compile(r"\{'epoch': .*?\}")
QUICKLY = {  # each of Ray's actors is a Python that imports torch, and it starts one after the other
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1",  # between two looks at the worker; else 2 s
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
ALONE = "ray.init(include_dashboard=False, num_cpus=1)\nTorchTrainer("


def test_the_worker(virtual_gpu: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in QUICKLY.items():
        monkeypatch.setenv(name, value)
    text = text_of("ray_train").replace("TorchTrainer(", ALONE).replace('"--gpu" in sys.argv', "True")
    run = watched(text, virtual_gpu, tmp_path / "run")
    assert run.steps == 12
    assert [run.phases[name] for name in ("forward", "backward", "optimizer")] == [12] * 3
    assert run.progress[0] == (None, None, 0, None, None)
    reports = REPORT.findall(run.output)
    assert sum("'gpumon/backward_peak_bytes': " in each for each in reports) >= 3


def test_the_losses_are_the_same_without_it(tmp_path: Path) -> None:
    """In Ray's local mode: with a worker of its own each takes half a minute."""
    assert changed_lines("ray_train") == 1
    texts = {tmp_path / "plain": without_gpumon("ray_train"), tmp_path / "ours": text_of("ray_train")}
    printed = alone({folder: text.replace("num_workers=1", "num_workers=0") for folder, text in texts.items()})
    plain, ours = map(REPORT.findall, printed.values())
    assert len(plain) == 3
    assert plain == ours
