"""A training run whose every byte is known, as the messages an agent would send: for tests of session and analysis."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from gpumon.session.frame import Frame, RankFrame
from gpumon.session.store import SessionStore
from gpumon_agent import wire

MIB = 1 << 20
GIB = 1 << 30
START_UNIX_NS = 1_700_000_000_000_000_000
STEP_NS = 50_000_000
UUID = "GPU-1"


@dataclass
class Run:
    """AdamW in fp32: W of weights, W of gradients (freed between steps), 2 W of state, W of foreach temporaries."""

    weights: int = 100 * MIB
    buffers: int = 0
    buckets: int = 0
    activations: Callable[[int], int] = lambda step: 300 * MIB
    input_bytes: Callable[[int], int] = lambda step: 64 * 1024
    inputs: Callable[[int], int] = lambda step: 1  # how many tensors of those bytes together
    forwards: Callable[[int], bool] = lambda step: True  # False: it differentiates what an earlier step has made
    optimizers: Callable[[int], tuple[int, ...]] = lambda step: (0,)
    several: bool = False  # a second one, of a single number
    kept: Callable[[int], int] = lambda step: 0  # leaked until this step
    rounding: int = 1000
    slack: int = 64 * MIB
    total: int = 40 * GIB
    context: int = 450 * MIB
    others: int = 0
    uuid: str = UUID
    strays: Callable[[int], tuple[int, ...]] = lambda step: ()  # pids of other ranks that hold a context on this device
    rank: int | None = None
    world_size: int | None = None
    run_id: str | None = None
    nonce: str = "ab12"
    pid: int = 4000
    name: str = "train.py"
    foreach: bool = True
    fused: bool = False
    sampled_every: int = 1
    parallel: wire.Parallel | None = None
    embedding_bytes: int = 0
    retries: Callable[[int], int] = lambda step: 0
    skipped: Callable[[int], bool] = lambda step: False
    started_ns: int = 0  # moves the whole run in time
    settings: dict[str, str] = field(default_factory=dict)
    blocks: Callable[[int], int] = lambda step: 100  # live ones
    standing: bool = False  # gradients stay from the optimizer to the next backward
    beside: Callable[[int], tuple[wire.Event, ...]] = lambda step: ()  # what else is sent as a step closes
    _seq: int = 0

    # ------------------------------------------------------------------------------------------------ what it holds

    @property
    def state(self) -> int:
        return 2 * self.weights

    @property
    def temporaries(self) -> int:
        return self.weights if self.foreach and not self.fused else 0

    def start(self, step: int) -> int:
        """Allocated as forward begins."""
        return (
            self.weights
            + self.buffers
            + self.buckets
            + (self.state if step else 0)
            + self.rounding
            + self.input_bytes(step)
            + self.kept(step)
        )

    def end(self, step: int) -> int:
        """Allocated at the end of the optimizer."""
        return self.start(step) + self.weights + (0 if step else self.state)

    def peaks(self, step: int) -> dict[str, int]:
        start = self.start(step)
        return {
            "between": self.end(step - 1) if step else start,
            "forward": start + self.activations(step),
            "backward": start + self.activations(step) + self.weights // 4,
            "optimizer": self.end(step) + self.temporaries,
        }

    def peak(self, step: int) -> int:
        return max(self.peaks(step).values())

    def reserved(self, step: int) -> int:
        """Grows only: what the highest peak so far needed, and some slack."""
        return max(self.peak(s) for s in range(max(0, step - 50), step + 1)) + self.slack

    # ---------------------------------------------------------------------------------------------- what it sends

    def hello(self) -> wire.Hello:
        return wire.Hello(
            protocol=(wire.PROTOCOL_MAJOR, wire.PROTOCOL_MINOR),
            agent="0.1",
            nonce=self.nonce,
            name=self.name,
            host="box",
            pid=self.pid,
            start_time=1,
            boot_id="b",
            argv=("train.py",),
            python="3.11",
            clock=wire.Clock(self.started_ns, START_UNIX_NS + self.started_ns),
            backend="cuda",
            torch="2.15.0",
            devices=(wire.Device(0, self.uuid, "Virtual", self.total),),
            rank=self.rank,
            world_size=self.world_size,
            run_id=self.run_id,
            settings=self.settings,
        )

    def model(self) -> list[wire.Event]:
        rest = self.weights - self.embedding_bytes
        modules: list[wire.Event] = [wire.Module(0, 0, "body", "Linear", rest // 4, rest, rest, self.buffers)]
        if self.embedding_bytes:
            size = self.embedding_bytes
            modules.append(wire.Module(0, 0, "words", "Embedding", size // 4, size, size, 0))
        adamw = wire.Optimizer("AdamW", self.weights // 4, self.weights, self.state, self.foreach, self.fused)
        described = wire.Model(
            0,
            0,
            "net",
            "Net",
            self.weights // 4,
            self.weights // 4,
            self.weights,
            self.weights,
            self.buffers,
            len(modules),
            (0,),
            (adamw, wire.Optimizer("AdamW", 1, 4, 8, self.foreach, self.fused)) if self.several else (adamw,),
            self.parallel,
        )
        return [described, *modules]

    def time_ns(self, step: int) -> int:
        return self.started_ns + (step + 1) * STEP_NS

    def unix_ns(self, step: int) -> int:
        return START_UNIX_NS + self.time_ns(step)

    def step_events(self, step: int) -> list[wire.Event]:
        peaks = self.peaks(step)
        start, end, reserved = self.start(step), self.end(step), self.reserved(step)
        after = {
            "between": start,
            "forward": start + self.activations(step),
            "backward": end - (0 if step else self.state),
            "optimizer": end,
        }
        sampled = step % self.sampled_every == 0
        flags = (wire.SAMPLED if sampled else 0) | (wire.SKIPPED if self.skipped(step) else 0)
        events: list[wire.Event] = []
        for index, name in enumerate(("between", "forward", "backward", "optimizer")):
            if name == "forward" and not self.forwards(step):
                continue
            events.append(
                wire.Phase(
                    step,
                    name,
                    0,
                    0,
                    self.time_ns(step) - (3 - index) * STEP_NS // 8,
                    STEP_NS // 8,
                    after[name],
                    peaks[name],
                    reserved,
                    reserved,
                    after[name],
                    0,
                    after[name] - self.rounding,
                    self.blocks(step),
                    self.retries(step),
                    0,
                    flags,
                )
            )
            if sampled:
                has_state = step > 0 or name == "optimizer"
                has_gradients = name in ("backward", "optimizer") or self.standing
                events.append(
                    wire.Ledger(
                        step,
                        name,
                        0,
                        0,
                        after[name],
                        after[name] - self.rounding,
                        reserved,
                        weights=self.weights,
                        buffers=self.buffers,
                        gradients=self.weights if has_gradients else 0,
                        optimizer=self.state if has_state else 0,
                        buckets=self.buckets,
                        inputs=self.input_bytes(step),
                        activations=self.activations(step) if name == "forward" else 0,
                    )
                )
        events.append(
            wire.Step(
                step,
                self.time_ns(step),
                STEP_NS,
                self.input_bytes(step),
                ((8, self.input_bytes(step) // 8 // self.inputs(step)),) * (self.inputs(step) * self.forwards(step)),
                self.skipped(step),
                3 + self.forwards(step),
                optimizers=self.optimizers(step),
            )
        )
        return [*self.beside(step), *events]

    def received(self, event: wire.Event, step: int, *, replayed: bool = False) -> wire.Received:
        numbered = isinstance(event, (wire.Phase, wire.Step, wire.Ledger, wire.Oom, wire.Notice, wire.Goodbye))
        seq = -1
        if numbered:
            seq, self._seq = self._seq, self._seq + 1
        return wire.Received(self.nonce, self.unix_ns(step), event, seq, replayed)

    def picture(self) -> Iterator[wire.Received]:
        for event in (self.hello(), *self.model()):
            yield self.received(event, -1, replayed=True)

    def step(self, step: int, *, replayed: bool = False) -> Iterator[wire.Received]:
        for event in self.step_events(step):
            yield self.received(event, step, replayed=replayed)

    def stream(self, steps: int, *, host_every: int = 0) -> Iterator[wire.Received]:
        """The whole run; with `host_every`, a device reading in the middle of every so many steps."""
        yield from self.picture()
        yield wire.Received(self.nonce, self.unix_ns(-1), wire.Synced(-1), -1, True)
        for step in range(steps):
            for received in self.step(step):
                if host_every and step % host_every == 0 and _is(received.event, "backward"):
                    yield self.host(step)
                yield received

    def host(self, step: int) -> wire.Received:
        """Read between the step's forward and its backward."""
        t_ns = self.time_ns(step) - 3 * STEP_NS // 16
        ours = self.reserved(step) + self.context
        processes = [wire.DeviceProcess(self.pid, ours, "python")]
        if self.others:
            processes.append(wire.DeviceProcess(99, self.others, "game"))
        processes += [wire.DeviceProcess(pid, self.context, "python") for pid in self.strays(step)]
        others = self.others + len(self.strays(step)) * self.context
        reading = wire.DeviceReading(
            self.uuid,
            total=self.total,
            free=self.total - ours - others,
            used=ours + others,
            processes=tuple(processes),
            began_ns=t_ns,
            ended_ns=t_ns + 1000,
        )
        event = wire.Host("box", t_ns, "580", (reading,), (wire.ProcessReading(self.pid, 500 * MIB, 99.0),))
        return wire.Received("host:box", START_UNIX_NS + t_ns, event)


