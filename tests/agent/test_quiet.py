"""Quiet steps: nothing is read in them, and yet every step is counted, no peak is lost, and what is new is noticed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gpumon_agent import agent as agents
from gpumon_agent import governor, wire
from gpumon_agent.hooks.idle_hooks import IdleHooks
from gpumon_agent.quiet_mark import marked

Gpu = Callable[..., Any]
FAR = 1 << 62


def model_and_optimizer(resting: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    resting(model, optimizer)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, batch: int = 2) -> None:
    for _ in range(steps):
        model(torch.ones(batch, 4)).sum().backward()
        optimizer.step()


def rested(resting: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """After the first steps: the agent rests."""
    model, optimizer = model_and_optimizer(resting)
    while not resting.agent.phases.quiet:
        train(model, optimizer, 1)
    return model, optimizer


def read_next(resting: Any) -> None:
    resting.agent.phases.read_soon()


def test_quiet_steps_are_counted_and_have_no_events(resting: Any) -> None:
    model, optimizer = rested(resting)
    begun = resting.agent.phases.step
    before = len(resting.events())
    train(model, optimizer, 20)
    assert len(resting.events()) == before
    assert resting.agent.phases.quiet_mark.idle
    read_next(resting)
    train(model, optimizer, 2)
    last = resting.steps()[-1]
    assert (last.step, last.quiet) == (begun + 21, 21)
    assert resting.words()[-1] == ["between", "forward", "backward", "optimizer"]


def test_a_batch_with_new_shapes_is_read(resting: Any) -> None:
    model, optimizer = rested(resting)
    resting.agent.governor._wakes_ns = FAR
    train(model, optimizer, 3)
    assert resting.agent.phases.quiet
    train(model, optimizer, 1, batch=3)
    assert (resting.steps()[-1].quiet, resting.steps()[-1].input_shapes) == (3, ((3, 4),))
    told = len(resting.steps())
    while not resting.agent.phases.quiet:
        train(model, optimizer, 1)
    train(model, optimizer, 5, batch=3)
    train(model, optimizer, 5, batch=2)
    assert len(resting.steps()) <= told + 2  # both are known now


def test_a_new_batch_that_costs_too_much_is_predicted_all_the_same(resting: Any, monkeypatch: Any) -> None:
    model, optimizer = rested(resting)
    monkeypatch.setattr(governor.Governor, "may_wake", lambda _: False)
    asked: list[Any] = []
    monkeypatch.setattr(resting.agent.phases, "_on_batch", lambda *args: asked.append(args) or (False, False))
    train(model, optimizer, 2, batch=3)
    train(model, optimizer, 1, batch=2)
    assert [(step, shapes) for step, _, shapes, *_ in asked] == [
        (step, [(3, 4)]) for step in (asked[0][0], asked[0][0] + 1)
    ]
    assert resting.agent.phases.quiet


def test_a_new_batch_that_was_only_predicted_leaves_no_trace_in_the_next_step_that_is_read(
    resting: Any, monkeypatch: Any
) -> None:
    """Its forward began and, as the step was idle, did not end."""
    model, optimizer = rested(resting)
    monkeypatch.setattr(governor.Governor, "may_wake", lambda _: False)
    train(model, optimizer, 1, batch=3)
    read_next(resting)
    train(model, optimizer, 2)
    assert resting.words()[-1] == ["between", "forward", "backward", "optimizer"]


def test_a_batch_that_may_not_fit_is_predicted_each_time_it_comes(resting: Any, monkeypatch: Any) -> None:
    model, optimizer = model_and_optimizer(resting)
    asked: list[int] = []
    monkeypatch.setattr(resting.agent.phases, "_on_batch", lambda step, *_: asked.append(step) or (True, False))
    monkeypatch.setattr(governor.Governor, "may_wake", lambda _: False)
    train(model, optimizer, 30)
    assert resting.agent.phases.quiet
    assert asked == list(range(30))


def test_an_evaluation_among_quiet_steps_is_read(resting: Any) -> None:
    model, optimizer = rested(resting)
    resting.agent.governor._wakes_ns = FAR
    train(model, optimizer, 3)
    with torch.no_grad():
        model(torch.ones(2, 4))
    train(model, optimizer, 1)
    assert "eval trains" in [f"{p.phase}{' trains' * bool(p.flags & wire.TRAINS)}" for p in resting.phases()[-5:]]
    assert resting.steps()[-1].quiet == 3


@pytest.mark.parametrize("several", [False, True])
def test_steps_of_optimizers_that_take_turns_are_counted(resting: Any, several: bool) -> None:
    model = nn.Linear(4, 4)
    optimizers = [torch.optim.SGD([model.weight]), torch.optim.SGD([model.bias])][: 1 + several]
    resting(model, optimizers)

    def turn() -> None:
        for optimizer in optimizers:
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()

    for _ in range(10):
        turn()
    assert resting.agent.phases.quiet
    assert resting.agent.phases.quiet_mark.idle is not several
    turn()
    resting.agent.phases._count_quiet()
    assert resting.agent.phases.step == 11 * (1 + several) - several  # the last waits for the next event


def test_an_idle_step_through_the_scaler_counts_once(resting: Any) -> None:
    model, optimizer = rested(resting)
    scaler, begun = torch.amp.GradScaler("cpu"), resting.agent.phases.step
    for _ in range(5):
        scaler.scale(model(torch.ones(2, 4)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert resting.agent.phases.quiet_mark.idle
    resting.agent.phases._count_quiet()
    assert resting.agent.phases.step == begun + 5


def test_hooks_that_are_muted_mark_nothing(resting: Any) -> None:
    """In a forked child the word is in memory that the parent's helper reads."""
    model, optimizer = rested(resting)
    train(model, optimizer, 1)
    mark = resting.agent.phases.quiet_mark
    before = mark.words[mark.at]
    resting.agent.hooks.mute()
    train(model, optimizer, 3)
    assert mark.words[mark.at] == before


