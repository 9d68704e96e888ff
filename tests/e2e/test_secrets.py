"""Secrets of a training's command line and environment are in nothing that gpumon stores or shows."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpumon import link
from gpumon_agent import wire

SECRETS = [f"Zq{number}vX9hidden" for number in range(5)]


def runs_out() -> None:
    import torch

    model = torch.nn.Linear(64, 64).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(2, 64, device="cuda")).sum().backward()
        optimizer.step()
    torch.empty(1 << 50, device="cuda")


def test_no_descriptor_recording_report_or_listing_holds_one(virtual_gpu: Callable[..., Any], tmp_path: Path) -> None:
    gpu = virtual_gpu()
    with tempfile.TemporaryDirectory(prefix="gm") as folder:
        environment = {
            **gpu.environment, "XDG_RUNTIME_DIR": folder, "TMPDIR": folder, "GPUMON_AWAIT_VIEWER": "1",
            "GPUMON_OOM_SNAPSHOT": "1", "WANDB_API_KEY": SECRETS[0], "HF_TOKEN": SECRETS[1],
        }  # fmt: skip
        gpumon = [sys.executable, "-m", "gpumon"]
        words = ["--api-key", SECRETS[2], f"+auth.token={SECRETS[3]}", f"https://me:{SECRETS[4]}@host/data"]
        training = subprocess.Popen(
            [*gpumon, "run", *gpu.command(runs_out), *words],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        end = time.monotonic() + 300
        while training.poll() is None and not list(Path(folder, "gpumon").glob("*.json")):
            assert time.monotonic() < end
            time.sleep(0.05)
        recording = tmp_path / "run.gpumon"
        recorded = subprocess.run(
            [*gpumon, "record", str(recording)],
            env=environment, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        out, raised = training.communicate(timeout=300)
        assert "OutOfMemoryError" in raised
        shown = [recorded.stdout, recorded.stderr, out]
        for verb in (["explain", "--last"], ["replay", "--json", str(recording)], ["replay", "--once", str(recording)]):
            ran = subprocess.run(
                [*gpumon, *verb], env=environment, capture_output=True, text=True, timeout=300, check=False
            )
            shown += [ran.stdout, ran.stderr]
        files = [path for path in [*Path(folder).rglob("*"), recording] if path.is_file()]
        stored = [path.read_bytes() for path in files]
        files.append(recording)  # it is compressed
        stored.append(b"".join(map(wire.encode_received, link.replay(recording))))
        assert b"--api-key" in stored[-1]
    assert {path.suffix for path in files} >= {".json", ".txt", ".pickle", ".gpumon"}, shown
    for secret in SECRETS:
        assert [path.name for path, data in zip(files, stored, strict=True) if secret.encode() in data] == []
        assert not [text for text in shown if secret in text]
    assert any("***" in text for text in shown)
