"""The phases of training loops as people write them, seen by the real hooks on a CPU."""

from __future__ import annotations

import copy
import sys
import threading
import time
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gpumon_agent
from gpumon_agent import wire
from gpumon_agent.hooks.backward_roots import leads_to

STEP = ["between", "forward", "backward", "optimizer"]
FIRST = ["load", "forward", "backward", "optimizer"]


class Net(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Any) -> Any:
        return self.b(torch.relu(self.a(x)))


def build(kind: type[nn.Module] = Net) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = kind()
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def iteration(model: Any, optimizer: Any, micro: int = 1) -> None:
    for _ in range(micro):
        model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_plain_loop(watch: Any) -> None:
    model, optimizer = build()
    watch(model, optimizer)
    for _ in range(3):
        iteration(model, optimizer)
    watch.agent.phases.finish()
    assert watch.words() == [FIRST, STEP, STEP]
    assert [step.phases for step in watch.steps()] == [4, 4, 4]
    assert [step.input_shapes for step in watch.steps()] == [((2, 4),)] * 3
    assert [step.input_bytes for step in watch.steps()] == [32] * 3


def test_a_part_of_a_larger_tensor_is_an_input_of_its_own_size(watch: Any) -> None:
    """A corpus on the device, of which each step reads a slice: its whole storage says nothing about the batch."""
    model, optimizer = build()
    watch(model, optimizer)
    data = torch.ones(1000, 4)
    for size in (2, 2, 5):
        model(data[7 : 7 + size]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    watch.agent.phases.finish()
    assert [step.input_bytes for step in watch.steps()] == [32, 32, 80]


def test_windows_tile_the_step(watch: Any) -> None:
    model, optimizer = build()
    watch(model, optimizer)
    for _ in range(4):
        iteration(model, optimizer)
    watch.agent.phases.finish()
    phases = watch.phases()
    assert all(b.t_ns - b.duration_ns == a.t_ns for a, b in pairwise(phases))
    for step in watch.steps():
        inside = [phase for phase in phases if phase.step == step.step]
        assert sum(phase.duration_ns for phase in inside) == step.duration_ns
        assert inside[-1].t_ns == step.t_ns


def test_accumulation_repeats_forward_and_backward_in_one_step(watch: Any) -> None:
    model, optimizer = build()
    watch(model, optimizer)
    iteration(model, optimizer, micro=2)
    iteration(model, optimizer, micro=2)
    again = ["between", "forward", "backward"]
    assert watch.words()[:2] == [["load", "forward", "backward", *again, "optimizer"], [*again, *again, "optimizer"]]
    assert [(p.phase, p.index) for p in watch.phases() if p.step == 1 and p.phase == "forward"] == [
        ("forward", 0),
        ("forward", 1),
    ]
    assert watch.steps()[0].input_shapes == ((2, 4), (2, 4))


@pytest.mark.filterwarnings("ignore:`torch.cpu.amp.autocast:FutureWarning")  # checkpoint() of torch 2.4
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputed_forward_belongs_to_backward(watch: Any, reentrant: bool) -> None:
    class Checkpointed(Net):
        def forward(self, x: Any) -> Any:
            return self.b(checkpoint(self.a, x, use_reentrant=reentrant))

    model, optimizer = build(Checkpointed)
    watch(model, optimizer)
    for _ in range(2):
        model(torch.ones(2, 4, requires_grad=True)).sum().backward()
        optimizer.step()
    assert watch.words()[1] == ["between", "forward", "backward recomputed", "optimizer"]


@pytest.mark.filterwarnings("ignore:`torch.cpu.amp.autocast:FutureWarning")  # checkpoint() of torch 2.4
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_root_that_is_itself_recomputed_shows_no_second_forward(watch: Any, reentrant: bool) -> None:
    model, optimizer = build()
    watch(model, optimizer)
    for _ in range(2):
        checkpoint(model, torch.ones(2, 4, requires_grad=True), use_reentrant=reentrant).sum().backward()
        optimizer.step()
    # the reentrant kind runs its forward without gradients
    assert watch.words()[1][1] == ("eval" if reentrant else "forward")
    assert watch.words()[1][-2:] == ["backward recomputed", "optimizer"]


def test_a_skipped_scaler_step_is_a_step_marked_skipped(watch: Any) -> None:
    model, optimizer = build()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    watch(model, optimizer)
    for value in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(model(torch.full((2, 4), value)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    watch.agent.phases.finish()
    assert watch.words() == [FIRST, [*STEP[:3], "optimizer skipped"], STEP]
    assert [step.skipped for step in watch.steps()] == [False, True, False]


def test_a_gan_makes_a_step_of_each_optimizer_step(watch: Any) -> None:
    (g, g_optimizer), (d, d_optimizer) = build(), build()
    watch(g, g_optimizer)
    watch(d, d_optimizer)
    for _ in range(2):
        fake = g(torch.ones(2, 4))
        d(fake.detach()).sum().backward()
        d_optimizer.step()
        d(fake).sum().backward()
        g_optimizer.step()
    watch.agent.phases.finish()
    of_d = ["between", "forward", "between", "forward", "backward", "optimizer"]
    assert watch.words() == [["load", *of_d[1:]], STEP, of_d, STEP]
    assert [step.optimizers for step in watch.steps()] == [(1,), (0,), (1,), (0,)]


def test_an_optimizer_that_is_made_anew_has_the_number_of_the_one_that_is_gone(watch: Any) -> None:
    model, optimizer = build()
    watch(model)
    for _ in range(4):
        iteration(model, optimizer)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch.agent.phases.finish()
    assert {step.optimizers for step in watch.steps()} <= {(0,), (1,)}


def test_optimizers_that_take_turns_make_one_step(watch: Any) -> None:
    model, _ = build()
    first = torch.optim.SGD(model.a.parameters(), lr=0.01)
    second = torch.optim.AdamW(model.b.parameters(), lr=0.01)
    watch(model)
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        first.step()
        second.step()
        first.zero_grad()
        second.zero_grad()
    watch.agent.phases.finish()
    assert watch.words() == [[*FIRST, "optimizer"], [*STEP, "optimizer"], [*STEP, "optimizer"]]
    assert [step.optimizers for step in watch.steps()] == [(0, 1)] * 3


def test_a_step_of_more_than_64_optimizers_names_as_many_as_a_viewer_takes(watch: Any) -> None:
    """A message with more of them is refused: the viewer would miss the step."""
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(70)))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in model]
    watch(model)
    for _ in range(2):
        model(torch.ones(2, 1)).sum().backward()
        for each in optimizers:
            each.step()
            each.zero_grad()
    watch.agent.phases.finish()
    for step in watch.steps():
        assert wire.decode_event(wire.encode_event(step)) == step
        assert step.optimizers == tuple(range(64))