def test_a_graphs_capture_ends_idle_steps(resting: Any) -> None:
    """Its step must be seen: each replay will be one, too."""
    model, optimizer = rested(resting)
    train(model, optimizer, 1)
    resting.agent.hooks._graphs._capture_begins(optimizer)
    assert not resting.agent.phases.quiet_mark.idle


def test_steps_that_the_user_marks_are_counted(resting: Any) -> None:
    model, optimizer = model_and_optimizer(resting)

    def marked_step() -> None:
        train(model, optimizer, 2)
        resting.agent.phases.mark()

    while not resting.agent.phases.quiet:
        marked_step()
    begun = resting.agent.phases.step
    for _ in range(5):
        marked_step()
    resting.agent.phases._count_quiet()
    assert resting.agent.phases.step == begun + 5


def test_a_step_that_the_scaler_skips_is_counted(resting: Any) -> None:
    model, optimizer = rested(resting)
    scaler = torch.amp.GradScaler("cpu")
    begun = resting.agent.phases.step
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 4)).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    resting.agent.phases._count_quiet()
    assert resting.agent.phases.step == begun + 3


def test_another_optimizer_is_noticed_in_an_idle_step(resting: Any) -> None:
    model, optimizer = rested(resting)
    other = torch.optim.SGD(model.parameters())
    train(model, optimizer, 2)
    train(model, other, 1)
    assert len(resting.agent.phases.optimizers) == 2
    assert not resting.agent.phases.quiet_mark.idle


def test_named_phases_are_read_and_the_run_rests_no_more(resting: Any) -> None:
    model, optimizer = rested(resting)
    train(model, optimizer, 3)
    with agents.phase("validate"):
        pass
    assert "validate" in [phase.phase for phase in resting.phases()]
    train(model, optimizer, 20)
    assert not resting.agent.phases.quiet


