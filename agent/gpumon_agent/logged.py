"""Figures under names, for a logger: what the agent has read since the logger was last given some."""

from __future__ import annotations

from collections.abc import Iterable

from gpumon_agent import wire

PREFIX = "gpumon/"
_PHASES = (wire.FORWARD, wire.BACKWARD, wire.OPTIMIZER)


class Logged:
    """One logger's. It follows the events that the agent sends to viewers."""

    def __init__(self) -> None:
        self._peaks: dict[str, int] = {}  # since the last `take`
        self._reserved: dict[int, int] = {}  # by device, newest
        self._outlooks: dict[int, wire.Outlook] = {}  # by device, newest

    def drained(self, events: Iterable[tuple[int, wire.NumberedEvent]]) -> None:
        """Call with all events, in order."""
        for _, event in events:
            if isinstance(event, wire.Phase):
                self.reads(event.device, event.allocated_peak, event.reserved)
                if event.phase in _PHASES:
                    self._raise(f"{event.phase}_peak", event.allocated_peak)
            elif isinstance(event, wire.Step):
                for quiet in event.quiet_peaks:
                    self._raise("peak", quiet.allocated_peak)
            elif isinstance(event, wire.Outlook):
                self._outlooks[event.device] = event

    def reads(self, device: int, peak: int | None, reserved: int | None) -> None:
        self._raise("peak", peak)
        if reserved is not None:
            self._reserved[device] = reserved

    def _raise(self, name: str, peak: int | None) -> None:
        if peak is not None and peak > self._peaks.get(name, -1):
            self._peaks[name] = peak

    def take(self) -> dict[str, int]:
        """The figures, in bytes; unknown ones are left out. Of several devices the one nearest to full counts."""
        peaks, self._peaks = self._peaks, {}
        figures = {name: peaks[name] for name in ("peak", *(f"{phase}_peak" for phase in _PHASES)) if name in peaks}
        if self._reserved:
            figures["reserved"] = max(self._reserved.values())
        if self._outlooks:
            figures["next_peak"] = max(outlook.next_peak for outlook in self._outlooks.values())
            room = [outlook.headroom for outlook in self._outlooks.values() if outlook.headroom is not None]
            if room:
                figures["headroom"] = min(room)
        return {f"{PREFIX}{name}_bytes": figure for name, figure in figures.items()}