def test_an_optimizer_inside_another_counts_once(watch: Any) -> None:
    class Outer(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            inner.step()
            return super().step(closure)

    model = Net()
    inner = torch.optim.SGD(model.a.parameters(), lr=0.01)
    outer = Outer(model.b.parameters(), lr=0.01)
    watch(model, outer)
    for _ in range(3):
        iteration(model, outer)
    watch.agent.phases.finish()
    assert watch.words() == [FIRST, STEP, STEP]


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True")  # LBFGS of torch 2.8
def test_lbfgs_runs_forward_and_backward_inside_its_step(watch: Any) -> None:
    model = Net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=2)
    watch(model, optimizer)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).pow(2).sum()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    watch.agent.phases.finish()
    rounds = ["between", "forward", "backward"]
    assert watch.words() == [["load", *rounds[1:], *rounds, "optimizer"], [*rounds, *rounds, "optimizer"]]


def test_an_optimizer_inside_backward_closes_the_step_with_it(watch: Any) -> None:
    model = Net()
    for parameter in model.parameters():
        own = torch.optim.SGD([parameter], lr=0.01)

        def act(parameter: Any, own: Any = own) -> None:
            own.step()
            own.zero_grad()

        parameter.register_post_accumulate_grad_hook(act)
    watch(model)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
    assert watch.words() == [["load", "forward", "backward"], ["between", "forward", "backward"]]
    assert len(watch.steps()) == 2


