"""One failure as the input for remedies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from gpumon.analysis.diagnosis.message_parser import OomMessage
from gpumon.analysis.diagnosis.optimizer_step import Recipe
from gpumon.analysis.estimate.model import Tensor
from gpumon.analysis.types import Finding

VARIABLES = ("PYTORCH_HIP_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""The last one exists since PyTorch 2.9."""


class Settings(msgspec.Struct, frozen=True):
    """Settings already in use. None: not known."""

    expandable: bool | None = None
    fused: bool | None = None
    bucket_views: bool | None = None  # None also without DDP
    set: str = ""  # the value of PYTORCH_CUDA_ALLOC_CONF, with all options

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Settings:
        """From environment variables. The last of `VARIABLES` that is set counts."""
        values = [environment[name] for name in VARIABLES if environment.get(name)]
        if not values:
            return cls()
        text = values[-1].replace(" ", "")
        return cls(expandable="expandable_segments:true" in text.lower(), set=text)


class FailureContext(msgspec.Struct, frozen=True):
    message: OomMessage
    verdict: str
    phase: str | None = None
    tensors: Sequence[Tensor] = ()
    recipe: Recipe | None = None
    way: str | None = None
    settings: Settings = msgspec.field(default_factory=Settings)
    activation: Tensor | None = None  # logits or attention scores, if the request was for these
    kept: Sequence[Finding] = ()  # findings on memory kept for no use


def available(message: OomMessage) -> int | None:
    """A lower bound of PyTorch's total bytes: reserved + free, within its limit."""
    if message.reserved is None or message.free is None:
        return None
    both = (message.reserved + message.free).low
    return min(both, message.allowed.low) if message.allowed is not None else both
