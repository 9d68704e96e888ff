"""Which frames of a recording stay when it has become too large."""

from __future__ import annotations

from collections.abc import Sequence


def spared(frames: Sequence[tuple[int, int]], limit: int) -> list[int]:
    """Positions of the frames to keep, in at most `limit` bytes. `frames`: (number, bytes), in order.

    The first and the newest quarter stay, and one of every 2, 4, 8, … of those between. If that is not enough, the
    newest alone. Thinned again and again, the older a time is, the fewer frames are left of it.
    """
    last = len(frames) - 1
    newest = len(frames) - max(2, len(frames) // 4)  # the last has just begun
    stride = 2
    while True:
        kept = [at for at, (number, _) in enumerate(frames) if at == 0 or at >= newest or number % stride == 0]
        if sum(frames[at][1] for at in kept) <= limit:
            return kept
        if stride > frames[last][0]:
            break
        stride *= 2
    left = limit - frames[0][1]
    kept = []
    for at in range(last, 0, -1):
        left -= frames[at][1]
        if left < 0 and kept:
            break
        kept.append(at)
    return [0, *reversed(kept)]
