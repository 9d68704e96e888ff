"""Ultralytics: YOLO's own trainer on images that are drawn here."""

from pathlib import Path

import _count
import numpy as np
from PIL import Image
from ultralytics import YOLO
from ultralytics.models.yolo.detect import DetectionTrainer

random = np.random.default_rng(0)
for part in ("train", "val"):
    for folder in ("images", "labels"):
        Path("data", folder, part).mkdir(parents=True)
    for i in range(32):
        Image.fromarray(random.integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(f"data/images/{part}/{i}.png")
        Path(f"data/labels/{part}/{i}.txt").write_text("")  # backgrounds: how many boxes there are depends on values
Path("data.yaml").write_text(
    f"path: {Path('data').absolute()}\ntrain: images/train\nval: images/val\nnames:\n  0: thing\n"
)


def begun(trainer: DetectionTrainer) -> None:
    _count.root(trainer.model)
    _count.root(trainer.ema.ema, trained=False)


yolo = YOLO("yolov8n.yaml", verbose=False)
yolo.add_callback("on_train_start", begun)
yolo.train(
    data="data.yaml", epochs=3, imgsz=64, batch=8, workers=0, device=0, plots=False, amp=False, verbose=False,
    project="runs", optimizer="SGD", nbs=8,
)  # fmt: skip
_count.said("done")
