"""What the agent has read since it was last asked: figures under names for a logger, and by device for a page."""

from __future__ import annotations

from collections.abc import Iterable

from gpumon_agent import wire

PREFIX = "gpumon/"
PEAK = "peak"
PHASES = (wire.FORWARD, wire.BACKWARD, wire.OPTIMIZER)


class Seen:
    """One device's. Each attribute is stored at once, so that any thread may read it."""

    __slots__ = ("allocated", "oom", "outlook", "peaks", "reserved")

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}  # PEAK or a phase → bytes, since the last `take`
        self.allocated: int | None = None  # newest, and so are the rest
        self.reserved: int | None = None
        self.outlook: wire.Outlook | None = None
        self.oom: wire.Oom | None = None

    def reads(self, peak: int | None, reserved: int | None) -> None:
        self.raise_peak(PEAK, peak)
        if reserved is not None:
            self.reserved = reserved

    def raise_peak(self, name: str, peak: int | None) -> None:
        if peak is not None and peak > self.peaks.get(name, -1):
            self.peaks[name] = peak


class Logged:
    """One reader's. It follows the events that the agent sends to viewers."""

    def __init__(self) -> None:
        self.devices: dict[int, Seen] = {}
        self._quiet: tuple[wire.QuietPeak, ...] = ()  # the last ones

    def device(self, index: int) -> Seen:
        seen = self.devices.get(index)
        if seen is None:
            seen = self.devices[index] = Seen()
        return seen

    def drained(self, events: Iterable[tuple[int, wire.NumberedEvent]]) -> None:
        """Call with all events, in order."""
        for _, event in events:
            if isinstance(event, wire.Phase):
                seen = self.device(event.device)
                seen.reads(event.allocated_peak, event.reserved)
                if event.allocated is not None:
                    seen.allocated = event.allocated
                if event.phase in PHASES:
                    seen.raise_peak(event.phase, event.allocated_peak)
            elif isinstance(event, wire.Step):
                self.quiet(event.quiet_peaks)
            elif isinstance(event, wire.Outlook):
                self.device(event.device).outlook = event
            elif isinstance(event, wire.Oom):
                self.device(event.device).oom = event

    def quiet(self, peaks: tuple[wire.QuietPeak, ...]) -> None:
        """Of steps that were not read. They may come again, with the event of the step after them: they count once."""
        if peaks is not self._quiet:
            self._quiet = peaks
            for quiet in peaks:
                self.device(quiet.device).raise_peak(PEAK, quiet.allocated_peak)

    def take(self) -> dict[str, int]:
        """The figures, in bytes; unknown ones are left out. Of several devices the one nearest to full counts."""
        devices = self.devices.values()
        figures = {}
        for name in (PEAK, *PHASES):
            if peaks := [seen.peaks[name] for seen in devices if name in seen.peaks]:
                figures[name if name == PEAK else f"{name}_peak"] = max(peaks)
        for seen in devices:
            seen.peaks = {}
        if reserved := [seen.reserved for seen in devices if seen.reserved is not None]:
            figures["reserved"] = max(reserved)
        if outlooks := [seen.outlook for seen in devices if seen.outlook is not None]:
            figures["next_peak"] = max(outlook.next_peak for outlook in outlooks)
            if room := [outlook.headroom for outlook in outlooks if outlook.headroom is not None]:
                figures["headroom"] = min(room)
        return {f"{PREFIX}{name}_bytes": figure for name, figure in figures.items()}
