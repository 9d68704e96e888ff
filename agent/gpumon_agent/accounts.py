"""Everything that is read on a sampled step: owners, activations, workspaces, layers, and the composition of the peak.

The order of one step: `begin_step`; walks of the graph as forward ends and backward begins; `boundary` as each phase
closes; `close_step` before its Step is told. What a step costs beyond its owners is measured and kept within the
governor's limit for a sampled step: layers at most once a second, the peak's composition only in steps without layers,
and once a minute where it takes the step over the limit.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import monotonic_ns
from typing import TYPE_CHECKING, Protocol

import torch

from . import wire
from .activations import Activations, Alive
from .composition import Block, Blocks, History, compose
from .governor import SAMPLED_STEP_NS
from .graph import Place, Places
from .inventory import INPUT_DEPTH_MAX, Inventory, claim, tensors_in
from .others import Others
from .probe import Reading
from .recorder import Recorder
from .storages import addresses, storages
from .workspaces import Workspaces

if TYPE_CHECKING:
    from torch.nn import Module

LAYERS_EVERY_NS = 1_000_000_000
COMPOSED_EVERY = 2
"""Sampled steps, with the governor on: every so many a peak is composed, unless layers are due."""
COMPOSED_AGAIN_NS = 60_000_000_000
"""Where composing takes a sampled step over its limit, not before so long."""
PLACES_EVERY_STEPS = 64
_LOOKS = 8  # steps at whose end workspaces are looked for; later only with the layers
_CPU = -1
_NOTHING: Counter[str] = Counter()


_Kept = dict[tuple[int, Place], "Counter[str]"]


class Cost(Protocol):
    """Where the cost of reading is booked: the governor."""

    ledger: bool
    ledger_at_end_only: bool
    ledger_ns: int


class Accounts:
    """The books of one process. Called in the training thread, under the guard."""

    def __init__(
        self,
        recorder: Recorder,
        cost: Cost,
        models: Callable[[], Iterable[tuple[int, Module]]],
        *,
        say: Callable[[tuple[wire.Event, ...]], None],
        tell: Callable[[str], None],
        limited: bool,
    ) -> None:
        self.inventory = Inventory()
        self.layers: dict[tuple[int, int], tuple[wire.Layers, ...]] = {}
        """the newest of each model and device"""
        self.ledgers: dict[int, wire.Ledger] = {}
        """the newest of each device"""
        self._recorder = recorder
        self._cost = cost
        self._models = models
        self._say = say
        self._limited = limited
        self._places = Places()
        self._places_left = 0
        self._activations = Activations(self._current_places, tell, limited=limited)
        self._others = self.others = Others(models, tell)
        self._workspaces = Workspaces()
        self._by_place: dict[int, dict[Place | None, int]] = {}  # of the step's fullest moment, by device
        self._layers_due_ns = 0
        self._layers_wanted = True  # in this step
        self._sampled = 0
        self._composed_again_ns = 0  # not before
        self._kept: _Kept | None = None
        self._peak = _PeakWatch(self)

    def changed(self) -> None:
        """A model was added, or wrapped."""
        self._others.changed()
        self._places_left = 0

    def begin_step(self) -> None:
        if not self._cost.ledger:
            return
        self._activations.begin_step(walks=not self._cost.ledger_at_end_only)
        self._by_place.clear()
        self._places_left -= 1
        now = monotonic_ns()
        self._layers_wanted = now >= self._layers_due_ns
        if self._limited:
            self._sampled += 1
            self._peak.wanted = (
                not self._layers_wanted and not self._sampled % COMPOSED_EVERY and now >= self._composed_again_ns
            )

    # ------------------------------------------------------------------------------------------------------ the graph

    def forward_ends(self, output: object) -> None:
        """A root returns `output`: it is noted, and what autograd saved for it."""
        self._walk(list(tensors_in(output, INPUT_DEPTH_MAX)))

    def backward_begins(self, roots: Iterable[object]) -> None:
        self._walk(list(roots))

    def backward_returns(self, gradients: Iterable[object]) -> None:
        """With `create_graph` they have a graph of their own, made in the engine's threads."""
        with_graph = [each for each in gradients if getattr(each, "grad_fn", None) is not None]
        if with_graph:
            self._walk(with_graph, whole=True)

    def _walk(self, roots: list[object], *, whole: bool = False) -> None:
        if not self._cost.ledger or self._cost.ledger_at_end_only or _nothing_is_real():
            return
        began = monotonic_ns()
        with _no_collection():
            self._activations.walk(roots, self.inventory.claimed, whole=whole)
        self._peak.graph_walked()
        self._cost.ledger_ns += monotonic_ns() - began

    def _current_places(self) -> Places:
        if self._places_left <= 0:
            self._places_left = PLACES_EVERY_STEPS
            self._places = Places()
            for index, model in self._models():
                self._places.add(index, model)
        return self._places

    # ------------------------------------------------------------------------------------------------------ boundaries

    def boundary(self, step: int, phase: str, index: int, where: torch.device, reading: Reading) -> None:
        """A phase closed on a device: its ledger."""
        if _nothing_is_real():
            return
        device = _index(where)
        fresh = phase == wire.OPTIMIZER or step == 0
        owners = self.inventory.owners(where, fresh=fresh)
        others = self._others.tensors(look=fresh)
        other_models = None if others is None else claim(others, self.inventory.claimed, device)
        saved = self._activations.alive(device, self.inventory.claimed)
        self._note_places(device, saved)
        if where.type == "cuda" and (step == 0 or (phase == wire.OPTIMIZER and (step < _LOOKS or self._layers_wanted))):
            self._workspaces.look(device, lambda: self._addresses(saved))
        ledger = wire.Ledger(
            step,
            phase,
            index,
            where.index or 0,
            reading.allocated,
            reading.requested,
            reading.reserved,
            *owners,
            activations=sum(each.nbytes for each in saved) if self._activations.known else None,
            workspaces=self._workspaces.bytes(device),
            other_models=other_models,
            hidden=tuple(self._activations.hidden)[:16],
        )
        self.ledgers[ledger.device] = ledger
        self._recorder.append(ledger)
        if phase == wire.OPTIMIZER and self._layers_wanted:
            self._kept = self._kept_by_place()
        self._peak.phase_ended(ledger, reading.allocated_peak, device, saved)

    def _addresses(self, saved: list[Alive]) -> set[int]:
        """Where what is owned or saved stands, on any device."""
        held = {address for _, tensor, _ in self.inventory.held() for address, _, _ in addresses(tensor)}
        held.update(each.address for each in saved)
        return held

    def close_step(self, step: int) -> None:
        """Before the step is told."""
        if not self._cost.ledger:
            return
        began = monotonic_ns()
        composed = self._peak.step_ended()
        if composed is not None:
            self._recorder.append(composed)
        if self._kept is not None:
            self._tell_layers(step, self._kept)
            self._kept = None
            self._layers_due_ns = began + LAYERS_EVERY_NS
        self._cost.ledger_ns += monotonic_ns() - began
        if composed is not None and self._cost.ledger_ns > SAMPLED_STEP_NS:
            self._composed_again_ns = began + COMPOSED_AGAIN_NS

    def stop(self) -> None:
        """Leaves nothing switched on and nothing replaced."""
        self._peak.stop()
        self.disown()

    def disown(self) -> None:
        """In a forked child: what is switched on is the parent's."""
        self._peak.history.remove()

    # ---------------------------------------------------------------------------------------------------------- layers

    def _note_places(self, device: int, saved: list[Alive]) -> None:
        """Activations by module, at the step's fullest moment."""
        if sum(self._by_place.get(device, {}).values()) < sum(each.nbytes for each in saved):
            by_place: Counter[Place | None] = Counter()
            for each in saved:
                by_place[each.place] += each.nbytes
            self._by_place[device] = by_place

    def _kept_by_place(self) -> _Kept:
        """Bytes of gradients and of optimizer state, by device and module."""
        places = self._current_places()
        kept: _Kept = {}
        seen: set[int] = set()
        for parameter, tensor, line in self.inventory.kept_for():
            for holder in places.by_parameter.get(id(parameter), ())[:1]:
                for identity, nbytes, where in storages(tensor):
                    if identity not in seen:
                        seen.add(identity)
                        kept.setdefault((_index(where), holder), Counter())[line] += nbytes
        return kept

    def _tell_layers(self, step: int, kept: _Kept) -> None:
        changed: list[wire.Event] = []
        for ledger in self.ledgers.values():
            device = next((d for d in (ledger.device, _CPU) if d in self._by_place or any(k[0] == d for k in kept)), 0)
            by_place = self._by_place.get(device, {}) if self._activations.known else None
            for index, _ in self._models():
                changed += self._layers_of(step, index, device, kept, by_place)
        if changed:
            self._say(tuple(changed))

    def _layers_of(
        self,
        step: int,
        index: int,
        device: int,
        kept: _Kept,
        by_place: dict[Place | None, int] | None,
    ) -> tuple[wire.Layers, ...]:
        """The messages about one model on one device; none if they say what the ones before said."""
        layers = []
        for place, kind in self._current_places().kinds.items():
            if place[0] != index:
                continue
            counted = kept.get((device, place), _NOTHING)
            saved = None if by_place is None else by_place.get(place, 0)
            if counted or saved:
                layers.append(wire.Layer(place[1], kind, counted["gradients"], counted["optimizer"], saved))
        elsewhere = None if by_place is None else by_place.get(None, 0)
        said = wire.layers(index, max(device, 0), step, layers, elsewhere)
        known = self.layers.get((index, device))
        if known is not None and [(p.layers, p.elsewhere) for p in known] == [(p.layers, p.elsewhere) for p in said]:
            return ()
        self.layers[index, device] = said
        return said


