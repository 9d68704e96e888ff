"""Figures sent to a real OpenTelemetry Collector, by HTTP and by gRPC. otelcol.go beside this says how to get one."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

CONFIG = """
receivers: {{otlp: {{protocols: {{grpc: {{endpoint: "127.0.0.1:{grpc}"}}, http: {{endpoint: "127.0.0.1:{http}"}}}}}}}}
exporters: {{debug: {{verbosity: detailed}}}}
service:
  telemetry: {{metrics: {{level: none}}}}
  pipelines:
    metrics: {{receivers: [otlp], exporters: [debug]}}
    traces: {{receivers: [otlp], exporters: [debug]}}
"""
SENDS = """
from gpumon.analysis.answer import Answer
from gpumon.analysis.types import Finding
from gpumon.export.run_figures import Figures, Value
from gpumon.export.trackers import open_run
from gpumon_agent import wire

sink = open_run(wire.Tracker("otlp"), "/", "train.py")
found = Finding("tensor-leak", "warning", 3, "it grows")
values = (Value("peak_bytes", 7 << 30, None, "cuda:0"), Value("headroom_bytes", -5, 1, "cuda:1"))
sink.log(Figures(41, values, Answer("leak", "it grows"), (found,)))
sink.finish({"gpumon/steps": 42}, (found,))
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_a_collector_takes_them(tmp_path: Path, protocol: str) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc" if protocol == "grpc" else "opentelemetry.sdk")
    collector = shutil.which("otelcol")
    if collector is None:
        pytest.skip("there is no otelcol on PATH")
    ports = {"grpc": free_port(), "http": free_port()}
    (tmp_path / "config.yaml").write_text(CONFIG.format(**ports))
    output = tmp_path / "output"
    with output.open("w") as out:
        running = subprocess.Popen(
            [collector, "--config", f"file:{tmp_path}/config.yaml"], stdout=out, stderr=subprocess.STDOUT
        )
    try:
        until = time.monotonic() + 60
        while "Everything is ready" not in output.read_text():
            assert running.poll() is None, output.read_text()
            assert time.monotonic() < until
            time.sleep(0.05)
        environment = {
            "PYTHONPATH": ":".join(sys.path),
            "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{ports[protocol.partition('/')[0]]}",
            "OTEL_SERVICE_NAME": "the-training",
        }
        subprocess.run([sys.executable, "-c", SENDS], env=environment, timeout=60, check=True)
    finally:
        running.terminate()
        running.wait(60)
    shown = output.read_text()
    metrics = re.findall(r"-> Name: (\S+)\n.*?-> Unit: (\S+)\n", shown, re.S)
    assert metrics == [
        ("gpumon.peak_bytes", "By"),
        ("gpumon.headroom_bytes", "By"),
        ("gpumon.step", "1"),
        ("gpumon.state", "1"),
    ]
    assert re.findall(r"^Value: (-?\d+)$", shown, re.M) == [str(7 << 30), "-5", "41", "3"]
    assert "service.name: Str(the-training)" in shown
    assert "-> gpumon.rank: Str(1)" in shown
    assert re.findall(r"Name +: (gpumon\S+)", shown) == ["gpumon.finding", "gpumon.summary"]
    assert "-> gpumon.code: Str(tensor-leak)" in shown
