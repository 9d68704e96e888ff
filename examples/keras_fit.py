"""Keras on PyTorch with gpumon's callback: `gpumon run examples/keras_fit.py`, or without `gpumon run`."""

import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np

import gpumon_agent.keras

keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(256, activation="relu"), keras.layers.Dense(10)])
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
x, y = np.random.randn(32 * 12, 64).astype("float32"), np.random.randint(10, size=32 * 12)
model.fit(
    x,
    y,
    batch_size=32,
    epochs=2,
    validation_split=1 / 6,
    verbose=0,
    callbacks=[gpumon_agent.keras.Callback(), keras.callbacks.CSVLogger("log.csv")],  # the first is the one line
)
