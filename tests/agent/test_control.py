"""What a viewer asks of an agent, on a virtual GPU, from the request to what comes of it: one training process."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import pickle
import pickletools
import re
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpumon import link
from gpumon.analysis.blocks import allocator
from gpumon.session.store import SessionStore
from gpumon.snapshots.reading import read
from gpumon_agent import wire
from gpumon_agent.oom import report_file
from gpumon_agent.transport import blocks, trainer

SCRIPT = Path(__file__).with_name("asked.py")
READ_BY_THE_PAGE = {
    "PROTO", "EMPTY_DICT", "MARK", "BINUNICODE", "BINPUT", "BINGET", "EMPTY_LIST", "BININT", "BININT1", "BININT2",
    "LONG1", "APPEND", "APPENDS", "SETITEMS", "SETITEM", "TUPLE2", "NEWTRUE", "NEWFALSE", "NONE", "BINFLOAT", "STOP",
}  # fmt: skip
"""Opcodes that the memory_viz page's own reader of pickles has been tested with."""


class Watched:
    """The training process, and a viewer that listens to it and asks."""

    def __init__(self, process: subprocess.Popen[str], gpu: Any) -> None:
        self.process = process
        self.gpu = gpu
        self.store = SessionStore()
        self.events: list[wire.Event] = []

    def tell(self, command: str) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, self.process.communicate()
        return json.loads(line)

    def ask(self, what: str, *more: int) -> wire.Reply:
        (descriptor,) = link.resolve(str(self.process.pid))
        return asyncio.run(link.Asker([descriptor])(descriptor.nonce, what, *more))

    def asked(self, what: str, until: Callable[[wire.Event], bool]) -> wire.Event:
        """Asks, lets steps go by, and returns what a viewer then hears of it. A file goes out in pieces; blocks wait
        for the end of a forward. Short phases are sent together, and requests heard then: the next boundary hears it.
        """
        reply = self.ask(what)
        assert reply.accepted, reply
        time.sleep(2 * trainer._TOGETHER_NS / 1e9)
        self.tell("steps 30" if what == wire.SNAPSHOT_FILE else "steps 8")
        return self.heard(until)

    def heard(self, until: Callable[[wire.Event], bool]) -> wire.Event:
        async def listen() -> wire.Event:
            async for received in link.subscribe(link.resolve(str(self.process.pid))):
                self.store.apply(received)
                self.events.append(received.event)
                if until(received.event):
                    return received.event
            raise AssertionError("it ended")

        return asyncio.run(asyncio.wait_for(listen(), 20))

    @property
    def rank(self) -> Any:
        return self.store.frame(0).ranks[0]


def test_what_is_asked_for_is_done_between_two_phases(virtual_gpu: Any) -> None:
    runtime = Path(os.environ["XDG_RUNTIME_DIR"])
    gpu = virtual_gpu(memory="4GiB")
    environment = {**gpu.environment, "XDG_RUNTIME_DIR": str(runtime), "GPUMON_GOVERNOR": "off"}
    process = subprocess.Popen(
        gpu.command(SCRIPT), env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline()) == 5
        deadline = time.monotonic() + 30
        while not any(found.pid == process.pid for found in link.discover()) and time.monotonic() < deadline:
            time.sleep(0.02)
        watched = Watched(process, gpu)
        _blocks(watched)
        _owners(watched)
        _file(watched, runtime)
        _refusals(watched)
        _out_of_memory(watched)
        _what_is_dear(watched)
        assert watched.tell("failures") == []
    finally:
        process.kill()
        process.communicate()


def _blocks(watched: Watched) -> None:
    """The map is the allocator's at that boundary, to the byte, and part of the picture for whoever comes later."""
    watched.tell("keep 3000")
    first = watched.asked(wire.BLOCKS, lambda e: isinstance(e, wire.Segments) and e.part == e.parts - 1)
    assert isinstance(first, wire.Segments)
    assert first.parts > 1
    watched.tell("steps 1")
    watched.heard(lambda e: isinstance(e, wire.Phase) and e.t_ns > first.t_ns)  # so all before it are heard too
    (record,) = watched.rank.segments
    found = allocator(record.segments).totals
    boundary = max(
        (e for e in watched.events if isinstance(e, wire.Phase) and e.t_ns <= record.t_ns), key=lambda e: e.t_ns
    )
    assert record.t_ns - boundary.t_ns < 5_000_000_000
    assert (found.reserved, found.allocated + found.waiting) == (boundary.reserved, boundary.active)
    assert (found.allocated, found.inactive_split) == (boundary.allocated, boundary.inactive_split)
    assert record.spent_ns is not None
    assert record.reason == "asked"
    assert watched.tell("capture") == ["blocks"]  # not within a CUDA graph
    watched.tell("steps 8")
    watched.heard(lambda e: isinstance(e, wire.Segments) and e.number > record.number)
    ran, on, off, count = watched.tell("collects")
    assert (on, off) == (True, False)
    assert count > 6000
    assert ran < 20  # a few before it is held and after: not one for every ten blocks


