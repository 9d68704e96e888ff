"""One failure as remedies see it: what is known of it, and what is on already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gpumon.analysis.diagnosis.message_parser import Message
from gpumon.analysis.diagnosis.optimizer_step import Recipe
from gpumon.analysis.estimate.model import Tensor
from gpumon.analysis.types import Finding

VARIABLES = ("PYTORCH_HIP_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""The last since PyTorch 2.9."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What is on already. None: not known."""

    expandable: bool | None = None
    fused: bool | None = None
    bucket_views: bool | None = None  # None too where there is no DDP
    set: str = ""  # PYTORCH_CUDA_ALLOC_CONF as it stands, the other options included

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Settings:
        """From environment variables by name; of several the last of `VARIABLES` counts."""
        values = [environment[name] for name in VARIABLES if environment.get(name)]
        if not values:
            return cls()
        text = values[-1].replace(" ", "")
        return cls(expandable="expandable_segments:true" in text.lower(), set=text)


@dataclass(frozen=True, slots=True)
class FailureContext:
    """What is known of the failure."""

    message: Message
    verdict: str
    phase: str | None = None
    tensors: Sequence[Tensor] = ()
    recipe: Recipe | None = None
    way: str | None = None
    settings: Settings = field(default_factory=Settings)
    activation: Tensor | None = None  # logits or attention scores, where it is one of those
    kept: Sequence[Finding] = ()  # of what the device keeps for nothing


def room(message: Message) -> int | None:
    """What PyTorch can surely have in all: what it holds and what the device has free, within its limit."""
    if message.reserved is None or message.free is None:
        return None
    both = (message.reserved + message.free).low
    return min(both, message.allowed.low) if message.allowed is not None else both
