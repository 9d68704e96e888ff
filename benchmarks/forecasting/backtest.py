"""Scores the forecasts of a recorded run: each step's forecast against the measured step, next to naive baselines.

Model. The messages are replayed in order, as a viewer would receive them, so no forecast uses later data. Scored:
- `outlook`: made when a batch enters forward, with its shapes known. If the agent recorded none, it is recomputed from
  the same model and the messages up to that moment;
- `next`: made after each step for the next one, whose batch is unknown;
- naive: the last peak, and the largest peak so far.
An OOM counts as predicted if the outlook of its step said so before the allocator's observer fired, or if the finding
`oom-ahead` was open. Warnings for steps that succeed are false. The baseline of device monitors is also scored: a
least-squares line through the device total over `SLOPE_WINDOW_S`, with an alarm at `SLOPE_ALARM` or more.
Cost. What a viewer spends on the same messages.

Known limitations. Steps before `WARM_UP` (`WARM_UP_VARYING`) are not scored. If a run stops before memory runs out, a
correct warning counts as false.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from gpumon.analysis.device_budget import available
from gpumon.analysis.forecast import Forecaster
from gpumon.analysis.forecast.forecaster import shared_out
from gpumon.analysis.history import step_peaks
from gpumon.analysis.report import Reporter
from gpumon.analysis.robust import median
from gpumon.session.frame import RankFrame, StepRecord
from gpumon.session.store import SessionStore, StoreLimits
from gpumon_agent import wire
from gpumon_agent.shape_model.outlook import judged

WARM_UP = 3  # steps; from the third iteration on, a forecast must be right if the shapes are constant
WARM_UP_VARYING = 20
SLOPE_WINDOW_S = 120.0
SLOPE_LEAST_S = 10.0
SLOPE_ALARM = 1e6
"""bytes per second"""
_STEPS_KEPT = 64
NAIVE = ("last peak", "largest so far")


@dataclass(slots=True)
class Accuracy:
    """Errors as fractions of the measured peak."""

    errors: list[float] = field(default_factory=list)
    held: int = 0
    judged: int = 0  # intervals
    exact: int = 0  # of those: the forecast was right to the byte, so any interval covers it
    widths: list[float] = field(default_factory=list)  # interval widths, as fractions of the peak

    def add(self, said: float, was: int, low: float | None = None, high: float | None = None) -> None:
        self.errors.append(abs(said - was) / was if was else 0.0)
        if low is not None and high is not None:
            self.judged += 1
            self.held += low <= was <= high
            self.exact += said == was
            self.widths.append((high - low) / was if was else 0.0)

    def merge(self, other: Accuracy) -> None:
        self.errors += other.errors
        self.held += other.held
        self.judged += other.judged
        self.exact += other.exact
        self.widths += other.widths

    def share_below(self, error: float) -> float | None:
        return sum(each <= error for each in self.errors) / len(self.errors) if self.errors else None

    @property
    def median(self) -> float | None:
        return median(self.errors) if self.errors else None

    @property
    def ninety_fifth(self) -> float | None:
        return sorted(self.errors)[int(0.95 * (len(self.errors) - 1))] if self.errors else None

    @property
    def coverage(self) -> float | None:
        return self.held / self.judged if self.judged else None

    @property
    def coverage_inexact(self) -> float | None:
        """Coverage without the exact forecasts."""
        left = self.judged - self.exact
        return (self.held - self.exact) / left if left else None

    @property
    def width(self) -> float | None:
        return median(self.widths) if self.widths else None


@dataclass(frozen=True, slots=True)
class Ended:
    step: int
    phase: str
    by_shape: int | None  # ns from the outlook that predicted it to the observer's event; None: not predicted
    steps_ahead: int | None  # of the finding oom-ahead; None: it was not open
    told_room: bool  # whether the memory budget was known


@dataclass(slots=True)
class Backtest:
    source: str
    rank: int | None
    device: int
    steps: int = 0
    varying: bool = False
    outlook: Accuracy = field(default_factory=Accuracy)
    next: Accuracy = field(default_factory=Accuracy)
    naive: dict[str, Accuracy] = field(default_factory=lambda: {name: Accuracy() for name in NAIVE})
    ended: list[Ended] = field(default_factory=list)
    false_outlooks: int = 0  # oom-ahead predicted for a step that succeeded
    false_findings: int = 0  # oom-ahead opened, then closed or still open at the end without an OOM
    clean_steps: int = 0
    to_oom: list[tuple[int, int]] = field(default_factory=list)  # step, predicted steps to OOM
    to_oom_spans: list[tuple[int, int, int | None]] = field(default_factory=list)  # step, predicted interval
    standing: list[tuple[int, int]] = field(default_factory=list)  # step, bytes allocated at its end
    slope_alarms: int = 0
    slope_readings: int = 0
    changes: int = 0  # detected regime changes
    oom_step: int | None = None

    def steps_to_oom_errors(self, said: Iterable[tuple[int, float]] | None = None) -> list[float]:
        """Relative errors of the steps after a quarter of the run, with ten or more steps left.

        `said`: (step, steps to OOM) to score instead of the recorded ones.
        """
        return [
            abs(left - remaining) / remaining
            for step, left in (self.to_oom if said is None else said)
            if (remaining := self._remaining(step))
        ]

    def _remaining(self, step: int) -> int | None:
        """Steps to OOM; None: not scored."""
        end = self.oom_step
        return end - step if end is not None and 4 * step >= end and end - step >= 10 else None

    def steps_to_oom_held(self) -> list[bool]:
        """For the same steps: did the interval cover it?"""
        return [
            least <= left and (most is None or left <= most)
            for step, least, most in self.to_oom_spans
            if (left := self._remaining(step))
        ]

    def steps_to_oom_coverage(self) -> float | None:
        held = self.steps_to_oom_held()
        return sum(held) / len(held) if held else None

    def steps_to_oom_error(self) -> float | None:
        """Median of those errors; None without a trend or an OOM."""
        judged = self.steps_to_oom_errors()
        return median(judged) if judged else None


class _Device:
    """State for one device of one rank during replay."""

    def __init__(self, source: str, rank: int | None, device: int, again: bool) -> None:
        self.again = again
        self.score = Backtest(source, rank, device)
        self.foreseen = Forecaster()
        self.last: int | None = None
        self.largest = 0
        self.next: tuple[int, int, int] | None = None
        self.shapes: set[tuple[tuple[int, ...], ...]] = set()
        self.said: dict[int, wire.Outlook] = {}
        self.opened: int | None = None  # step at which the finding opened
        self.totals: deque[tuple[float, int]] = deque()

    def closed(self, rank: RankFrame, record: StepRecord, room: int | None) -> None:
        figures = step_peaks(record, self.score.device)
        made = outlook_of(self.foreseen, record, self.score.device, room)
        if figures is not None:
            self.foreseen.observe(figures, record.on(self.score.device))
        written = self.said.pop(record.step, None)
        said = made if self.again or written is None else written
        for old in [step for step in self.said if step < record.step - 8]:
            del self.said[old]
        if figures is None:
            return
        score = self.score
        score.steps += 1
        if record.closed is not None and len(self.shapes) < 64:
            self.shapes.add(record.closed.input_shapes)
        score.varying = len(self.shapes) > 2
        peak = figures.peak
        if score.steps > WARM_UP_VARYING or (not score.varying and score.steps >= WARM_UP):
            if said is not None:
                score.outlook.add(said.next_peak, peak, said.low, said.high)
            if self.next is not None:
                score.next.add(self.next[0], peak, *self.next[1:])
            if self.last is not None:
                score.naive["last peak"].add(self.last, peak)
                score.naive["largest so far"].add(self.largest, peak)
        score.clean_steps += 1
        if said is not None and said.verdict == wire.OOM_AHEAD:
            score.false_outlooks += 1
        score.standing.append((record.step, figures.end))
        self.last, self.largest = peak, max(self.largest, peak)

    def forecast(self, rank: RankFrame, step: int, report_of: object) -> None:
        from gpumon.analysis.reports import DeviceReport, RankReport

        assert isinstance(report_of, RankReport)
        here: DeviceReport | None = next((d for d in report_of.devices if d.device == self.score.device), None)
        forecast = here.forecast if here is not None else None
        self.next = None if forecast is None else (forecast.next_peak, forecast.low, forecast.high)
        if forecast is not None and forecast.steps_to_oom is not None:
            self.score.to_oom.append((step, forecast.steps_to_oom))
            self.score.to_oom_spans.append((step, forecast.steps_to_oom_low or 0, forecast.steps_to_oom_high))
        found = next((f for f in report_of.findings if f.code == "oom-ahead" and f.state == "open"), None)
        if found is not None and self.opened is None:
            self.opened = step
        elif found is None and self.opened is not None:
            self.opened = None
            self.score.false_findings += 1

    def ended(self, event: wire.Oom, rank: RankFrame, room: int | None) -> None:
        said = self.said.get(event.step)
        warned = None
        if said is not None and said.verdict == wire.OOM_AHEAD and said.t_ns < event.t_ns:
            warned = event.t_ns - said.t_ns
        ahead = None if self.opened is None else event.step - self.opened
        told = said is not None and said.headroom is not None
        self.score.ended.append(Ended(event.step, event.phase, warned, ahead, told or room is not None))
        if self.score.oom_step is None:
            self.score.oom_step = event.step
        self.opened = None

    def reading(self, t_s: float, used: int) -> None:
        """A device monitor's slope alarm."""
        totals = self.totals
        totals.append((t_s, used))
        while totals and t_s - totals[0][0] > SLOPE_WINDOW_S:
            totals.popleft()
        if len(totals) < 3 or t_s - totals[0][0] < SLOPE_LEAST_S:
            return
        self.score.slope_readings += 1
        middle_t = sum(t for t, _ in totals) / len(totals)
        middle_b = sum(b for _, b in totals) / len(totals)
        spread = sum((t - middle_t) ** 2 for t, _ in totals)
        slope = sum((t - middle_t) * (b - middle_b) for t, b in totals) / spread if spread else 0.0
        self.score.slope_alarms += slope >= SLOPE_ALARM


