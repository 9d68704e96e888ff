"""The figures that experiment trackers get, and the card at a run's end, from runs whose every byte is known."""

from __future__ import annotations

import pytest
from synthetic import GIB, MIB, Run, apply, side_by_side

from gpumon.analysis import Reporter
from gpumon.analysis.answer import STATES
from gpumon.analysis.types import Finding, HighestStep
from gpumon.export.run_figures import NUMBERED, Figures, RunFigures, card
from gpumon.session.store import SessionStore
from gpumon_agent import wire


class Followed:
    """A run's figures, looked at whenever a test says so."""

    def __init__(self) -> None:
        self.store, self.reporter, self.figures = SessionStore(), Reporter(), RunFigures()

    def look(self, unix_ns: int) -> None:
        frame = self.store.frame(unix_ns)
        self.figures.look(frame, self.reporter.report(frame))

    def take(self) -> Figures:
        taken = self.figures.take()
        assert taken is not None
        return taken


def followed(run: Run, steps: int, *, host_every: int = 1) -> Followed:
    found = Followed()
    apply(run.stream(steps, host_every=host_every), store=found.store)
    found.look(run.unix_ns(steps))
    return found


def test_each_figure_is_what_the_run_had() -> None:
    run = Run()
    taken = followed(run, 20).take()
    assert taken.step == 19
    peaks = run.peaks(19)
    assert taken.numbers == {
        "gpumon/peak_bytes": run.peak(19),
        "gpumon/forward_peak_bytes": peaks["forward"],
        "gpumon/backward_peak_bytes": peaks["backward"],
        "gpumon/optimizer_peak_bytes": peaks["optimizer"],
        "gpumon/reserved_bytes": run.reserved(19),
        "gpumon/next_peak_bytes": run.peak(20),
        "gpumon/headroom_bytes": run.total - run.context - run.peak(20),
        "gpumon/state": 0,
    }


def test_no_peak_between_two_writes_is_missed_and_none_comes_twice() -> None:
    run = Run(activations=lambda step: (900 if step == 7 else 300) * MIB)
    one = Followed()
    apply(run.stream(5, host_every=1), store=one.store)
    one.look(run.unix_ns(5))
    assert one.take().numbers["gpumon/peak_bytes"] == run.peak(4)
    for step in range(5, 12):
        apply(run.step(step), store=one.store)
        one.look(run.unix_ns(step))  # more often than it is written
    second = one.take().numbers
    assert second["gpumon/peak_bytes"] == run.peak(7)
    assert second["gpumon/forward_peak_bytes"] == run.peaks(7)["forward"]
    apply(run.step(12), store=one.store)
    one.look(run.unix_ns(12))
    assert one.take().numbers["gpumon/peak_bytes"] == run.peak(12)
    assert one.figures.take() is None


def test_the_peak_of_a_runs_last_quiet_steps_counts() -> None:
    run = Run()
    one = followed(run, 5)
    last = wire.Step(30, run.time_ns(30), 0, phases=0, quiet=25, quiet_peaks=(wire.QuietPeak(0, 3 * GIB, 4 * GIB),))
    one.store.apply(run.received(last, 30))
    one.look(run.unix_ns(31))
    taken = one.take()
    assert (taken.step, taken.numbers["gpumon/peak_bytes"]) == (30, 3 * GIB)
    assert "  peak      3.00 GiB in or shortly before step 30 (cuda:0)" in card(one.figures)
    (report,) = Reporter().report(one.store.frame(run.unix_ns(31)))
    assert report.devices[0].highest == HighestStep(30, 3 * GIB)


def test_what_is_not_known_is_absent() -> None:
    run = Run(total=40 * GIB)
    numbers = followed(run, 20, host_every=0).take().numbers  # nobody read the device
    assert "gpumon/headroom_bytes" not in numbers
    assert "gpumon/peak_bytes" in numbers
    assert Followed().figures.take() is None


def test_ranks_are_told_apart_by_name() -> None:
    runs = [
        Run(rank=rank, world_size=2, run_id="job", nonce=f"ab{rank}", pid=4000 + rank, uuid=f"GPU-{rank}",
            activations=lambda step, rank=rank: (300 + 100 * rank) * MIB)
        for rank in range(2)
    ]  # fmt: skip
    one = Followed()
    apply(side_by_side(runs, 10), store=one.store)
    one.look(runs[0].unix_ns(10))
    taken = one.take()
    assert taken.numbers["gpumon/peak_bytes/rank_0"] == runs[0].peak(9)
    assert taken.numbers["gpumon/peak_bytes/rank_1"] == runs[1].peak(9)
    assert {(value.rank, value.device) for value in taken.values} == {(0, "cuda:0"), (1, "cuda:0")}
    lines = card(one.figures)
    assert lines[0] == "gpumon: train.py, 10 steps, 2 ranks"
    assert lines[1].endswith("(rank 1, cuda:0)")


