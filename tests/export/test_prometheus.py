"""The exporter against its own users: promtool, and a Prometheus server that scrapes it and fires the rule."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from gpumon.cli.export import address

pytest.importorskip("prometheus_client", reason="the extra `prometheus` is not installed")

MIB = 1 << 20
RULES = Path(__file__).parents[2] / "docs" / "prometheus"
EXPORTER = [sys.executable, "-m", "gpumon", "export", "prometheus"]
SAMPLE = re.compile(r"(\w+)(?:\{(.*)\})? (\S+)$")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed (Debian's package `prometheus` has it)")
    return path


def samples(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, labels, value = SAMPLE.match(line).groups()  # type: ignore[union-attr]
            found.setdefault(name, []).append((dict(LABEL.findall(labels or "")), float(value)))
    return found


def dashboard() -> list[str]:
    """The queries of the Grafana dashboard, for all trainings, runs and ranks."""
    panels = json.loads((RULES / "grafana.json").read_text())["panels"]
    return [re.sub(r"\$\w+", ".*", target["expr"]) for panel in panels for target in panel["targets"]]


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


def until(what: Callable[[], Any], seconds: float = 45) -> Any:
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, what
        time.sleep(0.2)
    return found


@pytest.fixture(scope="module")
def environment() -> Iterator[dict[str, str]]:
    import os

    folder = tempfile.mkdtemp(prefix="gm")
    yield {**os.environ, "XDG_RUNTIME_DIR": folder, "TMPDIR": folder}
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def exporter(environment: dict[str, str]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process, and where it serves."""
    process = subprocess.Popen(
        [*EXPORTER, "--listen", "127.0.0.1:0"], env=environment, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    line = process.stderr.readline()
    yield process, line.split()[1].rstrip(";")
    if process.poll() is None:
        process.kill()
    process.communicate()


@pytest.fixture(scope="module")
def ranks(environment: dict[str, str], exporter: tuple[subprocess.Popen[str], str]) -> Iterator[None]:
    """Two of three ranks; what they hold grows so that the machine's memory would not last for 300 steps more."""
    assert samples(get(exporter[1]))["gpumon_jobs"] == [({}, 0)]  # none yet, and it serves
    growth = psutil.virtual_memory().available // 350
    script = str(Path(__file__).with_name("speaking_ranks.py"))
    process = subprocess.Popen(
        [sys.executable, script, str(growth)], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    yield
    process.communicate(b"")


def test_what_is_served_is_what_gpumon_states(exporter, ranks) -> None:
    until(lambda: len(samples(get(exporter[1])).get("gpumon_headroom_bytes", ())) == 2)
    found = samples(get(exporter[1]))
    states = {labels["state"]: value for labels, value in found["gpumon_job_ranks"]}
    assert {state: n for state, n in states.items() if n} == {"live": 2, "missing": 1}
    assert [value for _, value in found["gpumon_rank_up"]] == [1, 1]
    info = found["gpumon_rank_info"][0][0]
    assert (info["run_id"], info["node"], info["backend"], info["torch"]) == ("night", "0", "cpu", "2.15.0")
    assert [value for _, value in found["gpumon_rank_restarts_total"]] == [1, 1]
    assert [value for _, value in found["gpumon_bucket_bytes"]] == [64 * MIB, 64 * MIB]
    assert [value for _, value in found["gpumon_host_pinned_bytes"]] == [8 * MIB, 8 * MIB]
    assert {labels["device"] for labels, _ in found["gpumon_reserved_bytes"]} == {"cpu"}
    peaks = {labels["phase"]: value for labels, value in found["gpumon_peak_bytes"] if labels["rank"] == "0"}
    assert peaks["backward"] - peaks["forward"] == 16 * MIB
    assert all(value == 3 for _, value in found["gpumon_allocator_retries_total"])

    lines = sum(value for labels, value in found["gpumon_memory_bytes"] if labels["rank"] == "0")
    assert lines == found["gpumon_reserved_bytes"][0][1]
    bounded = {"training", "run", "rank", "device", "line", "phase", "state", "code", "severity", "version"}
    for name, each in found.items():
        if name != "gpumon_rank_info":
            assert all(labels.keys() <= bounded for labels, _ in each), name
        assert len({tuple(labels.items()) for labels, _ in each}) == len(each), name


def test_promtool_finds_nothing_to_say_of_the_metrics(exporter, ranks) -> None:
    until(lambda: "gpumon_finding_open" in get(exporter[1]))
    checked = subprocess.run(
        [tool("promtool"), "check", "metrics"], input=get(exporter[1]), capture_output=True, text=True, check=False
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_promtool_accepts_configuration_and_rules() -> None:
    for verb, name in (("rules", "gpumon.rules.yml"), ("config", "prometheus.yml")):
        checked = subprocess.run(
            [tool("promtool"), "check", verb, name], cwd=RULES, capture_output=True, text=True, check=False
        )
        assert checked.returncode == 0, checked.stdout + checked.stderr


def test_a_prometheus_server_scrapes_it_and_fires_the_rule(exporter, ranks, tmp_path) -> None:
    program = tool("prometheus")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        here = f"127.0.0.1:{free.getsockname()[1]}"
    target = exporter[1].split("/")[2]
    text = (RULES / "prometheus.yml").read_text().replace("127.0.0.1:9464", target).replace("15s", "1s")
    (tmp_path / "prometheus.yml").write_text(text)
    shutil.copy(RULES / "gpumon.rules.yml", tmp_path)
    server = subprocess.Popen(
        [program, f"--config.file={tmp_path / 'prometheus.yml'}", f"--storage.tsdb.path={tmp_path / 'data'}",
         f"--web.listen-address={here}", "--log.level=error"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip

    def ask(path: str) -> Any:
        try:
            return json.loads(get(f"http://{here}/api/v1/{path}"))["data"]
        except OSError:
            return None  # not up yet

    try:
        alert = until(
            lambda: [
                each
                for each in (ask("alerts") or {"alerts": []})["alerts"]
                if each["labels"]["alertname"] == "GpumonOomAhead" and each["state"] == "firing"
            ]
        )
        assert {each["labels"]["training"] for each in alert} == {"grow.py"}
        assert "will run out of GPU memory" in alert[0]["annotations"]["summary"]
        recorded = until(lambda: ask("query?query=training:gpumon_reserved_bytes:sum")["result"])
        assert recorded[0]["metric"]["training"] == "grow.py"
        assert float(recorded[0]["value"][1]) > 2 * 512 * MIB
        (up,) = ask("query?query=up{job='gpumon'}".replace("'", "%22").replace("{", "%7B").replace("}", "%7D"))[
            "result"
        ]
        assert up["value"][1] == "1"
        for expression in dashboard():
            query = "query?" + urllib.parse.urlencode({"query": expression})
            if "gpumon_device_" not in expression:  # these ranks train on the CPU
                until(lambda query=query: ask(query)["result"])
            assert ask(query) is not None, expression
    finally:
        server.terminate()
        server.wait()


def test_a_port_in_use_is_one_sentence(exporter, environment) -> None:
    taken = exporter[1].split("/")[2]
    ran = subprocess.run([*EXPORTER, "--listen", taken], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert ran.stderr == f"Error: cannot listen at {taken}: Address already in use.\n"


def test_without_the_extra_it_says_how_to_get_it(environment) -> None:
    script = "import sys; sys.modules['prometheus_client'] = None; from gpumon.cli import main; main(sys.argv[1:])"
    ran = subprocess.run(
        [sys.executable, "-c", script, *EXPORTER[3:]], env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 1
    assert ran.stderr.startswith("Error: prometheus_client is not installed")
    assert len(ran.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [("127.0.0.1:9464", ("127.0.0.1", 9464)), ("[::1]:1", ("::1", 1)), (":80", ("0.0.0.0", 80)), ("a:0", ("a", 0))],
)
def test_an_address_is_read(text: str, expected: tuple[str, int]) -> None:
    assert address(text) == expected


@pytest.mark.parametrize("text", ["9464", "a:b", "a:70000", ""])
def test_a_wrong_address_is_a_usage_error(text: str) -> None:
    import click

    with pytest.raises(click.UsageError):
        address(text)


def test_a_signal_ends_it_cleanly(exporter) -> None:
    """The last one: nothing is served afterwards."""
    process, url = exporter
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 0
    assert process.stderr.read() == ""
    with pytest.raises(OSError, match="refused"):
        get(url)


@pytest.mark.parametrize(("later_s", "counts"), [(55, True), (65, False)])
def test_a_phase_s_peak_is_that_of_the_last_minute(later_s: int, counts: bool) -> None:
    from prometheus_client import CollectorRegistry, generate_latest
    from watched import Run

    from gpumon.analysis import Reporter
    from gpumon.export.prometheus import JobReports, Jobs
    from gpumon.session.store import SessionStore

    run = Run(extra=1 << 30).hello().model().steps(0, 3)
    run.t_ns += later_s * 1_000_000_000
    run.extra = 0
    store = SessionStore()
    for received in run.steps(3, 1).synced().events:
        store.apply(received)
    frame = store.frame(run.events[-1].unix_ns)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Jobs(lambda: (JobReports("bench", "0", frame, Reporter().report(frame)),)))
    told = samples(generate_latest(registry).decode())["gpumon_peak_bytes"]
    peaks = {labels["phase"]: value for labels, value in told}
    *before, last = [
        next(p.allocated_peak for p in record.phases if p.phase == "backward") for record in frame.ranks[0].steps
    ]
    assert min(before) > last
    assert peaks["backward"] == (max(before) if counts else last)


def test_a_job_of_more_than_1024_ranks_is_served_with_1024() -> None:
    from prometheus_client import CollectorRegistry, generate_latest
    from synthetic import Run

    from gpumon.analysis import Reporter
    from gpumon.export.prometheus import JobReports, Jobs
    from gpumon.session.store import SessionStore

    store = SessionStore()
    for rank in range(1030):
        for received in Run(rank=rank, nonce=f"n{rank}").picture():
            store.apply(received)
    frame = store.frame(0)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Jobs(lambda: (JobReports("bench", "0", frame, Reporter().report(frame)),)))
    told = samples(generate_latest(registry).decode())["gpumon_rank_up"]
    assert {int(labels["rank"]) for labels, _ in told} == set(range(1024))
