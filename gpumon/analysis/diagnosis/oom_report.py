"""The explanation of one out-of-memory as data, shared by screens, exports and `gpumon explain`."""

from __future__ import annotations

import msgspec

from gpumon.analysis.diagnosis.figures import Figure
from gpumon.analysis.estimate.model import Tensor
from gpumon.analysis.types import Breakdown

VERDICTS = {
    "capacity": "live bytes plus the request do not fit",
    "fragmentation": "enough is unused, but in no piece large enough",
    "other-process": "it would fit without the memory of other processes",
    "leak": "bytes are kept from step to step",
    "oversized": "the one request is larger than the device",
    "limit": "the process has a limit below the device's memory",
    "refused": "the driver refused although enough is free",
    "host": "the machine's own memory, not a device's",
    "unknown": "the message has no figures",
}


class Candidate(msgspec.Struct, frozen=True):
    """A tensor that the failed request may have been for."""

    tensor: Tensor
    what: str  # "second-moment square root", "gradient", "weights"
    phase: str | None
    bytes: int
    allocated_before: int | None = None  # allocated before the request, computed; None: unknown
    left: Figure | None = None  # the message's allocated figure − `stands`
    way: str | None = None  # the optimizer's implementation (optimizer_step.WAYS)
    explains: bool = False  # size and allocated figure both agree
    later: bool = False  # in a step after the first, with all states allocated


class Remedy(msgspec.Struct, frozen=True):
    code: str
    text: str
    saves: int | None = None  # bytes at the failure; None: not computable
    enough: bool | None = None  # whether that alone makes it fit


class OomReport(msgspec.Struct, frozen=True):
    """One out-of-memory, explained. Bytes; None: not known."""

    verdict: str  # a key of VERDICTS
    sentence: str  # the verdict in one line
    message: str
    reasons: tuple[str, ...] = ()  # evidence for the verdict, then against it
    requested: Figure | None = None  # as in the message: on a device, the segment's size
    tensor: tuple[Figure, ...] = ()  # possible sizes of the tensor itself
    missing: Figure | None = None  # bytes short even if all unused memory were usable
    device: int | None = None
    step: int | None = None
    phase: str | None = None
    module: str | None = None  # path of the nn.Module that was running
    where: str | None = None  # file.py:LINE in the user's code
    code: str | None = None  # that line
    suspects: tuple[Candidate, ...] = ()
    assumptions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # what the request depends on, and what it does not
    remedies: tuple[Remedy, ...] = ()
    lines: Breakdown | None = None  # the ledger at the failure
    file: str | None = None  # the report on the trainer's disk
