"""Where a finding or an out-of-memory names a line, its text goes with it, to every output."""

from __future__ import annotations

import msgspec
import pytest
from leaking import LOSSES, OUTPUTS, census, group, leaking
from looked import history, only
from msgspec.structs import replace
from synthetic import MIB, Run

from gpumon.analysis import Reporter
from gpumon.analysis.answer import answer, of_oom
from gpumon.analysis.diagnosis.live import of_file, of_rank
from gpumon.analysis.diagnosis.render import text
from gpumon.analysis.job_findings import JobFinding
from gpumon.analysis.types import Finding
from gpumon.export import jsonl
from gpumon.session.store import SessionStore
from gpumon.tui.screens.help import finding_facts
from gpumon_agent import wire
from gpumon_agent.oom.report_file import Report

MADE = "losses.append(loss * 2)"
KEPT = "losses = []"
HELD = msgspec.structs.replace(LOSSES, source_line=KEPT)


def leak_of(*censuses: wire.Census) -> Finding:
    return only(history(leaking(512, *censuses), steps=80)[-1], "tensor-leak")


def facts_of(found: Finding) -> dict[str, str]:
    return dict(finding_facts(JobFinding(found, "")))


def test_a_leaks_page_shows_the_line_that_made_the_tensors_and_the_variables() -> None:
    found = leak_of(census(25, group(24, HELD, source_line=MADE)))
    facts = facts_of(found)
    assert facts["At"] == f"train.py:57: {MADE}"
    assert facts["Held by"] == f"losses[*], in train.py:12: {KEPT}"


def test_without_it_the_place_alone_is_shown() -> None:
    facts = facts_of(leak_of(census(25, group(24))))
    assert (facts["At"], facts["Held by"]) == ("train.py:57", "losses[*], in train.py:12")


def test_a_leak_made_before_stacks_were_recorded_shows_the_variables_line() -> None:
    found = leak_of(census(25, group(24, HELD, where=None)))
    assert (found.where, found.source_line) == ("train.py:12", KEPT)


def test_the_text_belongs_to_the_line_of_the_most_frequent_tensors() -> None:
    """Two kinds of tensors behind one name, made on two lines: place and text are of the same."""
    few = group(4, HELD, shape=(2,), where="train.py:9", source_line="few()")
    many = group(20, HELD, source_line=MADE)
    unread = group(30, HELD, shape=(3,), where="train.py:99")
    for each, shown in (((few, many), ("train.py:57", MADE)), ((many, few), ("train.py:57", MADE)),
                        ((many, unread), ("train.py:99", None))):  # fmt: skip
        found = leak_of(census(25, *each))
        assert (found.where, found.source_line) == shown


def test_a_later_census_without_stacks_keeps_line_and_text() -> None:
    later = census(40, group(39, HELD, where=None), number=1)
    found = leak_of(census(25, group(24, HELD, source_line=MADE)), later)
    assert (found.where, found.source_line) == ("train.py:57", MADE)


def test_a_later_part_of_a_census_brings_line_and_text() -> None:
    later = msgspec.structs.replace(census(40, group(9, HELD, source_line=MADE), number=1), cut=True)
    found = leak_of(census(25, group(24, HELD, where=None)), later)
    assert (found.where, found.source_line) == ("train.py:57", MADE)


def test_what_nobody_holds_shows_the_line_that_made_most_of_it() -> None:
    made = (wire.Unclaimed("ext.py:4", 3, 512, 0, "few()"), wire.Unclaimed("ext.py:9", 9, 4096, 0, "cache(x)"))
    found = leak_of(msgspec.structs.replace(census(30), unclaimed=made))
    assert (found.where, found.source_line) == ("ext.py:9", "cache(x)")


