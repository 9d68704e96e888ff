"""What is made of a message: verdicts, the tensor and the moment, remedies that are not on already."""
# ruff: noqa: E501  messages stay as they were pasted

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tabformer
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpumon.analysis.diagnosis import log
from gpumon.analysis.diagnosis.cause import LeakEvidence, PredictedPeak
from gpumon.analysis.diagnosis.context import Settings
from gpumon.analysis.diagnosis.explaining import Known, explain
from gpumon.analysis.diagnosis.oom_report import OomReport
from gpumon.analysis.diagnosis.optimizer_step import peak, recipe_of
from gpumon.analysis.diagnosis.render import text
from gpumon.analysis.diagnosis.tensor_match import explaining
from gpumon.analysis.estimate.model import Tensor, from_shapes
from gpumon.analysis.types import Finding
from gpumon_agent.units import torch_size as shown

DATA = Path(__file__).parents[1] / "data"
GIB = 1 << 30

TABFORMER = (
    "Tried to allocate 2.69 GiB (GPU 0; 14.76 GiB total capacity; 12.32 GiB already allocated; 835.88 MiB free; 13.06 GiB "
    "reserved in total by PyTorch)"
)
SECOND = (
    "Tried to allocate 220.00 MiB (GPU 0; 15.78 GiB total capacity; 13.16 GiB already allocated; 201.44 MiB free; 14.44 "
    "GiB reserved in total by PyTorch)"
)


def of(message: str, known: Known | None = None) -> OomReport:
    story = log.read(message)
    assert story is not None
    return explain(story, known)


def model(vocabulary: int) -> tuple[Tensor, ...]:
    return from_shapes(json.loads((DATA / f"tabformer-{vocabulary}.json").read_text())).own


def test_tabformer_s_parameters_are_the_published_counts() -> None:
    for vocabulary, count in ((tabformer.SMALL, 98_510_560), (tabformer.LARGE, 874_326_757)):
        assert sum(tensor.count for tensor in model(vocabulary)) == count
        assert json.loads((DATA / f"tabformer-{vocabulary}.json").read_text()) == tabformer.shapes(vocabulary)


def test_the_case_everyone_should_recognise() -> None:
    report = of(TABFORMER, Known(model(tabformer.LARGE), "adamw"))
    assert report.verdict == "capacity"
    assert report.phase == "optimizer"
    (suspect,) = report.suspects
    assert suspect.tensor.name.endswith("bert.embeddings.word_embeddings.weight")
    assert suspect.tensor.shape == (867_813, 832)
    assert suspect.tensor.width == 4
    assert suspect.bytes == 2_888_081_664
    assert shown(suspect.bytes) == "2.69 GiB"
    assert suspect.what == "second-moment square root"
    assert suspect.way == "reach"
    assert suspect.allocated_before is not None
    assert shown(suspect.allocated_before) == "12.31 GiB"
    said = " ".join(report.assumptions)
    assert "transformers' own AdamW" in said
    assert "foreach=False, would request it at 13.03 GiB: " in said
    notes = " ".join(report.notes)
    assert "The batch does not matter" in notes
    assert "897 parameters (832 + 64 + 1)" in notes
    assert "874,326,757" in notes
    assert "batch" not in {remedy.code for remedy in report.remedies}


def test_in_a_later_step_all_states_stand_and_groups_are_stepped_one_after_another() -> None:
    standing = TABFORMER.replace("12.32 GiB already", "13.04 GiB already").replace("13.06 GiB", "13.78 GiB")
    (suspect,) = of(standing, Known(model(tabformer.LARGE), "adamw:reach", later=True)).suspects
    assert (suspect.later, shown(suspect.allocated_before or 0)) == (True, "13.03 GiB")
    said = text(of(standing, Known(model(tabformer.LARGE), "adamw:reach", later=True)))
    assert "in a later optimizer.step" in " ".join(said.split())
    large = tuple(  # its tables in a group of their own, stepped first: the others have no states yet
        replace(tensor, group=0 if tabformer.LARGE in tensor.shape else 1) for tensor in model(tabformer.LARGE)
    )
    others = sum(tensor.bytes for tensor in large if tensor.group)
    together, apart = (peak(tensors, recipe_of("adamw")[0], "foreach") for tensors in (model(tabformer.LARGE), large))
    assert together > apart >= together - 3 * others - (64 << 20)
    next_to_each_other = TABFORMER.replace("12.32 GiB already", "12.52 GiB already")  # the other table's root too
    assert "in 2 groups" in " ".join(of(next_to_each_other, Known(large, "adamw:reach")).assumptions)


