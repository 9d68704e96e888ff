"""`gpumon estimate`: what a run will need, before a GPU is available."""

from __future__ import annotations

import re
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec.structs import replace

from gpumon.cli import exits
from gpumon.cli.printing import say, say_json
from gpumon.cli.progress import working

if TYPE_CHECKING:
    from gpumon.analysis.estimate.comparing import Side
    from gpumon.analysis.estimate.model import ModelTensors
    from gpumon.analysis.estimate.plan import Subject, TargetDevice
    from gpumon.analysis.estimate.workload import OptimizerChoice, Precision, Workload

MOST = 1_000_000_000
RANKS_MAX = 1 << 20
PARAMETERS_MAX = 10**15
SUFFIXES = {"k": 3, "m": 6, "b": 9, "t": 12}
"""Letter → power of ten."""
_NUMBER = re.compile(r"([+-]?)(\d[\d_,]*(?:\.\d+)?)(?:e\+?0*(\d{1,4})| ?([kmbt]))?", re.ASCII | re.IGNORECASE)


def _read_optimizer(_: click.Context, __: click.Parameter, value: str | None) -> OptimizerChoice | None:
    from gpumon.analysis.estimate.workload import OptimizerChoice, Unknown

    try:
        return None if value is None else OptimizerChoice.parse(value)
    except Unknown as reason:
        raise click.BadParameter(str(reason)) from None


def _read_precision(_: click.Context, __: click.Parameter, value: str | None) -> Precision | None:
    from gpumon.analysis.estimate.workload import PRECISIONS

    if value is not None and value not in PRECISIONS:
        raise click.BadParameter(f"{value!r} is not a precision: choose from {', '.join(PRECISIONS)}")
    return None if value is None else PRECISIONS[value]


def _read_device(_: click.Context, __: click.Parameter, value: str | None) -> TargetDevice | None:
    """A virtual GPU profile, or a size."""
    from gpumon.analysis.estimate.kernels import CUBLAS_WORKSPACE, CUBLAS_WORKSPACE_HOPPER, Hardware
    from gpumon.analysis.estimate.plan import TargetDevice
    from gpumon.virtual_gpu import profiles

    if value is None:
        return None
    try:
        profile = profiles.find(value)
    except ValueError as reason:
        raise click.BadParameter(str(reason)) from None
    if profile.capacity_bytes <= profile.context_bytes:
        raise click.BadParameter(f"{value!r} is smaller than the context of a process")
    workspace = CUBLAS_WORKSPACE_HOPPER if profile.compute_capability[0] >= 9 else CUBLAS_WORKSPACE
    hardware = Hardware(profile.processors, cublas_workspace=workspace)
    return TargetDevice(value, profile.capacity_bytes, profile.context_bytes, hardware)