def _is(event: wire.Event, phase: str) -> bool:
    return isinstance(event, wire.Phase) and event.phase == phase


def side_by_side(runs: list[Run], steps: int) -> Iterator[wire.Received]:
    """Ranks of one machine, each with a device of its own; a reading of all devices in each step."""
    for run in runs:
        yield from run.picture()
        yield wire.Received(run.nonce, run.unix_ns(-1), wire.Synced(-1), -1, True)
    for step in range(steps):
        hosts = [run.host(step) for run in runs]
        said = [each.event for each in hosts if isinstance(each.event, wire.Host)]
        devices = tuple(device for host in said for device in host.devices)
        processes = tuple(process for host in said for process in host.processes)
        whole = wire.Host(said[0].host, said[0].t_ns, said[0].driver, devices, processes)
        yield wire.Received(hosts[0].source, hosts[0].unix_ns, whole)
        for run in runs:
            yield from run.step(step)


def apply(*streams: Iterator[wire.Received] | list[wire.Received], store: SessionStore | None = None) -> SessionStore:
    store = store or SessionStore()
    for stream in streams:
        for received in stream:
            store.apply(received)
    return store


def frame_of(run: Run, steps: int, *, host_every: int = 0) -> Frame:
    return apply(run.stream(steps, host_every=host_every)).frame(run.unix_ns(steps))


def rank_of(run: Run, steps: int, *, host_every: int = 0) -> RankFrame:
    return frame_of(run, steps, host_every=host_every).ranks[0]
