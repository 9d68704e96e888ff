"""What a phase needs for a batch of given shapes, learnt step by step: the few coefficients behind every outlook.

Model. A phase's excess (its peak above what stood as the batch came) is a linear function of the batch's elements, the
elements of its further inputs, and the square of its length (attention), plus what the nearest known batches differ
from that by. A batch whose shapes were seen before needs what it needed then. Residuals of known, new and larger
batches are kept apart, for they differ in size; each sort's interval is the conformal one of its own residuals, with
the level adapted so that it holds as often as it says.

Sources. Recursive least squares (Plackett 1950) with Huber's weights (Huber 1964); conformal prediction by category
(Vovk, Gammerman, Shafer, "Algorithmic Learning in a Random World", 2005, section 4.5), adaptive level (Gibbs and
Candès, "Adaptive Conformal Inference Under Distribution Shift", 2021). Peaks are piecewise linear in the batch, for
they are the maximum over moments that are each linear in it: hence the differences of the nearest known batches.
Cost. `Needs.at` a few multiplications; `Needs.learn` one update of a 4 × 4 matrix. Memory: `POINTS_MAX` batches,
`RESIDUALS_MAX` residuals a sort.

Known limitations. Lengths are dimension 1 of what has two or three dimensions, and the product of the last two of what
has four; elsewhere a square is not looked for. Beyond the largest batch seen the line is carried on.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence

Shapes = Sequence[Sequence[int]]
Features = tuple[int, int, int]
"""elements of the first input, of the further ones whose shape differs, and the first one's batch · length²"""

POINTS_MAX = 64
RESIDUALS_MAX = 200
KNOWN, NEW, BEYOND, AFTER = range(4)
"""sorts of predictions: a batch seen before; a new one; one larger than any seen; what follows it peaks higher"""
FIRST_WIDTH = 0.10  # share of the peak to each side, before residuals of a sort are known
LEAST_WIDTH = 0.0005  # rounding of single blocks
COVERAGE = 0.96  # the level aimed at, so that 95 % holds on short runs too
SURE_BATCHES = 12
SQUARE_BATCHES = 6
SQUARE_BETTER = 0.6
SQUARE_LEAST = 0.002
"""The square of the length counts once so many batches differed, if it leaves less than this share of the plain line's
error, and that is no rounding."""
_SAME = 0.001
_RATE = 0.01  # of the level's adaptation


def features(shapes: Shapes) -> Features | None:
    """None for a batch without tensors."""
    if len(shapes) == 1 and len(shapes[0]) == 2:  # as most are
        rows, length = shapes[0]
        return (rows * length, 0, rows * length * length) if rows and length else None
    first = further = square = 0
    before: list[Sequence[int]] = []
    for shape in shapes:
        if shape in before:
            continue  # a mask or labels of the very shape tell nothing more
        before.append(shape)
        rank = len(shape)
        elements = math.prod(shape)
        if not first:
            first = elements
            if rank in (2, 3):
                square = shape[0] * shape[1] * shape[1]
            elif rank == 4:
                area = shape[2] * shape[3]
                square = shape[0] * area * area
        elif not (rank >= 2 and shape[-1] == shape[-2]):  # an attention mask is a square already
            further += elements
    return (first, further, square) if first else None


class _Line:
    """Coefficients of 1 and some features, by recursive least squares; and how far off it was lately."""

    __slots__ = ("coefficients", "covariance", "off")

    def __init__(self, prior: Sequence[float]) -> None:
        self.coefficients: tuple[float, ...] = (0.0,) * len(prior)
        self.covariance = [[p if i == j else 0.0 for j in range(len(prior))] for i, p in enumerate(prior)]
        self.off = 0.0

    def at(self, x: Sequence[float]) -> float:
        return sum([c * v for c, v in zip(self.coefficients, x, strict=False)])

    def learn(self, x: Sequence[float], y: float, weight: float, robust: bool, size: float, share: float) -> None:
        error = y - self.at(x)
        if robust:
            reach = 3 * max(self.off, 0.005 * size)
            if abs(error) > reach:
                weight *= reach / abs(error)
        self.off += (min(abs(error) / size, 0.5) - self.off) * share
        covariance, count = self.covariance, len(self.coefficients)
        px = [sum([p * v for p, v in zip(row, x, strict=False)]) for row in covariance]
        gain = 1 / (1 / weight + sum([p * v for p, v in zip(px, x, strict=False)]))
        step = gain * error
        self.coefficients = tuple([c + step * p for c, p in zip(self.coefficients, px, strict=True)])
        for i in range(count):
            row, part = covariance[i], gain * px[i]
            for k in range(count):
                row[k] -= part * px[k]


