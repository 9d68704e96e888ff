"""gpumon's agent: two lines in a training script make every phase visible in a second terminal."""

from __future__ import annotations

from gpumon_agent._version import __version__

TYPE_CHECKING = False  # typing would be half a megabyte of the process that reads NVML
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from gpumon_agent.agent import phase
    from gpumon_agent.wire import Outlook

__all__ = ["__version__", "on_outlook", "phase", "step", "stop", "watch"]


def watch(model: Any, optimizer: Any = None, *, name: str | None = None, steps: str = "optimizer") -> None:
    """Watch `model` and its optimizer (or several) from here on. Once per model: a GAN calls it twice.

    `name` is what viewers call the job; by default the script's file name. `steps` says what a step is: "optimizer", a
    step of the optimizer (of alternating ones, one of each); "iteration", everything between two calls of `step()`.
    Never raises into training.
    """
    from gpumon_agent.agent import watch as start

    start(model, optimizer, name=name, steps=steps)


def step() -> None:
    """Mark the end of a training step, in a loop that updates parameters without an optimizer or steps its optimizers
    at different rates. From the first call on, steps end only here. Never raises.
    """
    from gpumon_agent.agent import step as mark

    mark()


def on_outlook(function: Callable[[Outlook], object]) -> None:
    """Have `function` called when a batch enters the model's forward, before anything is allocated for it.

    It gets the outlook: `next_peak`, `low`, `high`, `headroom` (None if capacity is unknown), and `verdict`: "fits",
    "tight" or "oom-ahead". Its result is ignored. An exception from it ends the model's call; a training loop can
    skip the batch.
    """
    from gpumon_agent.agent import on_outlook as listen

    listen(function)


def stop() -> None:
    """Remove all hooks and wrappers and close the connection. Training goes on unwatched."""
    from gpumon_agent.agent import stop as end

    end()


def load_ipython_extension(ipython: Any) -> None:
    """`%load_ext gpumon_agent`: `%%gpumon` measures a cell."""
    from gpumon_agent.notebook import load

    load(ipython)


def unload_ipython_extension(ipython: Any) -> None:
    """`%unload_ext gpumon_agent`: the opposite; it also stops the agent."""
    from gpumon_agent.notebook import unload

    unload(ipython)


def __getattr__(name: str) -> Any:
    if name == "phase":  # with gpumon_agent.phase("eval"): …
        from gpumon_agent.agent import phase

        return phase
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
