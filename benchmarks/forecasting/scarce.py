"""What the outlook says where the agent reads few steps whole: recordings with the other steps' figures taken out.

Of such a step the agent has read what stands at its end and its highest moment, no phase for itself, and as a batch
comes nothing at all (see gpumon_agent.governor). So the recording's events are told to an agent's Outlooks once more,
with that taken out of them. Used by forecast.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from msgspec.structs import replace

from gpumon import link
from gpumon_agent import wire
from gpumon_agent.shape_model.outlook import Outlooks

EVERY = (1, 2, 3, 10)
FIRST = 8  # steps that are read whole anyway
KNOWN_FROM = 20


@dataclass
class Scarce:
    every: int
    ooms: int = 0
    ahead: int = 0  # of them
    false: int = 0  # warnings of steps that fitted
    errors: list[float] = field(default_factory=list)
    held: list[bool] = field(default_factory=list)

    def row(self) -> str:
        which = "each" if self.every == 1 else f"every {self.every}th" if self.every > 3 else f"one in {self.every}"
        off = f"{100 * median(self.errors):.2f} % | {100 * sorted(self.errors)[int(0.95 * len(self.errors))]:.2f} %"
        share = f"{100 * sum(self.held) / len(self.held):.2f} %"
        return f"| {which} | {self.ahead} of {self.ooms} | {self.false} | {len(self.errors):,} | {off} | {share} |"


def scarce(files: Sequence[Path], every: int) -> Scarce:
    found = Scarce(every)
    for file in files:
        _play([received.event for received in link.replay(file)], found)
    return found


def _play(events: Sequence[wire.Event], found: Scarce) -> None:
    said: list[wire.Outlook] = []
    outlooks = Outlooks(lambda fields: said.append(wire.Outlook(*fields)), {})
    told = {event.step: event.input_shapes for event in events if isinstance(event, wire.Outlook)}
    oom = next((event for event in events if isinstance(event, wire.Oom)), None)
    if oom is not None and oom.free is not None and oom.reserved is not None:
        outlooks.room[oom.device] = oom.free + oom.reserved
    phases: list[wire.Phase] = []
    steps = 0
    for event in events:
        if isinstance(event, wire.Phase):
            phases.append(event)
        elif isinstance(event, wire.Step):
            here, phases = phases, []
            if [phase.phase for phase in here].count(wire.FORWARD) != 1 or any(p.allocated is None for p in here):
                continue
            whole, steps = steps < FIRST or steps % found.every == 0, steps + 1
            at = [phase.phase for phase in here].index(wire.FORWARD)
            stood = here[at - 1].allocated if at and whole else None
            peak = max(phase.allocated_peak or 0 for phase in here)
            said.clear()
            outlooks.batch(event.step, 0, event.input_shapes, event.input_bytes or 0, [(0, stood, 0)])
            if said and steps > KNOWN_FROM:
                found.errors.append(abs(said[0].next_peak / peak - 1))
                found.held.append(said[0].low <= peak <= said[0].high)
                found.false += said[0].verdict == wire.OOM_AHEAD
            for each in (*(here if whole else _end_only(here, peak)), event):
                outlooks.follow(each)
        elif event is oom and oom is not None and oom.step in told:
            said.clear()
            outlooks.batch(oom.step, 0, told[oom.step], 0, [(0, None, 0)])
            found.ooms += 1
            found.ahead += bool(said) and said[0].verdict == wire.OOM_AHEAD
            return


def _end_only(phases: Sequence[wire.Phase], peak: int) -> list[wire.Phase]:
    nothing = dict.fromkeys(("allocated", "allocated_peak", "reserved", "reserved_peak", "inactive_split", "retries"))
    last = replace(phases[-1], allocated_peak=peak, flags=phases[-1].flags | wire.BOUND)
    return [*(replace(phase, **nothing) for phase in phases[:-1]), last]
