"""What gpumon costs the training, as the agent measures it."""

from __future__ import annotations

from math import ceil

import msgspec

from gpumon_agent import wire

LIMIT_MAX = 0.1


class OwnCost(msgspec.Struct, frozen=True):
    """Shares of the mean step's time. The true cost is within `error` of `share`, 19 times in 20.

    `error` None: not measured (yet); it is `share` at most.
    """

    share: float
    error: float | None

    @property
    def says_something(self) -> bool:
        """A limit far above any plausible cost, as in the first seconds, does not."""
        return self.error is not None or self.share <= LIMIT_MAX

    @property
    def text(self) -> str:
        """ "costs 0.4 % ± 0.2", "costs ≤ 1.3 %"; limits are rounded up."""
        if self.error is None:
            return f"costs ≤ {_up(self.share)} %"
        return f"costs {100 * self.share:.1f} % ± {_up(self.error)}"


def own_cost(heartbeat: wire.Heartbeat | None) -> OwnCost | None:
    """None: not known, as of older agents or if GPUMON_GOVERNOR is off."""
    if heartbeat is None or heartbeat.cost is None:
        return None
    error = heartbeat.cost_error
    return OwnCost(heartbeat.cost / 1e6, None if error is None else error / 1e6)


def _up(share: float) -> str:
    """Per cent, in tenths; in whole ones from ten on, and never 0."""
    tenths = max(1, ceil(round(1_000 * share, 6)))
    return f"{tenths / 10:.1f}" if tenths < 100 else f"{ceil(tenths / 10):,}"
