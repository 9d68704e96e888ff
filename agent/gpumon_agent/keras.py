"""Keras's callback: `model.fit(..., callbacks=[gpumon_agent.keras.Callback()])`, with Keras on PyTorch.

Keras has optimizers of its own, which no hook of PyTorch's sees: the callback marks where each step ends. It starts
the agent if the training was not launched by `gpumon run`, tells viewers the stage, epoch and batch, and adds the
figures of `gpumon_agent.figures` to the logs of each epoch, which `History` and the callbacks after this one get.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

if find_spec("keras") is None:
    raise ModuleNotFoundError("gpumon_agent.keras needs Keras: pip install keras", name="keras")

import keras

import gpumon_agent
from gpumon_agent.guard import say
from gpumon_agent.loop import PREDICT, TEST, TRAIN, VALIDATE, Loop, Where


class Callback(keras.callbacks.Callback):  # type: ignore[misc]  # mypy does not look into keras
    """For `model.fit`, `evaluate` and `predict`."""

    def __init__(self) -> None:
        super().__init__()
        self._loop = Loop("keras")
        self._on_torch = keras.backend.backend() == "torch"
        self._epoch: int | None = None  # of `fit`, from 1 as Keras shows it

    def on_train_begin(self, logs: Any = None) -> None:
        if self._on_torch:
            self._loop.begin(self.model)
        else:
            say(f"Keras uses {keras.backend.backend()}, whose memory gpumon does not see: set KERAS_BACKEND=torch")

    def on_train_end(self, logs: Any = None) -> None:
        self._epoch = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch + 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._on_torch and logs is not None:
            logs.update(self._loop.figures())

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._loop.due():
            self._loop.say(self._at, TRAIN, batch, "steps")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._on_torch:
            gpumon_agent.step()

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._loop.due():
            self._loop.say(self._at, TEST if self._epoch is None else VALIDATE, batch)

    def on_predict_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._loop.due():
            self._loop.say(self._at, PREDICT, batch)

    def _at(self, stage: str, batch: int, count: str = "") -> Where:
        """Keras knows how many batches only the training has."""
        batches = (self.params or {}).get(count)
        return Where(stage, self._epoch, batch + 1, batches)
