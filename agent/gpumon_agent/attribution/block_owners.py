"""Maps block addresses of a device to owners: for the breakdown of a peak, and for a viewer's map of the allocator.

Cost: 1 µs per tensor. For peaks, lasting tensors (weights, buffers, optimizer state) are read again when their sums
change, or after `LASTING_USES`; `prepare` does that ahead, in a step that has time for it. A map is rare: everything is
read again for it, for at most `NOW_NS`.
Known limitations. A map has no owner for what no tensor of the process shows: DDP's buckets (without
gradient_as_bucket_view), unsharded gradients that FSDP2 or ZeRO accumulate, autocast's copies of weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from msgspec import structs
from torch import Tensor
from torch.nn import Parameter

from gpumon_agent import wire
from gpumon_agent.attribution import variables
from gpumon_agent.attribution.activations import Alive
from gpumon_agent.attribution.graph import Place, Places
from gpumon_agent.attribution.inventory import Inventory
from gpumon_agent.attribution.unwatched_models import UnwatchedModels
from gpumon_agent.attribution.workspaces import Workspaces
from gpumon_agent.storages import CPU, addresses, has_storage
from gpumon_agent.thread_clock import ThreadClock

LASTING_USES = 32
NOW_NS = 50_000_000  # of the thread's time
WAITS = 5  # times that in wall time: a busy machine
_AT_ONCE = 64  # tensors between two looks at the clock
_ELSEWHERE = ("gradients", "buckets", "workspaces", "other_models")
_LASTING = tuple(line for line in wire.LASTING if line not in _ELSEWHERE)
"""Lines whose tensors keep their addresses. The others are reallocated, or read each time anyway."""
_PLAIN = (Tensor, Parameter)


class Block(NamedTuple):
    line: str
    nbytes: int
    place: Place | None = None


Blocks = dict[int, Block]
"""address → block"""


Found = tuple[Any, wire.Holder]
"""A weak reference to a storage, and the variable that a census found it in."""


class Owned(NamedTuple):
    """The owners of a device's blocks at one moment. `codes`: address → number, as in `wire.BLOCK_OWNERS`."""

    codes: dict[int, int]
    holders: tuple[wire.Holder, ...] = ()


class _Lasting(NamedTuple):
    """Blocks of lasting tensors; valid while the sums of their lines are unchanged."""

    blocks: Blocks
    sums: tuple[int | None, ...]


