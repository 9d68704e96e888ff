"""Steps with notes as viewers get them: from the hooks through the helper."""

from __future__ import annotations

import ast
import asyncio
import os
import random
import signal
import subprocess
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpumon import link
from gpumon_agent import noted, wire
from gpumon_agent.hooks.recorder import NOTED_MAX, Recorder
from gpumon_agent.noted import NOTE_WORDS, Newest, Noted
from gpumon_agent.quiet_mark import CODES
from gpumon_agent.shape_model.outlook import Outlooks
from gpumon_agent.transport.ring import LONGEST

Gpu = Callable[..., Any]
ROWS = ((8, 64),)
USUAL = (wire.BETWEEN, wire.FORWARD, wire.BACKWARD, wire.OPTIMIZER)
TWO_BATCHES = (*USUAL[:3], *USUAL)
QUIET = 40, (wire.QuietPeak(1, 900, 1000),), (wire.QuietEnd(60, 1, 5, 6),)


def made(steps: int, names: tuple[str, ...] = USUAL) -> Noted:
    """From step 100 on. Note `n` ends at 1000 + 10 n ns, with the figures 1000 n, 1000 n + 1, …"""
    words = memoryview(bytearray(8 * NOTE_WORDS * steps * len(names))).cast("q")
    for n in range(steps * len(names)):
        code = CODES[names[n % len(names)]]
        note = [code, 1000 + 10 * n, -7, 2048, n == 2, *range(1000 * n, 1000 * n + 10)]
        for at, word in enumerate(note, n * NOTE_WORDS):
            words[at] = word
    return Noted(100, 500, 800, len(names), 1, (3,), words.tobytes(), {-7: ROWS}, 99, *QUIET)


def test_notes_are_phases_and_steps() -> None:
    phases, groups, closed = next(made(2, TWO_BATCHES).steps())
    figures = [tuple(range(1000 * n, 1000 * n + 10)) for n in range(7)]
    flags = [wire.BOUND if n == 2 else 0 for n in range(7)]
    ended = [1000 + 10 * n for n in range(7)]
    index = [0, 0, 0, 1, 1, 1, 0]
    assert phases == [
        wire.Phase(100, TWO_BATCHES[n], index[n], 1, ended[n], 200 if not n else 10, *figures[n], flags[n])
        for n in range(7)
    ]
    assert groups == [ROWS, ROWS]
    assert closed == wire.Step(100, 1060, 560, 4096, ROWS * 2, phases=7, optimizers=(3,), quiet=40,
                               quiet_peaks=QUIET[1], quiet_ends=QUIET[2])  # fmt: skip
    *_, after = made(2, TWO_BATCHES).events()
    assert after == wire.Step(101, 1130, 70, 4096, ROWS * 2, phases=7, optimizers=(3,))


@pytest.mark.parametrize("names", [USUAL, TWO_BATCHES])
def test_parts_tell_the_same(names: tuple[str, ...]) -> None:
    whole = made(90, names)
    records = [wire.encode_event(part) for part in whole.parts()]  # type: ignore[arg-type]
    assert len(records) > 3
    assert max(map(len, records)) <= LONGEST
    events = [raw for record in records for raw in noted.encoded(record)]
    assert events == [wire.encode_event(event) for event in whole.events()]
    assert list(noted.encoded(events[0])) == [events[0]]


def test_a_record_that_is_damaged_is_no_event() -> None:
    (raw,) = noted.encoded(wire.encode_event(made(2))[:40])  # type: ignore[arg-type]
    with pytest.raises(wire.WireError):
        wire.kind(raw)


def test_where_nobody_drains_few_records_are_kept() -> None:
    recorder = Recorder()
    for _ in range(NOTED_MAX + 5):
        recorder.append_noted(made(1))
    recorder.append(wire.Notice(0, "after"))
    assert len(recorder.drain()) == NOTED_MAX + 1
    assert recorder.dropped == 5


def test_of_the_newest_events_no_more_records_are_kept_than_are_needed() -> None:
    newest = Newest(50)
    for number in range(7):
        newest.extend([(number, made(4))])
    assert [number for number, _ in newest] == [number for number in (4, 5, 6) for _ in range(20)]
    newest.extend((7, wire.Notice(at, "")) for at in range(60))
    assert len(list(newest)) == 50


def test_outlooks_learn_of_notes_what_they_learn_of_events() -> None:
    """All that they learn is in `Noted.alike`, which quiet_hooks.cpp finds: here the bytes of a step without times."""
    chance = random.Random(0)
    runs = [chance.choice((1, 3, 40)) for _ in range(30)]
    of_notes, of_events = Outlooks(lambda _: None, {}), Outlooks(lambda _: None, {})
    learned: dict[Outlooks, list[Any]] = {of_notes: [], of_events: []}
    for outlooks, known in learned.items():
        count_learned(outlooks, known)
    step, begins = 0, 0
    for many in runs:
        changes = chance.random() < 0.2
        begins += changes
        for size in (many, 90, 20):
            each = msgspec.structs.replace(alike(size, begins), step=step)
            of_notes.noted(step, ROWS)  # the batch that had an outlook
            of_notes.follow(each)
            for phases, groups, closed in each.steps():
                for shapes in groups:
                    of_events.noted(closed.step, shapes)
                for event in (*phases, closed):
                    of_events.follow(event)
            step += size
    assert learned[of_notes] == learned[of_events]
    assert 300 < len(learned[of_notes]) < step / 4