def test_the_running_phase_is_known_without_an_event(resting: Any) -> None:
    model, optimizer = rested(resting)
    seen: list[tuple[int, str]] = []

    def look() -> None:
        seen.append(resting.agent.phases.where()[:2])

    class Slow(nn.Module):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            look()
            return value

    model.register_forward_pre_hook(lambda *_: look())
    handles = [parameter.register_hook(lambda _: look()) for parameter in model.parameters()]
    optimizer.register_step_pre_hook(lambda *_: look())
    train(model, optimizer, 2)
    assert resting.agent.phases.quiet_mark.idle
    step = resting.agent.phases.where()[0]
    each = ["forward", "backward", "backward", "optimizer"]
    assert seen == [(at, phase) for at in (step - 2, step - 1) for phase in each]
    assert resting.agent.phases.where()[1] == "between"
    for handle in handles:
        handle.remove()


def test_the_mark_ends_with_the_quiet_steps(resting: Any) -> None:
    model, optimizer = rested(resting)
    mark = resting.agent.phases.quiet_mark
    assert marked(mark.words[mark.at]) is not None
    read_next(resting)
    train(model, optimizer, 1)
    assert marked(mark.words[mark.at]) is None


def test_an_exception_in_a_quiet_step_is_said_where_it_was(resting: Any) -> None:
    model, optimizer = rested(resting)
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 5))
    train(model, optimizer, 2)
    assert resting.agent.phases.quiet


def test_the_steps_that_no_other_follows_are_told_at_the_end(resting: Any) -> None:
    model, optimizer = rested(resting)
    begun = resting.agent.phases.step
    train(model, optimizer, 7)
    resting.agent.phases.finish()
    last = resting.steps()[-1]
    assert (last.step, last.quiet, last.phases) == (begun + 6, 6, 0)


