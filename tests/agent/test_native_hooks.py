"""The compiled hooks of idle steps do what those in Python do, and keep nothing alive."""

from __future__ import annotations

import gc
import random
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gpumon_agent.allocator import native
from gpumon_agent.hooks import native_hooks
from gpumon_agent.quiet_mark import DUE, IN_BACKWARD, IN_OPTIMIZER, NOTES, PASSED, QuietMark
from gpumon_agent.transport.memory import CALLED, PAGE_BYTES, QUIET, Memory

Make = Callable[[], QuietMark]


@pytest.fixture
def make(native_reader: Path) -> Make:
    made = native_hooks.load()
    assert made is not None
    return made


def state(mark: QuietMark) -> list[Any]:
    names = ("step", "only", "left", "due_ns", "ends_due_ns", "heard", "passed", "idle", "evaluates")
    return [len(mark.times), mark.read(), *(getattr(mark, name) for name in names)]


def test_both_kinds_of_mark_go_through_the_same_states(make: Make) -> None:
    marks = [QuietMark(), make()]
    optimizer, other = object(), object()
    hooks: list[dict[str, Any]] = [
        {"enter": m.enters(IN_BACKWARD), "begin": m.begins(IN_OPTIMIZER), "close": m.closes()} for m in marks
    ]
    for mark in marks:
        mark.begin(7)
        mark.only, mark.due_ns = id(optimizer), 1 << 62
    what_happens = ("enter", "begin", *["close"] * 4, "idle", "left", "count", "due", "pass", "ends", "call", "hear")
    chance = random.Random(3)
    seen = set()
    for _ in range(9_000):
        what = chance.choice(what_happens)
        which, number = chance.choice((optimizer, optimizer, other)), chance.randint(1, 3)
        answers: list[Any] = []
        for mark, own in zip(marks, hooks, strict=True):
            if what == "idle":
                mark.idle = number > 1
            elif what == "left":
                mark.left = mark.passed = number
            elif what == "due":
                mark.due_ns = 1 << 62 if number > 1 else 0
            elif what == "pass":
                answers.append(mark.pass_step(5))
            elif what == "ends":
                mark.read_ends(number - 1, None)
            elif what == "call":
                mark.words[mark.called_at] = number
            elif what == "hear":
                mark.hear()
            elif what == "count":
                if number == 1:
                    mark.forget_times()
            else:
                answers.append(own[what](*(() if what == "enter" else (which,))))
        assert answers[1:] == answers[:-1]
        assert state(marks[0]) == state(marks[1])
        seen.add((what, *answers[:1]))
    assert {("close", 0), ("close", PASSED), ("close", DUE), ("enter", True), ("begin", False)} < seen


def test_the_time_at_which_a_step_closed_is_pythons(make: Make) -> None:
    from time import monotonic_ns

    mark = make()
    mark.idle, mark.only, mark.left, mark.due_ns = True, id(mark), 1 << 62, 1 << 62
    before = monotonic_ns()
    assert mark.closes()(mark) == PASSED
    assert before <= mark.times[0] <= monotonic_ns()
    close = mark.closes()
    for _ in range(17_000):
        before = monotonic_ns()
        close(mark)
    assert len(mark.times) == 16_384
    assert mark.times[-2] < before <= mark.times[-1]
    assert close(mark) == DUE  # to be counted before the list is full
    mark.forget_times()
    assert close(mark) == PASSED
    mark.due_ns = monotonic_ns()
    assert close(mark) == DUE


def test_16384_times_and_4096_shapes_are_kept(make: Make) -> None:
    mark: Any = make()
    for number in range(20_000):
        mark.pass_step(number)
        mark.fit(((2, number),))
    assert len(mark.times) == 16_384
    assert (mark.times[0], mark.times[-1]) == (0, 19_999)
    kept = [number for number in range(20_000) if mark.fits(((2, number),))]
    assert kept == list(range(4 * 4_096, 20_000))
    assert mark._known == len(kept) == sum(each != 0 for each in mark._hashes)


def test_what_the_helper_calls_for_is_due_in_the_next_step_whatever_its_memory(make: Make) -> None:
    """Its memory is replaced with it, and unmapped."""
    for mark in (QuietMark(), make()):
        mark.idle, mark.only, mark.left, mark.due_ns = True, id(mark), 99, 1 << 62
        close = mark.closes()
        before: Memory | None = None
        for _ in range(2):
            memory = Memory.create(4 * PAGE_BYTES, 4 * PAGE_BYTES)
            memory.words[CALLED] = 3
            mark.share(memory.words, QUIET, CALLED)
            if before is not None:
                before.close()
            assert close(mark) == PASSED
            memory.words[CALLED] = 4
            assert [close(mark), close(mark)] == [DUE] * 2
            mark.hear()
            assert close(mark) == PASSED
            memory.words[CALLED] = 5
            before = memory
        assert mark.hears
        mark.keep()
        memory.close()
        assert not mark.hears
        assert close(mark) == PASSED


