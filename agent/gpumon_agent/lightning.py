"""Lightning's callback: `Trainer(callbacks=[gpumon_agent.lightning.Callback()])`, and the same for Fabric.

It starts the agent if the training was not launched by `gpumon run`, tells viewers the stage, epoch and batch, and
gives the Trainer's loggers the figures of `gpumon_agent.figures` every `log_every_n_steps` steps. The user's package is
`lightning` or `pytorch_lightning`: `Callback` is made from what is imported when it is first asked for.
"""

from __future__ import annotations

import sys
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if not any(map(find_spec, ("lightning", "pytorch_lightning", "lightning_fabric"))):
    raise ModuleNotFoundError("gpumon_agent.lightning needs Lightning: pip install lightning", name="lightning")

from gpumon_agent.guard import protect
from gpumon_agent.loop import PREDICT, SANITY_CHECK, TEST, TRAIN, VALIDATE, Loop, Where


class _Hooks:
    """Every hook runs in the training loop: without anything to do it reads a clock or a counter."""

    def __init__(self) -> None:
        super().__init__()
        self._loop = Loop("lightning")
        self._steps = 0  # of the optimizers, when figures were last due

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._loop.begin()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._loop.due():
            self._loop.say(_training, trainer, batch_idx)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        steps = trainer.global_step
        if steps == self._steps:  # gradients accumulate: Lightning does not log either
            return
        self._steps = steps
        step = _step_to_log(trainer)
        if step is not None and (figures := self._loop.figures()):
            for logger in trainer.loggers:
                logger.log_metrics(figures, step=step)

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self._loop.due():
            self._loop.say(_validating, trainer, batch_idx, dataloader_idx)

    def on_test_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self._loop.due():
            self._loop.say(_at, TEST, batch_idx, trainer.num_test_batches, dataloader_idx)

    def on_predict_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self._loop.due():
            self._loop.say(_at, PREDICT, batch_idx, trainer.num_predict_batches, dataloader_idx)

    def on_after_setup(self, fabric: Any, module: Any) -> None:
        """Fabric's, from `fabric.setup`."""
        self._loop.begin()


@partial(protect, "callback")
def _step_to_log(trainer: Any) -> int | None:
    """The step under which Lightning logs what this batch said; None: it does not log now."""
    if not trainer.loggers or not trainer.log_every_n_steps:
        return None
    step: int = trainer.fit_loop.epoch_loop._batches_that_stepped  # as Lightning's own callbacks do
    return None if (step + 1) % trainer.log_every_n_steps else step


def _training(trainer: Any, batch_idx: int) -> Where:
    return Where(TRAIN, trainer.current_epoch, batch_idx + 1, _known(trainer.num_training_batches))


def _validating(trainer: Any, batch_idx: int, dataloader_idx: int) -> Where:
    if trainer.sanity_checking:
        return _at(SANITY_CHECK, batch_idx, trainer.num_sanity_val_batches, dataloader_idx)
    at = _at(VALIDATE, batch_idx, trainer.num_val_batches, dataloader_idx)
    return at._replace(epoch=trainer.current_epoch)


def _at(stage: str, batch_idx: int, batches: Any, dataloader_idx: int) -> Where:
    count = batches[dataloader_idx] if isinstance(batches, list) else batches
    return Where(stage, None, batch_idx + 1, _known(count))


def _known(batches: Any) -> int | None:
    """Data without a length has infinitely many."""
    return int(batches) if batches != float("inf") else None


def _bases() -> tuple[type, ...]:
    """The `Callback` of each package that is imported; if none is, of the first that is installed."""
    trainers = {"lightning.pytorch": "lightning", "pytorch_lightning": "pytorch_lightning"}
    imported = [name for name in trainers if name in sys.modules]
    installed = [name for name, package in trainers.items() if find_spec(package)][:1]
    return tuple(import_module(name).Callback for name in imported or installed)


if TYPE_CHECKING:

    class Callback(_Hooks):
        """For `Trainer(callbacks=[...])` and `Fabric(callbacks=[...])`."""

else:

    def __getattr__(name: str) -> Any:
        if name != "Callback":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        made = type(name, (_Hooks, *_bases()), {"__module__": __name__, "__doc__": __doc__})
        return globals().setdefault(name, made)