def test_a_user_who_listens_to_outlooks_hears_each(resting: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(resting.agent.outlooks, "_functions", [lambda _: None])
    model, optimizer = model_and_optimizer(resting)
    asked: list[int] = []
    batch = resting.agent.outlooks.batch
    monkeypatch.setattr(resting.agent.phases, "_on_batch", lambda step, *rest: asked.append(step) or batch(step, *rest))
    monkeypatch.setattr(governor.Governor, "may_wake", lambda _: False)
    train(model, optimizer, 20)
    assert asked == list(range(20))


def figures(read: str) -> None:
    """What the agent tells of quiet steps with a peak and a leak, what torch itself says, and how often Python read.
    `read`: what reads the ends."""
    import json

    import torch

    from gpumon_agent import agent as agents
    from gpumon_agent import governor, wire
    from gpumon_agent.registry import REGISTRY

    governor.READ_FIRST = 5
    governor.READ_AGAIN_NS = 1 << 61
    governor.Governor._decide = lambda self: None
    model = torch.nn.Linear(256, 256).cuda()
    optimizer = torch.optim.SGD(model.parameters())
    agent = REGISTRY.agent = agents.Agent("test", publish=False)
    agent.governor.read_every = agent.governor.ledger_every = 10**9
    agent.phases.ends_every_ns = 1
    agent.adopt(model, optimizer)
    if read == "Python":
        agent.phases._notes_of = lambda _: None
    batch = torch.ones(16, 256, device="cuda")
    kept, allocated, ours = [], {}, []
    read_end = agent.phases._read_end
    agent.phases._read_end = lambda where: ours.append(0) or read_end(where)

    def step(peak: int = 0) -> None:
        loss = model(batch).sum()
        torch.ones(1 + peak, dtype=torch.uint8, device="cuda")
        loss.backward()
        del loss
        optimizer.step()
        stats = torch.cuda.memory_stats()
        figures = stats["allocated_bytes.all.current"], stats["allocation.all.current"]
        allocated[agent.phases.where()[0] - 1] = figures

    while not agent.phases.quiet:
        step()
    if read == "Python":
        torch.cuda.reset_peak_memory_stats()  # from here on the hooks call Python
    if read == "Python, for a pool's sake":
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            kept.append(torch.ones(1 << 18, device="cuda"))
    for at in range(12):
        kept.append(torch.ones(1 << 18, device="cuda"))
        step(64 << 20 if at == 6 else 0)
    users = torch.cuda.max_memory_allocated()
    agent.phases.read_soon()
    step()
    step()
    last = [event for _, event in agent.recorder.drain() if isinstance(event, wire.Step)][-1]
    ends = [(end.step, (end.allocated, end.allocations), allocated[end.step]) for end in last.quiet_ends]
    print(json.dumps([last.quiet, last.quiet_peaks[0].allocated_peak, users, ends, len(ours)]))


@pytest.mark.parametrize(("read", "in_python"), [("the hooks", 0), ("Python, for a pool's sake", 13), ("Python", 13)])
def test_no_peak_is_lost_and_the_ends_are_torchs_figures(
    virtual_gpu: Gpu, native_reader: Path, read: str, in_python: int
) -> None:
    quiet, peak, users, ends, ours = json.loads(virtual_gpu().run(figures, read).stdout.splitlines()[-1])
    assert (quiet, ours) == (13, in_python)
    assert peak == users  # no step after the large one was larger
    assert len(ends) == 13
    assert all(told == torchs for _, told, torchs in ends)
    assert ends[-2][1][0] - ends[0][1][0] == 11 << 20  # what leaks


@pytest.mark.parametrize("what", ["_read_end", "_work", "_flush"])
def test_what_fails_as_a_quiet_step_closes_does_not_reach_the_training(
    resting: Any, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    model, optimizer = rested(resting)
    phases, failures = resting.agent.phases, resting.agent.guard.failures

    def fail(*_: Any) -> None:
        raise RuntimeError("by the test")

    monkeypatch.setattr(phases, what, fail)
    mark = phases.quiet_mark
    phases.works, mark.due_ns, mark.ends_due_ns, phases._look_due_ns = True, 0, 0, 0
    train(model, optimizer, 1)
    assert failures.pop("optimizer") == 1
    phases.works = False
    monkeypatch.undo()


def asks() -> None:
    """Prints what a viewer's request was taken for in quiet steps: from two helpers, each of which is stopped, so that
    this process can write in its place."""
    import json
    import os
    import signal
    import time

    import torch

    import gpumon_agent
    from gpumon_agent import endpoint, governor, wire
    from gpumon_agent.registry import REGISTRY
    from gpumon_agent.transport import messages, trainer
    from gpumon_agent.transport.memory import ANSWER, CALLED
    from gpumon_agent.transport.pages import Pages

    governor.READ_FIRST = 5
    governor.READ_AGAIN_NS = 1 << 61
    governor.Governor._decide = lambda self: None
    model = torch.nn.Linear(256, 256).cuda()
    optimizer = torch.optim.SGD(model.parameters())
    batch = torch.ones(16, 256, device="cuda")
    gpumon_agent.watch(model, optimizer)
    agent = REGISTRY.agent
    agent.governor.read_every = agent.governor.ledger_every = 10**9
    phases, transport, taken = agent.phases, agent.transport, []
    phases.time_idle = None
    transport._take = lambda request: taken.append(request.what)
    end_quietly, calls = phases._end_quietly, []
    phases._end_quietly = lambda *end: (calls.append(0), end_quietly(*end))  # whatever is due

    def step() -> None:
        model(batch).sum().backward()
        optimizer.step()

    def settles() -> None:
        transport.wait_ready(60)
        while not phases.quiet or transport._waiting or transport._long.waiting_bytes:
            step()
            agent.flush()
        for _ in range(3):
            step()

    for number in (1, 2):
        settles()
        os.kill(transport._helper, signal.SIGSTOP)
        time.sleep(0.1)
        step()
        phases._look_due_ns = phases._ask_due_ns = phases.quiet_mark.ends_due_ns = 1 << 62
        phases._set_due()
        answer = messages.FromHelper(True, requests=((number, wire.Request(wire.CENSUS, "")),))
        steps = [len(calls)]
        step()
        Pages(transport._memory, ANSWER).write(messages.encode(answer))
        step()  # as a sign of life
        steps.append(len(calls))
        transport._memory.words[CALLED] = number
        step()
        steps += [len(calls), len(taken)]
        step()
        print(json.dumps([steps[1] - steps[0], steps[2] - steps[1], len(calls) - steps[2], steps[3]]))
        transport._memory.words[CALLED] = number + 1  # of a request that is lost with the helper
        step()
        os.kill(transport._helper, signal.SIGKILL)
        while endpoint.start_time(transport._helper) is not None:
            time.sleep(0.01)
        silent, trainer._SILENT_NS = trainer._SILENT_NS, -1
        agent.flush()
        trainer._SILENT_NS = silent


@pytest.mark.parametrize("native", ["on", "off"])
def test_a_request_is_heard_in_the_next_quiet_step_of_this_helper_and_the_next(
    virtual_gpu: Gpu, native_reader: Path, native: str
) -> None:
    ran = virtual_gpu().run(asks, env={"GPUMON_NATIVE": native})
    assert [json.loads(line) for line in ran.stdout.splitlines()[-2:]] == [[0, 1, 0, 1], [0, 1, 0, 2]]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("layout", "shape"), [(torch.strided, (20,)), (torch.jagged, (5, 4))])
def test_a_nested_batch_is_told_with_the_shape_of_its_values(resting: Any, layout: Any, shape: Any) -> None:
    model, optimizer = rested(resting)
    nested = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=layout)
    resting.agent.governor._wakes_ns = FAR
    torch.nested.to_padded_tensor(model(nested), 0.0).sum().backward()
    optimizer.step()
    assert resting.steps()[-1].input_shapes == (shape,)
    assert "forward" not in resting.agent.guard.failures