def _owners(watched: Watched) -> None:
    """The owners of blocks are those of the ledger of the same boundary.

    To the byte for weights, gradients, optimizer state, activations and what a variable holds: all their sizes here are
    multiples of 512 bytes, to which the allocator rounds, but for the loss, 4 bytes in a block of 512.
    """
    before = watched.rank.segments[0].number
    assert watched.tell("accumulate") == 4
    watched.asked(wire.BLOCKS, lambda e: isinstance(e, wire.Segments) and e.number > before and e.part == e.parts - 1)
    watched.tell("steps 2")
    (record,) = watched.rank.segments
    watched.heard(lambda e: isinstance(e, wire.Synced))
    (step,) = (each for each in watched.rank.steps if each.step == record.step)
    boundary = max((e for e in step.phases if e.t_ns <= record.t_ns), key=lambda e: e.t_ns)
    assert boundary.phase == "forward"  # all is alive there
    (ledger,) = (e for e in step.ledgers if (e.phase, e.index) == ("forward", boundary.index) and not e.peak)
    assert ledger.activations is not None
    assert record.walked
    kinds = allocator(record.segments, record.holders).totals.kinds
    parameters = 4 * (2 * 256 * 1024 + 1024 + 256)
    assert (ledger.weights, ledger.gradients, ledger.optimizer) == (parameters, parameters, 2 * parameters)
    for line in ("weights", "gradients", "optimizer", "inputs"):
        assert kinds[line] == getattr(ledger, line), line
    losses = kinds["activations"] - ledger.activations
    assert 0 <= losses <= 508, "blocks of 4 bytes"
    assert [holder.text for holder in record.holders] == ["self.kept in steps()"]
    assert (kinds["variables"], ledger.variables) == (3_000 * 512, 3_000 * 256)
    named = {line: kinds[line] for line in wire.BLOCK_OWNERS if line in kinds}
    assert ledger.allocated == sum(named.values()) + kinds.get("unowned", 0)
    assert kinds.get("unowned", 0) == 0, kinds


def _file(watched: Watched, runtime: Path) -> None:
    """What torch.cuda.memory._dump_snapshot would have written, as far as the page's reader and torch's own see."""
    told = watched.asked(wire.SNAPSHOT_FILE, lambda e: isinstance(e, wire.Snapshot))
    assert isinstance(told, wire.Snapshot)
    assert told.path is not None
    path = Path(told.path)
    kept = runtime / "state" / "gpumon" / "snapshots"
    assert (path.parent, told.why) == (kept, None)
    assert [stat.S_IMODE(each.stat().st_mode) for each in (path, *path.parents[:3])] == [0o600, 0o700, 0o700, 0o700]
    assert path.stat().st_size == told.bytes
    data = path.read_bytes()
    assert {opcode.name for opcode, _, _ in pickletools.genops(data)} <= READ_BY_THE_PAGE
    snapshot = pickle.loads(data)
    assert [len(trace) for trace in snapshot["device_traces"]] == [0]
    taken = read(path)
    assert taken.taken is not None
    assert taken.taken[0] == told.step
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    assert len(blocks) > 6000
    assert sum(len(segment.blocks) for device in taken.devices for segment in device.segments) == len(blocks)
    assert all({"address", "size", "requested_size", "state", "frames"} <= block.keys() for block in blocks)
    assert sum(b["size"] for b in blocks) == sum(s["total_size"] for s in snapshot["segments"])
    viz = pytest.importorskip("torch.cuda._memory_viz")
    assert "total_allocated" in viz.segsum(snapshot)
    for plot in (viz.trace_plot, viz.segment_plot):  # the whole snapshot is in the page that torch makes of it
        embedded = re.search(r'"base64": "([^"]+)"', plot(snapshot))
        assert embedded is not None
        assert pickle.loads(base64.b64decode(embedded[1])) == snapshot
    for flames in (viz.memory, viz.segments):  # each byte of each block is told
        told_bytes = sum(int(line.rpartition(" ")[2]) for line in flames(snapshot, str).splitlines())
        assert told_bytes == sum(s["total_size"] for s in snapshot["segments"])
    seen = {told.t_ns}  # the newest is part of the picture
    for _ in range(9):
        seen.add(watched.asked(wire.SNAPSHOT_FILE, lambda e: isinstance(e, wire.Snapshot) and e.t_ns not in seen).t_ns)
    assert len(list(path.parent.glob("snapshot-*"))) == 8
    assert not list(path.parent.glob(".*"))


