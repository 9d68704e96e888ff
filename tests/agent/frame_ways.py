"""The ways in which a program gets hold of a frame's variables as a dict. Needs no torch: any Python can run it.

`ways(look)` calls `look()` while such dicts are held, and returns their contents. They must be what a bare run returns.
`python frame_ways.py bare` prints them as JSON; `python frame_ways.py look` reads every frame at each `look()`;
`python frame_ways.py read` checks what `frames` reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import json
import sys
import threading
import types
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

Look = Callable[[], object]
Shown = dict[str, str]


class Big:
    """Stands for a large object."""


def shown(values: Any) -> Shown:
    return {str(name): value if isinstance(value, str) else type(value).__name__ for name, value in values.items()}


def of_vars(look: Look) -> object:
    rate, steps = "0.1", "3"
    kept = vars()
    look()
    rate = "0.2"
    look()
    return [shown(kept), rate, steps]


def of_locals(look: Look) -> object:
    rate = "0.1"
    kept = locals()
    kept["extra"] = "mine"
    kept.pop("look")
    look()
    first = shown(kept)
    later = "set later"
    del rate
    look()
    again = shown(locals())
    return [first, shown(kept), again, later]


def of_locals_not_kept(look: Look) -> object:
    rate = "0.1"
    locals()["extra"] = "mine"  # before Python 3.13 it is there at the next locals()
    look()
    seen = shown(locals())
    look()
    return [seen, rate, shown(locals())]


def of_eval(look: Look) -> object:
    rate = "0.1"
    look()
    inner = [eval("rate"), sorted(eval("locals()"))]
    look()
    return [*inner, sorted(eval("vars()")), rate]


def of_exec(look: Look) -> object:
    rate = "0.1"
    exec("extra = 'made'; rate = 'changed'")
    look()
    exec("again = locals().get('extra')")
    look()
    return [rate, shown(locals())]


def of_a_callee(look: Look) -> object:
    rate, steps = "0.1", "3"

    def callee() -> dict[str, Any]:
        taken = inspect.currentframe().f_back.f_locals  # type: ignore[union-attr]
        with contextlib.suppress(AttributeError):  # since Python 3.13 nothing can be taken out
            taken.pop("steps")
        taken["extra"] = "mine"
        taken["rate"] = "changed"
        return taken

    kept = callee()
    look()
    first = shown(kept)
    more = "set later"
    look()
    return [first, shown(kept), rate, steps, more]


def of_a_generator(look: Look) -> object:
    def generate() -> Iterator[dict[str, Any]]:
        rate = "0.1"
        kept = locals()
        kept["extra"] = "mine"
        yield kept
        look()
        rate = "0.2"
        yield kept
        yield shown(locals()) | {"rate": rate}

    running = generate()
    first = next(running)
    look()
    seen = [shown(first)]
    seen += [shown(next(running)), shown(running.gi_frame.f_locals)]  # type: ignore[attr-defined]
    look()
    return [*seen, next(running)]


def of_a_coroutine(look: Look) -> object:
    async def several() -> AsyncIterator[str]:
        rate = "0.1"
        kept = vars()
        await asyncio.sleep(0)
        look()
        yield str(shown(kept))
        yield rate

    async def work() -> list[Any]:
        rate = "0.1"
        kept = vars()
        kept["extra"] = "mine"
        await asyncio.sleep(0)
        look()
        return [shown(kept), rate, [each async for each in several()]]

    async def both() -> list[Any]:
        return list(await asyncio.gather(work(), work()))

    return asyncio.run(both())


def of_a_class_body(look: Look) -> object:
    calls = []

    class Noted(dict[str, Any]):
        """A namespace that notes what is done to it."""

        def __delitem__(self, key: str) -> None:
            calls.append(f"del {key}")
            super().__delitem__(key)

    class Meta(type):
        @classmethod
        def __prepare__(cls, *_: Any) -> Noted:  # type: ignore[override]
            return Noted()

        def __new__(cls, name: str, bases: Any, namespace: Noted) -> Meta:
            return super().__new__(cls, name, bases, dict(namespace))

    class Body(metaclass=Meta):
        rate = "0.1"
        kept = vars()
        kept["extra"] = "mine"
        look()
        del rate
        look()
        seen = shown(kept)

        def method(self) -> Any:
            return super().__repr__()

    names = ("rate", "extra", "seen")
    return [calls, {name: str(getattr(Body, name, None)) for name in names}]


def of_a_traceback(look: Look) -> object:
    def fail() -> None:
        rate = "0.1"
        raise ValueError(rate)

    try:
        fail()
    except ValueError as error:
        frame = error.__traceback__.tb_next.tb_frame  # type: ignore[union-attr]
        kept = frame.f_locals
        if sys.version_info < (3, 13):
            kept["extra"] = "mine"
        look()
        return [shown(kept), shown(frame.f_locals)]


def of_cells(look: Look) -> object:
    rate = "0.1"

    def inner(step: str) -> Callable[[], str]:
        kept = locals()
        look()
        seen.append(shown(kept))
        return lambda: step + rate

    seen: list[Shown] = []
    made = inner("3")
    rate = "0.2"
    kept = locals()
    look()
    return [seen, made(), shown(kept)]


def of_the_deleted(look: Look) -> object:
    rate = "0.1"
    kept = locals()
    del rate
    look()
    seen = [shown(kept)]
    with contextlib.suppress(UnboundLocalError):
        seen.append({"rate": rate})  # noqa: F821
    return seen


def of_a_trace_function(look: Look) -> object:
    """As in a debugger: before Python 3.13 what its dict says is written into the variables as it returns."""
    before = sys.gettrace()
    seen = []

    def watched() -> list[str]:
        rate, steps = "0.1", "3"
        mark = 1
        return [rate, steps, str(mark)]

    def trace(frame: types.FrameType, event: str, arg: object) -> Any:
        if frame.f_code is not watched.__code__:
            return None
        values = frame.f_locals
        look()
        seen.append(shown(values))
        if "mark" in values:
            values["rate"] = "changed"
        return trace

    sys.settrace(trace)
    try:
        result = watched()
    finally:
        sys.settrace(before)
    return [result, seen]


def of_another_threads_trace_function(look: Look) -> object:
    stopped, go_on = threading.Event(), threading.Event()
    result = []

    def watched() -> list[str]:
        rate, steps = "0.1", "3"
        return [rate, steps]

    def trace(frame: types.FrameType, event: str, arg: object) -> Any:
        if frame.f_code is not watched.__code__:
            return None
        if event == "return":
            stopped.set()
            go_on.wait()
        return trace

    def work() -> None:
        sys.settrace(trace)
        result.extend(watched())
        sys.settrace(None)

    thread = threading.Thread(target=work)
    thread.start()
    stopped.wait()
    look()
    go_on.set()
    thread.join()
    return result


def of_nothing_kept_alive(look: Look) -> object:
    def work() -> list[bool]:
        big = Big()
        gone = weakref.ref(big)
        look()
        del big
        dropped = gone() is None
        again = Big()
        gone = weakref.ref(again)
        look()
        again = None  # type: ignore[assignment]
        return [dropped, gone() is None]

    def generate() -> Iterator[Any]:
        big = Big()
        yield weakref.ref(big)
        del big
        yield None

    running = generate()
    gone = next(running)
    look()
    next(running)
    references = []
    held = Big()
    references.append(sys.getrefcount(held))
    look()
    references.append(sys.getrefcount(held))
    return [work(), gone() is None, references[0] == references[1]]


WAYS = (
    of_vars, of_locals, of_locals_not_kept, of_eval, of_exec, of_a_callee, of_a_generator, of_a_coroutine,
    of_a_class_body, of_a_traceback, of_cells, of_the_deleted, of_a_trace_function, of_another_threads_trace_function,
    of_nothing_kept_alive,
)  # fmt: skip


def ways(look: Look) -> dict[str, object]:
    return {way.__name__: way(look) for way in WAYS}


# --------------------------------------------------------------------------------------------- with frames.py alone


def every_frame() -> Iterator[types.FrameType]:
    """The frames of all threads, of what is suspended, and of tracebacks."""
    for top in sys._current_frames().values():
        frame: types.FrameType | None = top
        while frame is not None:
            yield frame
            frame = frame.f_back
    for each in gc.get_objects():
        found = None
        if type(each) is types.GeneratorType:
            found = each.gi_frame
        elif type(each) is types.CoroutineType:
            found = each.cr_frame
        elif type(each) is types.AsyncGeneratorType:
            found = each.ag_frame
        elif type(each) is types.TracebackType:
            found = each.tb_frame
        if found is not None:
            yield found


def look_at_all() -> None:
    from gpumon_agent import frames

    for frame in every_frame():
        frames.variables(frame)


def read() -> None:
    """What is read is what the variables are."""
    from gpumon_agent.frames import variables

    def own(argument: str, celled: str, *rest: str, keyword: str = "k", **more: str) -> dict[str, Any]:
        first, deleted = "1", "gone"
        del deleted
        inside = "in a cell"
        if not argument:
            unbound = 1
            print(unbound)
        values = variables(sys._getframe())
        return {**values, "function": (lambda: (celled, inside, outer, first))()}

    outer = "of the closure"
    expected = {
        "argument": "a", "celled": "c", "rest": ("r",), "keyword": "k", "more": {"m": "m"}, "first": "1",
        "inside": "in a cell", "outer": outer,
    }  # fmt: skip
    assert {name: own("a", "c", "r", m="m")[name] for name in expected} == expected
    assert set(own("a", "c", "r", m="m")) == {*expected, "function", "variables"}

    def generate(celled: str) -> Iterator[Any]:
        value = "1"
        yield lambda: (celled, value)

    fresh = generate("c")
    suspended = not (3, 13) <= sys.version_info < (3, 13, 6)  # there a closed one would crash
    assert variables(fresh.gi_frame) == ({"celled": "c"} if suspended else {})  # type: ignore[attr-defined]
    next(fresh)
    frame = fresh.gi_frame  # type: ignore[attr-defined]
    assert variables(frame) == ({"celled": "c", "value": "1"} if suspended else {})
    fresh.close()
    assert variables(frame) in ({}, {"celled": "c", "value": "1"})
    frame.clear()
    assert variables(frame) == {}
    closed_generators()

    async def work() -> dict[str, Any]:
        value = "1"
        await asyncio.sleep(0)
        return {"value": variables(sys._getframe())["value"], "itself": value}

    assert asyncio.run(work()) == {"value": "1", "itself": "1"}

    def of_caller() -> dict[str, Any]:
        return variables(sys._getframe(1))

    def many() -> dict[str, Any]:
        lots = [str(at) for at in range(3)]
        copies = [each + "!" for each in lots]
        return {"seen": of_caller(), "copies": copies}

    assert many()["seen"] == {"lots": ["0", "1", "2"], "copies": ["0!", "1!", "2!"], "of_caller": of_caller}

    try:
        own("a")  # type: ignore[call-arg]
    except TypeError as error:
        failed = error.__traceback__.tb_frame  # type: ignore[union-attr]
    assert variables(failed)["outer"] == outer

    class Body:
        found = variables(sys._getframe())

    assert Body.found == {}  # not a function's
    frames_of_others()


def closed_generators() -> None:
    """Their frames live on in a traceback."""
    from gpumon_agent.frames import variables

    errors = []

    def generate() -> Iterator[None]:
        value = ["1"]
        try:
            raise ValueError(len(value))
        except ValueError as error:
            errors.append(error)
        yield

    def close(running: Any) -> None:
        running.close()

    for end in (close, list, lambda running: None):
        running = generate()
        next(running)
        end(running)
        del running
        frame = errors.pop().__traceback__.tb_frame  # type: ignore[union-attr]
        assert variables(frame).get("value", ["1"]) == ["1"]


def frames_of_others() -> None:
    """Of threads whose functions begin and end while they are looked at."""
    from gpumon_agent.frames import variables

    go_on = True

    def leaf(number: int) -> int:
        values = [object() for _ in range(8)]
        other = str(number) * 3
        return len(values) + len(other)

    def work() -> None:
        number = 0
        while go_on:
            number = leaf(number) + number

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20_000):
            for top in sys._current_frames().values():
                frame: types.FrameType | None = top
                while frame is not None:
                    for name, value in variables(frame).items():
                        if name == "values":
                            assert type(value) is list
                        elif name == "other":
                            assert type(value) is str
                    frame = frame.f_back
    finally:
        go_on = False
        sys.setswitchinterval(interval)
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    if sys.argv[1] == "read":
        read()
    else:
        print(json.dumps(ways(look_at_all if sys.argv[1] == "look" else lambda: None), indent=1))
