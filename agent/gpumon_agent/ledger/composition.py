"""What was alive at a step's highest moment: one phase of allocator history, without stacks, replayed.

Model. The phase that made the last step's peak is expected to make this one's. As it begins, PyTorch's own history of
allocations is switched on and the addresses of what owners hold are noted; as it ends, history and owners are read
again, and history is switched off. From what was requested at the phase's beginning every event adds or subtracts its
requested bytes; the largest sum is the peak. A block that was alive then belongs

- to the owner that held its address as the phase began, if it stood there since;
- else to the owner that holds it as the phase ends, if it stood there until then;
- else, if it was made and freed within the phase, to what autograd saved in it (of the loss), or to `temporaries`.

A block is gone as soon as it is given back, as `allocated` has it: one that another stream still uses (FSDP's gathered
parameters and gradients) waits, and torch goes on counting it as requested.

What is left of `requested` is *unexplained*. The module that was running: forward allocates what each module saves in
the modules' order, backward frees it and makes gradients in the opposite order, so the nearest such events before and
after the peak tell two modules; the answer is the innermost module around both, None where one of them is missing.

Source: history.History; the sizes in its trace are requested bytes.
Cost: 0.2 µs an allocation while it records; 1 µs an event to read and replay: benchmarks/inventory.py.
Known limitations. No composition once the user has recorded a history. The largest sum of requested bytes is taken for
the peak of allocated ones: they differ by rounding.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import accumulate
from typing import Any, NamedTuple

from gpumon_agent.ledger.graph import Place


class Block(NamedTuple):
    """Whose the bytes at an address are."""

    line: str
    nbytes: int
    place: Place | None = None


Blocks = dict[int, Block]
"""by address"""


class Composition(NamedTuple):
    """A peak, taken apart: requested bytes."""

    requested: int
    lines: dict[str, int]
    module: str | None


def compose(
    trace: Iterable[dict[str, Any]],
    requested: int,
    before: Blocks,
    after: Blocks,
    saved: Blocks,
    *,
    forward: bool,
) -> Composition:
    """The peak of one phase; see the module.

    `requested`: bytes as it began. `before`, `after`: whose the blocks are at its beginning and its end; `saved`: those
    that autograd saved within it, all of them alive at one moment, and that may be gone by its end.
    """
    addresses: list[int] = []
    changes: list[int] = []
    for event in trace:  # once: they are more than a processor's cache holds
        action = event["action"]
        if action == "alloc":
            addresses.append(event["addr"])
            changes.append(event["size"])
        elif action == "free_requested":
            addresses.append(event["addr"])
            changes.append(-event["size"])
    sums = list(accumulate(changes, initial=requested))
    peak = max(sums)
    behind = sums.index(peak)  # so many events led to the peak
    # dicts keep the last of equal keys: an address's newest event, and going backwards its first
    first = dict(zip(reversed(addresses), range(len(addresses) - 1, -1, -1), strict=True))
    newest = dict(zip(addresses[:behind], range(behind), strict=True))
    made = [first[address] for address in saved.keys() & first.keys()]
    latest = max((at for at in made if changes[at] > 0), default=-1)  # until then the saved were all there
    lines: defaultdict[str, int] = defaultdict(int)
    for line, nbytes, _ in before.values():
        lines[line] += nbytes
    for address in newest.keys() & before.keys():
        if changes[first[address]] < 0:  # given back before the peak
            lines[before[address].line] -= before[address].nbytes
    alive = {address: changes[at] for address, at in newest.items() if changes[at] > 0}
    later = reversed(addresses[behind:] if alive else ())
    freed = dict(zip(later, range(len(addresses) - 1, behind - 1, -1), strict=False))  # after the peak, if they are
    for address, size in alive.items():
        until = freed.get(address)
        if until is None:
            owner = after.get(address)
            if owner is not None:
                lines[owner.line] += size
        else:
            kept = address in saved and newest[address] <= latest < until
            lines["activations" if kept else "temporaries"] += size
    running = _running(addresses, changes, behind - 1, before, after, saved, first, forward=forward)
    return Composition(peak, {line: nbytes for line, nbytes in lines.items() if nbytes > 0}, running)


def _running(
    addresses: list[int],
    changes: list[int],
    at: int,
    before: Blocks,
    after: Blocks,
    saved: Blocks,
    first: dict[int, int],
    *,
    forward: bool,
) -> str | None:
    """The innermost module around the nearest events that tell a module, before and after the peak."""
    telling = "activations" if forward else "gradients"
    newest: dict[int, int] = {}

    def told(index: int) -> Block | None:
        address = addresses[index]
        if changes[index] > 0:  # tells if it stays
            block = after.get(address)
            if block is None or block.line != telling:
                return None
            if not newest:
                newest.update(zip(addresses, range(len(addresses)), strict=True))
            return block if newest[address] == index else None
        block = None if forward else before.get(address) or saved.get(address)
        if block is None or block.line != "activations":
            return None
        stood = changes[first[address]] < 0  # as the phase began; else it is freed by the first event after it was made
        return block if index == (first[address] if stood else addresses.index(address, first[address] + 1)) else None

    earlier = next((block for index in range(at, -1, -1) if (block := told(index)) is not None), None)
    later = next((block for index in range(max(at, 0), len(changes)) if (block := told(index)) is not None), None)
    if earlier is None or later is None or earlier.place is None or later.place is None:
        return None
    if earlier.place[0] != later.place[0]:
        return None
    return _around(earlier.place[1], later.place[1]) or None


def _around(left: str, right: str) -> str:
    common = []
    for a, b in zip(left.split("."), right.split("."), strict=False):
        if a != b:
            break
        common.append(a)
    return ".".join(common)