def test_a_second_backward_through_the_same_graph(watch: Any) -> None:
    model, optimizer = build()
    watch(model, optimizer)
    for _ in range(2):
        loss = model(torch.ones(2, 4)).pow(2).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
    assert watch.words()[1] == ["between", "forward", "backward", "backward", "optimizer"]


def test_a_gradient_penalty(watch: Any) -> None:
    model, optimizer = build()
    watch(model, optimizer)
    for _ in range(2):
        x = torch.ones(2, 4, requires_grad=True)
        loss = model(x).pow(2).sum()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + gradient.norm()).backward()
        optimizer.step()
    assert watch.words()[1] == ["between", "forward", "backward", "backward", "optimizer"]


def test_evaluation_in_between(watch: Any) -> None:
    model, optimizer = build()
    watch(model, optimizer)
    iteration(model, optimizer)
    model.eval()
    with torch.no_grad():
        model(torch.ones(2, 4))
        model(torch.ones(2, 4))
    model.train()
    iteration(model, optimizer)
    assert watch.words()[1] == ["between", "eval", "between", "eval", *STEP]
    assert watch.steps()[1].input_shapes == ((2, 4),)


def test_the_evaluation_of_a_copy(watch: Any) -> None:
    model, optimizer = build()
    watch(model, optimizer)
    average = copy.deepcopy(model)
    watch.agent.hooks.watch(average, evaluated=True)
    watch.agent.hooks.watch(model, evaluated=True)  # it is trained all the same
    iteration(model, optimizer)
    with torch.no_grad():
        average(torch.ones(2, 4))  # in training mode: a target network, say
        average.eval()
        average(torch.ones(2, 4))
    average(torch.ones(2, 4))  # a graph is recorded
    iteration(model, optimizer)
    assert watch.words()[1] == ["between", "eval", *STEP]
    assert watch.steps()[1].input_shapes == ((2, 4),)


def test_a_loss_that_does_not_depend_on_the_root(watch: Any) -> None:
    model, optimizer = build()
    watch(model, optimizer)
    for _ in range(2):
        model(torch.ones(2, 4))
        (model.a.weight**2).sum().backward()
        optimizer.step()
    assert watch.words() == [FIRST, STEP]


def test_a_step_without_a_forward_has_none(watch: Any) -> None:
    """As SAC's temperature: a scalar that is trained from what the models gave before."""
    model, optimizer = build()
    scalar = nn.Parameter(torch.zeros(()))
    other = torch.optim.SGD([scalar], lr=0.1)
    watch(model, optimizer)
    for _ in range(3):
        iteration(model, optimizer)
        (scalar * 2).backward()
        other.step()
        other.zero_grad()
    told = [[word for word in words if word not in ("load", "between")] for words in watch.words()]
    assert [words for words in told if "forward inferred" in words] == []
    assert sum(words.count("forward") for words in told) == 3
    assert sum(words.count("backward") for words in told) == 6


def test_the_first_backward_needs_no_forward_if_it_has_no_parameter_of_a_model(watch: Any) -> None:
    """Stable-Baselines3's SAC begins with the temperature."""
    model, optimizer = build()
    scalar = nn.Parameter(torch.zeros(()))
    other = torch.optim.SGD([scalar], lr=0.1)
    watch(model, optimizer)
    for _ in range(2):
        (scalar * 2).backward()
        other.step()
        iteration(model, optimizer)
    told = [word for words in watch.words() for word in words if word not in ("load", "between")]
    assert told == ["backward", "optimizer", "forward", "backward", "optimizer"] * 2