def test_a_state_s_number_grows_with_what_is_wrong() -> None:
    assert NUMBERED == ("ok", "unknown", "tight", "leak", "will-not-fit", "out-of-memory")
    assert set(NUMBERED) == {*STATES} - {"ended"}


def test_a_leak_is_an_event_once_and_stays_the_answer_after_the_end() -> None:
    run = Run(kept=lambda step: step * MIB)
    one = followed(run, 120)
    first = one.take()
    assert first.state == NUMBERED.index("leak")
    assert [found.code for found in first.opened] == ["tensor-leak"]
    one.store.apply(run.received(wire.Goodbye("finished", run.time_ns(120), 120), 120))
    apply([run.received(event, 120) for event in run.step_events(120)], store=one.store)
    one.look(run.unix_ns(121))
    second = one.take()
    assert second.opened == ()
    assert second.answer is not None
    assert second.answer.state == "leak"
    assert any(line.startswith("  finding   tensor-leak: ") for line in card(one.figures))


def test_the_card_has_the_highest_peak_and_what_was_left_then() -> None:
    run = Run(activations=lambda step: (900 if step == 7 else 300) * MIB)
    one = followed(run, 20)
    assert card(one.figures) == (
        "gpumon: train.py, 20 steps",
        f"  peak      {run.peak(7) / GIB:.2f} GiB in backward of step 7 (cuda:0)",
        f"  headroom  {(run.total - run.context - run.peak(7)) / GIB:.1f} GiB above it",
    )
    assert one.figures.summary() == {
        "gpumon/steps": 20,
        "gpumon/findings": 0,
        "gpumon/highest_peak_bytes": run.peak(7),
        "gpumon/highest_peak_step": 7,
        "gpumon/highest_peak_phase": "backward",
        "gpumon/headroom_at_highest_peak_bytes": run.total - run.context - run.peak(7),
    }


def test_the_headroom_follows_if_the_device_is_read_only_after_the_highest_peak() -> None:
    run = Run(activations=lambda step: (900 if step == 7 else 300) * MIB)
    one = followed(run, 10, host_every=0)
    assert len(card(one.figures)) == 2
    apply([run.host(10)], list(run.step(10)), store=one.store)
    one.look(run.unix_ns(11))
    assert card(one.figures)[2] == f"  headroom  {(run.total - run.context - run.peak(7)) / GIB:.1f} GiB above it"


def test_after_an_out_of_memory_the_card_says_what_explains_it() -> None:
    run = Run()
    one = followed(run, 5)
    oom = wire.Oom(5, "forward", 0, run.time_ns(5), 40 * GIB, run.total, GIB, run.end(4), run.reserved(4))
    one.store.apply(run.received(oom, 5))
    one.look(run.unix_ns(5))
    assert card(one.figures)[-1] == "  next      gpumon explain --last"
    assert card(one.figures)[-2].startswith("  OUT OF MEMORY: ")
    assert one.take().state == NUMBERED.index("out-of-memory")


def test_the_card_has_eight_findings_and_counts_the_others() -> None:
    one = followed(Run(), 5)
    one.figures._findings = {(number,): Finding("tensor-leak", "warning", 0, f"leak {number}") for number in range(10)}
    lines = card(one.figures)
    assert [line for line in lines if "finding" in line][7:] == [
        "  finding   tensor-leak: leak 7", "  and       2 more findings",
    ]  # fmt: skip


def test_without_a_step_there_is_no_card() -> None:
    assert card(followed(Run(), 0).figures) == ()


@pytest.mark.parametrize("where", ["https://me:secret@host/x?token=secret", "postgresql://me:secret@host/db"])
def test_a_tracker_s_password_is_neither_sent_nor_kept(where: str) -> None:
    told = wire.Trackers("/home", (wire.Tracker("mlflow", where=where),))
    assert "secret" not in told.used[0].where
    assert b"secret" not in wire.encode_event(told)