def _refusals(watched: Watched) -> None:
    assert watched.ask("reboot") == wire.Reply(
        False, "this agent does not know the request 'reboot': upgrade gpumon-agent"
    )
    assert watched.ask(wire.ROOM).accepted is False
    assert watched.ask(wire.ROOM, 0, 3 << 30).accepted
    watched.tell("steps 1")
    assert watched.tell("budget") == {"0": 3 << 30}
    assert watched.ask(wire.BLOCKS).why == "at the next phase boundary"
    assert watched.ask(wire.BLOCKS).why == "already requested: at the next phase boundary"
    watched.tell("steps 1")


def _out_of_memory(watched: Watched) -> None:
    number = watched.rank.segments[0].number
    assert watched.tell("oom") == "caught"
    read = watched.heard(lambda e: isinstance(e, wire.Segments) and e.reason == "oom")
    assert isinstance(read, wire.Segments)
    assert read.number > number
    watched.heard(lambda e: isinstance(e, wire.Synced))
    told = [e for e in watched.events if isinstance(e, wire.Oom)]
    oom = told[-1] if told else watched.heard(lambda e: isinstance(e, wire.Oom))  # on a busy machine it is made later
    assert isinstance(oom, wire.Oom)
    found = allocator(watched.rank.segments[0].segments).totals
    assert (found.reserved, found.allocated) == (oom.reserved, oom.allocated)
    assert found.kinds["weights"] == 4 * (2 * 256 * 1024 + 1024 + 256)


def _what_is_dear(watched: Watched) -> None:
    """Where the script records history, or there are too many blocks, nothing is read, and it is said why."""

    def refused(event: wire.Event) -> bool:
        return isinstance(event, wire.Notice) and event.text.startswith(wire.NOT_DONE)

    watched.tell("record 1")
    told = watched.asked(wire.BLOCKS, refused)
    assert isinstance(told, wire.Notice)
    assert "the script records the allocator's history" in told.text
    written = watched.asked(wire.SNAPSHOT_FILE, lambda e: isinstance(e, wire.Snapshot) and e.path is None)
    assert isinstance(written, wire.Snapshot)
    assert "torch.cuda.memory._dump_snapshot" in str(written.why)
    watched.tell("record 0")
    watched.tell("keep 60000")
    watched.asked(wire.BLOCKS, lambda e: refused(e) and "cannot be read within 100 ms (at most 60,000)" in e.text)
    watched.tell("keep 0")