def backtest(stream: Iterable[wire.Received], *, again: bool = False) -> list[Backtest]:
    """Scores, one per device of each rank. `again`: recompute outlooks instead of using the recorded ones."""
    store, reporter = SessionStore(StoreLimits(steps=_STEPS_KEPT), replaying=True), Reporter()
    devices: dict[tuple[str, int], _Device] = {}
    rooms: dict[tuple[str, int], int | None] = {}

    def of(rank: RankFrame, index: int) -> _Device:
        key = rank.source, index
        if key not in devices:
            devices[key] = _Device(rank.source, rank.hello.rank, index, again)
        return devices[key]

    for received in stream:
        store.apply(received)
        event = received.event
        if isinstance(event, wire.Outlook):
            rank = store.rank(received.source, received.unix_ns)
            if rank is not None:
                of(rank, event.device).said[event.step] = event
        elif isinstance(event, wire.Step):
            rank = store.rank(received.source, received.unix_ns)
            if rank is None or not rank.steps or rank.steps[-1].step != event.step:
                continue
            record = rank.steps[-1]
            report = reporter.rank(rank)
            for index in sorted({phase.device for phase in record.phases}):
                device = of(rank, index)
                device.closed(rank, record, rooms.get((rank.source, index)))
                device.forecast(rank, record.step, report)
                room = available(rank, index)
                if room is not None:
                    rooms[rank.source, index] = room
        elif isinstance(event, wire.Oom):
            rank = store.rank(received.source, received.unix_ns)
            if rank is not None:
                of(rank, event.device).ended(event, rank, rooms.get((rank.source, event.device)))
        elif isinstance(event, wire.Host):
            _readings(store, received, event, devices)
    for device in devices.values():
        device.score.changes = device.foreseen.shape_model.changed
        if device.opened is not None:
            device.score.false_findings += 1
    return [devices[key].score for key in sorted(devices) if devices[key].score.steps]


