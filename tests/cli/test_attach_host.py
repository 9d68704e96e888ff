"""The screen reads the processes of its own pid namespace: elsewhere a number belongs to somebody else."""

from __future__ import annotations

import msgspec

from gpumon.cli.attach import seen_here
from gpumon_agent import endpoint


def test_a_pid_of_another_namespace_is_not_looked_up_here() -> None:
    mine = msgspec.structs.replace(endpoint.describe("mine"), pid=7)
    contained = msgspec.structs.replace(endpoint.describe("contained"), pid=8, pid_ns="pid:[1]")
    untold = msgspec.structs.replace(endpoint.describe("untold"), pid=9, pid_ns="")
    assert seen_here((mine, contained, untold), lambda: (7, 8, 9, 10))() == [7, 9, 10]
