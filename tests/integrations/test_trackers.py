"""One training that logs to every tracker that is installed, under `gpumon run --log-to auto`.

Each tracker's store is then read with what the library itself brings, and compared with what torch says in the
training.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import virtual

from gpumon import virtual_gpu as vgpu
from gpumon.export.run_figures import NUMBERED

pytestmark = pytest.mark.integration

STEPS = 150
TRAIN = """
import importlib.util, json, sys, time, torch
from pathlib import Path
from torch import nn

def installed(name):
    return importlib.util.find_spec(name) is not None

has = {name: installed(name) for name in ("mlflow", "tensorboard", "tensorboardX", "trackio", "wandb")}
if has["mlflow"]:
    import mlflow
    mlflow.set_tracking_uri("sqlite:///mlflow.db")
    mlflow.start_run(run_name="mine")
if has["tensorboard"]:
    from torch.utils.tensorboard import SummaryWriter
    writer = SummaryWriter("runs/mine")
elif has["tensorboardX"]:
    from tensorboardX import SummaryWriter
    writer = SummaryWriter("runs/mine")
if has["trackio"]:
    import trackio
    trackio.init(project="ours", name="mine", embed=False)
if has["wandb"]:
    import wandb
    wandb.init(project="ours", name="mine", mode="offline", settings=wandb.Settings(silent=True))

model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
kept, highest = [], 0
for step in range(int(sys.argv[1])):
    output = model(torch.randn(64, 512, device="cuda"))
    output.pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    kept.append(output)
    if has["wandb"]:
        wandb.log({"loss": step})
    if has["mlflow"] and step % 50 == 0:
        mlflow.log_metric("loss", step, step=step)
    time.sleep(0.02)
Path("torch.json").write_text(json.dumps({
    "peak": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.memory_reserved(),
}))
print("trained")
if has["mlflow"]:
    mlflow.end_run()
if has["trackio"]:
    trackio.finish()
if has["wandb"]:
    wandb.finish()
sys.exit(7)
"""


class Trained(NamedTuple):
    folder: Path
    out: str
    err: str
    code: int
    torch: dict[str, int]
    received: list[tuple[str, bytes]]  # path and body of what came by OTLP


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("trackers")
    (folder / "run").mkdir(mode=0o700)
    (folder / "train.py").write_text(TRAIN)
    virtual_gpu = virtual.environment(sys.executable)
    with _Receiver() as receiver:
        ended = subprocess.run(
            [sys.executable, "-m", "gpumon", "run", "--log-to", "auto", "train.py", str(STEPS)],
            cwd=folder,
            env={
                **virtual_gpu,
                "GPUMON_GOVERNOR": "off",  # every step is read, up to the last
                "XDG_RUNTIME_DIR": str(folder / "run"),
                "TRACKIO_DIR": str(folder / "trackio"),
                "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint,
                "OTEL_SERVICE_NAME": "the-training",
                "MLFLOW_DISABLE_TELEMETRY": "true",
            },
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    vgpu.remove_session(virtual_gpu["VGPU_SESSION"])
    assert (folder / "torch.json").exists(), ended.stdout + ended.stderr
    told = json.loads((folder / "torch.json").read_text())
    return Trained(folder, ended.stdout, ended.stderr, ended.returncode, told, receiver.received)


class _Receiver:
    """Keeps what is sent to it by OTLP over HTTP, as it came."""

    def __enter__(self) -> _Receiver:
        self.received: list[tuple[str, bytes]] = []
        received = self.received

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                received.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def check(numbers: dict[str, float], trained: Trained, *, exact: bool = True) -> None:
    """The last figures of the run, by name, against torch's. `exact`: False where the tracker keeps 32-bit floats."""
    told = trained.torch
    rel = 0.0 if exact else 1e-6
    assert numbers["gpumon/peak_bytes"] == pytest.approx(told["peak"], rel=rel)  # it grows: the last is the highest
    assert numbers["gpumon/reserved_bytes"] == pytest.approx(told["reserved"], rel=rel)
    phases = [numbers[f"gpumon/{phase}_peak_bytes"] for phase in ("forward", "backward", "optimizer")]
    assert max(phases) == pytest.approx(told["peak"], rel=rel)
    assert numbers["gpumon/next_peak_bytes"] == pytest.approx(told["peak"], rel=0.02)
    assert numbers["gpumon/headroom_bytes"] > 70 << 30
    assert numbers["gpumon/state"] == NUMBERED.index("leak")


