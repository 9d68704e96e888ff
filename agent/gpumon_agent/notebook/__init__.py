"""`%load_ext gpumon_agent`: `%%gpumon` measures a cell of a notebook and shows what stayed alive.

IPython runs the cell itself: a line `%%gpumon` is removed before the cell is compiled, and IPython's events say when
the cell begins and ends. So outputs, tracebacks, `await`, other magics and `Out` are those of a cell without it.
"""

from __future__ import annotations

import gc
import re
import sys
from typing import TYPE_CHECKING, Any

from gpumon_agent.guard import protect
from gpumon_agent.registry import REGISTRY

if TYPE_CHECKING:
    from gpumon_agent.notebook.measuring import Measurement

_MAGIC = re.compile(r"%%gpumon[ \t]*$")
_OF_PYTHON = ("%%capture", "%%prun", "%%time")  # and %%timeit
_LAST = ("last_exc", "last_value", "last_traceback")
_EVENTS = ("pre_run_cell", "post_run_cell")


class Notebook:
    """Measures one cell at a time; a cell that a measured cell runs (by `%%capture`) belongs to it."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self.began = REGISTRY.agent is None and not REGISTRY.finders  # so the agent, if any, will be ours
        self._running: Measurement | None = None
        self._cell = ""
        self.pre_run_cell = protect("notebook", self._begins)
        self.post_run_cell = protect("notebook", self._ends)

    def _begins(self, info: Any) -> None:
        from gpumon_agent.notebook.measuring import Measurement

        if self._running is None and _is_measured(info.raw_cell):
            self._cell = info.raw_cell
            self._running = Measurement(self._shell)

    def _ends(self, result: Any) -> None:
        from IPython.display import display

        running = self._running
        if running is None or (result is not None and result.info.raw_cell != self._cell):
            return
        self._running = None
        error = None if result is None else result.error_in_exec or result.error_before_exec
        display(running.end(error))

    def gpumon(self, line: str, cell: str | None = None) -> None:
        """`%%gpumon` measures this cell: peak memory, the phases of a training in it, and the tensors that stay alive.

        `%gpumon forget` frees what the last exception holds.
        """
        if cell is not None:  # called by name: IPython itself never gets here
            self._shell.run_cell(f"%%gpumon\n{cell}")
        elif line.strip() == "forget":
            forget(self._shell)
        else:
            from IPython.core.error import UsageError

            raise UsageError("write `%%gpumon` as the first line of a cell, or `%gpumon forget`")


def load(shell: Any) -> None:
    notebook = Notebook(shell)
    shell.input_transformers_cleanup.append(without_magic)
    for event in _EVENTS:
        shell.events.register(event, getattr(notebook, event))
    shell.register_magic_function(notebook.gpumon, "line_cell", "gpumon")
    REGISTRY.notebook = notebook


def unload(shell: Any) -> None:
    """Also removes the agent, unless it was there before."""
    from gpumon_agent.agent import stop

    notebook = REGISTRY.notebook
    if notebook is None:
        return
    REGISTRY.notebook = None
    shell.input_transformers_cleanup.remove(without_magic)
    for event in _EVENTS:
        shell.events.unregister(event, getattr(notebook, event))
    for kind in ("line", "cell"):
        shell.magics_manager.magics[kind].pop("gpumon", None)
    if notebook.began:
        stop()


def forget(shell: Any) -> None:
    """Lets go of the last exception, wherever Python and IPython keep it."""
    for name in _LAST:
        if hasattr(sys, name):
            setattr(sys, name, None)
    shell.InteractiveTB.tb = None
    last = getattr(shell, "last_execution_result", None)
    if last is not None:
        last.error_in_exec = last.error_before_exec = None
    gc.collect()  # frames and exceptions refer to each other


def without_magic(lines: list[str]) -> list[str]:
    """The lines of a cell without its `%%gpumon`. An empty line takes its place, so that tracebacks name the line that
    the user sees; not above another cell magic, which must come first."""
    at = next((at for at, line in enumerate(lines) if line.strip()), 0)
    if not lines or not _MAGIC.match(lines[at]):
        return lines
    below = lines[at + 1 :]
    return [*lines[:at], *([] if below and below[0].startswith("%%") else ["\n"]), *below]


def _is_measured(cell: str) -> bool:
    """Whether it begins with `%%gpumon`, perhaps below magics that run the rest of the cell as Python."""
    for line in cell.splitlines():
        if _MAGIC.match(line):
            return True
        if line.strip() and not line.startswith(_OF_PYTHON):
            return False
    return False