def test_an_end_that_hooks_cannot_read_is_due(make: Make) -> None:
    """There is no CUDA allocator to read."""
    mark = make()
    mark.idle, mark.only, mark.left, mark.due_ns = True, id(mark), 9, 1 << 62
    close = mark.closes()
    assert close(mark) == PASSED
    for device in (0, None):
        mark.read_ends(1 << 60, device)
        assert mark.reads_ends is (device == 0)
        assert close(mark) == DUE
        assert list(mark.take_ends()) == []
    mark.ends_due_ns = 1 << 62
    assert close(mark) == PASSED
    mark.read_ends(0, None)
    assert mark.ends_due_ns > 1 << 62


class Model(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> None: ...


class _Tensor(torch.Tensor):
    pass


def call(mark: QuietMark, model: nn.Module, asked: nn.Module, *args: Any, **kwargs: Any) -> bool:
    """What a hook for `model` answers in a call of `asked`."""

    hooks = asks(mark, weakref.ref(model))
    vars(asked)["_forward_pre_hooks"] = hooks
    asked(*args, **kwargs)
    return not hooks.asked


def asks(mark: QuietMark, model: weakref.ref[nn.Module]) -> native_hooks._Asks:
    hooks = mark.kind_of_hooks(native_hooks._Asks)({0: None})
    mark.ask(hooks, model, begins=True)
    return hooks


def test_a_call_is_known_by_the_shapes_of_all_its_tensors(make: Make) -> None:
    mark, model = make(), Model()
    mark.idle = True
    mark.begin(7)
    chance = random.Random(5)
    shapes: list[tuple[int, ...]] = [(), (1,), (2, 3), (3, 2), (6,), (0, 4)]
    for _ in range(50):
        mark.fit([chance.choice(shapes) for _ in range(chance.randint(1, 3))])
    plain = (None, True, 3, 0.5, "text")
    answers = []
    for _ in range(1_000):
        arguments = [
            torch.empty(chance.choice(shapes)) if chance.random() < 0.7 else chance.choice(plain)
            for _ in range(chance.randint(0, 4))
        ]
        named = chance.randint(0, len(arguments))
        args, kwargs = arguments[named:], {f"a{at}": each for at, each in enumerate(arguments[:named])}
        read = [each.shape for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
        before = mark.passed
        answer = call(mark, model, model, *args, **kwargs)
        assert answer is mark.fits(read)
        assert mark.passed - before == answer
        answers.append(answer)
    assert 50 < sum(answers) < 950


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "argument",
    [
        [torch.ones(2, 3)],
        (torch.ones(2, 3),),
        {"batch": torch.ones(2, 3)},
        object(),
        b"",
        torch.ones(2, 3).as_subclass(_Tensor),
        nn.Parameter(torch.ones(2, 3)),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    ],
)
def test_what_may_hold_tensors_is_left_to_python(make: Make, argument: Any) -> None:
    mark, model = make(), Model()
    mark.idle = True
    mark.fit(())
    mark.fit(((2, 3),))
    assert call(mark, model, model)
    assert call(mark, model, model, torch.ones(2, 3))
    given = argument() if callable(argument) else argument
    assert not call(mark, model, model, given)
    assert not call(mark, model, model, named=given)


def test_without_a_graph_an_evaluation_must_be_known(make: Make) -> None:
    mark, model = make(), Model()
    mark.idle = True
    with torch.no_grad():
        assert not call(mark, model, model)
        mark.evaluates = True
        assert call(mark, model, model, [object()])


def test_only_the_models_own_calls_by_torch_are_known(make: Make) -> None:
    mark, model = make(), Model()
    mark.idle = True
    mark.fit(())
    assert not call(mark, model, Model())
    hooks = asks(mark, weakref.ref(model))
    assert not hooks
    assert hooks.asked  # not by torch
    registered = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert not call(mark, model, model)
    registered.remove()
    mark.idle = False
    assert not call(mark, model, model)
    gone = weakref.ref(Model())
    assert gone() is None
    mark.idle = True
    vars(model)["_forward_pre_hooks"] = asks(mark, gone)
    model()
    assert mark.passed == 0


def test_a_hook_of_the_users_or_none_of_ours_is_left_to_python(make: Make) -> None:
    mark, model = make(), Model()
    mark.idle = True
    mark.fit(())
    hooks = vars(model)["_forward_pre_hooks"] = asks(mark, weakref.ref(model))
    answers = []
    for change in (
        lambda: None,
        lambda: hooks.update({1: None}),
        lambda: hooks.pop(1),
        lambda: mark.ask_no_more(hooks),
    ):
        change()
        hooks.asked = False
        model._call_impl()
        answers.append((hooks.asked, mark.passed))
    assert answers == [(False, 1), (True, 1), (False, 2), (True, 2)]


def test_what_python_answers_and_raises_is_bools(make: Make) -> None:
    class Answers(native_hooks._Asks):
        def asks(self) -> Any:
            return {"yes": [1], "no": []}[self.pop(0)]

        __bool__ = asks

    mark = make()
    kind = mark.kind_of_hooks(Answers)
    assert [bool(kind({0: answer})) for answer in ("yes", "no")] == [True, False]
    with pytest.raises(KeyError, match="perhaps"):
        bool(kind({0: "perhaps"}))
    assert kind is mark.kind_of_hooks(Answers)
    assert kind.__bool__ is Answers.__bool__  # for a compiler
    gone = weakref.ref(kind({0: None}))
    assert gone() is None


def test_nothing_is_kept_alive(make: Make) -> None:
    mark, model = make(), Model()
    mark.idle = True
    mark.fit(((3, 4),))
    batch, text, optimizer = torch.empty(3, 4), "text" * 9, object()
    mark.only = id(optimizer)
    kept = (mark, model, batch, text, optimizer, torch.Tensor, type(None), str, native_hooks.CALL)
    counts = list(map(sys.getrefcount, kept))
    for _ in range(1_000):
        call(mark, model, model, batch, text, None)
        call(mark, model, model, batch, text, [])
        mark.begins(IN_OPTIMIZER)(optimizer)
        mark.closes()(optimizer)
        mark.enters(IN_BACKWARD)()
    vars(model)["_forward_pre_hooks"] = {}
    gc.collect()
    assert [abs(a - b) < 500 for a, b in zip(counts, map(sys.getrefcount, kept), strict=True)] == [True] * len(kept)
    hook = mark.enters(IN_BACKWARD)
    gone = weakref.ref(mark)
    del mark, kept
    assert hook()
    assert gone() is not None
    del hook
    assert gone() is None


@pytest.mark.parametrize("answer", [lambda _: True, lambda _: False, lambda right: not right])
def test_hooks_that_give_wrong_answers_are_not_used(make: Make, answer: Callable[[bool], bool]) -> None:
    class Wrong(native_hooks._Asks):
        def __bool__(self) -> bool:
            self.asked = not answer(bool(hooks) or not hooks.asked)
            hooks.asked = False
            return False

    mark: Any = make()
    hooks = mark.kind_of_hooks(native_hooks._Asks)({0: None})
    right = mark.ask
    mark.ask = lambda _, model, begins: right(hooks, model, begins=begins)
    mark.kind_of_hooks = lambda _: Wrong
    assert not native_hooks._is_right(mark)
    assert native_hooks._is_right(make())


@pytest.mark.usefixtures("make")
@pytest.mark.parametrize(
    ("owner", "name", "answer"), [(native_hooks.ctypes, "sizeof", 1), (native_hooks.frames, "call_layout", None)]
)
def test_a_library_with_another_layout_is_not_used(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, answer: Any
) -> None:
    monkeypatch.setattr(owner, name, lambda _: answer)
    assert native_hooks.load() is None


@pytest.mark.usefixtures("make")
def test_the_program_does_not_see_our_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    registered = nn.modules.module.register_module_forward_pre_hook(lambda *each: seen.append(each))
    assert native_hooks.load() is None
    registered.remove()

    def called(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        seen.append(self)
        return self._call_impl(*args, **kwargs)

    monkeypatch.setattr(nn.Module, "__call__", called)
    assert native_hooks.load() is not None
    assert not seen


def test_a_note_that_cannot_be_taken_is_left_to_python(make: Make) -> None:
    """There is no CUDA allocator to read."""
    mark, optimizer = make(), object()
    enter, leave, begin, close = mark.enters(IN_BACKWARD), mark.leaves(), mark.begins(IN_OPTIMIZER), mark.closes()
    mark.begin(7)
    mark.idle, mark.only, mark.left, mark.due_ns = True, id(optimizer), 9, 1 << 62
    mark.begin_notes(0, native.Peaks())
    assert enter() == 0  # no forward was noted
    mark.passed = 1
    assert enter() == NOTES
    assert not begin(optimizer)
    assert not leave()
    assert (mark.engine, mark.read()) == (True, (7, "backward"))
    mark.engine = False
    assert begin(optimizer)
    assert close(optimizer) == 0
    assert (mark.stepping, mark.left, mark.noted, mark.take_notes().words) == (True, 9, 0, b"")


def test_no_notes_are_taken_in_another_thread(make: Make) -> None:
    mark = make()
    mark.idle, mark.passed = True, 1
    thread = threading.Thread(target=lambda: mark.begin_notes(0, native.Peaks()))
    thread.start()
    thread.join()
    assert mark.enters(IN_BACKWARD)() == 0


def test_no_notes_are_taken_where_torch_does_not_ask_for_hooks(make: Make, monkeypatch: Any) -> None:
    assert make().can_note()
    mark: Any = make()
    assert native_hooks._finishes(mark)
    monkeypatch.setattr(nn.Module, "_call_impl", lambda module: bool(module._forward_hooks))
    assert not native_hooks._finishes(mark)
