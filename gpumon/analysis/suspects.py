"""Finds the variables that can explain a growth in a census: their tensors, counts and holders.

Model. A census lists groups of like tensors, each with the names that reach them. If batches differ in length, every
step's tensors form a group of their own, and a kept state_dict has one group per shape, so groups are merged by the
variable that leads to them. A tensor reached by several names counts for the first one, in the census's order. A
variable explains a growth over n steps if it holds a quarter of the blocks added, or one tensor per two steps, and not
far more; if no blocks were added, about as many bytes: a single tensor that is concatenated to. A census that ended
early needs fewer. Suspects with less than `BEST_SHARE` of the largest count are left out as unrelated. A second census
tells directly which groups have grown.
Cost. A walk over at most `wire.GROUPS_MAX` groups.
Known limitations. A first census cannot distinguish older tensors of about the same number.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from gpumon.analysis import units
from gpumon_agent import wire
from gpumon_agent.units import rounded

COUNT_SHARE = 0.25  # of the added blocks: several names may share a growth
STEPS_SHARE = 0.5
BYTES_SHARE = 0.5
GRAPH_STEPS = 3  # of growth that one graph must hold: only its newest part may be measured
BEST_SHARE = 0.25
LEAST = 3  # tensors
LEAST_OF_CUT = 5  # in a census that ended early
TOO_MANY_TIMES = 4  # times the blocks added: more tensors must be older


class Suspect(msgspec.Struct):
    """Live tensors kept by one variable. `holder` is None if none was found."""

    holder: wire.Holder | None
    has_graph: bool
    count: int = 0
    bytes: int = 0
    graph_bytes: int = 0
    cyclic: int = 0
    grown: int | None = None
    kinds: dict[tuple[tuple[int, ...], str], int] = msgspec.field(default_factory=dict)  # (shape, dtype) → tensors
    names: dict[str, int] = msgspec.field(default_factory=dict)  # holders' names → tensors
    several_places: bool = False  # one tensor in each
    where: str | None = None
    phase: str | None = None
    source_line: str | None = None  # the text of the line `where`

    @property
    def line(self) -> tuple[str | None, str | None]:
        """Where its tensors were made, else where the variable gets its value: file.py:LINE and its text."""
        if self.where is not None or self.holder is None:
            return self.where, self.source_line
        return self.holder.where, self.holder.source_line

    @property
    def by(self) -> wire.Holder | None:
        """The holder; the variable, if several holders lead through one."""
        if self.holder is None or len(self.names) == 1:
            return self.holder
        return msgspec.structs.replace(self.holder, name=f"{self.holder.variable}[*]")

    def add(self, other: Suspect) -> None:
        """Adds another's tensors; the name stays."""
        self.several_places = True
        self.count += other.count
        self.bytes += other.bytes
        self.graph_bytes += other.graph_bytes
        if other.grown is not None:
            self.grown = (self.grown or 0) + other.grown
        for kind, count in other.kinds.items():
            self.kinds[kind] = self.kinds.get(kind, 0) + count

    @property
    def held(self) -> int:
        """Bytes of its tensors and their graphs."""
        return self.bytes + self.graph_bytes

    @property
    def scalar(self) -> bool:
        """Only single numbers, such as losses."""
        return all(_elements(shape) == 1 for shape, _ in self.kinds)

    @property
    def example(self) -> str:
        """ "[8, 512] float32" of the most frequent kind."""
        shape, dtype = max(self.kinds, key=lambda kind: self.kinds[kind])
        return f"{list(shape)} {dtype}" if shape else f"{dtype} scalars"

    @property
    def tensors(self) -> str:
        """ "1,227 tensors [8, 512] float32", of several kinds the most frequent as an example."""
        (shape, dtype), _ = max(self.kinds.items(), key=lambda kind: kind[1])
        each = f"{list(shape)} {dtype}" if shape else f"{dtype} scalars"
        if len(self.kinds) > 1:
            return f"{units.count(self.count)} tensors of {len(self.kinds)} shapes, such as {list(shape)} {dtype}"
        if not shape:
            return f"{units.count(self.count)} {each}" if self.count != 1 else f"1 {dtype} scalar"
        return f"{units.count(self.count)} tensor{'s' if self.count != 1 else ''} {each}"


