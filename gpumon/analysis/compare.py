"""Compares two runs: bytes by category, phase and module, and how they were run.

Model. Each run is read from `--json` objects: of a recording, a live job or a file. Of several ranks the one with the
highest peak is compared. Categories are those of the highest peak with a breakdown; if one run has none, those at the
end of the newest sampled step. Phases have their highest peak of all steps; modules are of the newest set of layers. A
positive difference means that the second run needs more.
Cost. A pass over the objects; a few figures are kept per rank.
Known limitations. A category missing in one run is left out, not counted as 0. Peaks before a recording's first step
are not known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec

from gpumon.analysis import units
from gpumon.analysis.types import OWNERS

Kind = Literal["peak", "category", "phase", "module"]
CATEGORIES = (*OWNERS, "unexplained", "rounding")
OF_A_MODULE = ("weights", "buffers", "gradients", "optimizer", "activations")
Object = Mapping[str, Any]


class _Hello(msgspec.Struct, frozen=True):
    torch: str | None
    argv: list[str]
    world_size: int | None
    devices: list[dict[str, Any]]


class _Model(msgspec.Struct, frozen=True):
    model: int
    parameters: int
    trainable: int
    optimizer: dict[str, Any] | None
    parallel: dict[str, Any] | None


class _Layer(msgspec.Struct, frozen=True):
    path: str
    kind: str
    weights: int | None = None
    buffers: int | None = None
    gradients: int | None = None
    optimizer: int | None = None
    activations: int | None = None


class _Layers(msgspec.Struct, frozen=True):
    by_module: list[_Layer]


class _Phase(msgspec.Struct, frozen=True):
    phase: str
    allocated_peak: int | None
    reserved_peak: int | None


class _Step(msgspec.Struct, frozen=True):
    step: int
    phases: list[_Phase]
    input_shapes: list[list[int]]
    ledger_peak: dict[str, int | str | None] | None
    ledger: dict[str, int | None] | None


_KINDS: dict[str, Any] = {"hello": _Hello, "model": _Model, "layers": _Layers, "step": _Step}


class RankSummary(msgspec.Struct):
    """What is kept of one rank of a run. Bytes; None: not known."""

    rank: int | None
    peak: int | None = None
    reserved: int | None = None
    phase: str | None = None
    step: int | None = None
    steps: int = 0
    composed: int = -1  # the peak that `categories` belong to
    categories: dict[str, int] = msgspec.field(default_factory=dict)
    at_end: dict[str, int] = msgspec.field(default_factory=dict)
    """the same, at the end of the newest step that was sampled"""
    phases: dict[str, int] = msgspec.field(default_factory=dict)
    modules: dict[str, int] = msgspec.field(default_factory=dict)
    facts: dict[str, str] = msgspec.field(default_factory=dict)  # how it was run: "batch" → "8×512"

    def take(self, obj: Object) -> None:
        """One object of `--json`. Raises ValidationError if it is malformed."""
        match msgspec.convert(obj, _KINDS[obj["type"]]):
            case _Hello() as said:
                self._fact("torch", said.torch)
                self._fact("command", " ".join(said.argv))
                self._fact("ranks", said.world_size)
                self._fact("device", ", ".join(sorted({str(each.get("name")) for each in said.devices})))
            case _Model() as said:
                optimizer, parallel = said.optimizer or {}, said.parallel or {}
                which = f" of model {said.model}" if said.model else ""
                self._fact(f"parameters{which}", f"{said.parameters:,}")
                self._fact(f"trainable{which}", f"{said.trainable:,}")
                self._fact(f"optimizer{which}", optimizer.get("kind"))
                for name in ("fused", "foreach"):
                    self._fact(f"optimizer {name}{which}", optimizer.get(name))
                self._fact(f"parallel{which}", parallel.get("kind"))
                self._fact(f"gradient_as_bucket_view{which}", parallel.get("gradient_as_bucket_view"))
            case _Layers() as said:
                self.modules = {
                    each.path or each.kind: sum(getattr(each, name) or 0 for name in OF_A_MODULE)
                    for each in said.by_module
                }
            case _Step() as said:
                self._step(said)

    def _fact(self, name: str, value: object) -> None:
        if value not in (None, ""):
            self.facts[name] = str(value)

    def _step(self, said: _Step) -> None:
        self.steps += 1
        for phase in said.phases:
            peak, name = phase.allocated_peak, phase.phase
            if phase.reserved_peak is not None:
                self.reserved = max(self.reserved or 0, phase.reserved_peak)
            if peak is None:
                continue
            self.phases[name] = max(self.phases.get(name, 0), peak)
            if self.peak is None or peak > self.peak:
                self.peak, self.phase, self.step = peak, name, said.step
                self._fact("batch", units.shapes(said.input_shapes))
        apart = {name: bytes_ for name, bytes_ in (said.ledger_peak or {}).items() if isinstance(bytes_, int)}
        if apart.get("allocated", -1) > self.composed:
            self.composed = apart["allocated"]
            self.categories = {name: apart[name] for name in CATEGORIES if name in apart}
        end = {name: bytes_ for name, bytes_ in (said.ledger or {}).items() if bytes_ is not None}
        if "activations" in end:
            self.at_end = {name: end[name] for name in CATEGORIES if name in end}


class Run(msgspec.Struct):
    """One run: pass it every object."""

    ranks: dict[object, RankSummary] = msgspec.field(default_factory=dict)

    def take(self, obj: Object) -> None:
        """One object of `--json`. Raises ValidationError if it is malformed."""
        if obj["type"] in _KINDS:
            rank = msgspec.convert(obj.get("rank"), int | None)
            self.ranks.setdefault((rank, msgspec.convert(obj.get("pid"), int | None)), RankSummary(rank)).take(obj)

    @property
    def highest(self) -> RankSummary | None:
        """The rank with the highest peak; None if no step was read."""
        known = [each for each in self.ranks.values() if each.peak is not None]
        return max(known, key=lambda each: each.peak or 0, default=None)


class Difference(msgspec.Struct, frozen=True):
    """One figure of both runs, in bytes."""

    kind: Kind
    name: str
    before: int
    after: int

    @property
    def bytes(self) -> int:
        return self.after - self.before


class RunComparison(msgspec.Struct, frozen=True):
    """`differences`: the peaks first, then by kind, largest first, without equal ones."""

    before: RankSummary
    after: RankSummary
    differences: tuple[Difference, ...]
    at_peak: bool  # categories are of the highest peaks, else of a step's end
    changed: tuple[tuple[str, str, str], ...]  # fact, before, after; "–" if missing in one run

    @property
    def growth(self) -> float:
        """Relative increase of the peak from the first run to the second."""
        before, after = self.before.peak or 0, self.after.peak or 0
        return after / before - 1 if before else 0.0


def compare(before: RankSummary, after: RankSummary) -> RunComparison:
    """Compares two ranks whose peaks are known."""
    peaks = [
        Difference("peak", name, one, other)
        for name, one, other in (
            ("allocated", before.peak, after.peak),
            ("reserved", before.reserved, after.reserved),
        )
        if one is not None and other is not None
    ]
    at_peak = bool(before.categories and after.categories)
    categories = (before.categories, after.categories) if at_peak else (before.at_end, after.at_end)
    found = [
        *_differences("category", *categories, both=True),
        *_differences("phase", before.phases, after.phases, both=True),
        *_differences("module", before.modules, after.modules, both=not (before.modules and after.modules)),
    ]
    names = dict.fromkeys((*before.facts, *after.facts))
    changed = tuple(
        (name, before.facts.get(name, "–"), after.facts.get(name, "–"))
        for name in names
        if before.facts.get(name) != after.facts.get(name)
    )
    return RunComparison(before, after, (*peaks, *found), at_peak, changed)


def _differences(
    kind: Kind, before: Mapping[str, int], after: Mapping[str, int], *, both: bool
) -> Iterable[Difference]:
    """`both`: only names that both runs have. Otherwise a missing module counts as 0."""
    names = before.keys() & after.keys() if both else before.keys() | after.keys()
    found = [Difference(kind, name, before.get(name, 0), after.get(name, 0)) for name in names]
    return sorted((each for each in found if each.bytes), key=lambda each: (-abs(each.bytes), each.name))
