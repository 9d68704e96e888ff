"""The simulated device's memory with a ledger: which line each allocated byte belongs to, at a phase's peak and end.

Cost. A few µs an allocation beside the simulator's own, and a copy of the lines at each new peak.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gpumon.analysis.estimate.simulator import Allocator, Block
from gpumon.analysis.lines import Lines


@dataclass(frozen=True, slots=True)
class PhaseBytes:
    """One phase of one iteration (0: load). The lines add up to `peak` and to `end`, `rounding` included."""

    phase: str
    iteration: int
    peak: int
    end: int
    at_peak: Lines
    at_end: Lines
    reserved: int  # at its highest


@dataclass(eq=False, slots=True)
class Storage:
    """Bytes of one line, until `uses` falls to 0."""

    block: Block | None
    line: str
    bytes: int
    uses: int = 1


@dataclass(slots=True)
class Memory:
    """Hands out storages and remembers the highest moment of the open phase."""

    allocator: Allocator = field(default_factory=Allocator)
    phases: list[PhaseBytes] = field(default_factory=list)
    iteration: int = 0
    _lines: dict[str, int] = field(default_factory=dict)
    _highest: int = 0
    _at_highest: dict[str, int] = field(default_factory=dict)

    def take(self, size: int, line: str) -> Storage:
        """`size` bytes, 0 allowed. Raises simulator.OutOfMemory."""
        if not size:
            return Storage(None, line, 0)
        block = self.allocator.malloc(size)
        self._lines[line] = self._lines.get(line, 0) + size
        if self.allocator.allocated > self._highest:
            self._highest = self.allocator.allocated
            self._at_highest = {**self._lines, "rounding": self._highest - self.allocator.requested}
        return Storage(block, line, size)

    def drop(self, storage: Storage) -> None:
        """One use less."""
        storage.uses -= 1
        if storage.uses == 0 and storage.block is not None:
            self.allocator.free(storage.block)
            self._lines[storage.line] -= storage.bytes

    def brief(self, size: int) -> None:
        """Temporaries that are gone at once."""
        self.drop(self.take(size, "temporaries"))

    def move(self, storage: Storage, line: str) -> Storage:
        """The same bytes under another name."""
        self._lines[storage.line] -= storage.bytes
        self._lines[line] = self._lines.get(line, 0) + storage.bytes
        storage.line = line
        return storage

    def close(self, phase: str) -> None:
        """End the phase here."""
        allocated = self.allocator.allocated
        highest = max(self._highest, allocated)
        end = {**self._lines, "rounding": allocated - self.allocator.requested}
        peak = self._at_highest if self._highest > allocated else end
        reserved = self.allocator.peaks.reserved
        self.phases.append(
            PhaseBytes(
                phase, self.iteration, highest, allocated, _as_lines(peak, highest), _as_lines(end, allocated), reserved
            )
        )
        self.allocator.reset_peaks()
        self._highest, self._at_highest = allocated, end


def _as_lines(lines: dict[str, int], allocated: int) -> Lines:
    return Lines(**{name: value for name, value in lines.items() if value}, allocated=allocated)