class BlockOwners:
    def __init__(self, inventory: Inventory, others: UnwatchedModels, workspaces: Workspaces) -> None:
        self._inventory = inventory
        self._others = others
        self._workspaces = workspaces
        self._lasting: dict[int, _Lasting] = {}
        self._uses = 0

    def prepare(self, ledger: wire.Ledger, device: int) -> None:
        """Reads lasting tensors ahead if that is soon needed. Call it as a step ends that has no other task."""
        lasting = self._lasting.get(device)
        if device != CPU and (lasting is None or lasting.sums != _sums(ledger) or self._uses > LASTING_USES // 2):
            self._look(ledger, device)

    def _look(self, ledger: wire.Ledger, device: int) -> None:
        self._uses = 0
        blocks: Blocks = {}
        for tensor in self._inventory.gathered():  # while FSDP2 has gathered a parameter, the module holds it
            _add(blocks, tensor, "buckets", device, None)
        gathered = set(blocks)
        for line, tensor, _ in self._inventory.held(fleeting=False):
            _add(blocks, tensor, line, device, None)
        for address in gathered:
            del blocks[address]
        self._lasting[device] = _Lasting(blocks, _sums(ledger))

    def blocks(self, ledger: wire.Ledger, device: int, saved: Iterable[Alive], places: Places) -> Blocks:
        """All blocks with an owner or saved by autograd, consistent with `ledger`."""
        lasting = self._lasting.get(device)
        self._uses += 1
        if lasting is None or lasting.sums != _sums(ledger) or self._uses > LASTING_USES:
            self._look(ledger, device)
            lasting = self._lasting[device]
        blocks = lasting.blocks.copy()
        holders = places.by_parameter
        for line, tensor, parameter in self._inventory.held(lasting=False):
            at = holders.get(id(parameter)) if parameter is not None else None
            _add(blocks, tensor, line, device, at)
        for tensor in self._others.tensors(look=False) or ():
            _add(blocks, tensor, "other_models", device, None)
        for address, nbytes in self._workspaces.addresses.get(device, {}).items():
            blocks.setdefault(address, Block("workspaces", nbytes))
        for each in saved:
            if each.address not in blocks:
                blocks[each.address] = Block("activations", each.nbytes, each.place)
        for tensor in variables.tensors():
            _add(blocks, tensor, "variables", device, None)
        return blocks

    def now(self, device: int, saved: list[Alive], loaded: Iterable[Any], found: Iterable[Found]) -> Owned | None:
        """Every block that has an owner now; the first claim counts, in the ledger's order. None: it took too long.

        `loaded`: weak references to storages of loaded checkpoints. What a census found is a variable's even if
        autograd saved it too: it has outlived the step that made it.
        """
        clock = ThreadClock(NOW_NS, wall_ns=WAITS * NOW_NS)
        blocks: Blocks = {}
        for line, tensor in _in_time(self._claimed_first(), clock):
            _add(blocks, tensor, line, device, None)
        for reference in _in_time(loaded, clock):
            if (storage := reference()) is not None and storage.device.index == device:
                blocks.setdefault(storage.data_ptr(), Block("checkpoints", storage.nbytes()))
        for address, nbytes in self._workspaces.addresses.get(device, {}).items():
            blocks.setdefault(address, Block("workspaces", nbytes))
        held = _Held()
        for reference, holder in _in_time(found, clock):
            storage = reference()
            if storage is not None and storage.device.index == device and storage.data_ptr() not in blocks:
                held.add(storage.data_ptr(), storage.nbytes(), holder)
        for each in saved:
            if each.address not in held.of:
                blocks.setdefault(each.address, Block("activations", each.nbytes))
        for tensors, holder_of in variables.named():
            theirs: Blocks = {}
            for tensor in _in_time(tensors, clock):
                _add(theirs, tensor, "variables", device, None)
            new = [(address, block.nbytes) for address, block in theirs.items() if address not in blocks]
            if new:  # a container that a census has named keeps that name
                holder = held.holder_of_most(theirs) or holder_of()
                for address, nbytes in new:
                    held.add(address, nbytes, holder)
        if clock.over():
            return None
        codes = {address: wire.BLOCK_OWNERS.index(block.line) for address, block in blocks.items()}
        named, holders = held.numbered()
        return Owned(codes | named, holders)

    def _claimed_first(self) -> Iterator[tuple[str, Tensor]]:
        yield from ((line, tensor) for line, tensor, _ in self._inventory.held())
        yield from (("other_models", tensor) for tensor in self._others.tensors(look=False) or ())

    def addresses(self, saved: Iterable[Alive]) -> set[int]:
        """Addresses of owned and saved storages, on any device."""
        held = {address for _, tensor, _ in self._inventory.held() for address, _, _ in addresses(tensor)}
        held.update(each.address for each in saved)
        held.update(address for tensor in variables.tensors() for address, _, _ in addresses(tensor))
        return held


class _Held:
    """Blocks of variables. Those with the most bytes keep their names."""

    def __init__(self) -> None:
        self.of: dict[int, tuple[str, str | None]] = {}
        """address → container and function of the variable"""
        self._bytes: Counter[tuple[str, str | None]] = Counter()
        self._holders: dict[tuple[str, str | None], wire.Holder] = {}

    def add(self, address: int, nbytes: int, holder: wire.Holder) -> None:
        if address in self.of:
            return
        key = holder.container, holder.function
        self._holders.setdefault(key, holder)
        self._bytes[key] += nbytes
        self.of[address] = key

    def holder_of_most(self, addresses: Iterable[int]) -> wire.Holder | None:
        """The container that already holds most of them, if any."""
        known = Counter(key for address in addresses if (key := self.of.get(address)) is not None)
        holders = (self._holders[key] for key, _ in known.most_common())
        return next((holder for holder in holders if "[*]" in holder.name), None)

    def numbered(self) -> tuple[dict[int, int], tuple[wire.Holder, ...]]:
        """address → number, and the named variables."""
        chosen = [key for key, _ in self._bytes.most_common(wire.BLOCK_HOLDERS_MAX)]
        numbers = {key: wire.HOLDER_OWNERS + at for at, key in enumerate(chosen)}
        others = wire.BLOCK_OWNERS.index("variables")
        codes = {address: numbers.get(key, others) for address, key in self.of.items()}
        return codes, tuple(structs.replace(self._holders[key], source_line=None) for key in chosen)


T = TypeVar("T")


def _in_time(each: Iterable[T], clock: ThreadClock) -> Iterator[T]:
    rest = iter(each)
    while not clock.over():
        some = list(islice(rest, _AT_ONCE))
        if not some:
            return
        yield from some


def _sums(ledger: wire.Ledger) -> tuple[int | None, ...]:
    return tuple(getattr(ledger, line) for line in _LASTING)


def _add(blocks: Blocks, tensor: Tensor, line: str, device: int, at: list[tuple[int, str]] | None) -> None:
    if type(tensor) in _PLAIN and has_storage(tensor):
        if tensor.get_device() != device:
            return
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address and address not in blocks:
            blocks[address] = Block(line, storage.nbytes(), at[0] if at else None)
        return
    for address, nbytes, where in addresses(tensor):
        if where == device and address not in blocks:
            blocks[address] = Block(line, nbytes, at[0] if at else None)
