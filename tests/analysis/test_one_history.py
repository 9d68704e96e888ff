"""What is stated of a run does not depend on who looks, since when, and how often."""

from __future__ import annotations

import random
from typing import Any

import pytest
from leaking import LOSSES, census, group, leaking
from served import Served
from synthetic import GIB, MIB, Run

from gpumon.analysis import Reporter
from gpumon.analysis.answer import answer, line
from gpumon.session.frame import Frame


def stated(reporter: Reporter, frame: Frame) -> dict[str, Any]:
    (report,) = reporter.report(frame)
    (device,) = report.devices
    return {
        "ledger": device.ledger,
        "peak": device.peak,
        "read": device.read,
        "composed": device.composed,
        "estimate": device.estimate,
        "forecast": device.forecast,
        "growth": device.growth,
        "host growth": report.host_growth,
        "findings": [each for each in report.findings if each.state == "open"],
        "what-if": device.whatif,
        "answer": line(answer(frame, [report])),
    }


def a_leak() -> Run:
    return leaking(512 * 1024, *(census(step, group(step), number=step) for step in (40, 3_000)))


def one_from_the_middle() -> Run:
    """Of a step in five, beside batches of all sizes."""
    draw = [random.Random(7 * step).randrange(1, 9) for step in range(20_000)]
    return Run(
        kept=lambda step: 2 * MIB * max(0, (step - 900) // 5),
        blocks=lambda step: 100 + max(0, (step - 900) // 5),
        activations=lambda step: 40 * MIB * draw[step],
        input_bytes=lambda step: 8192 * draw[step],
        sampled_every=9,
    )


def turns() -> Run:
    """A GAN's, with an evaluation every so often and one monstrous batch."""
    return Run(
        optimizers=lambda step: (step % 2,),
        activations=lambda step: (700 if step == 333 else 300 + 100 * (step % 2)) * MIB,
        input_bytes=lambda step: 1 << (22 if step == 333 else 16),
        sampled_every=4,
    )


@pytest.mark.parametrize("make", [Run, a_leak, one_from_the_middle, turns])
def test_a_viewer_that_comes_late_states_what_one_from_the_start_states(make: Any) -> None:
    served, early, draw = Served(make(), rss_per_step=MIB), Reporter(), random.Random(3)
    steps = 0
    for moment in (100, 505, 800, 2_040, 4_500):
        while steps < moment:  # an early viewer looks now and then
            more = min(draw.randrange(1, 40), moment - steps)
            early.report(served.go_on(more))
            steps += more
        for _ in range(10):  # a finding opens after some looks
            frame = served.go_on(1)
            early.report(frame)
            steps += 1
        here = stated(early, frame)
        one_by_one = Reporter()
        for arriving in served.arriving():  # as in a replay: it looks while the history comes in
            one_by_one.report(arriving)
        for late, its in ((Reporter(), served.late()), (one_by_one, arriving)):
            there = stated(late, its)
            for what, told in here.items():
                assert there[what] == told, f"{what} at step {steps}"


def test_a_leak_since_the_beginning_is_not_taken_for_normal() -> None:
    served = Served(leaking(1 * MIB, census(40, group(40), number=1), total=200 * GIB))
    served.go_on(7_000)
    said = stated(Reporter(), served.late())
    (grown,) = [each for each in said["growth"] if each.figure == "allocated"]
    assert grown.since is not None
    assert grown.since <= 10
    assert grown.so_far == pytest.approx(7_000 * MIB, rel=0.02)
    leak = next(each for each in said["findings"] if each.code == "tensor-leak")
    assert leak.holder == LOSSES.name
    assert leak.step is not None
    assert leak.step <= 10
    assert said["estimate"].lines.allocated < 3 * GIB  # what it needed before anything leaked
