"""The two distributions, built and put into environments that hold what they declare and nothing else."""

from __future__ import annotations

import email
import importlib.metadata as metadata
import os
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
INSTALLED_BYTES_MAX = 30 << 20
"""All that gpumon adds beside torch, its dependencies included and byte-compiled."""


def build(project: Path, folder: Path) -> Path:
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=project,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="session")
def wheels(tmp_path_factory) -> dict[str, Path]:
    """Import name of the outermost package → its wheel."""
    return {
        "gpumon": build(ROOT, tmp_path_factory.mktemp("gpumon")),
        "gpumon_agent": build(ROOT / "agent", tmp_path_factory.mktemp("agent")),
    }


def required(wheel: Path) -> set[str]:
    """The installed distributions that a wheel needs, and what those need, extras left out."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        declared = email.message_from_bytes(archive.read(name)).get_all("Requires-Dist", [])
    return closure(declared)


def closure(lines: Iterable[str], extras: Iterable[str] = ()) -> set[str]:
    """Names of the distributions that requirement lines mean here, and of those that they need in turn."""
    found: set[str] = set()
    for requirement in map(Requirement, lines):
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": e}) for e in ("", *extras)):
            name = canonicalize_name(requirement.name)
            found |= {name} | closure(metadata.requires(name) or [], requirement.extras)
    return found


def tops(name: str) -> set[Path]:
    """What a distribution put directly into site-packages."""
    distribution = metadata.distribution(name)
    base = Path(str(distribution.locate_file("")))
    return {base / file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}


def environment(wheel: Path, folder: Path) -> Path:
    """The Python of a new environment with a wheel and its declared dependencies, and nothing else."""
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for name in required(wheel):
        for top in tops(name):
            (site / top.name).symlink_to(top)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return folder / "bin" / "python"


@pytest.fixture(scope="session")
def without_torch(wheels, tmp_path_factory) -> Path:
    return environment(wheels["gpumon"], tmp_path_factory.mktemp("without_torch"))


def run(python: Path, *args: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
    return subprocess.run([str(python), "-W", "error", *args], capture_output=True, text=True, env=env, timeout=300)


IMPORT_ALL = """
import importlib, pkgutil, sys
OPTIONAL = (
    "torch", "prometheus_client", "keras", "lightning", "transformers", "mlflow", "opentelemetry", "tabulate",
    "tensorboard", "trackio", "wandb",
)  # fmt: skip
package = importlib.import_module(sys.argv[1])
for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    if not found.name.endswith("__main__"):
        try:
            importlib.import_module(found.name)
        except ModuleNotFoundError as error:
            assert error.name.partition(".")[0] in OPTIONAL, found.name
            print(found.name)
"""


def test_every_viewer_module_runs_on_what_is_declared_and_without_torch(without_torch):
    done = run(without_torch, "-c", IMPORT_ALL, "gpumon")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [
        "gpumon.analysis.estimate.on_meta", "gpumon.analysis.estimate.ranks", "gpumon.cli.exporting",
        "gpumon.demo.train", "gpumon.export.prometheus", "gpumon.export.trackers.to_mlflow",
        "gpumon.export.trackers.to_otlp", "gpumon.export.trackers.to_tensorboard", "gpumon.export.trackers.to_trackio",
        "gpumon.export.trackers.to_wandb", "gpumon.host.context_probe", "gpumon.snapshots.replay_child",
    ]  # fmt: skip


def test_the_agent_runs_on_what_is_declared_and_torch(wheels, tmp_path):
    done = run(environment(wheels["gpumon_agent"], tmp_path), "-c", IMPORT_ALL, "gpumon_agent")
    assert done.returncode == 0, done.stderr
    assert not {f"gpumon_agent.{m}" for m in ("wire", "endpoint", "publisher", "recorder")} & set(done.stdout.split())


def test_the_agent_alone_needs_two_packages(wheels):
    assert required(wheels["gpumon_agent"]) == {"msgspec", "pyzmq"}


def test_everything_that_is_no_python_file_is_packed(wheels):
    with zipfile.ZipFile(wheels["gpumon"]) as archive:
        packed = set(archive.namelist())
    tracked = subprocess.run(
        ["git", "ls-files", "gpumon", "agent/gpumon_agent"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert {name.removeprefix("agent/") for name in tracked.stdout.split()} <= packed


@pytest.mark.torch
def test_it_adds_no_more_than_the_budget_beside_torch(wheels):
    names = required(wheels["gpumon"]) - closure(["torch"])
    size = {
        name: sum(
            path.stat().st_size for file in metadata.files(name) or () if (path := Path(str(file.locate()))).is_file()
        )
        for name in sorted(names)
    }
    with zipfile.ZipFile(wheels["gpumon"]) as archive:
        size["torch-gpumon"] = sum(file.file_size for file in archive.infolist())
    assert sum(size.values()) < INSTALLED_BYTES_MAX, size


def test_the_demo_without_torch_says_how_to_get_it(without_torch):
    shown = run(without_torch, "-m", "gpumon", "demo")
    assert shown.returncode == 1
    assert shown.stderr.strip().endswith("get it with: pip install torch")
    assert "Traceback" not in shown.stderr


def test_the_doctor_without_torch_says_how_to_get_it(without_torch):
    shown = run(without_torch, "-m", "gpumon", "doctor")
    assert shown.returncode == 1
    assert "get it with: pip install torch" in shown.stdout
    assert shown.stderr == ""