def suspects(census: wire.Census, device: int) -> list[Suspect]:
    """A census's tensors on a device by holder, most bytes first."""
    found: dict[tuple[object, ...], Suspect] = {}
    for group in census.groups:
        if group.device != device or not group.count:
            continue
        for holder, count in _shares(group):
            named = (root(holder),) if holder else (group.shape, group.dtype, group.where)
            key = (group.has_graph, holder is None, *named)
            suspect = found.get(key)
            if suspect is None:
                suspect = found[key] = Suspect(holder, group.has_graph)
            _add(suspect, group, count)
            if holder is not None:
                suspect.names[holder.text] = suspect.names.get(holder.text, 0) + count
    return sorted(found.values(), key=lambda suspect: -suspect.held)


def _shares(group: wire.Group) -> Iterator[tuple[wire.Holder | None, int]]:
    left = group.count
    for holder in group.holders:
        count = min(left, holder.count or group.count)
        if count:
            yield holder, count
        left -= count
    if left:
        yield None, left


def _add(suspect: Suspect, group: wire.Group, count: int) -> None:
    suspect.count += count
    each = -(-group.bytes // group.count)
    suspect.bytes += (rounded(each) if group.device >= 0 else each) * count
    suspect.graph_bytes += (group.graph_bytes or 0) * count // group.count
    suspect.cyclic += min(group.cyclic, count)
    if group.grown is not None:
        suspect.grown = (suspect.grown or 0) + group.grown
    kind = (group.shape, group.dtype)
    if suspect.where is None or count > max(suspect.kinds.values(), default=0):
        if group.where:
            suspect.where, suspect.source_line = group.where, group.source_line
        suspect.phase = group.phase or suspect.phase
    suspect.kinds[kind] = suspect.kinds.get(kind, 0) + count


def explaining(
    census: wire.Census, device: int, *, since: int, blocks_per_step: float | None, bytes_per_step: float | None
) -> list[Suspect]:
    """The suspects that can explain a growth since step `since`, most bytes first."""
    steps = census.step - since + 1
    if steps <= 1:
        return []
    blocks = steps * blocks_per_step if blocks_per_step else 0.0
    grown = steps * bytes_per_step if bytes_per_step else 0.0
    known = suspects(census, device)
    if not blocks:
        known = _of_one_name(known)
    found = [each for each in known if _explains(each, census.cut, steps, blocks, grown)]
    most = max((each.count for each in found), default=0)
    return [each for each in found if each.count >= BEST_SHARE * most]


def _of_one_name(known: list[Suspect]) -> list[Suspect]:
    """Merges single tensors that are the same attribute of several objects, such as layers."""
    alike: dict[tuple[str, bool], Suspect] = {}
    left = []
    for each in known:
        attribute = each.holder.attribute if each.holder is not None else ""
        if each.count > 1 or not attribute or "[" in attribute:
            left.append(each)
            continue
        first = alike.setdefault((attribute, each.has_graph), each)
        if first is each:
            left.append(each)
        else:
            first.add(each)
    return sorted(left, key=lambda suspect: -suspect.held)


def _explains(suspect: Suspect, cut: bool, steps: int, blocks: float, grown: float) -> bool:
    if suspect.cyclic:
        return True  # seen to stay: one is a sample of many
    if suspect.grown is not None and suspect.grown <= 0:
        return False
    if suspect.graph_bytes and GRAPH_STEPS * grown <= suspect.held * steps and suspect.held <= TOO_MANY_TIMES * grown:
        return True  # one tensor whose graph reaches back over several steps
    if blocks:
        wanted = LEAST_OF_CUT if cut else max(LEAST, min(COUNT_SHARE * blocks, STEPS_SHARE * steps))
        if suspect.count < wanted:
            return False
        return suspect.grown is not None or suspect.count <= TOO_MANY_TIMES * max(blocks, steps)
    return bool(grown) and BYTES_SHARE * grown <= suspect.held <= TOO_MANY_TIMES * grown


def root(holder: wire.Holder) -> tuple[str, str | None]:
    """The variable that leads to the tensors, and its function."""
    return holder.variable, holder.function


def _elements(shape: tuple[int, ...]) -> int:
    product = 1
    for length in shape:
        product *= length
    return product
