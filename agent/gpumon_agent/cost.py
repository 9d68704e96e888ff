"""What the agent costs the training, as a share of the mean step. In the status it is one word, 0 if not known."""

from __future__ import annotations

from typing import NamedTuple

_BITS = 32
_MOST = (1 << _BITS) - 2


class Cost(NamedTuple):
    """In millionths of the mean step. The true cost is within `error` of `share`, 19 times in 20.

    `error` None: not measured; it is `share` at most.
    """

    share: int
    error: int | None

    def packed(self) -> int:
        """Both are one more, so that 0 is free. A clock that was set back may have made them negative."""
        error = 0 if self.error is None else _within(self.error) + 1
        return _within(self.share) + 1 << _BITS | error


def unpacked(word: int) -> Cost | None:
    if not word:
        return None
    share, error = word >> _BITS, word & (1 << _BITS) - 1
    return Cost(share - 1, error - 1 if error else None)


def _within(millionths: int) -> int:
    return max(0, min(millionths, _MOST))