def test_the_training_is_as_without(trained: Trained) -> None:
    assert trained.code == 7
    assert [line for line in trained.out.splitlines() if "gpumon" in line] == []
    assert "trained" in trained.out.splitlines()


def test_the_card_is_the_last_thing_on_stderr(trained: Trained) -> None:
    pytest.importorskip("mlflow")  # without any tracker another line says so
    lines = trained.err[trained.err.index("gpumon: train.py") :].splitlines()
    assert lines[0] == f"gpumon: train.py, {STEPS} steps"
    assert (
        lines[1] == f"  peak      {trained.torch['peak'] / (1 << 20):.1f} MiB in backward of step {STEPS - 1} (cuda:0)"
    )
    assert lines[2].startswith("  headroom  ")
    assert lines[3].startswith("  finding   retained-graph: ")
    assert len(lines) == 4, lines  # no tracker has failed


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of its own, as it reads a run
def test_mlflow_has_them_in_the_trainings_own_run(trained: Trained) -> None:
    mlflow = pytest.importorskip("mlflow")
    client = mlflow.MlflowClient(f"sqlite:///{trained.folder}/mlflow.db")
    (run,) = client.search_runs(["0"])
    assert run.info.run_name == "mine"
    assert run.info.status == "FINISHED"
    check(run.data.metrics, trained)
    history = client.get_metric_history(run.info.run_id, "gpumon/peak_bytes")
    assert max(metric.step for metric in history) == STEPS - 1
    assert run.data.metrics["gpumon/highest_peak_bytes"] == trained.torch["peak"]
    assert run.data.metrics["gpumon/steps"] == STEPS
    assert run.data.tags["gpumon/answer"].startswith("LEAK: `kept[*]`")
    assert "held by `kept[*]`" in run.data.tags["gpumon/finding/retained-graph"]


def test_tensorboard_shows_them_as_a_run_of_its_own_beside_the_trainings(trained: Trained) -> None:
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reading.EventAccumulator(str(trained.folder / "runs" / "mine" / "gpumon"))
    events.Reload()
    last = {tag: events.Scalars(tag)[-1] for tag in events.Tags()["scalars"]}
    check({tag: event.value for tag, event in last.items()}, trained, exact=False)
    assert last["gpumon/peak_bytes"].step == STEPS - 1
    texts = {tag: events.Tensors(tag)[-1].tensor_proto.string_val[0].decode() for tag in events.Tags()["tensors"]}
    assert texts["gpumon/answer"].startswith("LEAK: `kept[*]`")
    assert texts["gpumon/findings"].startswith("retained-graph: ")
    assert f"| gpumon/highest_peak_bytes | {trained.torch['peak']} |" in texts["gpumon/summary"]


def test_wandb_has_them_in_a_run_of_the_same_group(trained: Trained) -> None:
    pytest.importorskip("wandb")
    runs = {_of_wandb(path)[0]: path for path in trained.folder.glob("wandb/offline-run-*/*.wandb")}
    assert sorted(runs) == ["mine", "mine gpumon"]
    _, project, group, numbers, summary, alerts = _of_wandb(runs["mine gpumon"])
    assert (project, group) == ("ours", "mine")
    check(numbers, trained)
    assert numbers["_step"] == STEPS - 1
    assert summary["gpumon/highest_peak_bytes"] == trained.torch["peak"]
    assert summary["gpumon/answer"].startswith("LEAK: `kept[*]`")
    assert "held by `kept[*]`" in summary["gpumon/finding/retained-graph"]
    assert alerts == ["gpumon: retained-graph"]


