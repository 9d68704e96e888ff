"""Reads everything in a sampled step: owners, activations, workspaces, layers, the peak's breakdown.

Order of calls in a step: `begin_step`; graph walks as forward ends and as backward begins; `boundary` as each phase
closes; `close_step` before its Step is recorded. With the governor on, a sampled step does at most one task besides
its ledger: break down the peak, or report layers (at most once a second). They alternate; the first sampled step has
none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from gpumon_agent import wire
from gpumon_agent.allocator import Reading
from gpumon_agent.attribution.activations import REST_MAX, Activations
from gpumon_agent.attribution.block_owners import BlockOwners, Found, Owned
from gpumon_agent.attribution.caller_frames import made
from gpumon_agent.attribution.cost_accounting import NO_COLLECTION, Booked, Cost
from gpumon_agent.attribution.graph import Places
from gpumon_agent.attribution.history import AllocationHistory
from gpumon_agent.attribution.inventory import Inventory, claim
from gpumon_agent.attribution.kept import Claimed
from gpumon_agent.attribution.layers import LayerLedger
from gpumon_agent.attribution.peak_breakdown import PeakBreakdowns
from gpumon_agent.attribution.rolling import Rolling
from gpumon_agent.attribution.saving import READABLE
from gpumon_agent.attribution.unwatched_models import UnwatchedModels
from gpumon_agent.attribution.variables import NOTHING, Variables
from gpumon_agent.attribution.workspaces import Workspaces, tracks_blocks
from gpumon_agent.governor import SAMPLED_STEP_NS, Rest
from gpumon_agent.guard import pass_on
from gpumon_agent.hooks.recorder import Recorder
from gpumon_agent.module_tree import SEARCHED_EVERY, tree
from gpumon_agent.storages import CPU, index_of, tensors_in

if TYPE_CHECKING:
    from torch.nn import Module

LAYERS_EVERY_NS = 1_000_000_000
TENSORS_AT_ONCE = 3_000
"""Parameters, buffers and modules. With more, and the governor on, a step reads only a slice, as it ends."""
_any_autocast: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)


class LoadedCheckpoints(Protocol):
    """Loaded checkpoints, whose bytes are one line of the ledger."""

    loads: list[Any]

    def claim(self, device: int, claimed: Claimed) -> int: ...
    def storages(self) -> list[Any]: ...


class Accounts:
    """The accounts of one process. Called in the training thread, under the guard."""

    def __init__(
        self,
        recorder: Recorder,
        cost: Cost,
        models: Callable[[], Iterable[tuple[int, Module]]],
        *,
        say: Callable[[tuple[wire.Event, ...]], None],
        tell: Callable[[str], None],
        loads: LoadedCheckpoints,
        limited: bool,
    ) -> None:
        self.inventory = Inventory()
        self.many = False
        """whether the models have too many tensors for one step"""
        self.ledgers: dict[int, wire.Ledger] = {}
        """device → newest ledger"""
        self.map_awaited = False
        """a viewer waits for a map of blocks: steps walk, and break down no peak, whose recording no map may disturb"""
        self._recorder = recorder
        self._cost = cost
        self._booked = Booked(cost, clock=True)
        self._booked_by_thread = Booked(cost, clock=False)
        self._models = models
        self._limited = limited
        self._tell = tell
        self._untracked = False  # the notice about an allocator without blocks was sent
        self._places = Places()
        self._places_left = 0
        self._activations = Activations(self._current_places, tell, limited=limited)
        self._others = self.others = UnwatchedModels(models, tell)
        self._rolling = Rolling(self.inventory.models, self.inventory.optimizers, self.others.in_slices)
        self._rolled_step = -1
        self._told_unreadable = False
        self._graph_lives = False  # a graph was walked, and no backward has ended since
        self._variables = Variables()
        self._workspaces = Workspaces()
        self._loads = loads
        self._layers = LayerLedger(self.inventory, self._current_places, models, say)
        self._layers_due_ns = 0
        self._layers_wanted = not limited  # in this step
        block_owners = BlockOwners(self.inventory, self._others, self._workspaces)
        self._block_owners = block_owners
        self._peak = PeakBreakdowns(block_owners, self._activations, self._current_places)
        self._peak.wanted = not limited
        self._composes = True  # of two sampled steps, the second may break down its peak
        self._last_ns = SAMPLED_STEP_NS  # cost of the last sampled step
        self._rest = Rest(REST_MAX)  # from breakdowns, after one takes a sampled step over its limit

    @property
    def recomputes(self) -> bool:
        """Whether backward recomputes parts of the forward, according to the last graph walked."""
        return self._activations.recomputes

    @property
    def layers(self) -> dict[tuple[int, int], tuple[wire.Layers, ...]]:
        """(model, device) → newest layers"""
        return self._layers.newest

    @property
    def history(self) -> AllocationHistory:
        return self._peak.history

    @property
    def walked(self) -> bool:
        """Whether a graph of this step was read."""
        return self._cost.ledger and self._activations.walked

    @property
    def graph_to_come(self) -> bool:
        """No graph was read that is still alive, but that of a sampled step would be."""
        if self.many or self._cost.ledger_at_end_only or not READABLE:
            return False
        return not (self.walked and self._graph_lives)

    def owned_now(self, device: int, found: Iterable[Found]) -> Owned | None:
        """The owners of a device's blocks, for a viewer's map. None: unknown."""
        if _nothing_is_real():
            return None
        with NO_COLLECTION:
            return self._block_owners.now(device, self._activations.living(device), self._loads.storages(), found)

    def changed(self) -> None:
        self._rolling.restart()
        self._others.changed()
        self._activations.forget_models()
        self._places_left = 0

    def measure(self) -> None:
        """Counts the models' tensors up to `TENSORS_AT_ONCE`, to estimate a ledger's cost before the first one."""
        tensors = 0
        for _, reference in tree([model for _, model in self._models()]):
            module = reference()
            if module is not None:
                tensors += 1 + len(module._parameters) + len(module._buffers)
            if tensors > TENSORS_AT_ONCE:
                break
        self.many = self._limited and tensors > TENSORS_AT_ONCE
        self._cost.at_end_only = self.many
        self._cost.ledger_at_end_only |= self.many
        self._cost.hurries = self.many and self._rolling.hurries

    def begin_step(self) -> None:
        if not self._cost.ledger:
            return
        if self.many:
            self._layers_wanted = self._peak.wanted = False
            self._activations.begin_step(walks=False)
            return
        self._places_left -= 1
        walks = not self._cost.ledger_at_end_only
        self._layers_wanted = monotonic_ns() >= self._layers_due_ns
        if self._limited:
            self._peak.wanted = False
            self._composes = not self._composes
            turn = walks and self._composes
            if turn:
                # if walk and breakdown in one step would cost too much: first the walk, next time the breakdown
                self._peak.wanted = self._rest.is_over() and (
                    self._peak.alone or self._peak.moved or self._last_ns < SAMPLED_STEP_NS // 3
                )
            self._layers_wanted = self._layers_wanted and not turn
            walks = walks and not (self._peak.wanted and self._peak.alone)
            walks = walks and not (self._layers_wanted and self._layers.stale)
        if self.map_awaited:
            walks = not self._cost.ledger_at_end_only
        self._peak.wanted = not self.map_awaited and (self._peak.wanted or not self._limited)
        self._activations.begin_step(walks=walks)
        self._layers.begin_step(walks=self._activations.known)

    def inputs(self, args: object, kwargs: object) -> tuple[int, list[tuple[int, ...]]]:
        """A root's forward begins with these arguments. Returns their bytes and shapes."""
        found = self.inventory.inputs(args, kwargs)
        if self._cost.ledger:
            with self._booked:
                self.inventory.beside()
        return found

    # ------------------------------------------------------------------------------------------------------ the graph

    def forward_ends(self, output: object, model: Module | None) -> None:
        """A root returns `output`: records it, and what autograd saved for it."""
        if not self._cost.ledger:
            return
        self._walk(list(tensors_in(output)))
        if model is None or torch.is_grad_enabled() or self.many or _nothing_is_real():
            return
        if torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):  # otherwise its cache is empty
            with self._booked:
                self._activations.evaluated(model.parameters())

    def backward_begins(self, roots: Iterable[object]) -> None:
        """`roots` includes the initial gradients, which stay alive until `loss.backward()` returns."""
        if self._cost.ledger:
            self._walk(list(roots), look=made, backward=True)

    def backward_returns(self, gradients: Iterable[object]) -> None:
        """With `create_graph`, gradients have their own graph, made in the engine's threads."""
        with_graph = [each for each in gradients if getattr(each, "grad_fn", None) is not None]
        if with_graph:
            self._walk(with_graph, whole=True, backward=True)

    def _walk(
        self,
        roots: list[object],
        *,
        look: Callable[[], Iterable[Tensor]] = tuple,
        whole: bool = False,
        backward: bool = False,
    ) -> None:
        if not self._cost.ledger or self.many or not self._activations.known or _nothing_is_real():
            return
        with self._booked:
            self._activations.walk(roots, self.inventory.weights, made=look(), whole=whole)
            if self._activations.known:
                self._graph_lives = True
                self._peak.graph_walked(backward=backward)

    def _current_places(self) -> Places:
        if self._places_left <= 0:
            self._places_left = SEARCHED_EVERY
            self._places = Places()
            for index, model in self._models():
                self._places.add(index, model)
        return self._places

    # ------------------------------------------------------------------------------------------------------ boundaries

    def boundary(self, step: int, phase: str, index: int, where: torch.device, reading: Reading) -> None:
        """Reads the ledger of a device as a phase closes."""
        if phase == wire.BACKWARD:
            self._graph_lives = False
        if not _nothing_is_real():
            with self._booked_by_thread:
                if self.many:
                    self._boundary_of_many(step, phase, index, where, reading)
                else:
                    self._boundary(step, phase, index, where, reading)

    def _boundary_of_many(self, step: int, phase: str, index: int, where: torch.device, reading: Reading) -> None:
        """Reads a slice as the first optimizer phase ends; makes a ledger once all slices are known and agree."""
        if phase != wire.OPTIMIZER or index:
            return
        rolling = self._rolling
        if step and self._rolled_step != step:  # the first step has enough to do
            self._rolled_step = step
            rolling.look()
            self.inventory.know_ddp(module for module, _ in rolling.ddp)
            self._cost.hurries = rolling.hurries
            if rolling.unreadable is not None and not self._told_unreadable:
                self._told_unreadable = True
                self._tell(f"this model is too large for a breakdown by owner: {rolling.unreadable}")
        sums = rolling.sums(index_of(where))
        if sums is None:
            return
        owners = self.inventory.rolled(where, sums)
        tracked = where.type != "cuda" or tracks_blocks()
        other_models = sums["other_models"] if rolling.knows_others else None
        if reading.requested is not None and tracked and sum(owners) + (other_models or 0) > reading.requested:
            rolling.restart()
            return
        ledger = wire.Ledger(
            step,
            phase,
            index,
            where.index or 0,
            reading.allocated,
            reading.requested if tracked else None,
            reading.reserved,
            *owners,
            checkpoints=None if self._loads.loads else 0,
            other_models=other_models,
        )
        self.ledgers[ledger.device] = ledger
        self._recorder.append(ledger)

    def _boundary(self, step: int, phase: str, index: int, where: torch.device, reading: Reading) -> None:
        device, kind = index_of(where), where.type
        # what rarely changes is summed again at the end of a step, unless that step breaks down its peak
        fresh = step == 0 or (phase == wire.OPTIMIZER and not (self._limited and self._peak.wanted))
        owners = self.inventory.owners(where, fresh=fresh, living=self._activations.storages)
        claimed = self.inventory.claimed
        others = self._others.tensors(look=fresh)
        other_models = None if others is None else claim(others, claimed, device)
        checkpoints = self._loads.claim(device, claimed)
        saved = self._activations.alive(device, claimed)
        activations = saved.nbytes
        if self._activations.walked:  # not before: a walk that is too slow would leave zeros
            self._layers.note(device, saved, activations)
        tracked = kind != "cuda" or tracks_blocks()
        if not tracked and not self._untracked and reading.allocated is not None:
            self._untracked = True
            self._tell("cudaMallocAsync reports no blocks: workspaces and the breakdown of peaks stay unknown")
        if kind == "cuda" and tracked and self._looks_for_workspaces(step, phase):
            self._workspaces.look(device, lambda: self._block_owners.addresses(saved))
        workspaces = self._workspaces.bytes(device)
        named = activations + sum(owners) + (checkpoints or 0) + (other_models or 0) + (workspaces or 0)
        if fresh:
            self._variables.forget()
        held = NOTHING
        if device != CPU and named != reading.requested:  # else variables hold nothing more
            held = self._variables.held(claimed, device, graphs=self._activations.known)
        casting = _casts_weights(kind)
        if casting and reading.requested is not None:  # autocast's cache is not readable: cap by what is unexplained
            unexplained = max(0, reading.requested - named - held.nbytes)
            activations += min(self._activations.cast_bytes(device), unexplained)
        elif not casting:
            self._activations.forget_casts()
        ledger = wire.Ledger(
            step,
            phase,
            index,
            where.index or 0,
            reading.allocated,
            reading.requested if tracked else None,
            reading.reserved,
            *owners,
            activations=activations if self._activations.known else None,
            workspaces=workspaces,
            checkpoints=checkpoints,
            other_models=other_models,
            hidden=(*self._activations.hidden, *(("autocast's copies of weights",) if casting else ()))[:16],
            variables=None if device == CPU else held.nbytes,
            held_by=held.holders,
        )
        self.ledgers[ledger.device] = ledger
        self._recorder.append(ledger)
        if phase == wire.OPTIMIZER and self._layers_wanted:
            self._layers.take()
        if phase == wire.OPTIMIZER and self._limited and not (self._layers_wanted or self._peak.wanted):
            self._block_owners.prepare(ledger, device)
        if tracked:
            self._peak.phase_ended(ledger, reading, device, saved)

    def _looks_for_workspaces(self, step: int, phase: str) -> bool:
        """Workspaces need two searches. Both are in the first step, so that its end can report them."""
        if phase != wire.OPTIMIZER:
            return step == 0 and (phase == wire.BACKWARD or not self._limited)
        return self._layers_wanted or step == 0

    def close_step(self, step: int) -> None:
        """Call it before the Step is recorded."""
        if self._cost.ledger:
            with self._booked:
                composed = self._close_step(step)
            self._last_ns = self._cost.ledger_thread_ns
            if composed:
                self._rest.judge(dear=self._limited and self._last_ns > SAMPLED_STEP_NS)

    def _close_step(self, step: int) -> bool:
        """Returns whether a peak was broken down."""
        composed = self._peak.step_ended()
        for each in composed:
            self._recorder.append(each)
        if self._layers.tell(step, self.ledgers):
            self._layers_due_ns = monotonic_ns() + LAYERS_EVERY_NS
        return bool(composed)

    def stop(self) -> None:
        self._peak.stop()
        self._peak.history.remove()
        self._activations.stop()

    def disown(self) -> None:
        """In a forked child: recordings belong to the parent."""
        self._peak.history.disown()
        self._activations.stop()


def _casts_weights(kind: str) -> bool:
    """Whether autocast's cache is active: it may hold the only copy of a weight that no gradient needs."""
    if not _any_autocast():
        return False
    try:
        return bool(torch.is_autocast_enabled(kind) and torch.is_autocast_cache_enabled())
    except RuntimeError as error:  # no autocast on this kind of device
        pass_on(error)
        return False


def _nothing_is_real() -> bool:
    """Whether a torch.func transform or FakeTensorMode is active: a model's tensors are then not its real ones."""
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    )
