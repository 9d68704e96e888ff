"""gpumon's agent: two lines in a training script, and every phase of it can be watched from a second terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpumon_agent._version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpumon_agent.agent import phase
    from gpumon_agent.wire import Outlook

__all__ = ["__version__", "on_outlook", "phase", "step", "stop", "watch"]


def watch(model: Any, optimizer: Any = None, *, name: str | None = None, steps: str = "optimizer") -> None:
    """Watch `model` and its optimizer (or several) from here on. Once per model: a GAN calls it twice.

    `name` is what viewers call the job; by default the script's file name. `steps` says what a step is: "optimizer", a
    step of the optimizer (of several that take turns, one of each); "iteration", whatever lies between two calls of
    `step()`. Never raises into training.
    """
    from gpumon_agent.agent import watch as start

    start(model, optimizer, name=name, steps=steps)


def step() -> None:
    """Mark the end of a training step: in a loop that updates parameters without an optimizer, or that steps its
    optimizers at different rates. From the first call on, steps end here and nowhere else. Never raises.
    """
    from gpumon_agent.agent import step as mark

    mark()


def on_outlook(function: Callable[[Outlook], object]) -> None:
    """Have `function` called as a batch enters the model's forward, before anything is allocated for it.

    It gets the outlook: `next_peak`, `low`, `high`, `headroom` (None where nobody told what the device has), and
    `verdict`, "fits", "tight" or "oom-ahead". What it returns is ignored; what it raises is not: raised there, it ends
    the model's call, and a training loop can skip the batch.
    """
    from gpumon_agent.agent import on_outlook as listen

    listen(function)


def stop() -> None:
    """Take every hook and wrapper out again and close the connection. Training goes on unwatched."""
    from gpumon_agent.agent import stop as end

    end()


def __getattr__(name: str) -> Any:
    if name == "phase":  # with gpumon_agent.phase("eval"): …
        from gpumon_agent.agent import phase

        return phase
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
