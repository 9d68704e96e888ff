"""What a session keeps at most: every ring and every table of the store has its bound here."""

from __future__ import annotations

from dataclasses import dataclass

from gpumon_agent import wire


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """What a session keeps at most."""

    steps: int = 4_096  # closed steps a rank, of which the helper keeps everything: it says when it drops the oldest
    steps_in_all: int = 16_384  # of all ranks together: where they are many, each keeps fewer
    steps_at_least: int = 64  # of each rank, however many there are
    older: int = 1_024  # of those it dropped, the ones it kept
    open_steps: int = 8  # steps under way a rank; more than one only while live and replayed events mix
    events_per_step: int = 8 * wire.PHASES_PER_STEP_MAX
    notices: int = 64
    modules: int = 65_536  # a model
    models: int = 64
    layers: int = 65_536  # of a model on a device
    checkpoints: int = 256  # loads, each on each device
    blocks: int = 1_048_576  # of a device
    host_samples: int = 600  # a machine; ten minutes at one reading a second
    gaps: int = 64  # intervals of lost numbers a rank that a late snapshot may still fill
    ended: int = 64  # ranks that said goodbye

    def steps_of(self, ranks: int) -> int:
        """How many closed steps each of so many ranks keeps."""
        return min(self.steps, max(self.steps_at_least, self.steps_in_all // max(1, ranks)))

    def older_of(self, ranks: int) -> int:
        """How many of the thinned steps each of so many ranks keeps."""
        return min(self.older, max(self.steps_at_least, self.steps_in_all // 4 // max(1, ranks)))
