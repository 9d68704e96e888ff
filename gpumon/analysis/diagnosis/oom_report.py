"""What gpumon states about one out-of-memory: the words that screens, exports and `gpumon explain` share."""

from __future__ import annotations

from dataclasses import dataclass

from gpumon.analysis.diagnosis.figures import Figure
from gpumon.analysis.estimate.model import Tensor
from gpumon.analysis.types import Breakdown

VERDICTS = {
    "capacity": "what is alive and what is asked for do not fit",
    "fragmentation": "enough is unused, but in no piece large enough",
    "other-process": "somebody else's bytes on the device make the difference",
    "leak": "more stays allocated from step to step",
    "oversized": "the one request is larger than the device",
    "limit": "this process may not take what the device has",
    "refused": "the driver refused although it counts enough as free",
    "host": "the machine's own memory, not a device's",
    "unknown": "the message names no figures",
}


@dataclass(frozen=True, slots=True)
class Candidate:
    """A tensor whose size it is."""

    tensor: Tensor
    what: str  # "second-moment square root", "gradient", "weights"
    phase: str | None
    bytes: int
    stands: int | None = None  # allocated as it is asked for, by the walk; None where the walk does not tell
    left: Figure | None = None  # of what the message says is allocated, beyond `stands`
    way: str | None = None  # how the optimizer creates its states, where it matters
    explains: bool = False  # size and allocated figure both agree
    later: bool = False  # of a step after the first, when all states stand


@dataclass(frozen=True, slots=True)
class Remedy:
    """Something to do, in order of what serves most."""

    code: str
    text: str
    saves: int | None = None  # bytes at the moment that failed; None where not computable
    enough: bool | None = None  # whether that alone makes it fit


@dataclass(frozen=True, slots=True)
class OomReport:
    """One out-of-memory, explained. Bytes; None where not known."""

    verdict: str  # a key of VERDICTS
    sentence: str  # the verdict in one line
    message: str
    reasons: tuple[str, ...] = ()  # what speaks for the verdict, then what speaks against it
    requested: Figure | None = None  # as the message says: of a device, the size of a segment
    tensor: tuple[Figure, ...] = ()  # what the tensor itself may take: one of these ranges
    missing: Figure | None = None  # of the request, once everything unused is given to it
    device: int | None = None
    step: int | None = None
    phase: str | None = None
    module: str | None = None  # path of the nn.Module that was running
    where: str | None = None  # file.py:LINE in the user's code
    code: str | None = None  # that line
    suspects: tuple[Candidate, ...] = ()
    assumptions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # what it grows with, and what has nothing to do with it
    remedies: tuple[Remedy, ...] = ()
    lines: Breakdown | None = None  # the ledger at that moment
    file: str | None = None  # the report on the trainer's disk
