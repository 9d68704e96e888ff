"""A time limit for a slice of work, by the thread's own time: waiting for a busy processor does not count."""

from __future__ import annotations

from time import monotonic_ns, thread_time_ns


class ThreadClock:
    """From its making on. Asking the processor for a thread's time is a system call; the other clock costs a tenth of
    that, and can only run ahead: so it is asked first."""

    __slots__ = ("_began", "_budget_ns", "_last_ns", "_look_ns")

    def __init__(self, budget_ns: int, *, wall_ns: int | None = None) -> None:
        self._began = thread_time_ns()
        self._budget_ns = budget_ns
        now = monotonic_ns()
        self._last_ns = None if wall_ns is None else now + wall_ns  # whoever else runs: this is the end
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
