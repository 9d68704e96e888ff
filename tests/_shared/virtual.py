"""The virtual GPU's environment for a test, which is skipped where there can be none, or fails if CI demands it."""

from __future__ import annotations

import os
from typing import Any

import pytest

from gpumon import virtual_gpu as vgpu


def environment(python: str, **options: Any) -> dict[str, str]:
    """As `gpumon.virtual_gpu.environment`; with GPUMON_REQUIRE_VIRTUAL_GPU=1 what would skip the test fails it."""
    try:
        return vgpu.environment(python=python, **options)
    except vgpu.BuildUnavailable as reason:
        if os.environ.get("GPUMON_REQUIRE_VIRTUAL_GPU") == "1":
            pytest.fail(str(reason))
        pytest.skip(str(reason))
