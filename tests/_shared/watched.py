"""A training run as an agent and the viewer's own readings would tell it, event by event: for tests of the screen."""

from __future__ import annotations

from dataclasses import dataclass, field

from gpumon_agent import wire

GIB = 1 << 30
MIB = 1 << 20
START_NS = 1_790_000_000_000_000_000
STEP_NS = 312_000_000


@dataclass
class Run:
    """One rank's run, written down event by event: a transformer on an H200 unless told otherwise."""

    name: str = "train.py"
    pid: int = 41873
    rank: int | None = None
    world_size: int | None = None
    device: str = "NVIDIA H200"
    total: int = round(139.8 * GIB)
    extra: int = 0  # bytes that this run's peak is higher
    shrink: int = 1  # the model is so many times smaller
    events: list[wire.Received] = field(default_factory=list)
    t_ns: int = 5_000_000_000
    seq: int = 0
    reserved: int = 0
    owned: list[tuple[str, str, int]] = field(default_factory=list)  # of each module: path, kind, bytes of weights

    @property
    def source(self) -> str:
        return f"nonce-{self.pid}"

    @property
    def uuid(self) -> str:
        return f"GPU-00000000-0000-0000-0000-{self.rank or 0:012d}"

    def say(self, event: wire.Event, *, numbered: bool = False, replayed: bool = False) -> None:
        seq = -1
        if numbered:
            seq, self.seq = self.seq, self.seq + 1
        self.events.append(wire.Received(self.source, START_NS + self.t_ns, event, seq, replayed))

    def hello(self, **changes: object) -> Run:
        fields: dict[str, object] = {
            "protocol": (wire.PROTOCOL_MAJOR, wire.PROTOCOL_MINOR),
            "agent": "0.1.0",
            "nonce": self.source,
            "name": self.name,
            "host": "node1",
            "pid": self.pid,
            "start_time": 1,
            "boot_id": "b",
            "argv": (self.name,),
            "python": "3.11",
            "clock": wire.Clock(0, START_NS),
            "backend": "cuda",
            "torch": "2.15.0+cu132",
            "devices": (wire.Device(0, self.uuid, self.device, self.total),),
            "rank": self.rank,
            "world_size": self.world_size,
        }
        self.say(wire.Hello(**{**fields, **changes}))  # type: ignore[arg-type]
        return self

    def model(self) -> Run:
        size = round(12.1 * GIB) // self.shrink
        optimizer = wire.Optimizer("AdamW", size // 4, size, 2 * size, foreach=True)
        self.say(wire.Model(0, 0, "GPT", "GPT", size // 4, size // 4, size, size, 0, 0, (0,), (optimizer,)))
        return self

    def modules(self, blocks: int = 24, width: int = 2048, vocabulary: int = 50_304) -> Run:
        """A GPT's, with the head tied to the embedding: Model and Module events."""
        table, square = vocabulary * width, width * width
        owned = [("embedding", "Embedding", table, None), ("positions", "Embedding", 1024 * width, None)]
        for i in range(blocks):
            owned += [
                (f"blocks.{i}.norm1", "LayerNorm", 2 * width, None),
                (f"blocks.{i}.attention.qkv", "Linear", 3 * square, None),
                (f"blocks.{i}.attention.out", "Linear", square, None),
                (f"blocks.{i}.norm2", "LayerNorm", 2 * width, None),
                (f"blocks.{i}.mlp.up", "Linear", 4 * square, None),
                (f"blocks.{i}.mlp.down", "Linear", 4 * square, None),
            ]
        owned += [("norm", "LayerNorm", 2 * width, None), ("head", "Linear", 0, "embedding")]
        all_ = sum(parameters for _, _, parameters, _ in owned)
        optimizer = wire.Optimizer("AdamW", all_, 4 * all_, 8 * all_, foreach=True)
        self.say(wire.Model(0, 0, "GPT", "GPT", all_, all_, 4 * all_, 4 * all_, 0, len(owned), (0,), (optimizer,)))
        for path, kind, parameters, tied in owned:
            self.say(wire.Module(0, 0, path, kind, parameters, 4 * parameters, 4 * parameters, 0, tied))
        self.owned = [(path, kind, 4 * parameters) for path, kind, parameters, _ in owned]
        return self

    def layers(self, step: int, batch: int = 8, sequence: int = 1024) -> Run:
        """What the modules keep in a sampled step; `modules` came before."""
        hidden = batch * sequence * 2048 * 2
        kept = {"Linear": hidden, "LayerNorm": hidden, "Embedding": batch * sequence * 8}
        each = [
            wire.Layer(path, kind, held, 2 * held, kept[kind] * (4 if path.endswith("down") else 1))
            for path, kind, held in self.owned
        ]
        for part in wire.layers(0, 0, step, each, elsewhere=batch * sequence * 50_304 * 2):
            self.say(part)
        return self

    def step(self, step: int, *, leak: int = 0, replayed: bool = False, sampled: bool = True) -> Run:
        """One iteration: forward, backward, optimizer, between."""
        w = round(12.1 * GIB) // self.shrink
        base = 4 * w + 160 * MIB // self.shrink + leak
        wiggle = (step * 7919 % 13) * 9 * MIB // self.shrink
        up = round(12.2 * GIB) // self.shrink + wiggle + self.extra
        self.reserved = reserved = max(round(62.0 * GIB) // self.shrink, base + up + 400 * MIB // self.shrink)
        shape = [
            ("between", base - w, base, 18_000_000),
            ("forward", base - w + up, base - w + up + 300 * MIB // self.shrink, 96_000_000),
            ("backward", base, base + up + 200 * MIB // self.shrink, 151_000_000),
            ("optimizer", base, base + round(0.4 * w), 47_000_000),
        ]
        for phase, end, peak, took in shape:
            self.t_ns += took
            self.say(
                wire.Phase(
                    step,
                    phase,
                    0,
                    0,
                    self.t_ns,
                    took,
                    allocated=end,
                    allocated_peak=peak,
                    reserved=reserved,
                    reserved_peak=reserved,
                    active=end,
                    inactive_split=0,
                    requested=end - 90 * MIB // self.shrink,
                    allocations=900,
                    retries=0,
                    ooms=0,
                    flags=wire.SAMPLED if sampled else 0,
                ),
                numbered=True,
                replayed=replayed,
            )
        if sampled:
            self.say(
                wire.Ledger(
                    step,
                    "optimizer",
                    0,
                    0,
                    base,
                    base - 90 * MIB // self.shrink,
                    reserved,
                    weights=w,
                    buffers=0,
                    gradients=w,
                    optimizer=2 * w,
                    inputs=2 * MIB,
                    activations=0,
                    workspaces=32 * MIB // self.shrink,
                ),
                numbered=True,
                replayed=replayed,
            )
            peak = base + up + 200 * MIB // self.shrink
            self.say(
                wire.Ledger(
                    step,
                    "backward",
                    0,
                    0,
                    peak,
                    peak - 90 * MIB // self.shrink,
                    reserved,
                    weights=w,
                    gradients=w,
                    optimizer=2 * w,
                    inputs=2 * MIB,
                    activations=up,
                    workspaces=32 * MIB // self.shrink,
                    peak=True,
                    module="blocks.23.mlp",
                ),
                numbered=True,
                replayed=replayed,
            )
        self.say(
            wire.Step(step, self.t_ns, STEP_NS, input_bytes=2 * MIB, input_shapes=((8, 1024),), phases=4),
            numbered=True,
            replayed=replayed,
        )
        return self

    def steps(self, first: int, count: int, **how: object) -> Run:
        for step in range(first, first + count):
            self.step(step, **how)  # type: ignore[arg-type]
        return self

    def beat(self, step: int, phase: str = "forward", age_ns: int = 40_000_000) -> Run:
        self.say(wire.Heartbeat(self.t_ns, step, phase, age_ns, rss=round(3.2 * GIB)))
        return self

    def synced(self) -> Run:
        self.say(wire.Synced(self.seq - 1))
        return self

    def host(self, **changes: object) -> Run:
        """A reading of the machine, as the viewer makes it."""
        context = 540 * MIB
        reserved = self.reserved
        fields: dict[str, object] = {
            "uuid": self.uuid,
            "name": self.device,
            "total": self.total,
            "free": self.total - reserved - context,
            "used": reserved + context,
            "processes": (wire.DeviceProcess(self.pid, reserved + context, "python"),),
            "utilization_percent": 83,
            "temperature_c": 61,
            "power_mw": 412_000,
            "power_limit_mw": 700_000,
        }
        children = tuple(wire.ChildProcess(self.pid + i, "python", 310 * MIB) for i in range(1, 5))
        host = wire.Host(
            "node1",
            self.t_ns,
            driver="580.1",
            devices=(wire.DeviceReading(**{**fields, **changes}),),  # type: ignore[arg-type]
            processes=(wire.ProcessReading(self.pid, round(3.2 * GIB), 104.0, 60, children),),
            memory_total=256 * GIB,
            memory_available=190 * GIB,
        )
        self.events.append(wire.Received("host:node1", START_NS + self.t_ns, host))
        return self

    def notice(self, text: str) -> Run:
        self.say(wire.Notice(self.t_ns, text, 12_400), numbered=True)
        return self

    def leaking(self) -> Run:
        """A run whose memory grows until an allocation fails."""
        self.hello().model()
        for step in range(12_192, 12_432):
            self.step(step, leak=(step - 12_192) * 300 * MIB)
        self.host().step(12_432, leak=240 * 300 * MIB).beat(12_433, "backward").synced()
        message = (
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 900.00 "
            "MiB is free. Including non-PyTorch memory, this process has 138.92 GiB memory in use. Of the allocated "
            "memory 136.90 GiB is allocated by PyTorch, and 1.48 GiB is reserved by PyTorch but unallocated."
        )
        allocated, reserved = round(136.9 * GIB), round(138.38 * GIB)
        oom = wire.Oom(
            12_433, "backward", 0, self.t_ns, 2 * GIB, self.total, 900 * MIB, allocated, reserved, message,
            "train.py:58", "blocks.11.mlp",
        )  # fmt: skip
        self.say(oom, numbered=True)
        return self

    def census(self, step: int, number: int = 0, kept: int = 1_227) -> Run:
        """What a walk over the objects found: a list of outputs, losses, and who knows what."""
        one = 8 * 1024 * 512 * 4
        groups = (
            wire.Group(
                (8, 1024, 512), "float32", 0, kept, kept * one, True, 3 * kept * MIB, kept if number else None,
                (wire.Holder("outputs[*]", "local", "train.py:58", kept),), "train.py:57", "forward",
            ),
            wire.Group(
                (), "float32", 0, kept, kept * 512, True, None, kept if number else None,
                (wire.Holder("Trainer.history['loss'][*]", "attribute", "trainer.py:112", kept),
                 wire.Holder("best[*]", "global", None, 2)), "train.py:61", "forward",
            ),
            wire.Group((2048, 512), "bfloat16", 0, 3, 3 * 2048 * 512 * 2, cyclic=2, where="model.py:31"),
        )  # fmt: skip
        self.say(
            wire.Census(
                step,
                self.t_ns,
                number,
                "growth" if number else "asked",
                groups,
                2 * kept + 3,
                sum(group.bytes for group in groups),
                695_214,
                812,
                76_000_000,
                step - 40,
            )
        )
        return self

    def checkpoint(self, step: int = 0) -> Run:
        """Loaded before the training, and never let go."""
        size = round(12.1 * GIB) // self.shrink
        self.say(
            wire.Checkpoint(
                0,
                0,
                step,
                self.t_ns,
                "torch.load",
                "last.pt",
                "train.py:31",
                size,
                290,
                size,
                2,
                0,
                False,
                False,
                (wire.Holder("ckpt", "local", "train.py:31", 290),),
            )
        )
        return self

    def segments(self, step: int, reason: str = "asked", phase: str = "forward") -> Run:
        """The allocator's map: large segments with gaps, small ones of scalars; a second stream, a graph's own pool."""
        made: list[wire.Segment] = []
        at = 0x7F3A_0000_0000
        sizes = [2, 20, 64, 128, 512, 1024]

        def add(size: int, blocks: list[tuple[int, int]], **how: object) -> None:
            nonlocal at
            made.append(wire.Segment(at, size, blocks=tuple(blocks), **how))  # type: ignore[arg-type]
            at += size

        for i in range(72):
            size = sizes[i * 7 % 6] * MIB
            gap = (size // 8) * (i % 4)
            state = wire.PENDING if i % 17 == 5 else wire.INACTIVE
            cut = [((size - gap) // 2, wire.ALLOCATED), (gap, state), (size - gap - (size - gap) // 2, wire.ALLOCATED)]
            add(size, [block for block in cut if block[0]], small=False, stream=0)
        for i in range(12):
            add(2 * MIB, [(512, wire.ALLOCATED if (i * j) % 5 else wire.INACTIVE) for j in range(4096)], small=True,
                stream=0)  # fmt: skip
        add(1024 * MIB, [(1024 * MIB, wire.INACTIVE)], small=False, stream=0)
        add(256 * MIB, [(256 * MIB, wire.INACTIVE)], small=False, stream=7)
        add(512 * MIB, [(500 * MIB, wire.ALLOCATED), (12 * MIB, wire.INACTIVE)], small=False, stream=0, private=True)
        cut = list(wire.parts(made))
        for part, some in enumerate(cut):
            self.say(wire.Segments(0, 0, step, phase, self.t_ns, reason, part, len(cut), some, 24_600_000))
        return self

    def goodbye(self, reason: str, step: int, phase: str, detail: str = "") -> Run:
        self.say(wire.Goodbye(reason, self.t_ns, step, phase, detail), numbered=True)
        return self

    def usual(self, steps: int = 240, last: int = 12_431) -> Run:
        """A healthy run in full swing."""
        self.hello().model().steps(last - steps + 1, steps - 1).host().step(last)
        return self.beat(last + 1, "forward").synced().host()
