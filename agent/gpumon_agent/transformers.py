"""The callback of Hugging Face's Trainer: `Trainer(callbacks=[gpumon_agent.transformers.Callback()])`, and TRL's.

It starts the agent if the training was not launched by `gpumon run`, tells viewers the stage, epoch and batch, and
adds the figures of `gpumon_agent.figures` to what the Trainer logs of its steps: to `trainer.state.log_history`, and to
what callbacks after this one get.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

if find_spec("transformers") is None:
    raise ModuleNotFoundError(
        "gpumon_agent.transformers needs the Trainer: pip install transformers", name="transformers"
    )

from transformers import TrainerCallback

from gpumon_agent.guard import pass_on
from gpumon_agent.loop import TRAIN, VALIDATE, Loop, Where


class Callback(TrainerCallback):  # type: ignore[misc]  # mypy does not look into transformers
    """For `Trainer(callbacks=[...])` and its subclasses."""

    def __init__(self) -> None:
        super().__init__()
        self._loop = Loop("transformers")
        self._predicted = 0  # batches of this evaluation

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._loop.begin()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._loop.due():
            self._loop.say(_training, state, kwargs.get("train_dataloader"))

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._predicted += 1
        if self._loop.due():
            self._loop.say(_validating, state, self._predicted, kwargs.get("eval_dataloader"))

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._predicted = 0

    def on_predict(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._predicted = 0

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """The logs of an evaluation are its result too, which must stay as it is."""
        if logs and "loss" in logs and (figures := self._loop.figures()):
            logs.update(figures)
            if state.log_history:  # has a copy, made just before
                state.log_history[-1].update(figures)


def _training(state: Any, loader: Any) -> Where:
    """`state.epoch` is the share of the epochs that is done, also after resuming from a checkpoint."""
    epoch = state.epoch or 0.0
    batches = _count(loader)
    batch = None if batches is None else round(epoch % 1 * batches) + 1
    return Where(TRAIN, int(epoch), batch, batches)


def _validating(state: Any, batch: int, loader: Any) -> Where:
    return Where(VALIDATE, None if state.epoch is None else int(state.epoch), batch, _count(loader))


def _count(loader: Any) -> int | None:
    """An iterable data set has no length."""
    try:
        return len(loader)
    except TypeError as error:
        pass_on(error)
        return None