@pytest.mark.parametrize(("nodes", "leads"), [(900, False), (1_500, True)])
def test_a_graph_of_more_than_1_000_nodes_is_taken_for_a_model_s(nodes: int, leads: bool) -> None:
    """To search all of it would make the training wait."""
    total = torch.ones((), requires_grad=True)
    for _ in range(nodes):
        total = total + 1
    assert leads_to([total], ()) == leads


def test_the_compiled_copy_of_a_model_is_its_copy(watch: Any) -> None:
    model, optimizer = build()
    watch(model, optimizer)
    reference = copy.deepcopy(model).eval()
    watch.agent.hooks.watch(reference, evaluated=True)
    compiled = torch.compile(reference, backend="eager")
    iteration(model, optimizer)
    with torch.no_grad():
        compiled(torch.ones(2, 4))
    compiled(torch.ones(2, 4))  # a graph is recorded
    iteration(model, optimizer)
    assert watch.words()[1] == ["between", "eval", *STEP]


def test_a_forward_that_nobody_saw_is_inferred(watch: Any) -> None:
    model, optimizer = build()
    watch(model, optimizer)
    for _ in range(2):
        model.b(model.a(torch.ones(2, 4))).sum().backward()
        optimizer.step()
    assert watch.words() == [["forward inferred", "backward", "optimizer"]] * 2


