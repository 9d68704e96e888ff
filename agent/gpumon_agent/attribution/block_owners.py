"""Maps block addresses of a device to owners, for the breakdown of a peak.

Cost: 1 µs per tensor. Lasting tensors (weights, buffers, optimizer state) are read again when their sums change, or
after `LASTING_USES`; `prepare` does that ahead, in a step that has time for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

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

LASTING_USES = 32
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

    def blocks(self, ledger: wire.Ledger, device: int, saved: list[Alive], places: Places) -> Blocks:
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

    def addresses(self, saved: Iterable[Alive]) -> set[int]:
        """Addresses of owned and saved storages, on any device."""
        held = {address for _, tensor, _ in self._inventory.held() for address, _, _ in addresses(tensor)}
        held.update(each.address for each in saved)
        held.update(address for tensor in variables.tensors() for address, _, _ in addresses(tensor))
        return held


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
