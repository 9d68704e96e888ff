"""Limits of a session: bounds of all rings and tables of the store."""

from __future__ import annotations

import msgspec

from gpumon_agent import wire


class StoreLimits(msgspec.Struct, frozen=True):
    steps: int = 4_096  # closed steps a rank that the helper keeps in full, until `Thinned` drops the oldest
    steps_in_all: int = 16_384  # of all ranks together: with many ranks each keeps fewer
    steps_at_least: int = 64  # of each rank, for any number of ranks
    older: int = 1_024  # thinned steps kept
    open_steps: int = 8  # running steps a rank; more than one only while live and replayed events mix
    events_per_step: int = 8 * wire.PHASES_PER_STEP_MAX
    notices: int = 64
    modules: int = 65_536  # a model
    models: int = 64
    layers: int = 65_536  # of a model on a device
    checkpoints: int = 256  # loads, each on each device
    blocks: int = 1_048_576  # of a device
    host_samples: int = 600  # a machine; ten minutes at one reading a second
    gaps: int = 64  # intervals of lost numbers a rank that a late snapshot may still fill
    ended: int = 64  # ranks that sent Goodbye

    def steps_of(self, ranks: int) -> int:
        """Closed steps that each of `ranks` keeps."""
        return min(self.steps, max(self.steps_at_least, self.steps_in_all // max(1, ranks)))

    def older_of(self, ranks: int) -> int:
        """Thinned steps that each of `ranks` keeps."""
        return min(self.older, max(self.steps_at_least, self.steps_in_all // 4 // max(1, ranks)))
