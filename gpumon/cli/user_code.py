"""Runs the code named by `--model`, `--input` and `--loss`; its exceptions are printed with a trimmed traceback."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import click

from gpumon.analysis.estimate.model import NotAModel
from gpumon.cli import exits
from gpumon.cli.printing import say

if TYPE_CHECKING:
    from gpumon.analysis.estimate.from_config import FromConfig
    from gpumon.analysis.estimate.from_module import FromModule
    from gpumon.analysis.estimate.workload import Workload

_OURS = (str(Path(__file__).parents[1]), "<frozen ")
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})

_TOLD = (click.ClickException, click.exceptions.Exit, NotAModel)
"""Reported as one sentence: no failure of the user."""


class TheirFailure:
    """Prints an exception without frames of gpumon and libraries, and exits with code UNKNOWN."""

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, _: TracebackType | None
    ) -> None:
        if not isinstance(failure, (Exception, SystemExit)) or isinstance(failure, _TOLD):
            return
        say("".join(_trimmed(failure)), nl=False, err=True)
        raise click.exceptions.Exit(exits.UNKNOWN) from None


def _trimmed(failure: BaseException) -> list[str]:
    shown = traceback.TracebackException.from_exception(failure)
    link: traceback.TracebackException | None = shown
    while link is not None:
        theirs = [frame for frame in link.stack if not frame.filename.startswith((*_OURS, *_LIBRARIES))]
        kept = theirs or [frame for frame in link.stack if not frame.filename.startswith(_OURS)]
        link.stack = traceback.StackSummary.from_list(kept)
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return list(shown.format())


def find(option: str, named: str) -> Any:
    """Imports the object "pkg.module:name", as a script in this folder would."""
    module, colon, name = named.partition(":")
    if not colon or not module or not name:
        raise click.UsageError(f"{option} takes package.module:function, not {named!r}")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    with TheirFailure():
        if not _is_there(module):
            raise click.UsageError(f"there is no module {module!r} in this folder or in Python's packages")
        found: Any = importlib.import_module(module)
    for part in name.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, dir(found), 1)
            hint = f": did you mean {near[0]!r}?" if near else ""
            raise click.UsageError(f"{module} has no {part!r}{hint}")
        found = getattr(found, part)
    if not callable(found):
        raise click.UsageError(f"{named} is not a function but a {type(found).__name__}")
    return found


def _is_there(module: str) -> bool:
    parent = module.rpartition(".")[0]
    if parent and not _is_there(parent):
        return False
    return module in sys.modules or importlib.util.find_spec(module) is not None


def need(option: str, *packages: str) -> None:
    """Raises UsageError if one is missing."""
    missing = [name for name in packages if name not in sys.modules and importlib.util.find_spec(name) is None]
    if missing:
        named = " and ".join({"torch": "PyTorch"}.get(name, name) for name in missing)
        raise click.UsageError(f"{option} needs {named}, which this Python lacks: pip install {' '.join(missing)}")


def config_subject(option: str, config: Path) -> FromConfig:
    """The model of a config.json, built by transformers. Raises NotAModel."""
    need(option, "torch", "transformers")
    from gpumon.analysis.estimate import from_config

    subject = from_config.load(config)
    subject.began = Traces()
    return subject


def module_subject(model: str, batch_factory: str | None, loss: str | None) -> FromModule:
    """The user's module on the meta device, with its inputs and loss if they are named."""
    need("--model", "torch")
    from gpumon.analysis.estimate import from_module

    factory = find("--model", model)
    batches = find("--input", batch_factory) if batch_factory else None
    measure = find("--loss", loss) if loss else None
    with TheirFailure():
        made = from_module.on_meta(factory)
    if not from_module.is_module(made):
        raise click.UsageError(f"{model} returned a {type(made).__name__}, not a torch.nn.Module")
    return from_module.FromModule(made, factory, batches, measure, Traces())


class Traces:
    """Says which workload is traced; every remedy and every limit is a trace."""

    def __init__(self) -> None:
        self.tell: Callable[[str], None] = lambda _: None
        self._count = 0

    def __call__(self, work: Workload) -> None:
        self._count += 1
        self.tell(f"tracing on the meta device: trace {self._count}, batch {work.batch}")
