"""What a callback adds to a batch that sends nothing, and what reading a loop's variables costs.

`python benchmarks/callbacks.py`: of the libraries what is installed; CPU only.

Each hook is called in a row, so with warm caches. The agent runs; one batch in a second also sends a message, and one
in `log_every_n_steps` (`logging_steps`) reads figures: both are timed by themselves.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")
os.environ["CUDA_VISIBLE_DEVICES"] = ""
TIMES = 20_000


def us(function: Callable[[], object], times: int = TIMES) -> float:
    """Of one call: the fastest of five rounds."""
    rounds = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(times // 5):
            function()
        rounds.append((time.perf_counter() - began) / (times // 5))
    return min(rounds) * 1e6


def lightning() -> tuple[Any, Callable[[], object]]:
    import lightning as L
    from lightning.pytorch.demos.boring_classes import BoringModel
    from lightning.pytorch.loggers import CSVLogger

    import gpumon_agent.lightning

    callback = gpumon_agent.lightning.Callback()
    model = BoringModel()
    trainer = L.Trainer(
        max_steps=1, callbacks=[callback], logger=CSVLogger("."), enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
    )  # fmt: skip
    trainer.fit(model)

    def batch() -> None:
        callback.on_train_batch_start(trainer, model, None, 0)
        callback._steps = -1  # as if the optimizer had stepped
        callback.on_train_batch_end(trainer, model, None, None, 0)

    return callback, batch


def transformers() -> tuple[Any, Callable[[], object]]:
    import gpumon_agent.transformers

    callback = gpumon_agent.transformers.Callback()
    state = SimpleNamespace(epoch=0.5)
    callback.on_train_begin(None, state, None)
    return callback, lambda: callback.on_step_begin(None, state, None, train_dataloader=[0] * 10)


def keras() -> tuple[Any, Callable[[], object]]:
    import keras
    import numpy as np

    import gpumon_agent.keras

    callback = gpumon_agent.keras.Callback()
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(np.zeros((4, 4)), np.zeros(4), verbose=0, callbacks=[callback])
    return callback, lambda: callback.on_train_batch_begin(0)


def variables(frames: int) -> float:
    """Of reading a loop's `epoch` and `batch_idx`, of which the first is so many functions further out."""
    from gpumon_agent.attribution.loop_variables import of_callers

    def within(left: int) -> float:
        if left:
            return within(left - 1)
        batch_idx = 3
        cost = us(of_callers, 500)
        return cost if batch_idx else 0.0

    def one_epoch(epoch: int) -> float:
        return within(frames)

    return one_epoch(2)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        import torch

        import gpumon_agent

        model = torch.nn.Linear(8, 8)
        gpumon_agent.watch(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model(torch.zeros(1, 8)).sum().backward()
        told = ", ".join(f"{variables(frames):.1f} µs through {frames} functions" for frames in (1, 10, 40))
        print(f"{'variables':14} once a second {told}")
        for name, make in (("lightning", lightning), ("transformers", transformers), ("keras", keras)):
            if find_spec(name) is None:
                continue
            callback, batch = make()
            loop = callback._loop
            quiet = us(batch)
            numbers = iter(range(1 << 30))
            from gpumon_agent.loop import Where

            sends = us(lambda loop=loop, numbers=numbers: loop.say(Where, "train", 0, next(numbers)), 500)
            reads = us(loop.figures, 500)
            print(f"{name:14} a batch {quiet:5.1f} µs, a message {sends:6.1f} µs, figures {reads:6.1f} µs")


if __name__ == "__main__":
    main()
