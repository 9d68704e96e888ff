"""Fits what a phase needs for batches of two lengths (an encoder's and a decoder's): the maximum of two planes.

Model. A peak is the maximum over moments that are each linear in the batch. With one varying length we interpolate the
residuals of neighbouring batches. With two, neighbours in one length can be far apart in the other, so we fit
max(plane1, plane2), assigning each batch to the plane that is higher there, until the assignment stays or comes again.
It starts from the last planes, or from halves of the batches by size.
Source. Max-affine regression: Magnani and Boyd, "Convex piecewise-linear fitting", Optimization and Engineering 10
(2009). Squares and product of the lengths (attention that stores its weights: encoder, decoder,
cross-attention) have a ten times larger ridge, so that a few batches do not suggest them.
Benefit: without it the median error for batches of two lengths doubles (benchmarks/forecast.py: pairs,
random 0.68 to 1.46 %; pairs, sorted by length 0.55 to 1.23 %).
Cost. `fitted`: about 40 multiplications a batch and turn, mostly two or three turns: half a millisecond for 64 batches.
Known limitations. Two planes only approximate a peak with more than two moments, or a concave one.
"""

from __future__ import annotations

from collections.abc import Sequence

Plane = tuple[float, float, float, float, float, float]
Point = tuple[Plane, float]
"""(1 and the batch's features; its value)"""

LEAST = 6  # batches per plane
RIDGE = (1e-6, 1e-6, 1e-6, 1e-5, 1e-5, 1e-5)


def fitted(points: Sequence[Point], planes: Sequence[Plane] = ()) -> tuple[Plane, ...]:
    """The planes; none if there are too few points. `planes`: the previous ones."""
    if len(points) < 2 * LEAST:
        return ()
    if len(planes) == 2:
        groups = _won(points, planes)
    else:
        ordered = sorted(points, key=_size)
        groups = [ordered[: len(ordered) // 2], ordered[len(ordered) // 2 :]]
    known: list[list[list[Point]]] = []
    while groups not in known:  # until they stay as they are, or come again
        if min(len(group) for group in groups) < LEAST:
            return (_plane(points),)
        known.append(groups)
        planes = [_plane(group) for group in groups]
        groups = _won(points, planes)
    return tuple(planes)


def highest(planes: Sequence[Plane], x: Plane) -> float:
    _, u, v, w, p, q = x
    (a, b, c, d, e, f) = planes[0]
    found = a + b * u + c * v + d * w + e * p + f * q
    if len(planes) == 2:  # no loop: runs whenever a batch enters forward
        (a, b, c, d, e, f) = planes[1]
        other = a + b * u + c * v + d * w + e * p + f * q
        if other > found:
            return other
    return found


def _size(point: Point) -> float:
    return point[0][1] + point[0][2]


def _won(points: Sequence[Point], planes: Sequence[Plane]) -> list[list[Point]]:
    """The points at which each of two planes is the higher one."""
    first, second = ((plane,) for plane in planes)
    groups: list[list[Point]] = [[], []]
    for point in points:
        groups[highest(first, point[0]) < highest(second, point[0])].append(point)
    return groups


def _plane(points: Sequence[Point]) -> Plane:
    """Least squares, by the normal equations."""
    size = len(RIDGE)
    rows = [[ridge * len(points) if i == j else 0.0 for j in range(size)] + [0.0] for i, ridge in enumerate(RIDGE)]
    for x, value in points:
        every = (*x, value)
        for row, factor in zip(rows, x, strict=True):
            if factor:
                row[:] = [known + factor * each for known, each in zip(row, every, strict=True)]
    for i, pivot in enumerate(rows):  # positive definite: no pivot is zero
        for row in rows[i + 1 :]:
            share = row[i] / pivot[i]
            for k in range(i, size + 1):
                row[k] -= share * pivot[k]
    found = [0.0] * size
    for i in reversed(range(size)):
        row = rows[i]
        found[i] = (row[size] - sum(row[k] * found[k] for k in range(i + 1, size))) / row[i]
    a, b, c, d, e, f = found
    return a, b, c, d, e, f
