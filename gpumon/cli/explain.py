"""`gpumon explain`: explains an OOM from a message, a log, a recording or the last report on disk."""

from __future__ import annotations

import os
import re
import stat
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

import click

from gpumon.cli.printing import say, say_json
from gpumon.cli.progress import working

if TYPE_CHECKING:
    from gpumon.analysis.diagnosis.explaining import Known
    from gpumon.analysis.diagnosis.log import Story
    from gpumon.analysis.diagnosis.oom_report import OomReport
    from gpumon.analysis.estimate.model import Tensor

PIPE_BYTES_MAX = 1 << 30

_CODE = re.compile(r"[a-z]+(?:-[a-z]+)*")


@click.command("explain")
@click.argument("text", required=False, metavar="[MESSAGE|CODE|-]")
@click.option(
    "--log", type=click.Path(path_type=Path), metavar="FILE", help="A log; its last out-of-memory is explained."
)
@click.option("--session", type=click.Path(path_type=Path), metavar="FILE", help="A recording made by gpumon record.")
@click.option("--last", is_flag=True, help="The newest report of a watched training on this machine.")
@click.option("--parameters", type=click.Path(path_type=Path), metavar="FILE", help="The model as JSON: {name: shape}.")
@click.option("--config", type=click.Path(path_type=Path), metavar="FILE", help="The model's Hugging Face config.json.")
@click.option("--model", metavar="PKG.MODULE:FACTORY", help="Your function that returns the model.")
@click.option("--optimizer", metavar="NAME[:foreach|fused|loop|reach]", help="adamw, adam, sgd, momentum, rmsprop, …")
@click.option(
    "--batch", type=click.IntRange(1, 1_000_000_000), help="Samples, to recognise logits and attention scores."
)
@click.option("--sequence", type=click.IntRange(1, 1_000_000_000), help="Tokens a sample, for the same.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
def command(
    text: str | None,
    log: Path | None,
    session: Path | None,
    last: bool,
    parameters: Path | None,
    config: Path | None,
    model: str | None,
    optimizer: str | None,
    batch: int | None,
    sequence: int | None,
    as_json: bool,
) -> None:
    """Explain an out-of-memory: what failed, when, and why; or print the page of a finding's CODE.

    \b
    gpumon explain "CUDA out of memory. Tried to allocate 2.69 GiB (GPU 0; …"
    gpumon explain --log train.log --config config.json --optimizer adamw
    gpumon explain --last
    gpumon explain foreach-peak

    The message alone gives the verdict, its traceback the phase, the model the tensor. Rounded figures of the message
    are treated as intervals. Only --model runs your code.
    """
    sources = [each for each in (text, log, session, last or None) if each is not None]
    if len(sources) > 1:
        raise click.UsageError("give one of: a message, --log, --session or --last")
    if not sources and sys.stdin.isatty():
        raise click.UsageError(
            'give the message in quotes, or --log FILE, --session FILE, --last; "-" reads it from a pipe'
        )
    if text is not None and _CODE.fullmatch(text):
        _page(text)
        return
    if sum(each is not None for each in (parameters, config, model)) > 1:
        raise click.UsageError("give one of --parameters, --config or --model")
    from gpumon.analysis.diagnosis.explaining import Known

    if last and _killed(as_json):
        return
    with working("building the model, without its memory"):
        tensors, heads = _tensors(parameters, config, model)
    known = Known(tensors, optimizer, batch, sequence, heads)
    try:
        with working(f"reading {log or session or ('the last report' if last else 'the message')}"):
            reports = _reports(text, log, session, last, known)
    except ValueError as reason:  # an unknown optimizer
        raise click.UsageError(str(reason)) from None
    _print(reports, as_json)


def _reports(text: str | None, log: Path | None, session: Path | None, last: bool, known: Known) -> list[OomReport]:
    if session is not None:
        return _of_session(session)
    if last:
        return [_of_disk()]
    if log is not None:
        return [_of_log(log, known)]
    if text is None or text == "-":
        from gpumon.analysis.diagnosis.scan import scan

        with tempfile.TemporaryFile() as spool:
            _spool(sys.stdin.buffer, spool)
            return [_of_story(scan(spool), known, "no out-of-memory in the text from the pipe")]
    why = 'no out-of-memory in this text: paste PyTorch\'s message from "Tried to allocate" on'
    if " " not in text and Path(text).is_file():
        why = f"{text} is a file; read it with: gpumon explain --log {text}"
    return [_of_text(text, known, why)]


def _of_log(path: Path, known: Known) -> OomReport:
    from gpumon.analysis.diagnosis.scan import scan

    try:
        with path.open("rb") as file:
            kind = os.fstat(file.fileno()).st_mode
            if stat.S_ISREG(kind):
                return _of_story(scan(file), known, f"{path} has no out-of-memory")
            if not stat.S_ISFIFO(kind):
                raise click.ClickException(f"{path} is neither a file nor a pipe; name a log")
            with tempfile.TemporaryFile() as spool:
                _spool(file, spool)
                return _of_story(scan(spool), known, f"{path} has no out-of-memory")
    except OSError as reason:
        raise click.ClickException(f"{path}: {reason.strerror}") from None


def _spool(pipe: IO[bytes], spool: IO[bytes]) -> None:
    """Copies a pipe, which cannot be read twice, to a temporary file."""
    while data := pipe.read(1 << 20):
        spool.write(data)
        if spool.tell() > PIPE_BYTES_MAX:
            raise click.ClickException("more than 1 GiB came through the pipe; write it to a file, and use --log FILE")


def _of_text(text: str, known: Known, otherwise: str) -> OomReport:
    from gpumon.analysis.diagnosis.log import read

    return _of_story(read(text), known, otherwise)


def _of_story(story: Story | None, known: Known, otherwise: str) -> OomReport:
    from gpumon.analysis.diagnosis.explaining import explain

    if story is None:
        raise click.ClickException(otherwise)
    return explain(story, known)


def _killed(as_json: bool) -> bool:
    """Prints the newest killed training, if it is newer than the newest OOM report."""
    from gpumon.analysis.diagnosis.killed import text
    from gpumon_agent.oom import last_known, report_file

    known = last_known.newest()
    found = report_file.newest()
    if known is None or (found is not None and found[1].unix > known.unix):
        return False
    if as_json:
        import msgspec

        say_json({"type": "killed", **msgspec.to_builtins(known)})
    else:
        say(text(known))
    return True


def _of_disk() -> OomReport:
    from gpumon.analysis.diagnosis.live import of_file
    from gpumon.cli.oom_proof import proved
    from gpumon_agent.oom import report_file

    refused: list[str] = []
    found = report_file.newest(refused=refused)
    if found is None and refused:
        raise click.ClickException(f"{refused[0]}; run gpumon as the user who trained")
    for reason in refused:
        say(f"Note: {reason}.", err=True)
    if found is None:
        places = " or ".join(map(str, report_file.directories()))
        raise click.ClickException(f"no report in {places}: a training started with `gpumon run` writes one there")
    path, report = found
    return proved(of_file(report, str(path), _watched(path.with_suffix(report_file.RECORDING))), report, path)


def _watched(recording: Path) -> OomReport | None:
    """The viewer's explanation, from the recording that the helper left next to the report."""
    from gpumon import link

    try:
        if recording.lstat().st_uid != os.geteuid() or not stat.S_ISREG(recording.lstat().st_mode):
            return None
        found = _recorded(recording)
    except (OSError, link.LinkError):
        return None
    return found[-1] if found else None


def _of_session(path: Path) -> list[OomReport]:
    """One report per rank that ran out of memory, by rank."""
    from gpumon import link

    try:
        found = _recorded(path)
    except link.LinkError as error:
        raise click.ClickException(str(error)) from None
    if not found:
        raise click.ClickException(f"nothing ran out of memory in {path}")
    return found


def _recorded(path: Path) -> list[OomReport]:
    """Raises LinkError."""
    from gpumon import link
    from gpumon.analysis import Reporter
    from gpumon.analysis.diagnosis.explaining import explain
    from gpumon.analysis.diagnosis.log import read
    from gpumon.session.store import SessionStore

    store, heard = SessionStore(replaying=True), 0
    for received in link.replay(path):
        store.apply(received)
        heard = received.unix_ns
    frame = store.frame(heard)
    pairs = zip(frame.ranks, Reporter().report(frame), strict=True)
    found = []
    for rank, report in pairs:
        if report.oom is not None:
            found.append(report.oom)
        elif rank.goodbye is not None and (story := read(rank.goodbye.detail)) is not None:
            found.append(explain(story))
    return found


def _tensors(parameters: Path | None, config: Path | None, model: str | None) -> tuple[Sequence[Tensor], int | None]:
    """The model's parameters, and the config's attention heads."""
    from gpumon.analysis.estimate.model import NotAModel, from_shapes
    from gpumon.analysis.estimate.reading import OutOfBounds, check_shapes, read_object

    try:
        if parameters is not None:
            shapes = read_object(parameters)
            check_shapes(shapes, parameters)
            return from_shapes(shapes, parameters.name).own, None
        if config is not None:
            from gpumon.cli.user_code import config_subject

            read = config_subject("--config", config)
            return read.model.own, read.heads
    except OutOfBounds as reason:
        raise click.UsageError(str(reason)) from None
    except NotAModel as reason:
        raise click.ClickException(str(reason)) from None
    if model is not None:
        from gpumon.cli.user_code import module_subject

        return module_subject(model, None, None).model.own, None
    return (), None


def _print(reports: list[OomReport], as_json: bool) -> None:
    if as_json:
        from gpumon.export.explained import message

        for report in reports:
            say_json(message(report))
        return
    from gpumon.analysis.diagnosis.render import text

    say("\n\n".join(text(report) for report in reports))


def _page(code: str) -> None:
    from gpumon.analysis.findings import RULES

    known = {rule.code: rule for rule in RULES}
    if code not in known:
        raise click.ClickException(f"there is no finding {code!r}; there are {', '.join(sorted(known))}")
    from gpumon.analysis.pages import page

    say(page(known[code]))