def alike(steps: int, allocated: int) -> Noted:
    whole = made(steps)
    words = memoryview(bytearray(whole.words)).cast("q")
    for at in range(0, len(words), NOTE_WORDS):
        words[at + 4] = 0
        for figure in range(10):
            words[at + 5 + figure] = (allocated + 1) << 20
    return msgspec.structs.replace(whole, words=words.tobytes(), alike=1 + allocated, quiet=0)


def count_learned(outlooks: Outlooks, known: list[Any]) -> None:
    nothing_new = outlooks._nothing_new

    def counted(phases: list[wire.Phase], groups: list[Any]) -> bool:
        nothing = nothing_new(phases, groups)
        if not nothing:
            known.append((phases, groups))
        return nothing

    outlooks._nothing_new = counted  # type: ignore[method-assign]


SCRIPT = '''
"""`told|kill`: a training of which every step is read."""
import os, signal, sys, time
import torch
import gpumon_agent
from gpumon_agent.governor import Governor
from gpumon_agent.hooks.native_hooks import NativeMark
from gpumon_agent.registry import REGISTRY

FAR = 1 << 62
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
gpumon_agent.watch(model, optimizer)
agent, governor = REGISTRY.agent, REGISTRY.agent.governor
steps = 0

def train(count, *rows):
    global steps
    for _ in range(count):
        model(torch.ones(rows[steps % len(rows)], 64, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1

train(120, 32, 8, 16, 48)
Governor._decide = lambda _: None
governor.read_every, governor._ledger_at, governor._ledger_until_ns, governor.ledger = 1, FAR, FAR, False
agent.phases.read_soon()
train(8, 32)
assert agent.transport.wait_ready(60)
sys.stdin.readline()
if sys.argv[1] == "told":
    noting = []
    for rows in [(32,), (8, 16, 48)]:
        for can in (True, False):
            NativeMark.can_note = lambda _: can
            agent.phases.stir()
            begins = steps
            train(60, *rows)
            noting.append((agent.phases._noting, begins))
    print(noting, flush=True)
else:
    until = time.monotonic() + 1.2
    while time.monotonic() < until or time.monotonic_ns() < agent.phases.quiet_mark.due_ns - 50_000_000:
        train(1, 32)
        time.sleep(0.005)
    print(steps, time.monotonic_ns(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
'''


def heard(virtual_gpu: Gpu, how: str) -> tuple[int, str, list[wire.Event]]:
    """Of a training: its exit code, what it printed, and what a viewer heard."""
    gpu = virtual_gpu(memory="4GiB")
    process = subprocess.Popen(
        gpu.command(SCRIPT, how), text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, **gpu.environment},
    )  # fmt: skip
    events: list[wire.Event] = []

    async def hear() -> None:
        while not (found := [each for each in link.discover() if each.pid == process.pid]):
            await asyncio.sleep(0.05)
        async for received in link.subscribe(found):
            events.append(received.event)
            if isinstance(received.event, wire.Synced):
                assert process.stdin is not None
                process.stdin.write("\n")
                process.stdin.flush()

    with process:
        try:
            asyncio.run(asyncio.wait_for(hear(), 120))
            assert process.stdout is not None
            return process.wait(60), process.stdout.read(), events
        finally:
            process.kill()


def without_times(event: wire.Phase | wire.Step, begins: int) -> dict[str, Any]:
    fields = msgspec.structs.asdict(event)
    del fields["t_ns"], fields["duration_ns"]
    return {**fields, "kind": type(event).__name__, "step": event.step - begins}


def test_a_viewer_is_told_of_noted_steps_as_of_others(virtual_gpu: Gpu, native_reader: Path) -> None:
    """Field by field, with the same shapes in all steps and with others in each."""
    code, said, events = heard(virtual_gpu, "told")
    assert code == 0
    read = [event for event in events if isinstance(event, (wire.Phase, wire.Step))]
    told: list[list[dict[str, Any]]] = []
    for noted_there, (noting, begins) in zip((True, False) * 2, ast.literal_eval(said), strict=True):
        assert noting == noted_there
        here = [event for event in read if begins + 3 <= event.step < begins + 60]
        for kind, many in ((wire.Phase, 4), (wire.Step, 1)):
            tiles = [event for event in here if isinstance(event, kind)]
            assert len(tiles) == 57 * many
            assert all(b.t_ns - b.duration_ns == a.t_ns for a, b in pairwise(tiles))
        told.append([without_times(event, begins) for event in here])
    assert told[0] == told[1]
    assert told[2] == told[3]
    assert len({each["input_bytes"] for each in told[2] if each["kind"] == "Step"}) == 3


def test_a_kill_loses_half_a_second_of_noted_steps(virtual_gpu: Gpu, native_reader: Path) -> None:
    """And its step and phase are known."""
    code, said, events = heard(virtual_gpu, "kill")
    assert code == -signal.SIGKILL
    steps, killed_ns = map(int, said.split())
    *_, last = (event for event in events if isinstance(event, wire.Step))
    assert 0.3 < (killed_ns - last.t_ns) / 1e9 < 0.6  # with the step that ran, and this one's own print
    *_, goodbye = (event for event in events if isinstance(event, wire.Goodbye))
    assert (goodbye.reason, goodbye.step, goodbye.phase) == ("lost", steps, wire.BETWEEN)