class Needs:
    """One phase's excess over the batch. `fixed`: with one batch known, take its excess as independent of the batch."""

    __slots__ = (
        "_keys", "_now", "_plain", "_points", "_scale", "_settled", "_square", "_unit", "fixed", "seen", "squares",
    )  # fmt: skip

    def __init__(self, *, fixed: bool = False) -> None:
        self.fixed = fixed
        self.forget()

    def forget(self) -> None:
        """Another regime: nothing learnt so far holds."""
        self.seen = 0
        self.squares = False  # the square of the length tells more than it costs
        self._unit: tuple[float, float, float] = (1.0, 1.0, 1.0)
        self._scale = 1.0
        sure, open_ = 1e2, 1e6
        prior = (open_, sure, sure, sure) if self.fixed else (sure, open_, 1e4, 1e4)
        self._plain, self._square = _Line(prior[:3]), _Line(prior)
        self._now = (0.0, 0.0, 0.0, 0.0)  # the line that counts, in bytes an element
        self._points: dict[Features, list[float]] = {}  # the last three excesses of each batch
        self._settled: dict[Features, float] = {}  # what they come to
        self._keys: list[Features] = []  # replaced, never changed: another thread may read

    @property
    def batches(self) -> int:
        """How many different batches are known."""
        return len(self._keys)

    def largest(self) -> Features | None:
        return self._keys[-1] if self._keys else None

    def sort_of(self, batch: Features) -> int:
        keys = self._keys
        if batch in self._points:
            return KNOWN
        return NEW if keys and batch[0] <= keys[-1][0] else BEYOND

    def line(self, batch: Features) -> float:
        """By the coefficients alone."""
        a, b, c, d = self._now
        return a + b * batch[0] + c * batch[1] + d * batch[2]

    def at(self, batch: Features) -> float:
        """The excess to expect."""
        settled = self._settled
        known = settled.get(batch)
        if known is not None:
            return known
        keys = self._keys
        if not keys:
            return 0.0
        x, y, z = batch
        if x > keys[-1][0]:
            return self._beyond(batch, keys[-1])
        at = bisect_left(keys, batch)
        if at == 0 or at == len(keys):
            return self.line(batch) + self._beside(keys[0 if at == 0 else -1])
        # as `line` and `_beside`, without a call for each: this is asked as a batch enters forward
        left, right = keys[at - 1], keys[at]
        (x1, y1, z1), (x2, y2, z2) = left, right
        share = (x - x1) / (x2 - x1) if x1 != x2 else 0.5
        a, b, c, d = self._now
        below, above = settled.get(left), settled.get(right)
        low = 0.0 if below is None else below - (a + b * x1 + c * y1 + d * z1)
        high = 0.0 if above is None else above - (a + b * x2 + c * y2 + d * z2)
        return a + b * x + c * y + d * z + (1 - share) * low + share * high

    def _beyond(self, batch: Features, largest: Features) -> float:
        """Carried on from the largest batch known. A maximum of moments does not bend down: nor does this."""
        _, b, c, d = self._now
        square: float = batch[2] - largest[2]
        if d < 0:
            square = 2 * largest[2] * (batch[0] / largest[0] - 1)
        more = b * (batch[0] - largest[0]) + c * (batch[1] - largest[1]) + d * square
        return self.line(largest) + self._beside(largest) + max(0.0, more)

    def _beside(self, batch: Features) -> float:
        known = self._settled.get(batch)
        return 0.0 if known is None else known - self.line(batch)

    def learn(self, batch: Features, excess: float) -> None:
        """One step's excess. Of the same batch, the same again costs next to nothing."""
        self.seen += 1
        points = self._points
        known = points.get(batch)
        if known is not None:
            known.append(excess)
            if len(known) > 3:
                del known[0]
            if abs(excess - known[-2]) <= _SAME * abs(excess):
                self._settled[batch] = excess
                return
            self._settled[batch] = _settled(known)
        else:
            if not points:
                self._unit = (1 / batch[0], 1 / batch[1] if batch[1] else 0.0, 1 / batch[2] if batch[2] else 0.0)
                self._scale = max(abs(excess), 1.0)
            sure = len(points) >= SURE_BATCHES and abs(excess - self.at(batch)) <= _SAME * abs(excess)
            if len(points) >= POINTS_MAX:
                self._drop()
            points[batch] = [excess]
            self._settled[batch] = excess
            keys = self._keys.copy()
            insort(keys, batch)
            self._keys = keys
            if sure:
                return  # nothing to be learnt from it
        self._update(batch, excess)

    def _drop(self) -> None:
        """The batch known longest, unless it is the smallest or the largest."""
        keys = self._keys
        oldest = next((key for key in self._points if key not in (keys[0], keys[-1])), keys[0])
        self._keys = [key for key in keys if key != oldest]
        del self._points[oldest], self._settled[oldest]

    def _update(self, batch: Features, excess: float) -> None:
        u, v, w = self._unit
        x = (1.0, batch[0] * u, batch[1] * v, batch[2] * w)
        y = excess / self._scale
        size = max(x[1], 1e-3)
        weight = min(size * size, 1e4)  # large batches decide whether memory suffices; below, the differences tell
        robust, share = len(self._keys) > 5, 1 / min(self.seen, 20)
        self._plain.learn(x, y, weight, robust, size, share)
        if batch[2]:
            self._square.learn(x, y, weight, robust, size, share)
            if len(self._keys) >= SQUARE_BATCHES:
                self.squares = self._square.off < SQUARE_BETTER * self._plain.off and self._plain.off > SQUARE_LEAST
        scale = self._scale
        if self.squares:
            a, b, c, d = self._square.coefficients
        else:
            (a, b, c), d = self._plain.coefficients, 0.0
        self._now = a * scale, b * u * scale, c * v * scale, d * w * scale


