"""Learns step by step how many bytes a phase needs for a batch of given shapes: a regression with few coefficients.

Model. A phase's excess (its peak above what was allocated as the batch arrived) is linear in the elements of the first
input, the elements of the others, and the square of its length (attention), plus the interpolated residuals of the
nearest known batches. For batches with two lengths the maximum of two planes (see max_affine) is used instead if it has
been closer so far. Shapes seen before get the excess they had then. Others get a multiple of the allocator's block.

Source. Recursive least squares (Plackett 1950). A peak is the maximum over moments that are each linear in the batch,
so it is piecewise linear: hence the residuals of neighbours.
Cost. `at`: a few multiplications; `learn`: one update of a 4 × 4 matrix, sometimes planes. Memory: `POINTS_MAX`
batches.

Known limitations. The length is dimension 1 of inputs with two or three dimensions, and the product of the last two of
inputs with four; no other square is tried. Beyond the largest batch seen the line is extrapolated.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Sequence

from gpumon_agent.shape_model.max_affine import LEAST, Plane, fitted, highest
from gpumon_agent.units import BLOCK_BYTES

Shapes = Sequence[Sequence[int]]
Features = tuple[int, int, int, int, int]
"""elements of the first input, of the others; batch · length² of the first, of the others; batch · both lengths"""

_Columns = tuple[list[Features], "array[float]", "array[float]", "array[float]", "array[float]"]
"""Batches by size; their first three features and their excess as contiguous columns, because they are looked up after
a whole training step, when nothing of them is in the CPU's caches."""

POINTS_MAX = 64
KNOWN, NEW, BEYOND, AFTER = range(4)
"""sorts of predictions: a batch seen before; a new one; one larger than any seen; a later phase peaks higher"""


def features(shapes: Shapes) -> Features | None:
    """None for a batch without tensors."""
    if len(shapes) == 1 and len(shapes[0]) == 2:  # the most common case
        rows, length = shapes[0]
        return (rows * length, 0, rows * length * length, 0, 0) if rows and length else None
    if len(shapes) == 2 and len(shapes[0]) == len(shapes[1]) == 2:  # encoder and decoder
        (rows, length), (others, other) = shapes
        first = rows * length
        if first:
            if others == other:
                return first, 0, first * length, 0, 0
            further = others * other
            return first, further, first * length, further * other, further * length
    first = further = square = other = product = length = 0
    for shape in shapes:
        rank = len(shape)
        elements = math.prod(shape)
        if not first:
            first = elements
            if rank in (2, 3):
                length = shape[1]
            elif rank == 4:
                length = shape[2] * shape[3]
            if rank in (2, 3, 4):
                square = shape[0] * length * length
        elif not (rank >= 2 and shape[-1] == shape[-2]):  # an attention mask is a square already
            further += elements
            if rank == 2 and length:  # decoder: self-attention and cross-attention
                other += shape[0] * shape[1] * shape[1]
                product += shape[0] * shape[1] * length
    return (first, further, square, other, product) if first else None


class _Line:
    """Coefficients of 1 and three features, by recursive least squares. Written out: it runs in every step."""

    __slots__ = ("coefficients", "covariance")

    def __init__(self, a: float, b: float, c: float, d: float) -> None:
        self.coefficients = (0.0, 0.0, 0.0, 0.0)
        self.covariance = (a, 0.0, 0.0, 0.0, b, 0.0, 0.0, c, 0.0, d)  # the upper triangle: it is symmetric

    def learn(self, u: float, v: float, w: float, y: float, weight: float) -> None:
        """Learns that the features (1, u, v, w) gave y."""
        c0, c1, c2, c3 = self.coefficients
        a, b, c, d, e, f, g, h, i, j = self.covariance
        p = a + b * u + c * v + d * w
        q = b + e * u + f * v + g * w
        r = c + f * u + h * v + i * w
        s = d + g * u + i * v + j * w
        gain = 1 / (1 / weight + (p + q * u + r * v + s * w))
        step = gain * (y - (c0 + c1 * u + c2 * v + c3 * w))
        self.coefficients = c0 + step * p, c1 + step * q, c2 + step * r, c3 + step * s
        x, y, z = gain * p, gain * q, gain * r
        self.covariance = (
            a - x * p, b - x * q, c - x * r, d - x * s, e - y * q, f - y * r, g - y * s, h - z * r, i - z * s,
            j - gain * s * s,
        )  # fmt: skip