def test_no_more_than_512_blocks_are_converted_between_two_phases() -> None:
    block = {"size": 512, "state": "active_allocated"}
    segment = {"address": 1 << 20, "total_size": 1 << 20, "segment_type": "small", "stream": 0, "device": 0}
    raw = blocks.Raw([{**segment, "blocks": [block] * 700} for _ in range(3)], {}, 1, 0)
    *slices, segments = blocks.made_of(raw, 0)
    assert slices == [None] * (2_100 // 512)
    assert segments is not None
    assert [len(made.blocks) for made in segments] == [700] * 3


def test_blocks_have_the_states_that_recordings_name() -> None:
    """Viewers and recordings of other versions read these numbers."""
    states = ("inactive", "active_allocated", "active_pending_free", "active_awaiting_free")
    segment = {"address": 1 << 20, "total_size": 1 << 20, "segment_type": "small", "stream": 0, "device": 0}
    raw = blocks.Raw([{**segment, "blocks": [{"size": 512, "state": state} for state in states]}], {}, 1, 0)
    *_, segments = blocks.made_of(raw, 0)
    assert segments is not None
    assert [state for _, state in segments[0].blocks] == [0, 1, 2, 2]


def many_blocks() -> None:
    import torch

    from gpumon_agent.guard import Guard
    from gpumon_agent.transport.requests import Requests

    told: list[str] = []
    requests = Requests(
        Guard(), now=lambda: (0, "forward", 0), say=lambda events: None, write_file=lambda *file: None,
        tell=told.append, rang=lambda: None, recording=lambda: False,
    )  # fmt: skip
    kept = [torch.empty(64, device="cuda") for _ in range(200_002)][::2]
    requests.out_of_memory(0)
    print(*told, len(kept), sep="\n")


def test_more_than_200_000_blocks_are_not_read_at_an_out_of_memory(virtual_gpu: Any) -> None:
    """It delays nothing then, but the host's memory may be short too."""
    told, _ = virtual_gpu(memory="4GiB").run(many_blocks).stdout.splitlines()
    assert re.fullmatch(r"blocks were not read: 200,\d+ blocks cannot be read .* \(at most 200,000\)", told)


def test_no_pickle_of_many_blocks_needs_an_opcode_that_the_page_does_not_know() -> None:
    """It would need LONG_BINPUT for the 257th object of one."""
    from gpumon_agent.oom.memory_viz import pieces

    blocks = [{"address": at, "state": "active_allocated", "frames": []} for at in range(1_000)]
    data = b"".join(pieces([{"address": 0, "blocks": blocks}], {}))
    assert {opcode.name for opcode, _, _ in pickletools.genops(data)} <= READ_BY_THE_PAGE
    assert pickle.loads(data)["segments"] == [{"address": 0, "blocks": blocks}]


def test_nothing_is_written_where_reports_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpumon_agent.oom.memory_viz import SnapshotWriter

    monkeypatch.setenv(report_file.VARIABLE, "off")
    written = SnapshotWriter(report_file.ReportFile())
    written.add(b"piece")
    written.end()
    assert (written.path, written.why) == (None, "no snapshot on disk: GPUMON_OOM_DIR is off")


def encodes(at_an_oom: bool, took_ms: int) -> None:
    """A message that never ends waits, and each look at the clock takes a millisecond."""
    from collections.abc import Iterator
    from contextlib import suppress
    from itertools import count

    import torch

    from gpumon_agent import agent, thread_clock, wire

    watched = agent.REGISTRY.agent = agent.Agent()
    model = torch.nn.Linear(8, 8).cuda()
    watched.adopt(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.ones(2, 8, device="cuda"))
    taken = 0

    def endless() -> Iterator[None]:
        nonlocal taken
        while True:
            taken += 1
            yield None

    watched.transport.say(endless())
    ticks = count(step=1_000_000)
    thread_clock.thread_time_ns = thread_clock.monotonic_ns = lambda: next(ticks)
    if at_an_oom:
        with suppress(torch.OutOfMemoryError):
            torch.empty(1 << 40, device="cuda")
    else:
        watched.requests.take(wire.Request(wire.BLOCKS))
        model(torch.ones(2, 8, device="cuda"))
    assert 0.9 * took_ms <= taken < 1.5 * took_ms, taken
    watched.leave("stopped")


@pytest.mark.parametrize(("at_an_oom", "took_ms"), [(False, 20), (True, 300)], ids=["asked", "out of memory"])
def test_encoding_may_take_20_ms_for_a_viewer_and_300_as_the_run_ends(
    virtual_gpu: Any, at_an_oom: bool, took_ms: int
) -> None:
    virtual_gpu().run(encodes, at_an_oom, took_ms)


@pytest.mark.parametrize(("after_ns", "waits"), [(4_900_000_000, True), (5_100_000_000, False)])
def test_blocks_wait_five_seconds_for_a_graph_that_never_comes(
    monkeypatch: pytest.MonkeyPatch, after_ns: int, waits: bool
) -> None:
    """As in a loop without a training forward."""
    from gpumon_agent.guard import Guard
    from gpumon_agent.transport import requests as module

    now, awaited = 10**12, []
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic_ns=lambda: now))
    requests = module.Requests(
        Guard(), now=lambda: (0, "eval", 0), say=lambda events: None, write_file=lambda *file: None,
        tell=lambda text: None, rang=lambda: None, recording=lambda: False, graph_to_come=lambda: True,
        await_graph=awaited.append,
    )  # fmt: skip
    assert requests._waits()
    now += after_ns
    assert requests._waits() == waits
    assert awaited == [True, waits]
