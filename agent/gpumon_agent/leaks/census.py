"""Finds live tensors without an owner, and their holders. Long: it runs in slices, so all of its state is in one class.

A census is started by memory growth, on request, or to find who holds a loaded checkpoint.

Model. Collect the storages of known owners (owned_storages), then walk the heap from names (heap_walker) in rounds: the
user's variables to 6, 12 and 24 levels, then without limit, last the modules of installed packages. A census started by
growth ends once a round explains the growth. Finds are grouped by shape, dtype, device and whether they have a graph; a
storage counts once, under the first name that reaches it. Tensors that lose their name are checked for reference cycles
(cycles).

Slices run as a step closes, in the training thread. A step earns a share of its time for them, which accumulates for at
most `CREDIT_STEPS` steps; the first are paid with `FIRST_CREDIT_NS`. A census requested by key first runs for up to
`PAUSE_NS` in one piece, reports that, and continues in slices. No slice runs during a CUDA graph capture, under a
compiler, or (before Python 3.13, where it would change what a debugger sees) under a trace function. Between slices it
holds only ids, counts, texts and weak references.
Cost: benchmarks/census.py.
Known limitations: those of heap_walker. A storage whose id is reused between two slices is missed until the next
census.
"""

from __future__ import annotations

import gc
import heapq
import operator
import sys
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from time import monotonic_ns
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from gpumon_agent import source_lines, wire
from gpumon_agent.attribution.history import AllocationHistory
from gpumon_agent.attribution.inventory import Inventory
from gpumon_agent.frames import Place
from gpumon_agent.governor import Governor
from gpumon_agent.leaks import gc_roots
from gpumon_agent.leaks.allocations import Allocations
from gpumon_agent.leaks.cycles import Cycles, InCycle
from gpumon_agent.leaks.graph_retention import Looks, Retained, reaches, retained
from gpumon_agent.leaks.growth_trigger import GrowthTrigger
from gpumon_agent.leaks.heap_walker import DEPTH_MAX, HeapWalker, Root
from gpumon_agent.leaks.loads import Load, Loads
from gpumon_agent.leaks.names import together
from gpumon_agent.leaks.object_children import Files, Name
from gpumon_agent.leaks.owned_storages import OwnedStorages
from gpumon_agent.storages import CPU, plain, shape_of
from gpumon_agent.thread_clock import ThreadClock

SLICE_NS = 2_000_000  # a slice ends at the first clock check after it: names that move in each step need long ones
SLICE_LEAST_NS = 500_000  # no slice starts with less: to go on where the last one ended takes some 100 µs
FOUND_MAX = 5_000  # storages remembered with their holders
PAUSE_NS = 70_000_000  # then a fifth of it to report what was found so far
CREDIT_STEPS = 200
FIRST_CREDIT_NS = 100_000_000  # once per process: short steps earn too little to name a leak within seconds
ROUNDS = (
    ("user", 6, True),
    ("beside", 6, False),
    ("user", 12, True),
    ("beside", 12, False),
    ("user", 24, True),
    ("user beside", DEPTH_MAX, True),
    ("packages", DEPTH_MAX, False),
)
"""roots, maximum depth, whether to walk again what earlier rounds have visited"""
_EXPLAINED = 0.5  # share of the added blocks that must be found
_STRIDED = torch.strided
_HOST_GROUPS_MAX = wire.GROUPS_MAX // 6  # where there are groups on a device too
_TALLIES_MAX = 2_000  # groups; further kinds of tensors share one
_NAMES_MAX = 200  # per group; tensors under further names are counted without their name
_OURS = "gpumon_agent"

_Key = tuple[Any, Any, int, bool, str]
"""shape, dtype, device, has a graph, and for a single tensor with a graph its name, since graph sizes differ"""


class _Tally:
    __slots__ = ("addresses", "bytes", "count", "graphs", "holders")

    def __init__(self) -> None:
        self.count = 0
        self.bytes = 0
        self.graphs: list[int | None] = []  # bytes retained by the graphs of the first few
        self.holders: Counter[Name] = Counter()
        self.addresses: deque[tuple[int, weakref.ref[Any]]] = deque(maxlen=_NAMES_MAX)  # the newest storages

    @property
    def graph_bytes(self) -> int | None:
        known = [nbytes for nbytes in self.graphs if nbytes is not None]
        return max(known) * self.count if known and len(known) == len(self.graphs) else None