class ShapeRegression:
    """One phase's excess over the batch."""

    __slots__ = (
        "_columns", "_compared", "_faces", "_furthest", "_keys", "_largest", "_line", "_now", "_off", "_planes",
        "_planes_off", "_points", "_refit_at", "_scale", "_settled", "_two", "_unit",
    )  # fmt: skip

    def __init__(self) -> None:
        self._unit: tuple[float, float, float] = (1.0, 1.0, 1.0)
        self._scale = 1.0
        # the variances of 1 and the features. The square's is small: blocks rounded up are not taken for a square, and
        # a real one is known after a few batches
        self._line = _Line(1e2, 1e6, 1e4, 1e1)
        self._now = (0.0, 0.0, 0.0, 0.0)  # the line in use, in bytes per element
        self._points: dict[Features, list[float]] = {}  # the last three excesses of each batch
        self._settled: dict[Features, float] = {}  # the excess to predict
        self._keys: list[Features] = []
        self._columns: _Columns = self._keys, array("d"), array("d"), array("d"), array("d")
        # replaced as a whole; only its last column changes in place: another thread may read
        self._largest, self._furthest = -1, 0  # most elements of the first input and of the others
        self._planes: tuple[Plane, ...] = ()  # for batches of two lengths, over `_unit`
        self._faces: tuple[Plane, ...] = ()  # the same in bytes per element; empty if the line is better
        self._off = self._planes_off = 0.0  # recent error: line with neighbours, planes
        self._compared = 0
        self._two = False  # two lengths vary independently
        self._refit_at = 0  # new batches until then

    @property
    def batches(self) -> int:
        return len(self._keys)

    @property
    def is_determined(self) -> bool:
        """True with as many batches as coefficients. Errors before that say nothing about later ones."""
        return len(self._keys) >= len(self._line.coefficients)

    def largest(self) -> Features | None:
        return self._keys[-1] if self._keys else None

    def sort_of(self, batch: Features) -> int:
        if batch in self._settled:
            return KNOWN
        return NEW if batch[0] <= self._largest and batch[1] <= self._furthest else BEYOND

    def line(self, batch: Features) -> float:
        """From the coefficients alone."""
        a, b, c, d = self._now
        return a + b * batch[0] + c * batch[1] + d * batch[2]

    def at(self, batch: Features) -> float:
        """The expected excess."""
        known = self._settled.get(batch)
        if known is not None:
            return known
        if batch[0] > self._largest:
            expected = self._beyond(batch, self._keys[-1]) if self._keys else 0.0
        elif self._faces and batch[1]:
            expected = highest(self._faces, (1.0, *batch))
        else:
            expected = self._between(batch)
        return float(round(expected / BLOCK_BYTES) * BLOCK_BYTES)

    def _between(self, batch: Features) -> float:
        """The line plus the interpolated residuals of both neighbours."""
        keys, xs, ys, zs, settled = self._columns
        x, y, z, _, _ = batch
        right = bisect_left(xs, x)
        if right < len(xs) and xs[right] == x:
            right = bisect_left(keys, batch)  # several with as many elements
        if right == 0 or right == len(xs):
            return self.line(batch) + self._beside(keys[0 if right == 0 else -1])
        left = right - 1
        # line plus weighted residuals of both: terms linear in the elements cancel out
        x1, low = xs[left], settled[left]
        apart = xs[right] - x1
        share = (x - x1) / apart if apart else 0.5
        between = low + share * (settled[right] - low)
        _, _, c, d = self._now
        if y:
            y1 = ys[left]
            between += c * (y - y1 - share * (ys[right] - y1))
        if d:
            z1 = zs[left]
            between += d * (z - z1 - share * (zs[right] - z1))
        return between

    def _beyond(self, batch: Features, largest: Features) -> float:
        """Extrapolates from the largest batch. A peak is convex: a negative square becomes its tangent."""
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
        """Learns one step's excess. The same value for the same batch costs almost nothing."""
        points = self._points
        known = points.get(batch)
        if known is not None:
            known.append(excess)
            if len(known) > 3:
                del known[0]
            if excess == known[-2]:
                self._settle(batch, excess)
                return
            self._settle(batch, _settled(known))
        else:
            if not points:
                self._unit = (1 / batch[0], 1 / batch[1] if batch[1] else 0.0, 1 / batch[2] if batch[2] else 0.0)
                self._scale = max(abs(excess), 1.0)
            if self._planes:
                self._compare(batch, excess)
            if len(points) >= POINTS_MAX:
                self._drop()
            points[batch] = [excess]
            keys = self._place(batch, excess)
            if batch[1]:
                self._furthest = max(self._furthest, batch[1])
                one = keys[0]  # masks and labels are proportional to the first input: no second length
                self._two = self._two or (batch[1] != one[1] and batch[1] * one[0] != one[1] * batch[0])
            if self._two:
                self._refit_at -= 1
                if self._refit_at <= 0:
                    self._fit()
        self._update(batch, excess)

    def _settle(self, batch: Features, excess: float) -> None:
        self._settled[batch] = excess
        keys, *_, settled = self._columns
        settled[bisect_left(keys, batch)] = excess

    def _place(self, batch: Features, excess: float) -> list[Features]:
        """Inserts a new batch, by size."""
        at = bisect_left(self._keys, batch)
        columns = keys, xs, ys, zs, settled = _copied(self._columns)
        keys.insert(at, batch)
        for column, value in ((xs, batch[0]), (ys, batch[1]), (zs, batch[2]), (settled, excess)):
            column.insert(at, value)
        self._settled[batch] = excess
        self._keys, self._columns, self._largest = keys, columns, keys[-1][0]
        return keys

    def _compare(self, batch: Features, excess: float) -> None:
        """Compares line and planes on a new batch of two lengths. The better one is used from now on."""
        self._compared += 1
        share = 1 / self._compared
        said = highest(self._planes, self._over(batch)) * self._scale
        self._off += (abs(excess - self._between(batch)) - self._off) * share
        self._planes_off += (abs(excess - said) - self._planes_off) * share
        self._face()

    def _over(self, batch: Features) -> Plane:
        u, v, w = self._unit
        return 1.0, batch[0] * u, batch[1] * v, batch[2] * w, batch[3] * w, batch[4] * w

    def _fit(self) -> None:
        points = [(self._over(batch), excess / self._scale) for batch, excess in self._settled.items()]
        self._planes = fitted(points, self._planes)
        self._refit_at = 2 * LEAST
        self._face()

    def _face(self) -> None:
        faces: list[Plane] = []
        if self._planes_off < self._off:
            (u, v, w), scale = self._unit, self._scale
            w *= scale
            faces = [
                (a * scale, b * u * scale, c * v * scale, d * w, e * w, f * w) for a, b, c, d, e, f in self._planes
            ]
        self._faces = tuple(faces)

    def _drop(self) -> None:
        """Drops the batch known longest, but not the smallest or largest."""
        keys = self._keys
        oldest = next((key for key in self._points if key not in (keys[0], keys[-1])), keys[0])
        at = bisect_left(keys, oldest)
        columns = _copied(self._columns)
        for column in columns:
            del column[at]
        self._keys, self._columns = columns[0], columns
        del self._points[oldest], self._settled[oldest]

    def _update(self, batch: Features, excess: float) -> None:
        u, v, w = self._unit
        elements = batch[0] * u
        size = max(elements, 1e-3)
        weight = min(size * size, 1e4)  # large batches decide whether memory suffices; smaller ones rely on residuals
        self._line.learn(elements, batch[1] * v, batch[2] * w, excess / self._scale, weight)
        scale = self._scale
        a, b, c, d = self._line.coefficients
        self._now = a * scale, b * u * scale, c * v * scale, d * w * scale


def _copied(columns: _Columns) -> _Columns:
    keys, xs, ys, zs, settled = columns
    return keys[:], xs[:], ys[:], zs[:], settled[:]


def _settled(values: list[float]) -> float:
    """The newest value, or the median of three if the last two disagree."""
    if len(values) < 3 or values[-1] == values[-2]:
        return values[-1]
    return sorted(values)[1]