def looked(resting: Any, model: nn.Module, optimizer: torch.optim.Optimizer, times: int) -> None:
    """So many looks at requests, at each of which the hooks may be timed."""
    for _ in range(times):
        resting.agent.phases._look_due_ns = resting.agent.phases.quiet_mark.due_ns = 0
        train(model, optimizer, 1)


def test_the_hooks_of_quiet_steps_are_timed_64_times_beside_the_training(resting: Any) -> None:
    model, optimizer = rested(resting)
    phases, governor = resting.agent.phases, resting.agent.governor
    looked(resting, model, optimizer, 1)
    begun, before, words = phases.step, len(resting.events()), phases.quiet_mark.read()
    looked(resting, model, optimizer, 260)
    assert len(governor._idle) == 64
    assert phases.time_idle is None
    assert 1_000 < sorted(governor._idle)[32] < 1_000_000
    assert len(resting.events()) == before
    assert phases.quiet
    assert phases.quiet_mark.read() == (words[0] + 260, words[1])
    assert len(governor._looked.spent) == 64
    assert phases.step == begun + 260


def test_forwards_of_a_step_count_each(resting: Any) -> None:
    model, optimizer = rested(resting)
    phases = resting.agent.phases
    assert phases._forwards == 1
    phases.time_idle, phases._forwards = (lambda: (30_000, 7_000)), 4
    looked(resting, model, optimizer, 1)
    assert list(resting.agent.governor._idle) == [127_000]


def test_no_hooks_are_timed_while_others_would_run_too(resting: Any) -> None:
    model, optimizer = rested(resting)
    called: list[str] = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: called.append(type(module).__name__))
    looked(resting, model, optimizer, 5)
    handle.remove()
    assert set(called) == {"Linear"}
    assert not resting.agent.governor._idle


def test_no_hooks_are_timed_while_the_user_sees_calls_of_modules(resting: Any, monkeypatch: Any) -> None:
    model, optimizer = rested(resting)
    called: list[str] = []

    def call(module: nn.Module, *args: Any) -> Any:
        called.append(type(module).__name__)
        return module._call_impl(*args)

    monkeypatch.setattr(nn.Module, "__call__", call)
    looked(resting, model, optimizer, 5)
    assert set(called) == {"Linear"}
    assert not resting.agent.governor._idle


