"""An out-of-memory as an object of --json."""

from __future__ import annotations

from gpumon.analysis.diagnosis.oom_report import Candidate, OomReport
from gpumon.analysis.estimate.model import Tensor
from gpumon.export.explained import message


def test_of_hundreds_of_tensors_of_one_size_sixteen_are_suspects() -> None:
    suspects = tuple(Candidate(Tensor(f"layer{n}.weight", (512, 512)), "weights", None, 1 << 20) for n in range(300))
    told = message(OomReport("too-big", "It does not fit.", "CUDA out of memory.", suspects=suspects))
    assert [each["name"] for each in told["suspects"]] == [f"layer{n}.weight" for n in range(16)]
