"""A time limit for a slice of work, in the thread's CPU time: waiting for a busy CPU does not count."""

from __future__ import annotations

from time import monotonic_ns, thread_time_ns


class ThreadClock:
    """Starts when created. Reading a thread's CPU time is a system call; the monotonic clock costs a tenth of that and
    is never behind, so it is read first."""

    __slots__ = ("_began", "_budget_ns", "_last_ns", "_look_ns")

    def __init__(self, budget_ns: int, *, wall_ns: int | None = None) -> None:
        self._began = thread_time_ns()
        self._budget_ns = budget_ns
        now = monotonic_ns()
        self._last_ns = None if wall_ns is None else now + wall_ns  # the end, whatever else runs
        self._look_ns = now + budget_ns

    def over(self) -> bool:
        now = monotonic_ns()
        if now < self._look_ns:
            return False
        left = self._budget_ns - self.spent_ns
        if left <= 0 or (self._last_ns is not None and now >= self._last_ns):
            return True
        self._look_ns = now + left
        return False

    @property
    def spent_ns(self) -> int:
        return thread_time_ns() - self._began
