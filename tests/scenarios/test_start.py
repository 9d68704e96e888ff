"""A scenario starts soon after torch is imported."""

from __future__ import annotations

import pytest
from scenarios.catalogue import BY_NAME

LIMIT_S = 5.0
"""Of processor time, which a busy machine does not stretch; the wall clock is measured by hand."""


@pytest.mark.parametrize("name", ["mlp", "bert-large"])
def test_a_scenario_starts_within_seconds_of_importing_torch(virtual_gpu, name):
    def timed(script):
        import runpy
        import sys
        import time
        from pathlib import Path

        import torch

        assert not torch.cuda.is_initialized()
        sys.path[0] = str(Path(script).parent)
        sys.argv = [script, "--steps", "1"]
        started = time.process_time()
        runpy.run_path(script, run_name="__main__")
        print(time.process_time() - started)

    completed = virtual_gpu(devices=1).run(timed, str(BY_NAME[name].path))
    assert float(completed.stdout) < LIMIT_S
