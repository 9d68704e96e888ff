"""What a phase needs for batches of two lengths (an encoder's and a decoder's): the highest of two planes.

Model. A peak is the maximum over moments that are each linear in the batch. Where one length differs, what the nearest
known batches differ from a line by tells that; where two do, a batch near in the one may be far in the other, so two
planes are fitted: each to the batches at which it is the higher one, from the planes before, or from halves of the
batches by size.
Source. Max-affine regression: Magnani and Boyd, "Convex piecewise-linear fitting", Optimization and Engineering 10
(2009).
Cost. `fitted`: some 15 multiplications a batch and turn, `TURNS` turns: a third of a millisecond for 64 batches.
Known limitations. What has more than two moments that peak, or bends down, is followed as far as two planes do.
"""

from __future__ import annotations

from collections.abc import Sequence

Plane = tuple[float, float, float, float]
Point = tuple[Plane, float]
"""1 and the batch's features, and what it needed"""

TURNS = 4
LEAST = 5  # batches that a plane is fitted to
_RIDGE = 1e-6


def fitted(points: Sequence[Point], planes: Sequence[Plane] = ()) -> tuple[Plane, ...]:
    """The planes, none where there are too few points. `planes`: those from before."""
    if len(points) < 2 * LEAST:
        return ()
    if len(planes) == 2:
        groups = _won(points, planes)
    else:
        ordered = sorted(points, key=_size)
        groups = [ordered[: len(ordered) // 2], ordered[len(ordered) // 2 :]]
    for _ in range(TURNS):
        if min(len(group) for group in groups) < LEAST:
            return (_plane(points),)
        planes = [_plane(group) for group in groups]
        before, groups = groups, _won(points, planes)
        if groups == before:
            break
    return tuple(planes)


def highest(planes: Sequence[Plane], x: Plane) -> float:
    return max([a * x[0] + b * x[1] + c * x[2] + d * x[3] for a, b, c, d in planes])


def _size(point: Point) -> float:
    return point[0][1] + point[0][2]


def _won(points: Sequence[Point], planes: Sequence[Plane]) -> list[list[Point]]:
    """The points at which each of two planes is the higher one."""
    (a, b, c, d), (e, f, g, h) = planes
    groups: list[list[Point]] = [[], []]
    for point in points:
        _, x, y, z = point[0]
        groups[a + b * x + c * y + d * z < e + f * x + g * y + h * z].append(point)
    return groups


def _plane(points: Sequence[Point]) -> Plane:
    """Least squares, by the normal equations."""
    rows = [[_RIDGE * len(points) if i == j else 0.0 for j in range(4)] + [0.0] for i in range(4)]
    for (one, x, y, z), value in points:
        for row, factor in zip(rows, (one, x, y, z), strict=True):
            row[0] += factor
            row[1] += factor * x
            row[2] += factor * y
            row[3] += factor * z
            row[4] += factor * value
    for i, pivot in enumerate(rows):  # positive definite: no pivot is zero
        for row in rows[i + 1 :]:
            share = row[i] / pivot[i]
            for k in range(i, 5):
                row[k] -= share * pivot[k]
    found = [0.0] * 4
    for i in (3, 2, 1, 0):
        row = rows[i]
        found[i] = (row[4] - sum(row[k] * found[k] for k in range(i + 1, 4))) / row[i]
    return found[0], found[1], found[2], found[3]
