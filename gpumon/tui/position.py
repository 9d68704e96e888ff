"""Where a replay stands, or which past step of a live run is shown."""

from __future__ import annotations

import msgspec


class Moment(msgspec.Struct, frozen=True):
    """An event of the run, as `]` finds it."""

    kind: str
    step: int
    unix_ns: int


class Position(msgspec.Struct, frozen=True):
    unix_ns: int = 0  # of the newest message; 0: none yet
    step: int = -1  # the newest that was closed; -1: none yet
    first_ns: int = 0
    last_ns: int = 0  # 0: the recording's length is not known yet
    last_step: int = -1
    speed: float = 1.0
    held: bool = False
    ended: bool = False
    going_to: int | None = None  # a step that is being looked for
    moments: tuple[Moment, ...] = ()

    @property
    def share(self) -> float | None:
        """Of the recording's time."""
        if self.last_ns <= self.first_ns or not self.unix_ns:
            return None
        return min(1.0, max(0.0, (self.unix_ns - self.first_ns) / (self.last_ns - self.first_ns)))

    @property
    def moment(self) -> Moment | None:
        """The event of this step. In a step that never ended too."""
        here = [each for each in self.moments if each.step == self.step or (self.ended and each.step > self.step)]
        return here[-1] if here else None