def test_hooks_are_timed_in_a_program_that_compiles(resting: Any, monkeypatch: Any) -> None:
    """The first compiled function replaces `Module.__init__`."""
    from torch._dynamo import mutation_guard

    init = nn.Module.__init__
    for name in ("__init__", "__setstate__"):
        monkeypatch.setattr(nn.Module, name, getattr(nn.Module, name))
    monkeypatch.setattr(nn.Module, "___has_generation_tag_patch", True, raising=False)
    monkeypatch.delattr(nn.Module, "___has_generation_tag_patch")
    monkeypatch.setattr(nn.Module, "___needs_generation_tag_patch", True, raising=False)  # before torch 2.15
    mutation_guard.install_generation_tagging_init()
    assert nn.Module.__init__ is not init
    model, optimizer = rested(resting)
    looked(resting, model, optimizer, 5)
    assert resting.agent.governor._idle


def test_each_part_of_the_hooks_is_timed_alone(resting: Any) -> None:
    """After another part, their common code is in the caches: together they take half as long."""
    model_and_optimizer(resting)
    made: Any = IdleHooks(resting.agent.guard, resting.agent.outlooks, resting.agent._make_mark)
    ran: list[list[str]] = []

    def noted(name: str) -> Any:
        part = getattr(made, name)

        def run(*args: Any) -> None:
            ran[-1].append(name)
            part(*args)

        return run

    made._make()
    made._make = lambda: None
    for name in ("_bare", "_engine", "_begins", "_ends"):
        setattr(made, name, noted(name))
    timed = []
    for _ in range(8):
        ran.append([])
        timed.append(made.timed())
    assert ran == 2 * [["_bare"], [], ["_engine"], ["_begins", "_ends"]]
    assert [each is None for each in timed] == 2 * [True, True, True, False]


def slept(*_: Any) -> None:
    time.sleep(0.02)


@pytest.mark.parametrize(("part", "sign"), [("_bare", -1), ("_engine", 1)])
def test_a_call_without_hooks_is_subtracted_from_the_forward(resting: Any, part: str, sign: int) -> None:
    model_and_optimizer(resting)
    made: Any = IdleHooks(resting.agent.guard, resting.agent.outlooks, resting.agent._make_mark)
    assert made.timed() is None
    made._times.clear()
    setattr(made, part, slept)
    *_, (forward, stepped) = (made.timed() for _ in range(4))
    assert forward * sign > 10_000_000 > stepped


@pytest.mark.parametrize(("part", "calls"), [("_model", 2), ("_ends", 4)])
def test_hooks_that_are_not_those_of_a_quiet_step_are_not_timed(resting: Any, part: str, calls: int) -> None:
    model_and_optimizer(resting)
    made: Any = IdleHooks(resting.agent.guard, resting.agent.outlooks, resting.agent._make_mark)
    assert made.timed() is None
    kept = getattr(made, part)
    setattr(made, part, lambda *_: None)
    for _ in range(calls - 2):
        assert made.timed() is None
    with pytest.raises(RuntimeError, match="not those of a quiet step"):
        made.timed()
    setattr(made, part, kept)
    assert [made.timed() is None for _ in range(5 - calls)][-1] is False  # it goes on where it was


def test_a_timing_that_a_signal_handler_ended_does_not_spoil_the_next(resting: Any) -> None:
    model_and_optimizer(resting)
    made: Any = IdleHooks(resting.agent.guard, resting.agent.outlooks, resting.agent._make_mark)
    assert [made.timed() is None for _ in range(7)] == [True, True, True, False, True, True, True]
    ends = made._ends

    def interrupted(*args: Any) -> None:
        ends(*args)
        raise KeyboardInterrupt

    made._ends = interrupted
    with pytest.raises(KeyboardInterrupt):
        made.timed()
    made._ends = ends
    assert made.timed() is not None


def test_steps_of_optimizers_that_take_turns_have_other_hooks_which_are_not_timed(resting: Any) -> None:
    model, optimizer = rested(resting)
    resting.agent.phases.quiet_mark.idle = False
    looked(resting, model, optimizer, 5)
    assert not resting.agent.governor._idle
