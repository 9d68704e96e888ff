"""Sequence numbers received from a stream, as a bounded number of intervals."""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise


class SequenceIntervals:
    """The event numbers received: disjoint closed intervals in order, the newest last."""

    __slots__ = ("_limit", "forgotten", "spans")

    def __init__(self, limit: int) -> None:
        self.spans: list[list[int]] = []
        self.forgotten = 0  # missing numbers in gaps no longer kept
        self._limit = limit

    def take(self, seq: int) -> bool:
        """True if `seq` is new."""
        spans = self.spans
        if spans:
            newest = spans[-1]
            if seq == newest[1] + 1:
                newest[1] = seq
                return True
            if seq > newest[1]:
                spans.append([seq, seq])
                if len(spans) > self._limit:
                    self.forgotten += spans[1][0] - spans[0][1] - 1
                    spans[0:2] = [[spans[0][0], spans[1][1]]]
                return True
            return self._take_older(seq)
        spans.append([seq, seq])
        return True

    def take_next(self, first: int, last: int) -> bool:
        """Takes these numbers if they directly follow the newest. False if not."""
        spans = self.spans
        if not spans or spans[-1][1] + 1 != first:
            return False
        spans[-1][1] = last
        return True

    def _take_older(self, seq: int) -> bool:
        spans = self.spans
        at = bisect_left(spans, seq, key=lambda span: span[1])  # the first span that ends at or after seq
        if spans[at][0] <= seq:
            return False
        joins_left = at > 0 and spans[at - 1][1] == seq - 1
        joins_right = spans[at][0] == seq + 1
        if joins_left and joins_right:
            spans[at - 1][1] = spans[at][1]
            del spans[at]
        elif joins_left:
            spans[at - 1][1] = seq
        elif joins_right:
            spans[at][0] = seq
        elif len(spans) < self._limit:
            spans.insert(at, [seq, seq])
        return True

    def lost(self) -> int:
        """Numbers missing between the lowest and the highest received."""
        gaps = sum(right[0] - left[1] - 1 for left, right in pairwise(self.spans))
        return gaps + self.forgotten

    def unbroken(self, first: int, last: int) -> bool:
        newest = self.spans[-1]
        if newest[0] <= first and last <= newest[1]:
            return True
        at = bisect_left(self.spans, last, key=lambda span: span[1])
        return at < len(self.spans) and self.spans[at][0] <= first