def _index(where: torch.device) -> int:
    """As Tensor.get_device() has it."""
    return _CPU if where.type == "cpu" else where.index or 0


def _nothing_is_real() -> bool:
    """Within torch.func's transforms and under fake tensors a model's own tensors stand for others, or for none."""
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    )


@contextmanager
def _no_collection() -> Iterator[None]:
    """Thousands of short-lived objects are made within: the collector would take them for a reason to look at all.

    In a process with transformers imported one such look takes a quarter of a second.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class _PeakWatch:
    """Composes the peak of the phase in which the last step peaked; see composition.py. The first device only."""

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts
        self.history = History()
        self._device: int | None = None
        self._phases: list[tuple[str, int, int]] = []  # of this step: phase, index, peak
        self._target: tuple[tuple[str, int], tuple[str, int]] | None = None  # a phase, and the one before it
        self._composed: wire.Ledger | None = None
        self._before: Blocks = {}
        self._saved: Blocks = {}
        self._began: wire.Ledger | None = None
        self._lasting: Blocks = {}
        self._lasting_sums: tuple[int | None, ...] = ()
        self._lasting_uses = 0
        self.wanted = True  # in this step

    def phase_ended(self, ledger: wire.Ledger, peak: int | None, device: int, saved: list[Alive]) -> None:
        """A boundary of a sampled step was read."""
        if device == _CPU or ledger.requested is None:
            return
        if self._device is None:
            self._device = device
        if device != self._device:
            return
        key = ledger.phase, ledger.index
        self._phases.append((*key, peak or 0))
        target = self._target
        if self._began is not None:
            if target is not None and key == target[0] and peak is not None:
                self._composed = self._compose(ledger, peak, saved)
            self.stop()
        elif target is not None and key == target[1] and self.wanted and self.history.begin():
            self._before = self._blocks(ledger, device, saved)
            self._saved = {}
            self._began = ledger

    def graph_walked(self) -> None:
        """Backward begins: what autograd saved since the phase began may be gone by its end."""
        if self._began is not None and self._device is not None:
            accounts = self._accounts
            alive = accounts._activations.alive(self._device, accounts.inventory.claimed.copy())
            self._saved = {
                each.address: Block("activations", each.nbytes, each.place)
                for each in alive
                if each.address not in self._before
            }

    def step_ended(self) -> wire.Ledger | None:
        """The composition, if it is of the phase that made the step's peak."""
        self.stop()
        composed, self._composed = self._composed, None
        phases, self._phases = self._phases, []
        highest = max(range(len(phases)), key=lambda at: phases[at][2], default=0)
        self._target = (phases[highest][:2], phases[highest - 1][:2]) if highest else None
        if composed is not None and (self._target is None or (composed.phase, composed.index) != self._target[0]):
            return None
        return composed

    def stop(self) -> None:
        self.history.stop()
        self._began = None
        self._before, self._saved = {}, {}

    def _compose(self, ended: wire.Ledger, peak: int, saved: list[Alive]) -> wire.Ledger | None:
        began, device = self._began, self._device
        assert began is not None
        assert device is not None
        assert began.requested is not None
        with _no_collection():
            trace = self.history.end(device)
            if trace is None:
                return None
            after = self._blocks(ended, device, saved)
            forward = ended.phase == wire.FORWARD
            composed = compose(trace, began.requested, self._before, after, self._saved, forward=forward)
            del trace
        if composed.requested > peak:
            return None  # other threads allocated while the boundary was read
        lines = composed.lines
        buckets = sum(block.nbytes for block in self._before.values() if block.line == "buckets")
        if began.buckets is not None and began.buckets > buckets:  # DDP tells how large its buckets are, not where
            lines["buckets"] = lines.get("buckets", 0) + began.buckets - buckets
        known: dict[str, int | None] = {line: lines.get(line, 0) for line in _COMPOSED}
        if not self._accounts._activations.known:
            known["activations"] = None
        for line in ("other_models", "workspaces"):
            if getattr(ended, line) is not None:
                known[line] = lines.get(line, 0)
        return wire.Ledger(
            ended.step,
            ended.phase,
            ended.index,
            ended.device,
            peak,
            composed.requested,
            None,
            **known,
            peak=True,
            module=composed.module,
            hidden=ended.hidden,
        )

    def _blocks(self, ledger: wire.Ledger, device: int, saved: list[Alive]) -> Blocks:
        """Whose the blocks of `device` are now; those that last are looked at again when their sums have moved."""
        inventory = self._accounts.inventory
        sums = (ledger.weights, ledger.buffers, ledger.optimizer)
        self._lasting_uses += 1
        fresh = sums != self._lasting_sums or self._lasting_uses > _LASTING_USES
        blocks: Blocks = {} if fresh else self._lasting.copy()
        holders = self._accounts._current_places().by_parameter
        for line, tensor, parameter in inventory.held(lasting=fresh):
            places = holders.get(id(parameter)) if parameter is not None else None
            for address, nbytes, where in addresses(tensor):
                if where == device and address not in blocks:
                    blocks[address] = Block(line, nbytes, places[0] if places else None)
        if fresh:
            self._lasting = {a: b for a, b in blocks.items() if b.line in ("weights", "buffers", "optimizer")}
            self._lasting_sums, self._lasting_uses = sums, 0
        for tensor in self._accounts._others.tensors(look=False) or ():
            for address, nbytes, where in addresses(tensor):
                if where == device:
                    blocks.setdefault(address, Block("other_models", nbytes))
        for address, nbytes in self._accounts._workspaces.addresses.get(device, {}).items():
            blocks.setdefault(address, Block("workspaces", nbytes))
        for each in saved:
            blocks.setdefault(each.address, Block("activations", each.nbytes, each.place))
        return blocks


_COMPOSED = ("weights", "buffers", "gradients", "optimizer", "buckets", "inputs", "activations", "temporaries")
_LASTING_USES = 32