def test_each_of_its_remedies_is_computed_and_does_what_it_says() -> None:
    report = of(TABFORMER, Known(model(tabformer.LARGE), "adamw"))
    saves = {remedy.code: remedy.saves for remedy in report.remedies}
    parameters = 874_326_757 * 4
    peak = report.suspects[0].allocated_before + report.suspects[0].bytes  # type: ignore[operator]
    assert saves["fused"] == pytest.approx(
        peak - 4 * parameters, abs=8 << 20
    )  # the next parameter's states meet this root
    assert saves["8-bit"] == pytest.approx(peak - 2 * parameters - 2.032 * 874_326_757, abs=8 << 20)
    assert all(remedy.enough for remedy in report.remedies)
    vocabulary = next(remedy for remedy in report.remedies if remedy.code == "vocabulary")
    rows = int(vocabulary.text.split("at most ")[1].split(" rows")[0].replace(",", ""))
    for count, fits in ((rows, True), (rows + 200, False)):
        shapes = from_shapes(tabformer.shapes(count)).own
        asked = next(t.bytes for t in shapes if t.shape == (count, 832))
        before = 2 * sum(t.bytes for t in shapes) + 2 * next(t.bytes for t in shapes if t.shape == (count, 64))
        room = 13.055 * GIB + 835.88 * (1 << 20)
        assert (before + 3 * asked <= room) is fits or abs(before + 3 * asked - room) < 16 << 20


def test_without_a_model_it_says_what_the_figures_alone_say() -> None:
    report = of(TABFORMER)
    assert report.verdict == "capacity"
    assert report.phase is None
    assert report.suspects == ()
    assert report.missing is not None
    assert report.missing.low < 1.13 * GIB < report.missing.high + (8 << 20)


def test_the_second_message_weighs_fragmentation_against_capacity() -> None:
    report = of(SECOND)
    assert report.verdict == "fragmentation"
    speaks_for, against, *doubt = report.reasons
    assert not doubt
    assert speaks_for.startswith("For fragmentation: 1.28 GiB is reserved but unallocated.")
    assert against.startswith("For capacity: the 201.44 MiB free on the device is 18.56 MiB too little")
    assert "1.26 GiB" in against
    assert report.remedies[0].code == "expandable-segments"
    assert report.remedies[0].enough