def _read_stages(_: click.Context, __: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """ "2", "0..3" or "0,2"."""
    if value is None:
        return None
    if match := re.fullmatch(r"([0-3])\.\.([0-3])", value):
        stages = tuple(range(int(match[1]), int(match[2]) + 1))
    elif re.fullmatch(r"[0-3](,[0-3])*", value):
        stages = tuple(sorted({int(stage) for stage in value.split(",")}))
    else:
        stages = ()
    if not stages:
        raise click.BadParameter(f"{value!r} is not a stage of ZeRO: write 0, 1, 2, 3 or 0..3")
    return stages


@click.command("estimate")
@click.option("--config", type=click.Path(path_type=Path), metavar="CONFIG.JSON", help="A Hugging Face configuration.")
@click.option("--model", metavar="PKG.MODULE:FACTORY", help="Your code: a function that returns the module.")
@click.option(
    "--input", "batch_factory", metavar="PKG.MODULE:FACTORY", help="With --model: a function (batch) → the input."
)
@click.option(
    "--loss", metavar="PKG.MODULE:FUNCTION", help="With --model: a function (output) → the loss [.loss, or sum]."
)
@click.option("--parameters", metavar="COUNT|SHAPES.JSON", help="A number, such as 7e9 or 7B, or a file {name: shape}.")
@click.option(
    "--compare", nargs=2, metavar="A B", help="Two models, layer by layer: configs, {name: shape}, PKG.MODULE:FACTORY."
)
@click.option("--batch", type=click.IntRange(1, MOST), default=1, show_default=True, help="Samples of one forward.")
@click.option("--sequence", type=click.IntRange(1, MOST), help="Tokens a sample [the model's longest, ≤ 512].")
@click.option(
    "--optimizer",
    callback=_read_optimizer,
    metavar="NAME[:fused]",
    help="Torch's names in lower case, adamw8bit, none [adamw].",
)
@click.option(
    "--precision", callback=_read_precision, metavar="NAME", help="fp32, bf16-autocast, bf16, bf16-master, … [fp32]."
)
@click.option(
    "--device", callback=_read_device, metavar="NAME|SIZE", help="The device to fit: a100-40, t4, …, or a size."
)
@click.option("--world-size", type=click.IntRange(1, RANKS_MAX), default=1, show_default=True, help="Ranks.")
@click.option(
    "--zero", callback=_read_stages, metavar="STAGE", help="Stage of ZeRO; 3 is FSDP; 0..3 shows all [0: DDP]."
)
@click.option("--fsdp1", is_flag=True, help="With --zero 3: FullyShardedDataParallel, not fully_shard.")
@click.option("--accumulation", type=click.IntRange(1, MOST), default=1, show_default=True, help="Forwards a step.")
@click.option("--checkpointing", is_flag=True, help="Recompute activations, layer by layer.")
@click.option("--attention", type=click.Choice(["sdpa", "eager"]), default="sdpa", show_default=True)
@click.option("--bucket-views", is_flag=True, help="DDP's gradient_as_bucket_view=True.")
@click.option("--keep-gradients", is_flag=True, help="zero_grad(set_to_none=False).")
@click.option("--inference", is_flag=True, help="No gradients, no optimizer.")
@click.option(
    "--kv-cache", type=click.IntRange(1, MOST), help="With --inference: tokens whose keys and values are kept."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
def command(
    config: Path | None,
    model: str | None,
    batch_factory: str | None,
    loss: str | None,
    parameters: str | None,
    compare: tuple[str, str] | None,
    zero: tuple[int, ...] | None,
    device: TargetDevice | None,
    as_json: bool,
    **how: Any,
) -> None:
    """Estimate a run: does it fit, where does it peak, and what would help?

    \b
    gpumon estimate --config config.json --batch 8 --sequence 512 --device a100-40
    gpumon estimate --model train:make_model --input train:make_batch --batch 8
    gpumon estimate --parameters 7.5B --world-size 64 --zero 0..3

    The first line is the answer. Nothing is allocated and no GPU is needed. Your code runs only if you name it:
    PKG.MODULE:FACTORY. Exit code 0: it fits --device (of several stages: one does). 1: it does not. 2: wrong
    arguments. 3: unknown, also without --device. --compare: 0.
    """
    from gpumon.analysis.estimate.model import NotAModel
    from gpumon.analysis.estimate.reading import OutOfBounds
    from gpumon.cli.user_code import TheirFailure

    if sum(map(bool, (config, model, parameters, compare))) != 1:
        raise click.UsageError("give one of --config, --model, --parameters or --compare")
    if not model and (batch_factory or loss):
        raise click.UsageError("--input and --loss need --model")
    try:
        if compare:
            _compare(*compare, as_json)
        elif parameters and (count := _written_count(parameters)) is not None:
            _count(count, zero, device, as_json, how)
        else:
            with working("building the model, without its memory"):
                subject = _subject(config, model, batch_factory, loss, parameters)
            works = _workloads(subject, zero, how)
            if device is not None:
                works = [replace(work, hardware=device.hardware) for work in works]
            with TheirFailure():
                _estimate(subject, works, device, as_json)
    except OutOfBounds as reason:
        raise click.UsageError(str(reason)) from None
    except NotAModel as reason:
        raise exits.CannotTell(str(reason)) from None


def _subject(
    config: Path | None, model: str | None, batch_factory: str | None, loss: str | None, parameters: str | None
) -> Subject:
    from gpumon.cli import user_code

    if config is not None:
        return user_code.config_subject("--config", config)
    if parameters is not None:
        shapes = _shapes(Path(parameters))
        user_code.need("--parameters with shapes", "torch")
        from gpumon.analysis.estimate.from_module import FromTensors

        return FromTensors.of(shapes)
    return user_code.module_subject(model or "", batch_factory, loss)


def _shapes(path: Path) -> ModelTensors:
    from gpumon.analysis.estimate.model import from_shapes
    from gpumon.analysis.estimate.reading import check_shapes, read_object

    content = read_object(path)
    check_shapes(content, path)
    return from_shapes(content, path.name)


def _workloads(subject: Subject | None, zero: tuple[int, ...] | None, how: Any) -> list[Workload]:
    """One workload per stage. Raises UsageError for contradictory settings."""
    from gpumon.analysis.estimate.workload import NONE, PRECISIONS, OptimizerChoice, Workload

    inference, optimizer = how["inference"], how["optimizer"]
    if optimizer is None:
        optimizer = OptimizerChoice.parse(NONE if inference else "adamw")
    if inference and optimizer.name != NONE:
        raise click.UsageError("--inference has no optimizer: leave --optimizer out, or write --optimizer none")
    if how["kv_cache"] and not inference:
        raise click.UsageError("--kv-cache needs --inference")
    longest = subject.longest if subject is not None else None
    sequence = how["sequence"] or min(longest or 512, 512)
    wanted = how["kv_cache"] or sequence
    if longest is not None and wanted > longest:
        raise click.UsageError(f"{wanted} tokens are more than the {longest} that this model takes")
    stages = zero or (0,)
    if max(stages) and how["world_size"] == 1:
        raise click.UsageError("--zero shards a model over ranks: give their number with --world-size")
    if how["fsdp1"] and 3 not in stages:
        raise click.UsageError("--fsdp1 needs --zero 3")
    work = Workload(
        batch=how["batch"],
        sequence=sequence,
        precision=how["precision"] or PRECISIONS["fp32"],
        optimizer=optimizer,
        world_size=how["world_size"],
        accumulation=how["accumulation"],
        checkpointing=how["checkpointing"],
        bucket_views=how["bucket_views"],
        set_to_none=not how["keep_gradients"],
        inference=inference,
        kv_cache=how["kv_cache"] or 0,
        attention=how["attention"],
        flat=how["fsdp1"],
    )
    return [replace(work, zero=stage) for stage in stages]


def _estimate(subject: Subject, works: list[Workload], device: TargetDevice | None, as_json: bool) -> None:
    """One report, or a row per stage."""
    from gpumon.analysis.estimate import report
    from gpumon.analysis.estimate.reading import OutOfBounds
    from gpumon.analysis.estimate.simulator import OutOfMemory
    from gpumon.cli.user_code import Traces

    try:
        with working("tracing on the meta device") as tell:
            traces = getattr(subject, "began", None)
            if isinstance(traces, Traces):
                traces.tell = tell
            done = [report.make(subject, work, device, brief=len(works) > 1) for work in works]
    except OutOfMemory:  # from a simulated device without a limit
        raise OutOfBounds("this would need more than 4 EiB; check the model, --batch and --sequence") from None
    if as_json:
        from gpumon.cli.estimate_json import as_object

        for each in done:
            say_json(as_object(each))
    else:
        from gpumon.cli.estimate_text import lines, stage_lines

        say("\n".join(lines(done[0]) if len(done) == 1 else stage_lines(done)))
    from gpumon.analysis.answer import of_estimate
    from gpumon.cli.estimate_answer import exit_code, of_stages

    raise click.exceptions.Exit(exit_code(of_estimate(done[0]) if len(done) == 1 else of_stages(done, device)))


def _written_count(text: str) -> int | None:
    """A number of parameters as people write it: 7000000000, 7_000_000_000, 7e9, 7B, 350M. None: the path of a file.

    Raises UsageError for one that no model has.
    """
    match = _NUMBER.fullmatch(text)
    if match is None:
        if text[:1] in "+-0123456789" and "/" not in text and not text.endswith(".json"):
            raise click.UsageError(f"{text!r} is no number, such as 7e9, 7B or 350M; write a file's path as ./{text}")
        return None
    sign, digits, exponent, suffix = match.groups()
    power = int(exponent or 0) + (SUFFIXES[suffix.lower()] if suffix else 0)
    count = Decimal(digits.replace("_", "").replace(",", "")).scaleb(power)
    if sign == "-" or not 0 < count <= PARAMETERS_MAX:
        raise click.UsageError(f"--parameters needs a number above 0 and up to {PARAMETERS_MAX:,}")
    if count != int(count):
        raise click.UsageError(f"{text!r} parameters are no whole number")
    return int(count)


def _count(count: int, zero: tuple[int, ...] | None, device: TargetDevice | None, as_json: bool, how: Any) -> None:
    """Estimate from the parameter count alone: bytes per rank by precision, optimizer and stage."""
    from gpumon.analysis.estimate import sharding
    from gpumon.analysis.estimate.workload import PRECISIONS
    from gpumon.cli import estimate_text

    works = _workloads(None, zero, how)
    if how["precision"] is None:  # with ZeRO, the precision of its paper; else all of them
        named = ["fp16-master"] if zero else list(PRECISIONS)
        works = [replace(work, precision=PRECISIONS[name]) for name in named for work in works]
    shares = [(work, sharding.per_rank(count, work)) for work in works]
    known = [(work, share) for work, share in shares if share is not None]
    if len(known) < len(shares):
        name = works[0].optimizer.name
        raise click.UsageError(f"the state of {name} depends on shapes: give --config, --model or {{name: shape}}")
    if as_json:
        from gpumon.cli.estimate_json import share_object

        for work, share in known:
            say_json(share_object(count, work, share, device))
    else:
        say("\n".join(estimate_text.share_lines(count, known, device)))
    from gpumon.cli.estimate_answer import exit_code, of_shares

    raise click.exceptions.Exit(exit_code(of_shares(known, device)))


def _compare(first: str, second: str, as_json: bool) -> None:
    from gpumon.analysis.estimate.comparing import compare
    from gpumon.cli import estimate_text

    with working("reading the models"):
        done = compare(_side(first), _side(second))
    if as_json:
        from gpumon.cli.estimate_json import comparison_object

        say_json(comparison_object(done))
    else:
        say("\n".join(estimate_text.comparison_lines(done, first, second)))


def _side(named: str) -> Side:
    """A config.json or its folder, a file of shapes, or a function in the user's code."""
    from gpumon.analysis.estimate.comparing import Side
    from gpumon.analysis.estimate.model import NotAModel
    from gpumon.cli import user_code

    path = Path(named)
    if not path.exists() and ":" in named and path.suffix != ".json":
        return Side(user_code.module_subject(named, None, None).model)
    try:
        shapes = _shapes(path) if path.is_file() else None
    except NotAModel:  # not a set of shapes
        shapes = None
    if shapes is not None:
        return Side(shapes)
    config = user_code.config_subject("--compare", path)
    return Side(config.model, config.vocabulary)