def _settled(values: list[float]) -> float:
    """Of the last three: the newest where the last two agree, else the middle one."""
    if len(values) < 3 or abs(values[-1] - values[-2]) <= _SAME * abs(values[-1]):
        return values[-1]
    return sorted(values)[1]


class Residuals:
    """How far off the predictions of one sort were, as shares of what was predicted; and the interval that gives."""

    __slots__ = ("_newest", "_ordered", "above", "below", "level", "prior", "seen")

    def __init__(self) -> None:
        self.forget()

    def forget(self, width: float = FIRST_WIDTH) -> None:
        self._newest: deque[float] = deque()
        self._ordered: list[float] = []
        self.level = 1 - COVERAGE  # misses aimed at; adapted
        self.prior = width
        self.seen = 0
        self.below, self.above = -width, width

    def learn(self, residual: float) -> bool:
        """Whether the interval held."""
        held = self.below <= residual <= self.above
        self.seen += 1
        if self.seen > 8:
            self.level = min(0.2, max(0.01, self.level + _RATE * (1 - COVERAGE - (not held))))
        if len(self._newest) == RESIDUALS_MAX:
            del self._ordered[bisect_left(self._ordered, self._newest.popleft())]
        self._newest.append(residual)
        insort(self._ordered, residual)
        self._settle()
        return held

    def _settle(self) -> None:
        ordered = self._ordered
        count = len(ordered)
        tail = self.level / 2
        reach = (ordered[-1] - ordered[0]) * 3 / (count + 1)
        low, high = math.floor((count + 1) * tail), math.ceil((count + 1) * (1 - tail))
        extra = self.prior / (self.seen + 1) ** 2
        least = LEAST_WIDTH + (extra if extra > 1e-4 else 0.0)
        self.below = min(-least, ordered[low - 1] if low >= 1 else ordered[0] - reach)
        self.above = max(least, ordered[high - 1] if high <= count else ordered[-1] + reach)

    def above_share(self, share: float) -> float:
        """How likely the next residual is above `share`."""
        count = len(self._ordered)
        return (count - bisect_left(self._ordered, share) + 0.5) / (count + 1)
