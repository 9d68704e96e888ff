"""The answer of an estimate that has several rows, and the exit code of every answer."""

from __future__ import annotations

from collections.abc import Sequence

from gpumon.analysis.answer import Answer
from gpumon.analysis.estimate.plan import TargetDevice
from gpumon.analysis.estimate.report import EstimateReport
from gpumon.analysis.estimate.sharding import RankShare
from gpumon.analysis.estimate.workload import Workload
from gpumon.analysis.units import size
from gpumon.cli import exits

GIVE_DEVICE = "give --device to see whether it fits"


def exit_code(said: Answer) -> int:
    return exits.of({"ok": True, "will-not-fit": False}.get(said.state))


def of_stages(done: Sequence[EstimateReport], device: TargetDevice | None) -> Answer:
    """For several stages of ZeRO: it fits if it does with one of them."""
    least, most = min(done, key=_needed), max(done, key=_needed)
    if device is None:
        span = f"{size(least.needed)} with {_stage(least)} to {size(most.needed)} with {_stage(most)}"
        return Answer("unknown", f"each rank needs {span}, and a context", do=GIVE_DEVICE)
    fit = [each for each in done if each.expected.played.fits(device.budget)]
    if not fit:
        needs = f"each rank needs at least {size(least.needed)}, with {_stage(least)}, of {named(device)}"
        return Answer("will-not-fit", needs, do="more ranks, a smaller batch, or a larger device")
    if len(fit) == len(done):
        return Answer("ok", f"each of them fits {named(device)}; the most is {size(most.needed)}, with {_stage(most)}")
    others = _list([_stage(each) for each in done if each not in fit])
    return Answer("ok", f"it fits {named(device)} with {_list([_stage(each) for each in fit])}, not with {others}")


def of_shares(known: Sequence[tuple[Workload, RankShare]], device: TargetDevice | None) -> Answer:
    """For a number of parameters. Activations are not known, so it never says that a training fits."""
    least, most = (choose(known, key=lambda each: each[1].total) for choose in (min, max))
    inference = least[0].inference
    what = "weights take" if inference else "weights, gradients and optimizer state take"
    span = f"{size(least[1].total)} ({row_name(least[0])})"
    if len(known) > 1:
        span += f" to {size(most[1].total)} ({row_name(most[0])})"
    if device is None:
        more = "give --config or --model, and --device, to see whether it fits"
        return Answer("unknown", f"{what} {span}; activations are not known", do=more)
    if least[1].total > device.budget:
        smaller = "a smaller model, " if inference else "more ranks with --zero 3, a smaller model, "
        alone = f"{what} at least {size(least[1].total)} ({row_name(least[0])}), more than {named(device)} has"
        return Answer("will-not-fit", f"{alone} beside a context", do=f"{smaller}or a larger device")
    return Answer(
        "unknown",
        f"{what} {span} of {named(device)}; activations are not known",
        do="give --config or --model to see whether it fits",
    )


def row_name(work: Workload) -> str:
    """A row of the table of shares: "fp16-master, ZeRO 1"."""
    return work.precision.name + (f", ZeRO {work.zero}" if work.world_size > 1 else "")


def named(device: TargetDevice) -> str:
    return f"{device.name} ({size(device.total)})" if size(device.total) != device.name else device.name


def _needed(done: EstimateReport) -> int:
    return done.needed


def _stage(done: EstimateReport) -> str:
    stage = done.expected.work.zero
    return f"ZeRO {stage}" if stage else "DDP"


def _list(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
