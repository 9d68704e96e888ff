"""Findings of what is kept: from growth and a census to a name, and silence on what is none."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from leaking import LOSSES, OUTPUTS, census, group, leaking
from looked import codes, history, only
from msgspec.structs import replace
from synthetic import GIB, MIB, Run

from gpumon.analysis import Reporter
from gpumon.analysis.batches import Batches
from gpumon.analysis.history import StepPeaks
from gpumon.session.store import SessionStore, StoreLimits
from gpumon_agent import wire


def test_a_kept_loss_is_named_within_50_steps() -> None:
    said = history(leaking(512, census(25, group(24, has_graph=True))), steps=50)
    found = only(said[-1], "retained-graph")
    assert codes(said[-1]) == {"retained-graph"}
    assert (found.holder, found.where) == ("losses[*]", "train.py:57")
    assert (found.bytes, found.bytes_per_step, found.step) == (24 * 512, 512, 2)
    assert found.title.startswith("24 float32 scalars, each with its graph")
    assert "`losses[*]` (a local variable, train.py:12)" in found.title
    assert "loss.item() in `losses`" in found.remedy
    assert found.severity == "warning"
    assert all("tensor-leak" not in codes(each) for each in said)


@pytest.mark.parametrize(("begun", "batches"), [(0, False), (30, False), (30, True)])
def test_where_it_ends_out_of_memory_who_held_it_is_what_to_do(begun: int, batches: bool) -> None:
    """Also where batches grew meanwhile, so that the forecast does not call the growth of the peak kept."""
    each, last = 40 * MIB, begun + 60
    named = census(begun + 42, group(42, OUTPUTS, shape=(8, 64), bytes=42 * each))
    run = Run(
        kept=lambda step: each * max(0, step - begun),
        blocks=lambda step: 100 + max(0, step - begun),
        beside=lambda step: (named,) if step == named.step else (),
        total=16 * GIB,
        **({"activations": lambda step: step * 60 * MIB} if batches else {}),
    )
    held = run.peak(last)
    free = run.total - held - 450 * MIB
    failed = wire.Oom(last, "backward", 0, 9, free + GIB, run.total, free, held, held)
    store, reporter = SessionStore(StoreLimits(steps=64)), Reporter()
    for received in run.stream(last + 1, host_every=1):
        store.apply(received)
        if isinstance(received.event, wire.Step):
            rank = store.rank(run.nonce, 0)
            assert rank is not None
            reporter.rank(rank)
    assert rank is not None
    report = reporter.rank(replace(rank, oom=failed)).oom
    assert report is not None
    assert report.verdict == "leak"
    assert report.sentence.endswith(f"held by `{OUTPUTS.text}`.")
    since = only(reporter.rank(rank).findings, "tensor-leak").step
    assert since in (begun + 1, begun + 2)
    assert report.reasons[1].startswith(f"Over {last - since} steps that is")  # not over all that it ran
    (remedy,) = report.remedies
    assert (remedy.code, remedy.saves) == ("tensor-leak", 42 * each)
    assert ".cpu()" in remedy.text


def test_four_that_keep_tensors_are_named() -> None:
    kept = [group(42, wire.Holder(f"kept{n}[*]", "local", "train.py:12", 0), shape=(8, n)) for n in range(6)]
    said = history(leaking(6 * 512, census(42, *kept)), steps=60)
    assert [found.code for found in said[-1]] == ["tensor-leak"] * 4


def test_outputs_of_many_lengths_are_one_finding_and_what_lives_anyway_is_none() -> None:
    kept = [group(2, OUTPUTS, shape=(8, n), bytes=2 * 32 * n) for n in range(500, 520)]
    dataset = group(4000, wire.Holder("data[*]", "global"), shape=(3, 32, 32), bytes=4000 * 12288)
    batch = group(1, wire.Holder("logits", "local"), shape=(8, 512, 32000), bytes=500 * MIB)
    said = history(leaking(32 * 512, census(42, *kept, dataset, batch)), steps=60)
    found = only(said[-1], "tensor-leak")
    assert found.holder == OUTPUTS.text
    assert found.title.startswith("40 tensors of 20 shapes, such as [8, 500] float32")
    assert ".cpu()" in found.remedy


def test_how_many_a_step_is_said_as_the_bytes_grow() -> None:
    """The list had 40 tensors before the growth began, so that at step 60 it has as many as there were steps."""
    listed = group(52, OUTPUTS, shape=(8, 64), bytes=52 * 2048)
    run = Run(
        kept=lambda step: 40 * 2048 + step // 5 * 2048,
        blocks=lambda step: 140 + step // 5,
        beside=lambda step: (census(60, listed),) if step == 60 else (),
    )
    assert ", one every 5 steps since" in only(history(run, steps=80)[-1], "tensor-leak").title
    each_step = history(leaking(2048, census(40, group(39, OUTPUTS, shape=(8, 64), bytes=39 * 2048))), steps=60)[-1]
    assert ", one a step since" in only(each_step, "tensor-leak").title


def test_two_names_share_a_growth() -> None:
    groups = (group(30, has_graph=True), group(30, OUTPUTS, shape=(8, 64), bytes=30 * 2048))
    found = history(leaking(2560, census(32, *groups)), steps=50)[-1]
    assert codes(found) == {"retained-graph", "tensor-leak"}
    assert only(found, "tensor-leak").bytes_per_step == 2048
    assert only(found, "retained-graph").title.endswith("; 20 % of the growth")


def test_what_makes_no_hundredth_of_a_growth_is_information_and_claims_none_of_the_rest() -> None:
    groups = (group(30, has_graph=True), group(30, OUTPUTS, shape=(8, 64), bytes=30 * MIB))
    found = history(leaking(MIB + 512, census(32, *groups), total=40 * GIB), steps=50)[-1]
    small, large = only(found, "retained-graph"), only(found, "tensor-leak")
    assert (small.severity, large.severity) == ("info", "warning")
    assert small.title.endswith("; <0.1 % of the growth")
    assert small.bytes_per_step == 512
    assert "MiB so far" in large.title


@pytest.mark.parametrize(("small", "severity"), [(7, "info"), (16, "warning")])  # of 1,000: below and above 1 %
def test_from_a_hundredth_of_a_growth_on_a_suspect_is_a_warning(small: int, severity: str) -> None:
    one = group(30, has_graph=True, bytes=30 * small * 1024)
    other = group(30, OUTPUTS, shape=(8, 64), bytes=30 * (1000 - small) * 1024)
    found = history(leaking(1000 * 1024, census(32, one, other), total=40 * GIB), steps=50)[-1]
    assert only(found, "retained-graph").severity == severity


def test_a_tensor_that_is_concatenated_to() -> None:
    one = group(1, OUTPUTS, shape=(320, 64), bytes=40 * 4096)
    run = Run(kept=lambda step: 4096 * step, beside=lambda step: (census(40, one),) if step == 40 else ())
    assert "one tensor that gets longer" in only(history(run, steps=60)[-1], "tensor-leak").remedy


def test_a_cycle_is_named_as_such_and_nobody_is_guessed() -> None:
    cyclic = history(leaking(512, census(30, group(28, None, cyclic=28))), steps=50)[-1]
    assert only(cyclic, "tensor-leak").holder == "a reference cycle"
    unheld = history(leaking(512, census(30, group(28, None))), steps=50)[-1]
    assert only(unheld, "tensor-leak").holder is None


def test_a_cycle_that_was_proven_is_a_sample_of_what_grows() -> None:
    holder = wire.Holder("reference cycle of node.kept in main()", "cycle", "train.py:12")
    said = history(leaking(512, census(30, group(1, holder, cyclic=1, shape=(8, 16)))), steps=50)[-1]
    found = only(said, "tensor-leak")
    assert (found.holder, found.where) == (holder.text, "train.py:57")
    assert found.title.startswith("tensors such as [8, 16] float32 stay in reference cycles since step 2, made at")
    assert found.bytes == 42 * 512  # of what grew, not of the sample
    assert "gc.collect()" in found.remedy


def test_what_nobody_was_found_to_hold_has_its_line() -> None:
    def made(step: int) -> wire.Census:
        return wire.Census(step, step * 1000, 0, "growth", unclaimed=(wire.Unclaimed("train.py:71", 2, 1024, 0),))

    found = only(history(leaking(512, made(40)), steps=60)[-1], "tensor-leak")
    assert (found.holder, found.where) == (None, "train.py:71")
    assert "most of it is made at train.py:71" in found.title


def test_one_tensor_in_each_of_a_few_layers_gets_longer() -> None:
    layers = [wire.Holder(f"model.{layer}.k_cache", "attribute") for layer in range(4)]
    kept = [group(1, layer, shape=(10 * at + 10, 64), bytes=10 * 4096) for at, layer in enumerate(layers)]
    run = Run(kept=lambda step: 4096 * step, beside=lambda step: (census(40, *kept),) if step == 40 else ())
    found = only(history(run, steps=60)[-1], "tensor-leak")
    assert found.holder == "model.0.k_cache"
    assert "one tensor that gets longer" in found.remedy


def test_a_graph_that_reaches_back_over_steps_names_its_tensor() -> None:
    hidden = wire.Holder("hidden in main()", "local", "train.py:8")
    back = group(1, hidden, has_graph=True, graph_bytes=4 * 512)
    assert only(history(leaking(512, census(25, back)), steps=50)[-1], "retained-graph").holder == hidden.text
    this_step = group(1, hidden, has_graph=True, graph_bytes=512)
    assert codes(history(leaking(512, census(25, this_step)), steps=60)[-1]) == {"tensor-leak"}


def test_a_leak_keeps_the_name_that_it_was_first_given() -> None:
    first = wire.Holder("Loop.callbacks[1].curve[*] in run()", "attribute", "train.py:15")
    other = wire.Holder("c.curve[*] in run()", "attribute", "train.py:20")
    part = wire.Holder("metric.target[*]", "attribute", "train.py:9")

    def cut(step: int, *groups: wire.Group) -> wire.Census:
        return wire.Census(step, step * 1000, 0, "growth", groups, cut=True)

    again = [cut(25 + 16 * at, group(24 + 16 * at, (other, first)[at % 2 == 0], where=None)) for at in range(8)]
    said = history(leaking(512, *again), steps=150)
    assert {only(each, "tensor-leak").holder for each in said[40:]} == {first.text}
    assert not codes(said[-1], "gone")

    def both(step: int, *held: wire.Holder) -> tuple[wire.Group, ...]:
        kept = [group(step, each, where=f"train.py:{at}") for at, each in enumerate((LOSSES, part)) if each in held]
        return tuple(kept)

    halves = [cut(25, *both(24, LOSSES)), cut(41, *both(40, part)), cut(73, *both(72, LOSSES))]
    ends = [cut(105, *both(104, part)), census(137, *both(136, LOSSES, part)), census(169, *both(168, part))]
    run = leaking(1024, *halves, *ends)
    run.blocks = lambda step: 100 + 2 * step
    said = history(run, steps=200)
    for at in (60, 100, 160):  # what a census that ended early did not list is still there
        assert {each.holder for each in said[at] if each.state == "open"} == {LOSSES.text, part.text}
    assert {each.holder for each in said[-1] if each.state == "open"} == {part.text}  # a whole one has refuted it


def test_a_census_that_saw_a_part_of_a_leak_makes_it_no_smaller() -> None:
    part = wire.Census(56, 56_000, 1, "growth", (group(18),), began_step=36, cut=True)
    whole = census(56, group(18), number=1)
    seen = wire.Census(33, 33_000, 0, "growth", (group(31),), began_step=19, cut=True)
    assert only(history(leaking(512, seen, part), steps=70)[-1], "tensor-leak").bytes == 31 * 512
    assert only(history(leaking(512, seen, whole), steps=70)[-1], "tensor-leak").bytes == 18 * 512
    little = wire.Census(56, 56_000, 1, "growth", (group(4),), began_step=36, cut=True)
    assert only(history(leaking(512, seen, little), steps=70)[-1], "tensor-leak").holder == LOSSES.text


def test_a_linked_list_that_was_not_followed_to_its_end_is_still_the_leak() -> None:
    links = wire.Holder("previous.before… in main()", "attribute", "train.py:12", 1)

    def early(step: int, count: int, grown: int | None = None) -> wire.Census:
        found = group(count, links, has_graph=True, grown=grown)
        return wire.Census(step, step * 1000, 0, "growth", (found,), cut=True)

    said = history(leaking(512, early(25, 20), early(40, 19, -1)), steps=80)
    assert {(each.code, each.holder) for each in said[-1] if each.state == "open"} == {("retained-graph", links.text)}
    refuted = census(60, group(2, links, has_graph=True, grown=-17), number=1)
    said = history(leaking(512, early(25, 20), refuted), steps=80)
    assert "retained-graph" not in {each.code for each in said[-1] if each.state == "open"}


@pytest.mark.parametrize(
    ("name", "grows"),
    [
        ("losses[*] in main()", "losses"),
        ("log.handlers[0].records[*].args[0] in main()", "log.handlers[0].records"),
        ("stats['train'][*][1]", "stats['train']"),
        ("epochs[*][*] in main()", "epochs"),
        ("runs[*].loss", "runs"),
    ],
)
def test_a_remedy_speaks_of_what_grows(name: str, grows: str) -> None:
    said = history(leaking(512, census(25, group(24, wire.Holder(name, "attribute")))), steps=50)
    found = only(said[-1], "tensor-leak")
    assert f"in `{grows}`" in found.remedy


def test_without_a_census_it_is_stated_later_and_alone() -> None:
    said = history(leaking(512), steps=60)
    assert "tensor-leak" not in codes(said[40])
    found = only(said[-1], "tensor-leak")
    assert found.title.startswith("allocated at the end of the step grows by 512 B a step since step 2")
    assert found.holder is None


def test_a_leak_that_gets_its_name_late_stays_the_same_finding() -> None:
    said = history(leaking(512, census(70, group(68))), steps=75)
    assert only(said[60], "tensor-leak").holder is None
    assert (only(said[-1], "tensor-leak").holder, only(said[-1], "tensor-leak").step) == ("losses[*]", 2)


def test_where_a_whole_census_found_nobody_it_says_so() -> None:
    found = only(history(leaking(512, census(30)), steps=60)[-1], "tensor-leak")
    assert found.holder is None
    assert "no variable leads to it" in found.title
    assert "gc.collect()" in found.remedy


def test_a_census_that_comes_late_gives_the_name() -> None:
    said = history(leaking(512, census(70, group(68, has_graph=True))), steps=72)
    assert codes(said[60]) == {"tensor-leak"}
    assert codes(said[-1]) == {"retained-graph"}
    assert codes(said[-1], "gone") == {"tensor-leak"}


def test_it_is_gone_when_the_cause_ends() -> None:
    run = leaking(512, census(25, group(24)))
    run.kept = lambda step: 512 * min(step, 60)
    run.blocks = lambda step: 100 + min(step, 60)
    said = history(run, steps=100)
    assert codes(said[55]) == {"tensor-leak"}
    assert codes(said[-1]) == set()
    assert codes(said[-1], "gone") == {"tensor-leak"}


def test_a_leak_that_fills_the_device_soon_is_critical() -> None:
    said = history(leaking(4 * MIB, census(25, group(24, bytes=24 * 4 * MIB)), total=2 * GIB), steps=60, host_every=1)
    found = only(said[-1], "tensor-leak")
    assert found.severity == "critical"
    assert "more steps" not in found.title  # a sentence that ages; how soon is in the forecast and in the answer


# ------------------------------------------------------------------------------------------------------- checkpoints


FIELDS = wire.Checkpoint.__struct_fields__


def loaded(step: int, **more: object) -> wire.Checkpoint:
    fields: dict[str, object] = {
        "file": "model.pt", "where": "train.py:31", "loaded": 100 * MIB, "tensors": 12, "alive": 100 * MIB,
        "looked_step": step, "used_step": 0, "holders": (wire.Holder("ckpt['model'][*]", "local", "train.py:31", 12),),
        **more,
    }  # fmt: skip
    return wire.Checkpoint(0, more.pop("device", 0), 0, 0, "torch.load", **fields)  # type: ignore[arg-type]


def findings_with(*checkpoints: wire.Checkpoint) -> set[str]:
    return codes(history(Run(beside=lambda step: checkpoints if step == 5 else ()), steps=8)[-1])


def test_a_checkpoint_still_held_two_steps_after_it_was_used() -> None:
    found = only(history(Run(beside=lambda step: (loaded(step),)), steps=8)[-1], "retained-checkpoint")
    assert found.bytes == 100 * MIB
    assert (found.holder, found.where) == ("ckpt['model'][*]", "train.py:31")
    assert "torch.load of model.pt at train.py:31, as much as the weights" in found.title
    assert found.remedy.startswith("del ckpt after load_state_dict")


@pytest.mark.parametrize("but", [{"used_step": None}, {"looked_step": 1}, {"alive": 0}, {"alive": MIB}])
def test_data_a_fresh_load_and_what_was_let_go_are_no_retained_checkpoint(but: dict[str, object]) -> None:
    assert findings_with(loaded(5, **but)) == set()


def test_what_something_else_had_read_is_told_by_what_it_was_given_to() -> None:
    given = loaded(5, file=None)
    given = wire.Checkpoint(*("load_state_dict" if name == "source" else getattr(given, name) for name in FIELDS))
    found = only(history(Run(beside=lambda step: (given,)), steps=8)[-1], "retained-checkpoint")
    assert "still alive after it was passed to load_state_dict at train.py:31" in found.title
    assert "a load to the host" in found.remedy
    elsewhere = wire.Checkpoint(*(name == "foreign" or getattr(given, name) for name in FIELDS))
    assert "checkpoint-device" not in codes(history(Run(beside=lambda step: (elsewhere,)), steps=8)[-1])


def test_a_checkpoint_on_another_rank_s_device() -> None:
    foreign = loaded(5, foreign=True, alive=0)
    found = only(history(Run(beside=lambda step: (foreign,)), steps=8)[-1], "checkpoint-device")
    assert 'map_location="cpu", or map_location="cuda:0"' in found.remedy
    assert "the context stays" in found.title


# ----------------------------------------------------------------------------------------------------------- settings


def test_gradients_that_stand_through_the_forward() -> None:
    found = only(history(Run(standing=True), steps=8)[-1], "zeroed-gradients")
    assert (found.bytes, found.severity) == (100 * MIB, "info")
    assert "zeroed-gradients" not in codes(history(Run(), steps=8)[-1])
    among_much = Run(standing=True, activations=lambda step: 6 * GIB)  # 100 MiB of more than 6 GiB
    assert "zeroed-gradients" not in codes(history(among_much, steps=8)[-1])


def test_an_evaluation_that_records_a_graph_until_one_does_not() -> None:
    def evaluated(flags: int) -> wire.Phase:
        return wire.Phase(9, wire.EVAL, 0, 0, 10 * 50_000_000, 1, 400 * MIB, 700 * MIB, flags=flags)

    phases = {9: (evaluated(wire.RECORDED),), 19: (evaluated(0),)}
    for step, (phase,) in phases.items():
        phases[step] = (wire.Phase(step, *[getattr(phase, name) for name in phase.__struct_fields__[1:]]),)
    said = history(Run(beside=lambda step: phases.get(step, ())), steps=25)
    assert codes(said[12]) == {"grad-in-eval"}
    assert codes(said[-1]) == set()


def test_one_batch_that_makes_the_peak() -> None:
    run = Run(
        input_bytes=lambda step: 4096 if step == 30 else 512 + 8 * (step % 9),
        activations=lambda step: 2400 * MIB if step == 30 else 300 * MIB,
    )
    said = history(run, steps=40)
    found = only(said[-1], "outlier-batch")
    assert (found.step, found.severity) == (30, "info")
    assert found.bytes == run.peak(30) - max(run.peak(step) for step in range(30))
    assert "99th percentile" in found.remedy


def test_of_two_batches_that_make_the_peak_the_second_is_advised_to_cut_both() -> None:
    """Two of 60 are more than one in a hundred: cut to the 99th percentile, they would both stay."""
    run = Run(
        input_bytes=lambda step: 4096 if step in (30, 60) else 512 + 8 * (step % 9),
        activations=lambda step: 2400 * MIB if step in (30, 60) else 300 * MIB,
    )
    found = only(history(run, steps=65)[-1], "outlier-batch")
    assert found.step == 60
    assert found.bytes == run.peak(60) - max(run.peak(step) for step in range(30))
    assert "95th percentile" in found.remedy


@pytest.mark.parametrize(
    ("before", "size", "peak", "found"),
    [
        ([100] * 9, 200, 200, False), ([100] * 10, 200, 200, True),  # after ten others
        ([100] * 60, 140, 200, False), ([100] * 60, 160, 200, True),  # half as large again as the usual
        ([100] * 60, 200, 120, False), ([100] * 60, 200, 130, True),  # with a peak a quarter higher
        ([900] * 60 + [100] * 400, 200, 200, False), ([900] * 60 + [100] * 512, 200, 200, True),  # of the newest 512
    ],
)  # fmt: skip
def test_from_when_a_batch_makes_the_peak(before: list[int], size: int, peak: int, found: bool) -> None:
    batches = Batches()
    for step, (size_then, peak_then) in enumerate([*zip(before, before, strict=True), (size, peak)], 2):
        batches.observe(StepPeaks(step, 0, 0, (), peak_then, "forward", size_then, (), False, None, None, 0, None))
    assert (batches.outlier is not None) is found


def test_memory_reserved_that_fits_nothing() -> None:
    run = Run(slack=0, activations=lambda step: 300 * MIB)
    run.reserved = lambda step: run.peak(0) + 200 * MIB * min(step, 6)  # type: ignore[method-assign]
    found = only(history(run, steps=12)[-1], "fragmentation")
    assert found.bytes == 1200 * MIB - (run.peak(1) - run.peak(0))
    assert "expandable_segments:True" in found.remedy
    assert "fragmentation" not in codes(history(Run(slack=400 * MIB), steps=12)[-1])


# ----------------------------------------------------------------------------------------------------------- the host


def test_workers_that_warm_up_are_no_leak() -> None:
    """They import, decode their first images and fill their queue: then they stand, and move by a batch or two."""
    random = Random(1)
    run, store, reporter = Run(), SessionStore(), Reporter()
    for received in run.picture():
        store.apply(received)
    for step in range(150):
        grown = (min(step, 28) * 5 + random.uniform(-4, 4) + 20 * (1 - 0.97**step) for _ in range(4))
        children = tuple(wire.ChildProcess(70 + at, "python", int((300 + more) * MIB)) for at, more in enumerate(grown))
        ours = wire.ProcessReading(4000, 900 * MIB, children=children)
        store.apply(wire.Received("host:box", run.unix_ns(step), wire.Host("box", step, processes=(ours,))))
        for received in run.step(step):
            store.apply(received)
        (report,) = reporter.report(store.frame(run.unix_ns(step)))
        assert "host-leak" not in [finding.code for finding in report.findings], step


def test_a_heap_that_settles_is_no_leak() -> None:
    """The C library's grows for a hundred steps and more, by half a MiB each, and then stands."""

    def beat(step: int) -> tuple[wire.Event, ...]:
        return (wire.Heartbeat(step, step, "forward", 0, rss=900 * MIB + min(step, 120) * (MIB >> 1)),)

    for findings in history(Run(beside=beat), steps=200):
        assert "host-leak" not in [finding.code for finding in findings]