@pytest.mark.parametrize(
    ("where", "holders", "shown"),
    [
        ("train.py:31", True, ("train.py:31", "ckpt = torch.load(path)")),
        (None, True, ("train.py:80", "self.outputs = {}")),
        (None, False, (None, None)),
    ],
)
def test_a_retained_checkpoint_shows_the_call_that_loaded_it_else_its_holder(
    where: str | None, holders: bool, shown: tuple[str | None, str | None]
) -> None:
    held = (msgspec.structs.replace(OUTPUTS, count=12, source_line="self.outputs = {}"),) if holders else ()
    loaded = wire.Checkpoint(
        0, 0, 0, 0, "torch.load", where=where, loaded=100 * MIB, tensors=12, alive=100 * MIB, looked_step=5,
        used_step=0, holders=held, source_line="ckpt = torch.load(path)" if where else None,
    )  # fmt: skip
    found = only(history(Run(beside=lambda step: (loaded,)), steps=8)[-1], "retained-checkpoint")
    assert (found.where, found.source_line) == shown
    foreign = msgspec.structs.replace(loaded, foreign=True, used_step=None)
    found = only(history(Run(beside=lambda step: (foreign,)), steps=8)[-1], "checkpoint-device")
    assert (found.where, found.source_line) == (where, loaded.source_line)


def test_the_jobs_answer_has_it_in_who_and_in_the_evidence() -> None:
    run = leaking(4 * MIB, census(25, group(24, HELD, bytes=96 * MIB, source_line=MADE)))
    store, reporter = SessionStore(), Reporter()
    for received in run.stream(60, host_every=1):
        store.apply(received)
    frame = store.frame(run.unix_ns(60))
    reports = reporter.report(frame)
    said = answer(frame, reports)
    assert said.who is not None
    assert (said.who.file, said.who.line, said.who.source_line) == ("train.py", 57, MADE)
    assert any(each.endswith(f". train.py:57: {MADE}") for each in said.evidence)
    stated = jsonl.answer(said, 0)
    assert stated["who"]["source_line"] == MADE
    found = next(each for each in reports[0].findings if each.code == "tensor-leak")
    assert jsonl.finding(frame.ranks[0], found, 0)["source_line"] == MADE


@pytest.mark.parametrize("source_line", ["loss.backward()", None])
def test_an_out_of_memory_shows_it(source_line: str | None) -> None:
    run, store = Run(), SessionStore()
    for received in run.stream(10, host_every=0):
        store.apply(received)
    rank = store.rank(run.nonce, 0)
    assert rank is not None
    failed = wire.Oom(10, "backward", 0, 9, 1 << 30, where="train.py:15", source_line=source_line)
    report = of_rank(replace(rank, oom=failed))
    assert report is not None
    assert f"Requested at train.py:15{'  loss.backward()' if source_line else ''}\n" in text(report) + "\n"
    said = of_oom(report)
    assert said.who is not None
    assert said.who.source_line == source_line
    stated = jsonl.oom(rank, failed, report)
    assert (stated["where"], stated["source_line"]) == ("train.py:15", source_line)


@pytest.mark.parametrize("source_line", ["loss.backward()", None])
def test_a_report_on_disk_without_a_recording_shows_it(source_line: str | None) -> None:
    """As where the helper was killed with its container. A report of an older agent has none."""
    report = Report(
        unix=1.8e9, host="node", pid=7, rank=None, name="train.py", argv=("train.py",), torch="2.9.0", backend="cuda",
        settings={}, device=0, device_total=1 << 30, step=3, phase="backward", requested=1 << 29, total=1 << 30,
        free=1 << 20, allocated=1 << 29, reserved=1 << 29, message="CUDA out of memory.", where="train.py:15",
        module="blocks.15", stack=(), ledger={}, ledger_step=None, ledger_phase=None, optimizers=(), parameters={},
        source_line=source_line,
    )  # fmt: skip
    shown = text(of_file(report))
    assert f"Requested at train.py:15{'  loss.backward()' if source_line else ''}\n" in shown
    assert "The module whose backward ran: blocks.15\n" in shown
