"""What gpumon costs a training: `python benchmarks/overhead.py [--seconds 60] [--write FILE]`.

One training runs with and without a monitor, a few steps each in turns, in one process: so memory layout and machine
are the same for both, and the drift of the machine's speed does not count. Two turns with and two without follow each
other in an order drawn at random (out, in, in, out or in, out, out, in). The steps after each change are not measured:
what has just been put back has left the caches.

bare again         nothing is put back (A/A): the noise of the measurement
hooks              two empty hooks on the model, which take torch off its fastest path
gpumon, quiet      steps that are not read: only its hooks cost
gpumon             as usual: some steps are read, some with their owners
gpumon, viewer     the same, followed by `gpumon attach --json`
gpumon, all read   every phase of every step, without owners
TraceML            `trace_step` around each step (traceml-ai from PyPI, installed for this run)
history            `torch.cuda.memory._record_memory_history()`

Steps of 0.4 to 100 ms of linear layers; `modules`: a thousand small modules; `rollout`: a forward without gradients,
300 of which come before each training step, which is not measured. Reported are the mean differences of CPU time of the
training's process, and of wall time, per step, each with its 95 % interval (bootstrap of turns), and the median of a
turn's CPU time against that of the turn beside it. A slow moment of the machine moves no median; nor do steps that are
read, which are few. Where half the A/A's interval is more than a third of what is promised for a kind, its figures are
void.

Monitors work where a forward, a backward or a step of the optimizer begins or ends. In a model of many layers the rest
is only noise on a shared machine. So the time between its first and its last twenty layers is taken apart, forward and
backward. Its difference is reported by itself, as *between*; and what of the other differences goes with it is taken
off (linear regression: a control variate), because it shows how fast the machine was. Turns that took three times the
median are the machine's, which stood still: the four turns of their round are left out, and counted under the table. A
monitor whose single steps take so long would not be seen; gpumon gives a step at most 10 ms.

Not seen: what a monitor costs while it is out, as TraceML's threads; the helper process (benchmarks/helper.py). The
training has the first core, what it starts has the others, or the same one with `--one-core`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from statistics import linear_regression, mean, median
from typing import Any

from common import interval, options, write

from gpumon import virtual_gpu
from gpumon.cli import native_reader

AGAIN = "bare again"
WAYS = (AGAIN, "hooks", "gpumon, quiet", "gpumon", "gpumon, viewer", "gpumon, all read", "TraceML", "history")
LAYERS = {"0.4 ms": 12, "1 ms": 26, "4.5 ms": 120, "20 ms": 560, "100 ms": 2800}
KINDS = (*LAYERS, "rollout", "modules")
PROMISED = {"0.4 ms": 3.0, "4.5 ms": 1.0, "20 ms": 0.5}
"""percent of a step, by kind"""
FAR = 1 << 62
WARM_STEPS = 200  # gpumon reads the first 100
FORWARDS = 300  # of a rollout
NEAR_LAYERS = 20  # the first and the last of a model, if it has three times as many
TURN_S = 0.005
SENT_S = 0.5  # where all is read: it is sent every 500 ms; here at the end of a turn
CLOCKS = (time.process_time, time.perf_counter)
Turn = list[tuple[float, float]]
"""of each of `CLOCKS`: seconds of a step, and how many of them are between its first and last layers"""
Round = dict[bool, list[Turn]]
"""Turns without and with the monitor."""
Found = tuple[list[float], list[float], list[float], int]
"""By rounds: seconds of a step without the monitor, how many more near the hooks with it, and how many more between;
the number of rounds that are left out."""
STILL = 3  # times the median: the machine stood still
TRACEML = "traceml-ai"
NOTE = """Per step: CPU time of the training's process and wall time without a monitor, and what each way adds, with its
95 % interval: a mean, and the median of CPU time, which shows what steps cost that are not read. `bare again` is the
noise. On the virtual GPU kernels take no time, so every step is bound by the host.
"""


def main() -> None:
    parser = options(__doc__, write=True)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each row (60)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(PROMISED), metavar="KIND")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[AGAIN, "gpumon"], metavar="WAY")
    parser.add_argument("--one-core", action="store_true", help="helper and viewer on the training's core")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if "rollout" in args.kinds and not {AGAIN, "hooks", "gpumon, quiet"}.issuperset(args.ways):
        parser.error("of a rollout only 'bare again', 'hooks' and 'gpumon, quiet' are measured")
    if args.child:
        way, kind = args.child
        return child(way, kind, args.seconds)
    try:
        native_reader.build()
    except native_reader.NotBuilt as reason:
        print(f"{reason}: a read takes four times as long", file=sys.stderr)
    with environment("TraceML" in args.ways) as known:
        lines = [line for kind in args.kinds for line in table(kind, args, known)]
    write("What gpumon costs a training", "\n".join([NOTE, *lines]), args.write)


def table(kind: str, args: argparse.Namespace, known: Mapping[str, str]) -> Iterator[str]:
    yield f"| {kind} | CPU, ms | adds, µs | % | median, % | between, % | wall, ms | adds, µs | % |"
    yield "|---|--:|--:|--:|--:|--:|--:|--:|--:|"
    noise: list[float] = []  # of CPU time, of wall time
    stood: list[int] = []
    for way in args.ways:
        cells = []
        for out, near, between, left_out in measured(way, kind, args, known):
            bare = mean(out)
            stood.append(left_out)
            found = interval(near)
            if way == AGAIN:
                noise.append(100 * (found[2] - found[1]) / 2 / bare)
            shown = [(found, 1e6, 1), (found, 100 / bare, 2)]
            if not cells:
                against = [each / beside for each, beside in zip(near, out, strict=True)]
                shown += [(interval(against, median), 100, 2), (interval(between), 100 / bare, 2)]
            cells.append(f"{1000 * bare:.3f}")
            for (middle, low, high), scale, digits in shown:
                within = f"({scale * low:+.{digits}f} to {scale * high:+.{digits}f})"
                cells.append(f"{scale * middle:+.{digits}f} {within}" if low < high else "–")
        yield f"| {way} | {' | '.join(cells)} |"
    yield ""
    promised = PROMISED.get(kind)
    if promised is not None and noise:
        cpu, wall = (f"±{each:.2f} %{' (void)' if each > promised / 3 else ''}" for each in noise)
        yield f"{kind}: promised {promised} %, noise {cpu} of CPU time, {wall} of wall time"
        yield ""
    if any(stood):
        yield f"Rounds left out, by ways and clocks: {', '.join(map(str, stood))}"
        yield ""


def measured(way: str, kind: str, args: argparse.Namespace, known: Mapping[str, str]) -> list[Found]:
    """Of each of `CLOCKS`."""
    script, arguments = [__file__], ["--child", way, kind, "--seconds", str(args.seconds)]
    if way == "TraceML":
        script = ["-m", "traceml_ai.launcher.cli", "run", __file__, "--mode", "summary", "--args"]
    cores = sorted(os.sched_getaffinity(0))
    given = json.dumps([cores[:1], cores[:1] if args.one_core else cores[1:] or cores])
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        env = {**known, "GPUMON_NATIVE": "on", "OVERHEAD_CORES": given, "OVERHEAD_ANSWER": str(answer)}
        command = [sys.executable, *script, *arguments]
        ran = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, check=False)
        if not answer.exists():
            sys.exit(f"{way}, {kind}: {ran.stderr[-2000:]}")
        found: list[Found] = json.loads(answer.read_text())
    return found


@contextlib.contextmanager
def environment(with_traceml: bool) -> Iterator[dict[str, str]]:
    """A GPU's, real or virtual, with TraceML on the path."""
    import torch

    virtual = not torch.cuda.is_available()
    known = virtual_gpu.environment() if virtual else dict(os.environ)
    with tempfile.TemporaryDirectory() as folder:
        if with_traceml:
            subprocess.run(
                [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "-t", folder, TRACEML], check=True
            )
            known["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, known.get("PYTHONPATH"))))
        try:
            yield known
        finally:
            if virtual:
                virtual_gpu.remove_session(known["VGPU_SESSION"])


# ------------------------------------------------------------------------------------------------------- the training


def child(way: str, kind: str, seconds: float) -> None:
    own, others = json.loads(os.environ["OVERHEAD_CORES"])
    os.sched_setaffinity(0, others)  # what the agent starts inherits it
    import torch

    between = [0.0] * len(CLOCKS)
    sign = -1

    def mark(value: Any) -> Any:
        nonlocal sign
        for i, clock in enumerate(CLOCKS):
            between[i] += sign * clock()
        sign = -sign
        return value

    class Marked(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, value: Any) -> Any:
            return mark(value.view_as(value))

        @staticmethod
        def backward(_: Any, gradient: Any) -> Any:
            return mark(gradient)

    class Mark(torch.nn.Module):
        def forward(self, value: Any) -> Any:
            return Marked.apply(value)

    modules: list[torch.nn.Module] = [torch.nn.Linear(64, 64) for _ in range(LAYERS.get(kind, 12))]
    if len(modules) >= 3 * NEAR_LAYERS:
        modules[NEAR_LAYERS:NEAR_LAYERS] = [Mark()]
        modules[-NEAR_LAYERS:-NEAR_LAYERS] = [Mark()]
    if kind == "modules":
        modules = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.0)) for _ in range(333)]
    model = torch.nn.Sequential(*modules).cuda()
    batch = torch.ones(32, 8 if kind == "modules" else 64, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext
    watched: Watched | None = None
    if way == AGAIN or way.startswith("gpumon"):
        watched = Watched(model, optimizer, way)
    elif way == "TraceML":
        traceml_ai = importlib.import_module(TRACEML.replace("-", "_"))
        traceml_ai.init()
        scope = partial(traceml_ai.trace_step, model)
    hooks = {name: OrderedDict({0: lambda *_: None}) for name in ("_forward_pre_hooks", "_forward_hooks")}
    os.sched_setaffinity(0, own)

    def train() -> None:
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()

    def forward() -> None:
        with torch.no_grad():
            model(batch)

    one = forward if kind == "rollout" else train

    def run(
        steps: int, scope: Callable[[], AbstractContextManager[Any]] = nullcontext, send: Callable[[], object] = int
    ) -> Turn:
        between[:] = [0.0] * len(CLOCKS)
        began = [clock() for clock in CLOCKS]
        for _ in range(steps):
            with scope():
                one()
        send()
        took = [clock() - since for clock, since in zip(CLOCKS, began, strict=True)]
        return [(each / steps, within / steps) for each, within in zip(took, between, strict=True)]

    def trains() -> None:
        """After a rollout."""
        for _ in range(FORWARDS):
            forward()
        train()

    def put(*, in_place: bool) -> None:
        if watched is not None:
            watched.put(in_place=in_place and way != AGAIN)
        elif way == "hooks":
            vars(model).update(hooks if in_place else {name: OrderedDict() for name in hooks})
        elif way == "history":
            torch.cuda.memory._record_memory_history("all" if in_place else None)

    begins = trains if kind == "rollout" else partial(run, 1, scope)
    for _ in range(WARM_STEPS):
        begins()
    if watched is not None:
        while not watched.phases.quiet:
            begins()
        watched.begin()
    steps = max(1, round((SENT_S if way == "gpumon, all read" else TURN_S) / run(50)[1][0]))
    settling = max(1, min(steps, 64) // 4)
    send: Callable[[], object] = int if watched is None else watched.send
    rounds: list[Round] = []
    chance = random.Random(0)
    now_in = watched is not None
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        turns: dict[bool, list[Turn]] = {False: [], True: []}
        first = chance.random() < 0.5
        for wanted in (first, not first, not first, first):
            if wanted != now_in:
                put(in_place=wanted)
                now_in = wanted
                run(settling, scope if wanted else nullcontext, send if wanted else int)
            turns[wanted].append(run(steps, scope if wanted else nullcontext, send if wanted else int))
        rounds.append(turns)
        if kind == "rollout" and not len(rounds) % (FORWARDS // steps):
            train()
    found = [differences(rounds, clock) for clock in range(len(CLOCKS))]
    Path(os.environ["OVERHEAD_ANSWER"]).write_text(json.dumps(found))
    if watched is not None:
        watched.end()
    os._exit(0)


def differences(rounds: list[Round], clock: int) -> Found:
    """`clock`: which of `CLOCKS`."""

    def longest(turns: Iterable[Turn]) -> float:
        return max(step - between for step, between in (turn[clock] for turn in turns))

    usual = median(longest(turns[False]) for turns in rounds)
    kept = [turns for turns in rounds if longest((*turns[False], *turns[True])) < STILL * usual]

    def of(figure: int, within: bool) -> list[float]:
        return [mean(turn[clock][figure] for turn in turns[within]) for turns in kept]

    steps, between = ([b - a for a, b in zip(of(i, False), of(i, True), strict=True)] for i in (0, 1))
    near = [step - each for step, each in zip(steps, between, strict=True)]
    if any(between):
        slope = linear_regression(between, near).slope
        near = [each - slope * beside for each, beside in zip(near, between, strict=True)]
    return of(0, False), near, between, len(rounds) - len(kept)


class Watched:
    """A watched training whose hooks can be taken out and put back."""

    def __init__(self, model: Any, optimizer: Any, way: str) -> None:
        import torch
        from torch.optim import optimizer as optimizers

        import gpumon_agent
        from gpumon_agent.registry import REGISTRY

        self._autograd = torch.autograd
        self._model, self._way = model, way
        self._viewer: subprocess.Popen[bytes] | None = None
        engine = torch.autograd._engine_run_backward
        gpumon_agent.watch(model, optimizer)
        self._agent: Any = REGISTRY.agent
        self.phases: Any = self._agent.phases
        self._engines = engine, torch.autograd._engine_run_backward
        hooks = vars(model).items()
        self._dicts = {name: each for name, each in hooks if name.startswith("_forward_") and each is not None}
        self._registries: tuple[Any, ...] = (
            optimizers._global_optimizer_pre_hooks,
            optimizers._global_optimizer_post_hooks,
        )
        self._registered = [dict(each) for each in self._registries]
        self._out_since_ns = 0
        if way == "gpumon, viewer":
            command = [sys.executable, "-m", "gpumon", "attach", "--json", str(os.getpid())]
            self._viewer = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def begin(self) -> None:
        """The first hundred steps are over."""
        if self._way == "gpumon, all read":
            governor = self.phases._governor
            type(governor)._decide = lambda self: None
            governor.read_every, governor._ledger_at, governor._ledger_until_ns = 1, FAR, FAR
            sys.modules[type(self.phases).__module__]._NOTES_TOGETHER_NS = FAR  # type: ignore[attr-defined]
            self.phases.read_soon()

    def put(self, *, in_place: bool) -> None:
        phases = self.phases
        phases._count_quiet()
        if phases._noting:
            phases.leave_notes()
        self._autograd._engine_run_backward = self._engines[in_place]
        for name, hooks in self._dicts.items():
            vars(self._model)[name] = hooks if in_place else OrderedDict()
        for registry, hooks in zip(self._registries, self._registered, strict=True):
            registry.clear()
            registry.update(hooks if in_place else {})
        now_ns = time.monotonic_ns()
        if in_place:
            self._later(now_ns - self._out_since_ns)
        else:
            self._out_since_ns = now_ns
        phases._step_opened_ns = now_ns  # the steps without hooks are none
        for boundary, device, _ in phases.readers or ():
            boundary(device)  # nor are their peaks
        if self._way == "gpumon, quiet" and phases.quiet:
            phases.quiet_mark.left, phases._until_ns = FAR, FAR
            phases._set_due()

    def send(self) -> None:
        """What has been read, as the agent does every 500 ms: once in a turn, however long that takes."""
        if self.phases._noting:
            self.phases._do_noted()

    def _later(self, by_ns: int) -> None:
        """What is due at some time is due later: time without hooks does not count."""
        for owner, names in (
            (self.phases, ("_until_ns", "_look_due_ns", "_ask_due_ns")),
            (self.phases.quiet_mark, ("ends_due_ns",)),
            (self.phases._governor, ("until_ns", "_ledger_until_ns")),
        ):
            for name in names:
                setattr(owner, name, min(getattr(owner, name) + by_ns, FAR))
        self.phases._set_due()

    def end(self) -> None:
        if self._viewer is not None:
            self._viewer.terminate()
            self._viewer.wait()


if __name__ == "__main__":
    main()
