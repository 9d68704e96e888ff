"""What a viewer that comes late is shown: of each thing the newest."""

from __future__ import annotations

import msgspec
from watched import Run

from gpumon_agent import wire
from gpumon_agent.transport.picture import Picture


def shown(picture: Picture) -> list[wire.Event]:
    return [wire.decode_event(raw) for raw in picture.events()]


def add(picture: Picture, *events: wire.Event) -> None:
    for event in events:
        picture.add(event, wire.encode_event(event))


def said(run: Run) -> list[wire.Event]:
    return [received.event for received in run.events]


def test_hello_comes_first_and_what_is_of_the_past_is_left_out() -> None:
    run = Run(shrink=64).modules(blocks=1).hello().steps(0, 3).layers(2)
    picture = Picture()
    add(picture, *said(run))
    events = shown(picture)
    assert isinstance(events[0], wire.Hello)
    assert picture.hello == events[0]
    kinds = {type(event) for event in events}
    assert kinds >= {wire.Hello, wire.Model, wire.Module, wire.Layers}
    assert not kinds & {wire.Phase, wire.Step, wire.Heartbeat, wire.Goodbye}
    assert Picture().events() == []


def test_a_newer_one_takes_the_older_ones_place() -> None:
    run = Run(shrink=64).hello().modules(blocks=1).layers(2).census(2).segments(2)
    once, twice = Picture(), Picture()
    add(once, *said(run))
    add(twice, *said(run), *said(run))
    assert sorted(twice.events()) == sorted(once.events())
    assert len(twice.events()) == len(set(twice.events()))


def test_a_model_that_is_told_anew_takes_its_modules_with_it() -> None:
    large, small = Run(shrink=64).modules(blocks=4), Run(shrink=64).modules(blocks=1)
    picture, alone = Picture(), Picture()
    add(picture, *said(large), *said(small))
    add(alone, *said(small))
    assert sorted(picture.events()) == sorted(alone.events())


def test_models_come_before_what_tells_of_them_whenever_they_came() -> None:
    picture = Picture()
    add(picture, *said(Run(shrink=64).layers(2).modules(blocks=1).hello()))
    kinds = [type(event) for event in shown(picture)]
    assert kinds[:2] == [wire.Hello, wire.Model]
    assert wire.Module not in kinds[kinds.index(wire.Layers) :]


def test_of_checkpoints_the_newest_256_are_shown() -> None:
    run = Run(shrink=64).hello().checkpoint()
    (checkpoint,) = [event for event in said(run) if isinstance(event, wire.Checkpoint)]
    many = [msgspec.structs.replace(checkpoint, number=number) for number in range(256 + 9)]
    picture = Picture()
    add(picture, *many)
    assert shown(picture) == many[9:]


def test_of_where_the_loop_is_the_newest_is_shown() -> None:
    picture = Picture()
    add(picture, *(wire.Progress(step, step, "lightning", "train", batch=step) for step in range(3)))
    assert shown(picture) == [wire.Progress(2, 2, "lightning", "train", batch=2)]


def test_of_censuses_the_newest_four_are_shown() -> None:
    """An incomplete one explains less than the one before it."""
    many = [wire.Census(step=9, t_ns=0, number=number, reason="asked") for number in range(7)]
    picture = Picture()
    add(picture, *many)
    assert shown(picture) == many[3:]