def _readings(
    store: SessionStore, received: wire.Received, event: wire.Host, devices: dict[tuple[str, int], _Device]
) -> None:
    for (source, index), device in devices.items():
        rank = store.rank(source, received.unix_ns)
        described = next((d for d in rank.hello.devices if d.index == index), None) if rank is not None else None
        if described is None or described.uuid is None:
            continue
        for reading in event.devices:
            if reading.uuid == described.uuid and reading.used is not None:
                device.reading(received.unix_ns / 1e9, reading.used)


def outlook_of(forecaster: Forecaster, record: StepRecord, device: int, room: int | None) -> wire.Outlook | None:
    """The agent's outlook at the step's first forward."""
    closed, here = record.closed, record.on(device)
    stood: int | None = None
    so_far = 0
    for phase in here:
        if phase.phase == wire.FORWARD:
            break
        stood = phase.allocated
        if phase.phase != wire.LOAD:
            so_far = max(so_far, phase.allocated_peak or 0)
    if closed is None or not closed.input_shapes or stood is None:
        return None
    groups = shared_out(closed.input_shapes, here)
    if not groups:
        return None
    return judged(
        forecaster.shape_model, closed.step, device, closed.t_ns - closed.duration_ns, groups[0], closed.input_bytes,
        stood, so_far, room, forecaster.fragments,
    )  # fmt: skip