def test_the_process_and_a_worker_each_for_itself() -> None:
    def beat(step: int) -> tuple[wire.Event, ...]:
        children = (wire.ChildProcess(71, "python", 300 * MIB), wire.ChildProcess(72, "python", (300 + 3 * step) * MIB))
        ours = wire.ProcessReading(4000, (900 + 2 * step) * MIB, children=children)
        return (
            wire.Heartbeat(step, step, "forward", 0, rss=(900 + 2 * step) * MIB),
            wire.Host("box", step, processes=(ours,)),
        )

    run = Run()
    events = {step: beat(step) for step in range(70)}
    store, reporter = SessionStore(), Reporter()
    for received in run.picture():
        store.apply(received)
    for step in range(70):
        heartbeat, host = events[step]
        store.apply(run.received(heartbeat, step))
        store.apply(wire.Received("host:box", run.unix_ns(step), host))
        for received in run.step(step):
            store.apply(received)
        (report,) = reporter.report(store.frame(run.unix_ns(step)))
        if step == 30:
            pinned = wire.Holder("staged[*] in main()", "local", "train.py:9", 30)
            group_ = wire.Group((256, 2048), "float32", -1, 30, 60 * MIB, holders=(pinned,))
            store.apply(run.received(wire.Census(step, step, 0, "growth", (group_,)), step))
    leaks = [finding for finding in report.findings if finding.code == "host-leak"]
    assert (leaks[0].holder, leaks[0].where) == ("staged[*] in main()", "train.py:9")
    assert leaks[0].remedy.startswith("bound `staged`")
    assert leaks[1].holder is None
    assert [(leak.bytes_per_step, leak.subject) for leak in leaks] == [(2 * MIB, "rss"), (3 * MIB, "worker 72")]
    assert "child process 72" in leaks[1].title