@pytest.mark.parametrize("where", ["forward", "backward", "optimizer"])
def test_an_exception_ends_its_phase_and_passes_untouched(watch: Any, where: str) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            if where == "forward" and armed:
                raise ValueError("mine")
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            if where == "backward" and armed:
                raise ValueError("mine")
            return g

    class Failing(Net):
        def forward(self, x: Any) -> Any:
            return Fails.apply(super().forward(x))

    class Sgd(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if where == "optimizer" and armed:
                raise ValueError("mine")
            return super().step(closure)

    model = Failing()
    optimizer = Sgd(model.parameters(), lr=0.01)
    watch(model, optimizer)
    armed = False
    iteration(model, optimizer)
    armed = True
    with pytest.raises(ValueError, match=r"^mine$"):
        iteration(model, optimizer)
    armed = False
    iteration(model, optimizer)
    ended = {"forward": 2, "backward": 3, "optimizer": 4}[where]
    if where == "optimizer":  # no hook tells of it; the next begin does
        assert watch.words()[1] == ["between", "forward", "backward", "optimizer aborted", *STEP]
    else:
        assert watch.words()[1] == [*STEP[: ended - 1], f"{where} aborted", *STEP]


def test_an_interrupt_in_forward_is_noticed_at_the_next(watch: Any) -> None:
    class Interrupted(Net):
        def forward(self, x: Any) -> Any:
            if armed:
                raise KeyboardInterrupt
            return super().forward(x)

    model, optimizer = build(Interrupted)
    watch(model, optimizer)
    armed = False
    iteration(model, optimizer)
    armed = True
    with pytest.raises(KeyboardInterrupt):
        iteration(model, optimizer)
    armed = False
    iteration(model, optimizer)
    assert watch.words()[1] == ["between", "forward aborted", *STEP]


def test_a_phase_of_the_users_own_is_one_window(watch: Any) -> None:
    model, optimizer = build()
    watch(model, optimizer)
    iteration(model, optimizer)
    with gpumon_agent.phase("validate"), torch.no_grad():
        model(torch.ones(2, 4))
        model(torch.ones(2, 4))
    iteration(model, optimizer)
    with pytest.raises(ValueError, match="mine"), gpumon_agent.phase("log"):
        raise ValueError("mine")
    iteration(model, optimizer)
    assert watch.words()[1:] == [["between", "validate", *STEP], ["between", "log aborted", *STEP]]


def test_an_optimizer_step_inside_a_users_phase_still_counts(watch: Any) -> None:
    model, optimizer = build()
    watch(model, optimizer)
    iteration(model, optimizer)
    with gpumon_agent.phase("whole"):
        iteration(model, optimizer)
        iteration(model, optimizer)
    iteration(model, optimizer)
    watch.agent.phases.finish()
    assert len(watch.steps()) == 4
    assert watch.words() == [FIRST, ["between", "whole"], ["whole"], ["whole", *STEP]]


def test_phase_without_an_agent_does_nothing() -> None:
    with gpumon_agent.phase("eval"):
        pass


def test_too_many_windows_are_folded(watch: Any) -> None:
    model, optimizer = build()
    watch(model, optimizer)
    iteration(model, optimizer)
    model.eval()
    with torch.no_grad():
        for _ in range(200):
            model(torch.ones(2, 4))
    model.train()
    iteration(model, optimizer)
    phases = [phase for phase in watch.phases() if phase.step == 1]
    merged = [phase for phase in phases if phase.flags & wire.MERGED]
    assert len(phases) == 256 + len(merged)
    assert {phase.phase for phase in merged} == {"eval", *STEP}
    assert sum(phase.duration_ns for phase in phases) == watch.steps()[1].duration_ns
    assert watch.steps()[1].phases == len(phases)


@pytest.mark.parametrize(("seconds", "told"), [(1, False), (3, True)])
def test_of_an_evaluation_without_an_end_a_viewer_hears_every_two_seconds(
    watch: Any, monkeypatch: pytest.MonkeyPatch, seconds: int, told: bool
) -> None:
    model, optimizer = build()
    watch(model, optimizer)
    iteration(model, optimizer)
    now = time.monotonic_ns()
    monkeypatch.setattr("gpumon_agent.hooks.phases.monotonic_ns", lambda: now)
    with torch.no_grad():
        for _ in range(300):
            model(torch.ones(2, 4))
        now += seconds * 1_000_000_000
        model(torch.ones(2, 4))
    assert any(phase.flags & wire.MERGED for phase in watch.phases()) == told


def test_a_rollout_of_many_forwards_is_counted_and_said_to_be_one(watch: Any) -> None:
    model, optimizer = build()
    watch(model, optimizer)
    iteration(model, optimizer)
    with torch.no_grad():
        for _ in range(300):
            model(torch.ones(2, 4))
    iteration(model, optimizer)
    forwards = [phase for phase in watch.phases() if phase.step == 1 and phase.phase == wire.EVAL]
    assert forwards[-1].index == 299
    assert forwards[-1].flags & wire.MERGED
    assert [at for at, phase in enumerate(forwards) if phase.flags & wire.TRAINS] == [0]
    model.eval()
    with torch.no_grad():
        model(torch.ones(2, 4))
    iteration(model, optimizer)
    assert not any(phase.flags & wire.TRAINS for phase in watch.phases() if phase.step == 2)


def test_two_threads_at_once_are_marked(watch: Any) -> None:
    inside, done = threading.Event(), threading.Event()

    class Waits(Net):
        def forward(self, x: Any) -> Any:
            inside.set()
            assert done.wait(60)
            return super().forward(x)

    model, optimizer = build(Waits)
    other = Net()
    watch(model, optimizer)
    watch(other)
    thread = threading.Thread(target=lambda: model(torch.ones(2, 4)))
    thread.start()
    assert inside.wait(60)
    other(torch.ones(2, 4))
    done.set()
    thread.join()
    assert "overlapped" in " ".join(watch.words()[0])
    for _ in range(40):
        iteration(model, optimizer)
    marked = [bool(phase.flags & wire.OVERLAPPED) for phase in watch.phases()]
    assert 50 <= sum(marked) <= 80  # those during the overlap, and 64 after it
    assert not any(marked[-40:])
    assert all(p.allocated_peak is None for p in watch.phases() if p.flags & wire.OVERLAPPED)


def test_data_parallel_replicas_make_no_phases(watch: Any) -> None:
    model, optimizer = build()
    watch(model, optimizer)
    replica = model._replicate_for_data_parallel()
    replica.a, replica.b = model.a, model.b
    replica(torch.ones(2, 4))
    assert watch.words() == []


@pytest.mark.parametrize("before", [True, False])
def test_a_model_that_gets_wrapped_is_followed(watch: Any, before: bool) -> None:
    model, optimizer = build()
    if before:
        watch(model, optimizer)
    wrapped = nn.DataParallel(model)
    if not before:
        watch(wrapped, optimizer)
    for _ in range(3):
        iteration(wrapped, optimizer)
    assert watch.words()[:3] == [FIRST, STEP, STEP]


def test_an_evaluation_that_records_a_graph_says_so(watch: Any) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch(model, optimizer)
    batch = torch.ones(2, 4)
    iteration(model, optimizer)
    model.eval()
    line = sys._getframe().f_lineno + 1
    model(batch)
    with torch.no_grad():
        model(batch)
    with torch.inference_mode():
        model(batch)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model(batch)  # nothing to record
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    model.train()
    iteration(model, optimizer)
    recorded = [(p.phase, p.flags & wire.RECORDED) for p in watch.phases() if p.step == 1 and p.phase != "between"]
    assert recorded[:4] == [("forward", wire.RECORDED), ("eval", 0), ("eval", 0), ("forward", 0)]
    assert [step.evaluated for step in watch.steps()[:2]] == [(), (0, 1)]
    assert [step.evaluated_by for step in watch.steps()[:2]] == ["", f"Linear, called at test_phases.py:{line}"]
    assert watch.steps()[1].input_shapes == ((2, 4),)


class Wrapper(nn.Module):
    """Its own mode says nothing: Lightning's sanity check calls `.eval()` on it, and restores the inner module only."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Any) -> Any:
        return self.module(x)


@pytest.mark.parametrize("how", ["fine-tuned in eval mode", "a wrapper in eval mode"])
def test_training_in_eval_mode_is_training(watch: Any, how: str) -> None:
    model, optimizer = build()
    root = Wrapper(model)
    watch(root, optimizer)
    root.eval()
    if how.startswith("a wrapper"):
        model.train()
    for _ in range(4):
        iteration(root, optimizer)
    assert [[word.split()[0] for word in step] for step in watch.words()[:3]] == [FIRST, STEP, STEP]
    assert [step.evaluated for step in watch.steps()] == [()] * len(watch.steps())
    assert {step.input_shapes for step in watch.steps()} == {((2, 4),)}
    assert {phase.phase for phase in watch.phases() if phase.flags & wire.RECORDED} == {"forward"}


def test_evaluation_and_fine_tuning_both_in_eval_mode_with_gradients(watch: Any) -> None:
    model, optimizer = build()
    watch(model, optimizer)
    model.eval()
    iteration(model, optimizer)
    for _ in range(3):
        model(torch.ones(5, 4))
    iteration(model, optimizer, micro=2)
    iteration(model, optimizer)
    one = model(torch.ones(2, 4))
    two = model(torch.ones(3, 4))  # both are used
    (one.sum() + two.sum()).backward()
    optimizer.step()
    del one, two
    iteration(model, optimizer)
    steps = watch.steps()
    assert [step.evaluated for step in steps[:4]] == [(), (0, 1, 2), (), ()]
    assert [step.input_shapes for step in steps[1:4]] == [((2, 4), (2, 4)), ((2, 4),), ((2, 4), (3, 4))]


def test_more_evaluations_than_a_step_may_have_windows_are_evaluations(watch: Any) -> None:
    model, optimizer = build()
    watch(model, optimizer)
    iteration(model, optimizer)
    model.eval()
    for _ in range(200):
        model(torch.ones(2, 4))
    model.train()
    iteration(model, optimizer)
    merged = {phase.phase for phase in watch.phases() if phase.flags & wire.MERGED}
    assert merged == {"eval", *STEP}
    assert watch.steps()[1].evaluated == tuple(range(128))


def test_steps_that_the_users_code_marks(watch: Any) -> None:
    """Two optimizers at different rates, as a GAN's: an iteration is what lies between two marks."""
    model, optimizer = build()
    other = Net()
    slow = torch.optim.SGD(other.parameters(), lr=0.1)
    gpumon_agent.watch(model, optimizer, steps="iteration")
    gpumon_agent.watch(other, slow)
    for at in range(4):
        iteration(model, optimizer)
        iteration(model, optimizer)
        if at % 2:
            iteration(other, slow)
        gpumon_agent.step()
    train = [*STEP, *STEP]
    assert watch.words()[:4] == [["load", *STEP[1:], *STEP], [*train, *STEP], train, [*train, *STEP]]
    assert [step.step for step in watch.steps()] == list(range(4))


def test_a_step_that_is_marked_where_its_optimizer_closed_it_is_one_step(watch: Any) -> None:
    model, optimizer = build()
    watch(model, optimizer)
    for _ in range(4):
        iteration(model, optimizer)
        gpumon_agent.step()
    assert watch.words()[:4] == [FIRST, STEP, STEP, STEP]


def test_parameters_that_are_updated_by_hand(watch: Any) -> None:
    model, _ = build()
    watch(model)
    for at in range(6):
        model(torch.ones(2, 4)).sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
        if at >= 4:
            gpumon_agent.step()
    (said,) = watch.notices()
    assert said.endswith("no steps are counted: call gpumon_agent.step() after each update")
    assert watch.words()[1] == STEP
    assert [step.step for step in watch.steps()] == [0, 1]


def test_steps_are_the_iterations_that_are_marked_or_the_optimizers(watch: Any, capfd: Any) -> None:
    model, optimizer = build()
    gpumon_agent.watch(model, optimizer, steps="iteration")
    for _ in range(3):
        iteration(model, optimizer)
    assert watch.steps() == []
    gpumon_agent.step()
    assert [step.step for step in watch.steps()] == [0]
    gpumon_agent.watch(model, steps="epoch")
    assert capfd.readouterr().err == (
        'gpumon: watch() counts steps="optimizer" or "iteration", not \'epoch\': optimizer steps are counted\n'
    )


def test_state_that_a_checkpoint_is_loaded_into_is_no_step(watch: Any) -> None:
    """torch.distributed.checkpoint steps an optimizer with zero gradients where it has no state yet."""
    from torch.distributed.checkpoint import state_dict

    model, optimizer = build()
    watch(model, optimizer)
    state_dict.get_optimizer_state_dict(model, optimizer)
    assert optimizer.state
    for _ in range(2):
        iteration(model, optimizer)
    assert [step.step for step in watch.steps()] == [0, 1]
    assert watch.words() == [FIRST, STEP]


def test_a_model_that_moves_to_another_gpu_is_found_there_within_200_steps(virtual_gpu: Any) -> None:
    def script() -> None:
        import torch

        from gpumon_agent import agent, wire

        watched = agent.Agent(publish=False)
        model = torch.nn.Linear(8, 8).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        watched.adopt(model, optimizer)
        for step in range(203):
            if step == 20:
                model.to("cuda:1")
            optimizer.zero_grad()
            model(torch.ones(2, 8, device=model.weight.device)).sum().backward()
            optimizer.step()
        phases = [event for _, event in watched.recorder.drain() if isinstance(event, wire.Phase)]
        assert {phase.device for phase in phases if phase.step > 200} == {1}

    virtual_gpu(devices=2).run(script, env={"GPUMON_GOVERNOR": "off"})


def test_the_resident_memory_is_read_once_a_second(watch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 10**10
    monkeypatch.setattr("gpumon_agent.hooks.phases.monotonic_ns", lambda: now)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    watch(model, optimizer)
    resident = []
    kept = None
    for step in range(6):
        if step == 2:
            kept = torch.ones(16 << 20)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        resident.append(watch.agent.leaks.resident_bytes)
        now += 300_000_000
    assert kept is not None
    assert resident[5] > resident[1] + kept.nbytes // 2
