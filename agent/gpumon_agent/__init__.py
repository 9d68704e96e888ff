"""gpumon's agent: two lines in a training script make every phase visible in a second terminal."""

from __future__ import annotations

from gpumon_agent._version import __version__

TYPE_CHECKING = False  # typing would be half a megabyte of the process that reads the drivers
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from gpumon_agent.agent import phase
    from gpumon_agent.wire import Outlook

__all__ = ["__version__", "figures", "on_outlook", "phase", "progress", "step", "stop", "watch"]


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


def progress(
    *, stage: str = "train", epoch: int | None = None, batch: int | None = None, batches: int | None = None
) -> None:
    """Say where the training loop is, for viewers: in this stage and epoch, at the `batch`-th of `batches`.

    Call it in every batch: it sends something once a second at most. Never raises, and does nothing without an agent.
    """
    from gpumon_agent.loop import Where, own_loop

    loop = own_loop()
    if loop.due():
        loop.say(Where, str(stage), epoch, batch, batches)


def figures() -> dict[str, int]:
    """Figures for a logger, in bytes, from what the agent has read since the last call: empty without an agent.

    `gpumon/peak_bytes` is the highest allocated peak, `gpumon/forward_peak_bytes`, `backward_peak_bytes` and
    `optimizer_peak_bytes` those of the phases in steps that were read; `gpumon/reserved_bytes` is the newest reading;
    `gpumon/next_peak_bytes` and `headroom_bytes` are the newest outlook's. What is not known is left out. Of several
    devices the fullest counts. Never raises, and resets no peak that you read.
    """
    from gpumon_agent.loop import own_loop

    return own_loop().figures()


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