def test_what_is_on_is_not_advised() -> None:
    on = Known(settings=Settings.read({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments: True,max_split_size_mb:64"}))
    assert "expandable-segments" not in {remedy.code for remedy in of(SECOND, on).remedies}
    other = Known(settings=Settings.read({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}))
    advice = next(r for r in of(SECOND, other).remedies if r.code == "expandable-segments")
    assert "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64,expandable_segments:True" in advice.text
    fused = Known(model(tabformer.LARGE), "adamw:fused")
    step = 'File "t.py", line 3, in main\n    optimizer.step()\nRuntimeError: CUDA out of memory. ' + TABFORMER
    assert "fused" not in {remedy.code for remedy in of(step, fused).remedies}


NEW = (
    "CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total capacity of 24.00 GiB of which {free} is free. {other}"
    "Including non-PyTorch memory, this process has {ours} memory in use. {allowed}Of the allocated memory {allocated} is "
    "allocated by PyTorch, and {slack} is reserved by PyTorch but unallocated."
)


@pytest.mark.parametrize(
    ("verdict", "figures"),
    [
        ("capacity", {"asked": "2.00 GiB", "free": "300.00 MiB", "ours": "23.70 GiB", "allocated": "23.00 GiB",
                      "slack": "200.00 MiB"}),
        ("fragmentation", {"asked": "2.00 GiB", "free": "300.00 MiB", "ours": "23.70 GiB", "allocated": "20.00 GiB",
                           "slack": "3.20 GiB"}),
        ("other-process", {"asked": "2.00 GiB", "free": "300.00 MiB", "ours": "12.70 GiB", "allocated": "12.00 GiB",
                           "slack": "200.00 MiB", "other": "Process 4711 has 11.00 GiB memory in use. "}),
        ("oversized", {"asked": "200.00 GiB", "free": "20.00 GiB", "ours": "1.00 GiB", "allocated": "512.00 MiB",
                       "slack": "0 bytes"}),
        ("limit", {"asked": "2.00 GiB", "free": "11.00 GiB", "ours": "12.90 GiB", "allocated": "12.00 GiB",
                   "slack": "200.00 MiB", "allowed": "12.50 GiB allowed; "}),
        ("refused", {"asked": "432.00 MiB", "free": "7.12 GiB", "ours": "9.00 GiB", "allocated": "8.08 GiB",
                     "slack": "321.96 MiB"}),
    ],
)  # fmt: skip
def test_each_verdict_has_its_figures(verdict: str, figures: dict[str, str]) -> None:
    report = of(NEW.format(**{"other": "", "allowed": "", **figures}))
    assert report.verdict == verdict
    assert len(report.sentence) <= 80
    assert report.remedies


def test_an_old_message_names_no_other_process_but_leaves_room_for_one() -> None:
    report = of(
        "CUDA out of memory. Tried to allocate 1.00 GiB (GPU 0; 23.70 GiB total capacity; 9.00 GiB already allocated; 0 "
        "bytes free; 9.10 GiB reserved in total by PyTorch)"
    )
    assert report.verdict == "other-process"
    assert "14.60 GiB" in report.sentence


def test_what_grows_with_every_step_is_a_leak() -> None:
    report = of(TABFORMER, Known(growth=LeakEvidence(4 << 20, 500)))
    assert report.verdict == "leak"
    assert "4.00 MiB" in report.sentence
    assert "1.95 GiB" in report.reasons[0]
    assert (
        of(TABFORMER, Known(growth=LeakEvidence(4 << 20, 200))).verdict == "capacity"
    )  # nor would it have fitted without
    assert (
        of(SECOND, Known(growth=LeakEvidence(4 << 20, 10))).verdict == "fragmentation"
    )  # 40 MiB are not what is missing


def leaked(bytes_: int, per_step: int | None = 4 << 20) -> Finding:
    code = "tensor-leak" if per_step else "retained-checkpoint"
    return Finding(
        code, "warning", 2, "tensors [8, 512] float32, one a step", bytes_, per_step, "kept[*] in main()", "train.py:7", "bound `kept`",
    )  # fmt: skip


def test_a_leak_that_has_a_name_is_told_by_it_and_what_to_do_is_its_own_remedy() -> None:
    named = (leaked(2 << 30),)
    report = of(TABFORMER, Known(growth=LeakEvidence(4 << 20, 500, named), kept=named))
    assert report.sentence.endswith("held by `kept[*] in main()`.")
    assert report.reasons[0] == (
        "`kept[*] in main()` held 2.00 GiB when last counted, made at train.py:7, growing since step 2."
    )
    (remedy,) = report.remedies
    assert (remedy.code, remedy.text, remedy.saves, remedy.enough) == ("tensor-leak", "bound `kept`", 2 << 30, True)


def test_a_checkpoint_that_stays_is_the_first_to_let_go_whatever_the_verdict() -> None:
    full = NEW.format(other="", allowed="", asked="4.00 GiB", free="1.00 GiB", ours="22.0 GiB", allocated="21.0 GiB",
                      slack="0.50 GiB")  # fmt: skip
    for bytes_, enough in ((3 << 30, True), (1 << 30, False)):
        report = of(full, Known(kept=(leaked(bytes_, None),)))
        assert report.verdict == "capacity"
        first = report.remedies[0]
        assert (first.code, first.saves, first.enough) == ("retained-checkpoint", bytes_, enough)


def test_what_saves_next_to_nothing_of_what_is_missing_comes_last() -> None:
    full = NEW.format(other="", allowed="", asked="4.00 GiB", free="1.00 GiB", ours="22.0 GiB", allocated="21.0 GiB",
                      slack="0.50 GiB")  # fmt: skip
    missing = round(2.5 * GIB)
    for bytes_, at in ((missing // 10 + (64 << 20), 0), (missing // 10 - (64 << 20), -1)):
        remedies = of(full, Known(kept=(leaked(bytes_, None),))).remedies
        assert len(remedies) > 2
        assert remedies[at].code == "retained-checkpoint"


def test_a_few_bytes_are_not_enough_where_what_is_unused_lies_in_pieces() -> None:
    report = of(SECOND, Known(kept=(leaked(512),)))
    assert report.verdict == "fragmentation"
    assert report.remedies[0].code == "expandable-segments"
    assert next(each.enough for each in report.remedies if each.code == "tensor-leak") is None


def test_a_batch_that_was_to_need_more_than_there_is_is_capacity_s_however_it_lies_where_it_failed() -> None:
    """14.64 GiB are allocated, unallocated or free: 13.16 + 1.28 + 0.20."""
    assert of(SECOND, Known(foreseen=PredictedPeak(15 * GIB, 14 * GIB))).verdict == "fragmentation"
    report = of(SECOND, Known(foreseen=PredictedPeak(20 * GIB, 15 * GIB, ((8, 1024),))))
    assert report.verdict == "capacity"
    assert "20.00 GiB, and 14.6" in report.sentence
    assert "8×1024" in report.reasons[0]


def test_a_device_full_to_the_last_crumbs_is_not_called_fragmented() -> None:
    figures = {"asked": "20.00 MiB", "free": "12.00 MiB", "ours": "23.98 GiB", "allocated": "23.50 GiB"}
    report = of(NEW.format(other="", allowed="", slack="10.00 MiB", **figures))
    assert report.verdict == "capacity"
    assert "20.00 MiB requested, 22.00 MiB left in pieces" in report.sentence


@pytest.mark.parametrize(
    ("message", "verdict"),
    [
        ("CUDA out of memory. Tried to allocate more than 1EB memory.", "oversized"),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "unknown"),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096000000 bytes.", "host"),
        ("DataLoader worker (pid 5) is killed by signal: Killed.", "host"),
        ("It is possible that dataloader's workers are out of shared memory.", "host"),
        ("CUDA out of memory. Allocation was preemptively rejected because it would exceed per_process_memory_fraction "
         "limit. Requested size: 2.00 GiB", "limit"),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", "unknown"),
        ("RuntimeError: MPS backend out of memory (MPS allocated: 17.36 GB, other allocations: 613.56 MB, max allowed: "
         "18.13 GB). Tried to allocate 192.00 MB on private pool.", "limit"),
    ],
)  # fmt: skip
def test_messages_of_others(message: str, verdict: str) -> None:
    report = of(message)
    assert report.verdict == verdict
    assert report.remedies
    assert all(len(line) <= 80 for line in text(report).splitlines())


def test_logits_of_a_batch_are_recognised() -> None:
    asked = 16 * 1024 * 50_257 * 4
    message = NEW.format(
        asked=shown(-(-asked // (2 << 20)) * (2 << 20)), free="300.00 MiB", ours="23.70 GiB", allocated="23.00 GiB",
        slack="200.00 MiB", other="", allowed="",
    )  # fmt: skip
    gpt2 = (Tensor("wte.weight", (50_257, 768)), Tensor("h.0.attn.c_attn.weight", (768, 2304)))
    report = of(message, Known(gpt2, batch=16, sequence=1024))
    assert [suspect.tensor.name for suspect in report.suspects] == ["logits", "logits without the last token"][:1]
    assert report.suspects[0].tensor.shape == (16, 1024, 50_257)
    codes = {remedy.code: remedy.saves for remedy in report.remedies}
    assert codes["fused-loss"] == asked
    backward = of('File "t.py", line 3, in main\n    loss.backward()\n' + message, Known(gpt2, batch=16, sequence=1024))
    assert backward.phase == "backward"
    assert "no-grad" in codes
    assert "no-grad" not in {remedy.code for remedy in backward.remedies}
    assert "their gradient" in " ".join(text(backward).split())


def test_tensors_of_the_same_size_are_named_where_no_moment_is_singled_out() -> None:
    message = NEW.format(
        asked="64.00 MiB",
        free="30.00 MiB",
        ours="23.97 GiB",
        allocated="23.90 GiB",
        slack="10.00 MiB",
        other="",
        allowed="",
    )
    layers = tuple(Tensor(f"layers.{n}.up.weight", (4096, 4096)) for n in range(8))
    report = of(message, Known(layers))
    assert len(report.suspects) == 8
    assert not any(suspect.explains for suspect in report.suspects)
    assert "and 4 more of that size" in text(report)


@pytest.mark.parametrize(
    ("before", "left", "found"), [(0, 90, True), (0, 100, False), (10_240, 190, True), (10_240, 230, False)]
)
def test_what_was_allocated_is_explained_up_to_96_mib_or_a_fiftieth(before: int, left: int, found: bool) -> None:
    shapes = {"before": [1 << 18, before], "late": [1 << 18, 40]}  # of a MiB each column
    tensors = from_shapes({name: shape for name, shape in shapes.items() if shape[1]}).own
    story = log.read(
        f"CUDA out of memory. Tried to allocate 40.00 MiB (GPU 0; 15.78 GiB total capacity; {before + left}.00 MiB "
        "already allocated; 20.44 MiB free; 14.44 GiB reserved in total by PyTorch)"
    )
    assert story is not None
    names = [each.tensor.name for each in explaining(story.message, tensors, recipe_of("adamw"), None, "load")]
    assert names == (["late"] if found else [])


@given(
    asked=st.integers(1, 40 * GIB), free=st.integers(0, 24 * GIB), slack=st.integers(0, 24 * GIB),
    allocated=st.integers(0, 24 * GIB),
)  # fmt: skip
def test_any_figures_give_one_verdict_and_lines_of_80_columns(
    asked: int, free: int, slack: int, allocated: int
) -> None:
    message = NEW.format(
        asked=shown(asked), free=shown(free), ours="1.00 GiB", allocated=shown(allocated), slack=shown(slack), other="",
        allowed="",
    )  # fmt: skip
    report = of(message)
    written = text(report)
    assert all(len(line) <= 80 for line in written.splitlines())
    if report.verdict == "capacity":
        assert asked + 40 * (1 << 20) > free + slack or free + slack - asked < 0.03 * 24 * GIB
    if report.verdict == "fragmentation":
        assert asked <= free + slack + 40 * (1 << 20)