def _of_wandb(path: Path) -> tuple[str, str, str, dict[str, Any], dict[str, Any], list[str]]:
    """Name, project, group, last history, summary and alerts' titles of a run's file: LevelDB's log format after seven
    bytes, in blocks of 32 KiB, each record one of wandb's own messages."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = path.read_bytes(), 7, b""
    name = project = group = ""
    history: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    alerts: list[str] = []
    while at + 7 <= len(data):
        left = (1 << 15) - at % (1 << 15)
        if left < 7:
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole, at = whole + data[at + 7 : at + 7 + size], at + 7 + size
        if kind not in (1, 4):  # the first or a middle piece
            continue
        record = Record.FromString(whole)
        whole = b""
        if record.HasField("run"):
            name, project, group = record.run.display_name, record.run.project, record.run.run_group
        elif record.HasField("history"):
            items = {item.key or "/".join(item.nested_key): item for item in record.history.item}
            history |= {key: json.loads(item.value_json) for key, item in items.items()}
        elif record.HasField("summary"):
            items = {item.key or "/".join(item.nested_key): item for item in record.summary.update}
            summary |= {key: json.loads(item.value_json) for key, item in items.items()}
        elif record.HasField("alert"):
            alerts.append(record.alert.title)
    return name, project, group, history, summary, alerts


def test_trackio_has_them_in_a_run_of_the_same_group(trained: Trained) -> None:
    pytest.importorskip("trackio")
    read = """
import json, trackio
from trackio.sqlite_storage import SQLiteStorage
new = hasattr(SQLiteStorage, "get_alerts")  # and groups
group = next(run.config["_Group"] for run in trackio.Api().runs("ours") if run.name == "mine gpumon") if new else "mine"
alerts = SQLiteStorage.get_alerts("ours") if new else [{"title": "gpumon: retained-graph"}]
print(json.dumps([group, SQLiteStorage.get_logs("ours", "mine gpumon"), alerts]))
"""
    shown = subprocess.run(
        [sys.executable, "-c", read],
        env={**os.environ, "TRACKIO_DIR": str(trained.folder / "trackio")},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    group, logged, alerts = json.loads(shown.stdout.splitlines()[-1])
    assert group == "mine"
    *_, figures, summary = logged
    check(figures, trained)
    assert figures["step"] == STEPS - 1
    assert figures["gpumon/answer"].startswith("LEAK: `kept[*]`")
    assert summary["gpumon/highest_peak_bytes"] == trained.torch["peak"]
    assert "held by `kept[*]`" in summary["gpumon/finding/retained-graph"]
    assert [alert["title"] for alert in alerts] == ["gpumon: retained-graph"]


def test_otlp_brings_gauges_and_a_span_for_each_finding(trained: Trained) -> None:
    metrics = pytest.importorskip("opentelemetry.proto.collector.metrics.v1.metrics_service_pb2")
    traces = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    gauges: dict[str, Any] = {}
    spans: dict[str, dict[str, Any]] = {}
    for path, body in trained.received:
        if path == "/v1/metrics":
            for of in metrics.ExportMetricsServiceRequest.FromString(body).resource_metrics:
                assert _named(of.resource.attributes)["service.name"] == "the-training"
                for metric in of.scope_metrics[0].metrics:
                    (gauges[metric.name],) = metric.gauge.data_points
        else:
            assert path == "/v1/traces"
            for of in traces.ExportTraceServiceRequest.FromString(body).resource_spans:
                spans |= {span.name: _named(span.attributes) for span in of.scope_spans[0].spans}
    check({name.replace("gpumon.", "gpumon/"): point.as_int for name, point in gauges.items()}, trained)
    assert gauges["gpumon.step"].as_int == STEPS - 1
    assert _named(gauges["gpumon.peak_bytes"].attributes) == {"gpumon.device": "cuda:0"}
    assert spans["gpumon.finding"]["gpumon.code"] == "retained-graph"
    assert spans["gpumon.summary"]["gpumon.highest_peak_bytes"] == trained.torch["peak"]


def _named(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}
