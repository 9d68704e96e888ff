"""Every kind of object holds to the schema, and the page about them shows real output."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import json_examples
import jsonschema
import pytest
from msgspec.structs import replace
from synthetic import GIB, MIB, Run

from gpumon.analysis import Breakdown
from gpumon.analysis.types import OWNERS
from gpumon.export import jsonl
from gpumon.export.objects import Objects
from gpumon_agent import wire

SCHEMA = json.loads((json_examples.ROOT / "docs" / "json.schema.json").read_text(encoding="utf-8"))
KINDS = ("hello", "model", "answer", "layers", "outlook", "step", "finding", "host", "oom", "goodbye")


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    return jsonschema.Draft202012Validator(SCHEMA)


def objects(stream: Iterable[wire.Received], **options: Any) -> list[dict[str, Any]]:
    """What is printed for a stream, as a reader parses it."""
    made = Objects(**options)
    return [json.loads(jsonl.line(stated.object)) for received in stream for stated in made.take(received)]


def eventful(run: Run, steps: int = 30) -> list[wire.Received]:
    """A run with readings of the host, a failed allocation, and an end."""
    events = list(run.stream(steps, host_every=2))
    oom = wire.Oom(steps, "forward", 0, run.time_ns(steps), 9 * GIB, 40 * GIB, GIB, 30 * GIB, 31 * GIB, "CUDA …")
    outlook = wire.Outlook(
        steps, 0, run.time_ns(steps), 4 * GIB, 3 * GIB, 5 * GIB, "backward", wire.OOM_AHEAD, -GIB, 65536, ((8, 2048),)
    )
    goodbye = wire.Goodbye("exception", run.time_ns(steps), steps, "forward")
    events += [
        run.received(each, steps)
        for each in wire.layers(0, 0, steps, (wire.Layer("act", "GELU", None, None, MIB),), 512)
    ]
    return [*events, run.received(outlook, steps), run.received(oom, steps), run.received(goodbye, steps)]


def every_kind() -> list[dict[str, Any]]:
    leaking = Run(kept=lambda step: step * 40 * MIB, total=3 * GIB, sampled_every=3, embedding_bytes=80 * MIB)
    return objects(eventful(leaking))


def test_every_kind_of_object_is_valid(validator: jsonschema.Draft202012Validator) -> None:
    made = every_kind()
    assert {each["type"] for each in made} == set(KINDS)
    for each in made:
        validator.validate(each)


def test_two_models_of_a_process_have_each_its_number() -> None:
    run = Run()
    second = [replace(event, model=1) for event in run.model()]
    told = objects([*run.picture(), *(run.received(event, -1) for event in second), *run.step(0), *run.step(1)])
    assert {each["model"] for each in told if each["type"] == "model"} == {0, 1}


@pytest.mark.parametrize("backend", ["bare", "ddp"])
def test_what_a_backend_does_not_tell_is_null_and_valid(
    backend: str, validator: jsonschema.Draft202012Validator
) -> None:
    parallel = wire.Parallel("ddp", 2, (MIB,), None, False) if backend == "ddp" else None
    run = Run(parallel=parallel)
    silent = wire.Phase(0, "optimizer", 0, 0, run.time_ns(0), 5)
    events = [*run.picture(), run.received(silent, 0), run.received(wire.Step(0, run.time_ns(0), 5), 0)]
    made = objects(events)
    for each in made:
        validator.validate(each)
    step = next(each for each in made if each["type"] == "step")
    assert step["phases"][0]["allocated"] is step["ledger"] is step["forecast"] is step["input_bytes"] is None


def test_the_schema_refuses_what_is_not_ours(validator: jsonschema.Draft202012Validator) -> None:
    step = next(each for each in every_kind() if each["type"] == "step")
    for broken in (
        {**step, "device": "cuda:0"},
        {**step, "type": "sample"},
        {**step, "extra": 1},
        {key: value for key, value in step.items() if key != "forecast"},
        {**step, "ledger": {**step["ledger"], "allocated": 1.5}},
    ):
        assert not validator.is_valid(broken)


def test_where_the_loop_is_is_told_once_and_valid(validator: jsonschema.Draft202012Validator) -> None:
    run = Run()
    known = wire.Progress(1, run.time_ns(1), "keras", "train", 2, 31, 200)
    unknown = wire.Progress(1, run.time_ns(1) + 1, "")
    late = [run.received(each, 1) for each in (known, known, unknown, known)]
    told = [each for each in objects([*run.stream(2), *late]) if each["type"] == "progress"]
    for each in told:
        validator.validate(each)
        assert list(each) == list(SCHEMA["$defs"]["progress"]["properties"])
    names = ("library", "stage", "epoch", "batch", "batches")
    assert [[each[name] for name in names] for each in told] == [["keras", "train", 2, 31, 200], [None] * 5]


def test_fields_come_in_the_documented_order() -> None:
    for each in every_kind():
        assert list(each) == list(SCHEMA["$defs"][each["type"]]["properties"])
    step = next(each for each in every_kind() if each["type"] == "step")
    assert list(step["ledger"]) == list(Breakdown.__struct_fields__)


def test_the_page_shows_real_output() -> None:
    page = json_examples.PAGE.read_text(encoding="utf-8")
    assert page == json_examples.page(page), "python tests/_shared/json_examples.py writes the examples"
    shown = {found[2] for found in json_examples.BLOCK.finditer(page)}
    assert shown == set(KINDS)


def test_the_recorded_session_is_valid_throughout(validator: jsonschema.Draft202012Validator) -> None:
    for each in json_examples.objects():
        validator.validate(json.loads(jsonl.line(each)))


def test_in_a_real_session_the_driver_s_lines_sum_to_its_total() -> None:
    ledgers = [each["ledger"] for each in json_examples.objects() if each["type"] == "step"]
    complete = [lines for lines in ledgers if lines["total"] is not None]
    assert complete
    for lines in complete:
        assert lines["reserved"] + lines["context"] + lines["other_processes"] + lines["free"] == lines["total"]
        assert lines["context"] == 450 * MIB  # what the virtual device was configured with


def test_in_a_real_session_of_one_shape_the_next_peak_is_known_from_the_third_iteration() -> None:
    steps = [each for each in json_examples.objects() if each["type"] == "step"]
    for before, after in pairwise(steps[1:]):
        measured = max(phase["allocated_peak"] for phase in after["phases"])
        assert abs(before["forecast"]["next_peak"] - measured) <= 0.005 * measured
        assert abs(after["estimate"]["peak"] - measured) <= 0.005 * measured


def test_hello_model_steps_goodbye_in_this_order_and_once() -> None:
    kinds = [each["type"] for each in objects(eventful(Run(), 5))]
    assert kinds[:3] == ["hello", "model", "answer"]
    assert kinds[-3:] == ["oom", "answer", "goodbye"]
    assert kinds.count("hello") == kinds.count("model") == kinds.count("goodbye") == 1
    assert kinds.count("step") == 5


def test_a_picture_told_again_is_not_printed_again() -> None:
    run = Run()
    again = [wire.Received(r.source, r.unix_ns, r.event, r.seq, True) for r in run.picture()]
    assert [each["type"] for each in objects([*run.picture(), *again, *again])] == ["hello", "model", "answer"]


def test_a_finding_is_printed_when_it_opens_and_when_it_is_gone() -> None:
    run = Run(activations=lambda step: 3 * GIB + 80 * MIB if step < 30 else GIB, total=4 * GIB)
    found = [each for each in objects(run.stream(60, host_every=1)) if each["type"] == "finding"]
    assert [(each["code"], each["state"]) for each in found] == [("near-capacity", "open"), ("near-capacity", "gone")]


def test_processes_that_are_watched_are_ours() -> None:
    host = next(each for each in objects(Run(others=GIB).stream(5, host_every=1)) if each["type"] == "host")
    assert [(p["pid"], p["ours"]) for p in host["devices"][0]["processes"]] == [(4000, True), (99, False)]


def test_only_the_rank_that_was_asked_for() -> None:
    runs = [Run(rank=rank, nonce=f"n{rank}", pid=100 + rank) for rank in range(3)]
    made = objects([r for run in runs for r in run.stream(3)], rank=1)
    assert {each["rank"] for each in made if each["type"] != "answer"} == {1}
    assert {each["who"]["rank"] for each in made if each["type"] == "answer"} == {1}


def test_numbers_survive_a_reader_that_is_not_python() -> None:
    for each in every_kind():
        assert "NaN" not in json.dumps(each)
        assert "Infinity" not in json.dumps(each)


def test_the_recorded_ledgers_add_up_and_the_context_is_what_the_device_was_given() -> None:
    steps = [each for each in json_examples.objects() if each["type"] == "step"]
    assert len(steps) == 10
    contexts = []
    for each in steps:
        ledger = each["ledger"]
        contexts.append(ledger["context"])
        named = (*OWNERS, "unexplained", "unattributed", "rounding", "slack")
        assert sum(ledger[name] or 0 for name in named) == ledger["reserved"]
        assert ledger["unexplained"] == 0
        if ledger["total"] is not None:
            assert ledger["total"] == ledger["reserved"] + ledger["context"] + ledger["free"]
    assert set(contexts) - {None} == {450 * MIB}
    composed = [each["ledger_peak"] for each in steps if each["ledger_peak"] is not None]
    assert len(composed) >= 8
    assert {peak["phase"] for peak in composed} == {"optimizer"}
    assert all(peak["temporaries"] == peak["weights"] and peak["unexplained"] == 0 for peak in composed)


def test_layers_are_stated_when_all_parts_came_and_join_what_the_model_tells() -> None:
    run = Run()
    kept = [wire.Layer("body", "Linear", 7, 14, None)]
    kept += [wire.Layer(f"act.{i}", "GELU", None, None, i + 1) for i in range(60)]
    parts = wire.layers(0, 0, 3, kept, 4)
    assert len(parts) == 2
    stream = [*run.picture(), *(run.received(part, 3) for part in parts)]
    stated = [each for each in objects(stream) if each["type"] == "layers"]
    assert len(stated) == 1
    body, first, *_ = stated[0]["by_module"]
    assert body == {"path": "body", "kind": "Linear", "weights": run.weights, "buffers": 0, "gradients": 7,
                    "optimizer": 14, "activations": None}  # fmt: skip
    assert (first["path"], first["weights"], first["activations"]) == ("act.0", None, 1)
    assert (stated[0]["step"], stated[0]["elsewhere"]) == (3, 4)


def test_the_last_goodbye_of_a_job_says_who_died_first(validator: jsonschema.Draft202012Validator) -> None:
    ranks = [Run(rank=rank, world_size=3, run_id="job", nonce=f"r{rank}", pid=4000 + rank) for rank in range(3)]
    heard = [received for run in ranks for received in run.stream(5)]
    deaths = (
        (0, "exception", 15),
        (2, "finished", 1),
        (1, "signal", 3),
    )  # rank 1 died before rank 0, and is heard later
    for number, reason, step in deaths:
        run = ranks[number]
        heard.append(run.received(wire.Goodbye(reason, run.time_ns(step), step, "backward"), 6))
    goodbyes = [each for each in objects(heard) if each["type"] == "goodbye"]
    for each in goodbyes:
        validator.validate(each)
    zero, one = {"rank": 0, "pid": 4000}, {"rank": 1, "pid": 4001}
    assert [each["first_to_die"] for each in goodbyes] == [zero, zero, one]
    assert goodbyes[2]["last_sign"] < goodbyes[0]["last_sign"]
    alone = objects(eventful(Run()))[-1]
    assert alone["first_to_die"] is None
    assert alone["last_sign"] is not None


def after_quiet_steps(peaks: tuple[wire.QuietPeak, ...], *beside: wire.Event) -> dict[str, Any]:
    """The object of a step that is read after 40 quiet ones, in a run that was read until then."""
    run = Run()
    stream = [*run.picture(), *(received for step in range(5) for received in run.step(step))]
    stream += [run.received(event, 5) for event in beside]
    for event in run.step_events(45):
        told = replace(event, quiet=40, quiet_peaks=peaks) if isinstance(event, wire.Step) else event
        stream.append(run.received(told, 45))
    return [each for each in objects(stream) if each["type"] == "step"][-1]


def test_a_step_tells_the_quiet_ones_before_it_and_their_highest_peak(
    validator: jsonschema.Draft202012Validator,
) -> None:
    peaks = (wire.QuietPeak(0, 7 * GIB, 8 * GIB), wire.QuietPeak(1, 9 * GIB, 9 * GIB))
    made = after_quiet_steps(peaks)
    validator.validate(made)
    assert (made["step"], made["quiet_steps"], made["quiet_peak"]) == (45, 40, 7 * GIB)
    assert made["highest"] == {"step": 45, "allocated": 7 * GIB}
    assert max(phase["allocated_peak"] for phase in made["phases"]) < GIB
    assert made["duration_s"] < 0.1


def test_the_peak_of_quiet_steps_that_was_not_read_is_null(validator: jsonschema.Draft202012Validator) -> None:
    for peaks in ((), (wire.QuietPeak(0, None, None),), (wire.QuietPeak(1, 9 * GIB, 9 * GIB),)):
        made = after_quiet_steps(peaks)
        validator.validate(made)
        assert (made["quiet_steps"], made["quiet_peak"]) == (40, None)
        assert made["highest"]["step"] < 45


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({}, None),
        ({"cost": 12_300}, {"share": 0.0123, "error": None}),
        ({"cost": 4_100, "cost_error": 1_900}, {"share": 0.0041, "error": 0.0019}),
    ],
)
def test_a_step_tells_what_gpumon_costs(
    told: dict[str, int], expected: dict[str, float] | None, validator: jsonschema.Draft202012Validator
) -> None:
    made = after_quiet_steps((), wire.Heartbeat(1, 4, "forward", 0, **told))
    validator.validate(made)
    assert made["agent_cost"] == expected