_One = tuple["weakref.ref[Any]", _Tally, Name, int, int]
"""A storage, its group, the name it is counted under, bytes, device."""


class Census:
    """The censuses of one process. Called in the training thread, under the guard."""

    def __init__(
        self,
        inventory: Inventory,
        governor: Governor,
        *,
        models: Callable[[], Iterable[tuple[int, Module]]],
        others: Callable[[], Iterable[Module]],
        say: Callable[[tuple[wire.Event, ...]], None],
        tell: Callable[[str], None],
        limited: bool,
        loads: Loads,
        history: AllocationHistory,
    ) -> None:
        self.loads = loads
        self.newest: wire.Census | None = None
        self.found: list[tuple[weakref.ref[Any], wire.Holder]] = []
        """The newest census' storages, the newest `FOUND_MAX` of them, with their holders."""
        self.growth_trigger = GrowthTrigger()
        self._inventory = inventory
        self._governor = governor
        self._models = models
        self._others = others
        self._say = say
        self._tell = tell
        self._limited = limited
        self._number = 0
        self._taking: _Taking | None = None
        self._requested = False
        self._suspected = False  # by an earlier step of the same batch of steps
        self._credit_ns = FIRST_CREDIT_NS
        self._before: Counter[_Key] | None = None
        self._heaped_before: Counter[int] = Counter()  # by device
        self._files = Files()
        self.allocations = Allocations(history, self._files)
        self._blocks: dict[int, int] = {}  # live blocks at the previous census, by device
        self.blocks: dict[int, int] = {}  # live blocks at the end of the newest step, by device
        self._buffers: dict[tuple[int, str], int] = {}
        self._figures: tuple[tuple[int, int | None, int | None], ...] = ()  # of the newest step that was read

    def ask(self) -> str | None:
        """Requests a census: at most 100 ms in one piece as the next step closes, then slices. None, or why not."""
        why = _why_not()
        if why is not None:
            return why
        self._requested = True
        return None

    def step_closed(
        self, step: int, figures: Iterable[tuple[int, int | None, int | None]], newest: bool = True
    ) -> None:
        """`figures`: (device, allocated, live blocks) at the end of the optimizer step. Steps come in batches; work is
        only started for the last step of a batch (`newest`)."""
        self._figures = figures = tuple(figures)
        self.blocks = {device: count for device, _, count in figures if count is not None}
        suspected = self._suspected = self.growth_trigger.step_closed(step, figures) or self._suspected
        self._earn()
        if not newest:
            return
        self._suspected = False
        self._work(step, suspected)

    def go_on(self, step: int) -> None:
        """A step closed whose end was not read."""
        self._earn()
        self._work(step, suspected=False)

    def _work(self, step: int, suspected: bool) -> None:
        figures = self._figures
        self.allocations.step_closed()
        blocks = sum(self.blocks.values())
        if self._requested and not self.allocations.waits_for_pause(blocks):
            self._requested = False
            if _why_not() is None:
                began = monotonic_ns()
                self.allocations.read_in_pause(blocks)
                if self._taking is None or self._taking.searches:
                    self._begin(step, "asked", figures)
                left = PAUSE_NS - (monotonic_ns() - began)
                complete = self._slice(step, ThreadClock(left, wall_ns=left))
                if not complete and self._taking is not None:
                    self._taking.tell_early()
                    complete = self._slice(step, ThreadClock(PAUSE_NS // 5, wall_ns=PAUSE_NS // 5))
                self._tell(_paused(monotonic_ns() - began, complete))
            return
        if suspected and self._taking is None:
            self._begin(step, "growth", figures)
        if self._taking is not None:
            self._go_on(step)

    @property
    def at_work(self) -> bool:
        """A census runs or is requested, or allocation stacks are recorded: then every step matters."""
        return self._taking is not None or self._requested or self.allocations.open

    def search(self) -> bool:
        """Starts a search for the holders of loaded checkpoints. False: not possible now."""
        if self._taking is not None or _why_not() is not None:
            return False
        self._begin(0, "checkpoint", ())
        return True

    def searching(self) -> bool:
        return self._taking is not None and self._taking.searches

    def stop(self) -> None:
        self._taking = None
        self.allocations.stop()

    def _begin(self, step: int, reason: str, figures: tuple[tuple[int, int | None, int | None], ...]) -> None:
        blocks = {device: count for device, _, count in figures if count is not None}
        before = self._blocks or self.growth_trigger.blocks_at_first()
        added = {device: count - before.get(device, count) for device, count in blocks.items()}
        self._taking = _Taking(self, step, reason, added)
        if reason != "checkpoint":
            self._blocks = blocks
            alive = sum(blocks.values())
            if self.allocations.worth_beginning(alive):
                self.allocations.begin(alive)

    def _earn(self) -> None:
        """Adds one step's share to the credit, which grows to `CREDIT_STEPS` of them."""
        earned = self._governor.census_ns
        self._credit_ns = max(self._credit_ns, min(self._credit_ns + earned, CREDIT_STEPS * earned))

    def _go_on(self, step: int) -> None:
        if (self._limited and self._credit_ns < SLICE_LEAST_NS) or _why_not() is not None:
            return
        clock = ThreadClock(min(self._credit_ns, SLICE_NS) if self._limited else SLICE_NS)
        taking = self._taking
        assert taking is not None
        taking.look_for_cycles(step)
        if not clock.over():  # one check may take a whole slice
            self._slice(step, clock)
        self._credit_ns -= clock.spent_ns

    def _slice(self, step: int, clock: ThreadClock) -> bool:
        taking = self._taking
        assert taking is not None
        self._taking = None  # a census that raises is not continued
        complete = taking.run(step, clock)
        if complete:
            vars(taking).clear()  # breaks its cycle with the walker: training may run with the collector off
        else:
            self._taking = taking
        return complete

    def publish(self, census: wire.Census, counts: Counter[_Key], heaped: Counter[int], *, complete: bool) -> None:
        self.newest = census
        if not complete:
            self._say((census,))
            return
        self._heaped_before = heaped
        self._number = census.number + 1
        self._before = counts
        self._say((census,))


class _Taking:
    """A running census: a stack of stages, each run in slices."""

    def __init__(self, census: Census, step: int, reason: str, added: Mapping[int, int]) -> None:
        self._census = census
        self._began = self._step = step
        self._reason = reason
        self._added = added
        self._files = census._files
        self._owners = OwnedStorages(census._inventory, census._others, census._buffers)
        self._claimed = self._owners.claimed
        self._inputs: set[int] = set()
        self._seen: set[int] = set()
        self._known: set[int] = set()  # addresses of finds
        self._single: set[str] = set()  # names of a single tensor
        self._tallies: dict[_Key, _Tally] = {}
        self._tensors: Counter[int] = Counter()  # by device
        self._heaped: Counter[int] = Counter()  # by device: tensors in containers or in groups of at least `_HEAP`
        self._largest = 0  # tensors in the largest group
        self._walk = HeapWalker(self._found, self._files, gc_roots.of_module)
        self._wanted: dict[int, tuple[Load, int]] = {}  # identity of a storage left by a load → load, device
        self._holders: dict[Load, dict[int, Counter[Name]]] = {}
        for load in census.loads.loads:
            self._holders[load] = {device: Counter() for device in load.loaded}
            self._wanted |= {
                identity: (load, each.device) for identity, each in load.followed.items() if identity not in load.owned
            }
        self._missing = len(self._wanted)
        self.searches = reason == "checkpoint"
        self._rounds = list(ROUNDS[::-1])
        self._names: list[str] = []  # of modules that are not yet sorted
        self._modules: tuple[list[str], list[str]] = ([], [])  # installed packages', the user's
        self._groups: list[wire.Group] = []
        self._groups_left: list[tuple[_Key, _Tally]] = []
        self._first_holders: dict[int, wire.Holder] = {}  # by the id of a tally
        self._on_cpu = False
        self._slices = 0
        self._fresh = True  # no stage has ended in this slice
        self._spent_ns = 0
        self._collects = True  # Python's collector is on
        self._reaches_back = False  # a single tensor's graph is too long to measure at once, or grows
        self._early = False  # intermediate results were sent before the deep rounds
        self._lines: dict[int, Place] = {}  # address → line that allocated it
        self._wanted_lines: set[int] = set()  # addresses
        self._unclaimed: tuple[wire.Unclaimed, ...] = ()
        self._cycles = Cycles()
        self._heap: list[_One] = []  # finds in containers, to check later whether they are still alive
        self._alive: list[_One] = []  # those of them found alive during that check
        self._clock = ThreadClock(0)
        self._stages = [self._tell, self._read_lines, self._go_round, self._owners.run]
        self._long: dict[str, tuple[_Tally, int, Looks]] = {}  # by name: graphs too long to measure in one go
        self._follow: set[str] = set()  # names of tensors whose graph grows only because another variable's does

    def run(self, step: int, clock: ThreadClock) -> bool:
        """Runs one slice. True: the census is complete and published."""
        self._step, self._clock = step, clock
        enabled = self._collects = gc.isenabled()
        gc.disable()  # objects made here could trigger a collection, which scans the whole process
        try:
            with torch._C.DisableTorchFunction():  # keeps our attribute reads from the user's torch function modes
                self._slices += 1
                self._inputs = self._census._inventory.input_storages()
                self._fresh = True
                while self._stages:
                    if not self._stages[-1](clock):
                        return False
                    self._stages.pop()
                    self._fresh = False
        finally:
            if enabled:
                gc.enable()
            self._spent_ns += clock.spent_ns
        self._publish(step)
        return True

    def _sort_modules(self, clock: ThreadClock) -> bool:
        names = self._names
        if not names and not self._modules[False]:
            names = self._names = list(sys.modules)
        while names:
            name = names.pop()
            if name.partition(".")[0] != _OURS:
                self._modules[self._files.users_module(name)].append(name)
            if clock.over():
                return not names
        return True

    def _go_round(self, clock: ThreadClock) -> bool:
        """Walks round by round, until the growth is explained or no round is left."""
        while self._walk.run(clock, self._explains):
            if not self._rounds or self._explains():
                return True
            if clock.over():
                return False
            if self._reaches_back and self._reason == "growth" and not self._early:
                self._reaches_back = False  # a long graph is enough: report now, and again before the last rounds
                self.tell_early()
                self._early = False
                return False
            if self._rounds[-1][1] == DEPTH_MAX:
                if not self._early:
                    self.tell_early()
                    if self._early:
                        return False
                if not self._sort_modules(clock):
                    return False
            which, levels, again = self._rounds.pop()
            found: list[Root | str] = []
            if "user" in which:
                found += gc_roots.of_the_user(self._files, self._modules[True][::-1])
            if "beside" in which:
                found += gc_roots.beside(self._files, self._watched())
            if "packages" in which:
                found += self._modules[False]
            self._walk.begin(found, limit=levels, installed="packages" in which, again=again)
        return False

    def _watched(self) -> list[tuple[str, Any]]:
        models = [("model", weakref.ref(model)) for _, model in self._census._models()]
        return models + [("optimizer", reference) for reference in self._census._inventory.references()[3]]

    def _explains(self) -> bool:
        """Whether deeper rounds can be skipped. A growth census: at least `_EXPLAINED` of the blocks added since the
        previous census were found. A checkpoint search: all storages were found, or one round is left."""
        if self._reason == "checkpoint":
            return self._missing <= 0 or len(self._rounds) == 1
        if self._reason != "growth" or self._rounds == list(ROUNDS[::-1]) or not self._seems_explained():
            return False
        return self._forget_dead() and self._seems_explained()

    def _seems_explained(self) -> bool:
        added = {device: count for device, count in self._added.items() if count > 0}
        if not added:
            deep = all(levels > 12 for _, levels, _ in self._rounds)  # enough for a single tensor that grows
            return self._largest >= _HEAP or (deep and not self._census.growth_trigger.blocks_grow)
        before = self._census._heaped_before
        return all(self._heaped[device] - before[device] >= _EXPLAINED * count for device, count in added.items())

    def _forget_dead(self) -> bool:
        """Uncounts finds that were freed meanwhile: they were no leak. A variable that is reassigned is walked more
        than once. True: all were checked; False: the slice is over."""
        while self._heap:
            each = self._heap.pop()
            reference, tally, name, nbytes, device = each
            if reference() is not None:
                self._alive.append(each)
            else:
                tally.count -= 1
                tally.bytes -= nbytes
                tally.holders[name] -= 1
                self._tensors[device] -= 1
                self._heaped[_numbered(device)] -= 1
            if self._clock.over():
                return False
        self._heap, self._alive = self._alive, []
        return True

    def _found(self, tensor: Any, walk: HeapWalker) -> bool:
        kind = type(tensor)
        if kind is Tensor or kind is Parameter:
            if tensor.is_meta or tensor.layout is not _STRIDED:
                return False
            return self._count(tensor, tensor, walk)
        found = False
        if kind.__name__ not in _UNREAL:
            for part in plain(tensor):
                found |= self._count(part, tensor, walk)
        return found

    def _count(self, part: Tensor, tensor: Tensor, walk: HeapWalker) -> bool:
        storage = part.untyped_storage()
        identity = storage._cdata
        wanted = self._wanted.get(identity)
        if wanted is not None:
            if identity not in self._seen:
                self._seen.add(identity)
                self._missing -= 1
                load, device = wanted
                if load.keeps(tensor, identity):
                    self._holders[load][device][walk.name()] += 1
            return True
        if identity in self._inputs or self._owners.claim(identity):
            return False
        if identity in self._seen:  # or a newer storage reuses the id
            if self._long and (long_name := walk.name().key) in self._long:
                self._measure(tensor, long_name, walk)
            return True
        nbytes = storage.nbytes()
        if not nbytes:
            return False
        name = walk.name()
        several = "*" in name.text or "…" in name.text
        if not several:  # a single variable; it may hold another tensor than before
            if self._reason == "growth":
                graph = tensor.requires_grad and not tensor.is_leaf
                key = (shape_of(tensor), tensor.dtype, part.get_device(), graph, "")
                self._cycles.note(walk.way(), name, key, storage, self._step)
            if name.key in self._single:
                if name.key in self._long:
                    self._measure(tensor, name.key, walk)
                return True
            self._single.add(name.key)
        self._seen.add(identity)
        self._known.add(storage.data_ptr())
        device = part.get_device()
        graph = tensor.requires_grad and not tensor.is_leaf
        key = (shape_of(tensor), tensor.dtype, device, graph, name.key if graph and not several else "")
        tally = self._tallies.get(key)
        if tally is None:
            if len(self._tallies) >= _TALLIES_MAX:
                key = ((), None, device, False, "")
            tally = self._tallies.setdefault(key, _Tally())
        tally.count += 1
        tally.bytes += nbytes
        alive = weakref.ref(storage)
        tally.addresses.append((storage.data_ptr(), alive))
        if key[3] and len(tally.graphs) < _GRAPHS_MAX:
            looks = Looks()
            measured = retained(tensor, self._claimed, _GRAPH_NS if several else self._time_for_graph(walk), looks)
            tally.graphs.append(None if measured is None else measured.bytes)
            if measured is not None and measured.cut and not several and len(self._long) < _LONG_MAX:
                self._reaches_back = True
                self._long[name.key] = tally, len(tally.graphs) - 1, looks
                if self._reason == "growth":
                    walk.once_more()  # measure again at the start of a slice, with time for several steps' graph
        if name in tally.holders or len(tally.holders) < _NAMES_MAX:
            tally.holders[name] += 1
        self._tensors[device] += 1
        if several or tally.count >= _HEAP:
            self._heaped[_numbered(device)] += 1
            if several and name in tally.holders:
                self._heap.append((alive, tally, name, nbytes, device))
        if _numbered(device) != CPU:
            self._largest = max(self._largest, tally.count)
        return True

    def _time_for_graph(self, walk: HeapWalker) -> int:
        return max(_GRAPH_NS, SLICE_NS - walk.spent_ns)

    def _measure(self, tensor: Any, name: str, walk: HeapWalker) -> None:
        """Retries a graph measurement that ran out of time, and keeps the maximum. If the graph leads through another
        variable's graph that also reaches back to an earlier step, that variable is to blame."""
        tally, at, looks = self._long[name]
        measured = retained(tensor, self._claimed, self._time_for_graph(walk), looks)
        if measured is None:
            return
        looks.count += 1
        if measured.bytes > (tally.graphs[at] or 0):
            tally.graphs[at] = measured.bytes
            self._reaches_back = True  # may be enough to report now
        if looks.before < looks.newest:
            beside = (each for each in walk.beside() if each is not tensor and _leads(each, measured))
            if any(reaches(each, looks.before, _REACH_NS) for each in beside):
                self._follow.add(name)
        if not measured.cut or looks.count == _LOOKS_MAX or name in self._follow:
            del self._long[name]
        elif self._reason == "growth":
            walk.once_more()

    @property
    def _unnamed(self) -> bool:
        """The walk is complete, and its finds do not explain the growth."""
        return self._reason == "growth" and not self._rounds and not self._explains()

    def _read_lines(self, clock: ThreadClock) -> bool:
        """Reads the allocation stacks, once their recording has ended; starts only in a fresh slice."""
        allocations = self._census.allocations
        if not allocations.reading:
            if self.searches or not (allocations.unread or self._unnamed):
                return True
            unexplained = self._reason == "growth" and not self._explains()
            if allocations.open or (unexplained and not allocations.survived) or not self._fresh:
                return False
            if not allocations.readable(sum(self._census.blocks.values())):
                return True
            self._wanted_lines = {address for tally in self._tallies.values() for address, _ in tally.addresses}
            self._wanted_lines.update(each.address for each in self._cycles.found)
        if not allocations.read(self._wanted_lines, (self._known, self._owners.addresses), clock):
            return False
        self._lines, self._unclaimed = allocations.lines, allocations.unclaimed
        return True

    def _tell(self, clock: ThreadClock) -> bool:
        """Builds the message's groups: cycles, then on devices, then on the host; most bytes first."""
        if not self._groups_left and not self._groups:
            if not self._forget_dead():
                return False
            named = [
                (key, tally)
                for key, tally in self._tallies.items()
                if tally.count and key[1] is not None and key[4] not in self._follow
            ]
            on_device = {device for device, count in self._tensors.items() if count and device != CPU}
            on_cpu = not on_device and all(each.key[2] == CPU for each in self._cycles.found)
            size = operator.itemgetter(1)
            theirs = [(item, item[1].bytes) for item in named if item[0][2] != CPU or on_cpu]
            self._on_cpu = on_cpu
            self._groups = self._in_cycles()
            on_host = [] if on_cpu else [(item, item[1].bytes) for item in named if item[0][2] == CPU]
            places_left = wire.GROUPS_MAX - len(self._groups) - min(len(on_host), _HOST_GROUPS_MAX)
            chosen = heapq.nlargest(places_left, theirs, size) + heapq.nlargest(_HOST_GROUPS_MAX, on_host, size)
            self._groups_left = [item for item, _ in chosen[::-1]]
        while self._groups_left:
            if clock.over():
                return False
            key, tally = self._groups_left.pop()
            group = self._group(key, tally)
            self._groups.append(group)
            if group.holders:
                self._first_holders[id(tally)] = group.holders[0]
        return not clock.over()

    def look_for_cycles(self, step: int) -> None:
        """Checks for a reference cycle, and reports it at once: a walk from names cannot find it."""
        if not self._cycles.due(step):
            return
        enabled = gc.isenabled()
        gc.disable()
        try:
            found = self._cycles.look(step)
        finally:
            if enabled:
                gc.enable()
        if found:
            self._early = False
            self.tell_early()

    def _in_cycles(self) -> list[wire.Group]:
        found: dict[tuple[_Key, Name], list[InCycle]] = {}
        for each in self._cycles.found:
            found.setdefault((each.key, each.name), []).append(each)
        lines = {
            key: next((self._lines[one.address] for one in each if one.address in self._lines), None)
            for key, each in found.items()
        }
        return [
            wire.Group(
                shape=shape,
                dtype=str(dtype).removeprefix("torch."),
                device=0 if self._on_cpu else device,
                count=len(each),
                bytes=sum(one.bytes for one in each),
                has_graph=has_graph,
                **_made_at(lines[key, name]),
                holders=(name._replace(kind=wire.CYCLE).holder(len(each)),),
                cyclic=len(each),
            )
            for (key, name), each in found.items()
            for shape, dtype, device, has_graph, _ in (key,)
        ][: wire.HOLDERS_MAX]

    def tell_early(self) -> None:
        """Schedules a report of the finds so far: the rest may take minutes."""
        if not self._early and not self.searches and (self._tallies or self._cycles.found):
            self._early = True
            self._stages += [self._tell_so_far, self._read_lines]

    def _tell_so_far(self, clock: ThreadClock) -> bool:
        if not self._tell(clock) and (self._groups_left or not self._groups):
            return False
        self._publish(self._step, complete=False)
        self._groups, self._groups_left = [], []
        return True

    def _tell_of_loads(self) -> None:
        """Stores the holders of loads. A census for another reason replaces them only if it found as many or more."""
        for load, devices in self._holders.items():
            for device, found in devices.items():
                if self.searches or found.total() >= load.holders.get(device, Counter()).total():
                    load.holders[device] = found

    def _publish(self, step: int, *, complete: bool = True) -> None:
        census = self._census
        if complete:
            self._tell_of_loads()
        if self._reason == "checkpoint":
            return
        census.found = self._storages()
        why = None
        if not complete:
            why = "some objects were not visited yet"
        elif self._rounds:
            why = "the tensors found explain the growth: deeper objects were not visited"
        census.publish(
            wire.Census(
                step=step,
                t_ns=monotonic_ns(),
                number=census._number,
                reason=self._reason,
                groups=tuple(self._groups),
                tensors=sum(tally.count for tally in self._tallies.values()),
                bytes=sum(tally.bytes for tally in self._tallies.values()),
                objects=self._walk.objects,
                slices=self._slices,
                spent_ns=self._spent_ns,
                began_step=self._began,
                cut=bool(self._rounds) or not complete,
                why=why,
                unclaimed=self._unclaimed,
                waiting=_waiting(self._collects),
            ),
            Counter({key: tally.count for key, tally in self._tallies.items()}),
            self._heaped,
            complete=complete,
        )

    def _storages(self) -> list[tuple[weakref.ref[Any], wire.Holder]]:
        """In the groups that are told: the newest of each, with its first holder; in containers, with their own."""
        found: dict[int, tuple[weakref.ref[Any], wire.Holder]] = {}
        for tally in self._tallies.values():
            first = self._first_holders.get(id(tally))
            if first is not None:
                found.update((id(alive), (alive, first)) for _, alive in tally.addresses)
        holders: dict[Name, wire.Holder] = {}
        for alive, tally, name, _, _ in self._heap[-FOUND_MAX:]:
            if id(tally) in self._first_holders:
                if name not in holders:
                    holders[name] = name.holder(0)
                found[id(alive)] = alive, holders[name]
        return list(found.values())[-FOUND_MAX:]

    def _group(self, key: _Key, tally: _Tally) -> wire.Group:
        shape, dtype, device, has_graph, _ = key
        made = Counter(
            self._lines[address]
            for address, alive in tally.addresses
            if address in self._lines and alive() is not None  # else another tensor may have taken its place
        )
        before = self._census._before
        return wire.Group(
            shape=shape,
            dtype=str(dtype).removeprefix("torch."),
            device=0 if self._on_cpu else device,
            count=tally.count,
            bytes=tally.bytes,
            has_graph=has_graph,
            graph_bytes=tally.graph_bytes,
            **_made_at(made.most_common(1)[0][0] if made else None),
            grown=None if before is None else tally.count - before[key],
            holders=tuple(name.holder(count) for name, count in together(+tally.holders).most_common(wire.HOLDERS_MAX)),
        )


def _made_at(line: Place | None) -> dict[str, Any]:
    return {} if line is None else {"where": str(line), "source_line": source_lines.text(line)}


_RARELY = 10_000  # collector threshold from which it counts as off; Python's default is 700 to 2,000
_UNREAL = frozenset({"FakeTensor", "FunctionalTensor"})
_GRAPHS_MAX = 3  # per group: the first may be of the current step, whose graph is already freed
_GRAPH_NS = 200_000
_REACH_NS = 100_000
_LOOKS_MAX = 5  # a step apart
_LONG_MAX = 4
_HEAP = 5  # equal tensors: a leak rather than what one step uses


def _numbered(device: int) -> int:
    """The device index as in readings: the host is 0 if CUDA is not initialized."""
    return 0 if device == CPU and not torch.cuda.is_initialized() else device


def _why_not() -> str | None:
    """Why no census may run now; None: it may."""
    if torch.compiler.is_compiling():
        return "a compiler is tracing"
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is being captured"
    if sys.version_info < (3, 13) and sys.gettrace() is not None:
        return "a debugger or a tracer is active"
    return None


def _leads(other: Any, measured: Retained) -> bool:
    """Whether the measured graph contains `other`'s grad_fn."""
    return isinstance(other, Tensor) and other.grad_fn in measured.nodes


def _waiting(collects: bool) -> int | None:
    """How many new objects wait for the collector, if it is off or practically off."""
    often = gc.get_threshold()[0]
    return None if collects and 0 < often < _RARELY else gc.get_count()[0]


def _paused(nanoseconds: int, complete: bool) -> str:
    rest = "it is complete" if complete else "the rest follows, a slice in each step"
    return f"the requested census paused the training for {nanoseconds / 1e6:.0f} ms: {rest}"