@pytest.mark.parametrize(
    ("pinned", "said"),
    [
        (lambda step: (64 + 2 * step) * MIB, "torch's pinned memory grows with it by 2.00 MiB a step"),
        (lambda step: 64 * MIB, None),
        (lambda step: None, None),
    ],
)
def test_of_a_growing_process_it_is_said_that_pinned_memory_grows_with_it(
    pinned: Callable[[int], int | None], said: str | None
) -> None:
    def beat(step: int) -> tuple[wire.Event, ...]:
        return (wire.Heartbeat(step, step, "forward", 0, rss=(900 + 2 * step) * MIB, pinned=pinned(step)),)

    found = [f for f in history(Run(beside=beat), steps=60)[-1] if f.code == "host-leak"]
    assert [f.subject for f in found] == ["rss"]  # what is pinned is no leak beside the process's own
    assert said in found[0].title if said else "pinned" not in found[0].title


@pytest.mark.parametrize(("on_the_device", "severity"), [(2 * MIB, "info"), (MIB, "warning"), (0, "warning")])
def test_what_the_device_has_kept_already_is_told_of_the_host_as_information(on_the_device: int, severity: str) -> None:
    """With unified memory, or a virtual GPU, one leak makes both grow."""

    def beat(step: int) -> tuple[wire.Event, ...]:
        return (wire.Heartbeat(step, step, "forward", 0, rss=(900 + 2 * step) * MIB),)

    run = Run(kept=lambda step: on_the_device * step, total=4 * GIB, beside=beat)
    found = only(history(run, steps=60)[-1], "host-leak")
    assert found.severity == severity
    assert ("these are the same bytes" in found.title) == (severity == "info")
