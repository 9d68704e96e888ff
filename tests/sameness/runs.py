"""Runs the scripts bare and watched, and says in what two runs differ."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gpumon_agent.shim import launch

FOLDER = Path(__file__).parent
SCRIPTS = FOLDER / "scripts"
HUNG_S = 180  # of a run that takes 2 on a machine of its own
LOGGED = re.compile(r"(?<=[IWEF])\d{4} [\d:.]+ \d+ |(?<=[A-Z]:)\d{4}-\d\d-\d\d [\d:]+ \d+:\d+")
OPTIONS = re.compile(r"^# same: (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Script:
    """One script, or one case of a script that takes the case's name as its argument.

    Its line `# same: …` may say, with "; " between:
    cases=a,b,c     each is a test of its own
    on=cpu          or on=cuda: it makes no sense on the other
    fresh           a process of its own, where what Python does at its start matters
    whole           the interpreter's end, too, where what Python does there matters
    command=-m x    a process of its own, with these arguments of Python before the script
    needs=module    skipped without it
    """

    path: Path
    case: str
    options: Mapping[str, str]

    @property
    def name(self) -> str:
        return f"{self.path.stem}[{self.case}]" if self.case else self.path.stem

    @property
    def fresh(self) -> bool:
        return "fresh" in self.options or "command" in self.options

    def argv(self) -> list[str]:
        return [str(self.path), *([self.case] if self.case else [])]


def scripts(device: str) -> list[Script]:
    """All that run on cpu or cuda."""
    found = []
    for path in sorted(SCRIPTS.glob("*.py")):
        if path.name == "same.py":
            continue
        line = OPTIONS.search(path.read_text())
        words = line.group(1).split("; ") if line else []
        options = dict(word.partition("=")[::2] for word in words)
        if options.get("on", device) == device:
            found += [Script(path, case, options) for case in options.get("cases", "").split(",")]
    return found


MODES = ("run", "run-off", "watch", "watch-off")
"""`gpumon run` or the two lines; with the governor, or without it: then every step is sampled. First and last, and both
in between, are opposites. Under `gpumon run` the hooks of idle steps are compiled, if they can be."""


@dataclass
class Run:
    """What a user sees of one run."""

    code: int | None
    out: str
    err: str
    told: dict[str, list[Any]] = field(default_factory=dict)
    worked: dict[str, Any] = field(default_factory=dict)


def differences(a: Run, b: Run) -> list[str]:
    """Each field in which they differ, with both values."""
    found = []
    if a.code != b.code:
        found.append(f"exit code: {a.code} → {b.code}")
    for name in ("out", "err"):
        one, other = normal(getattr(a, name)), normal(getattr(b, name))
        if one != other:
            found.append(f"std{name}:\n{lines(one, other)}")
    for name in [*a.told, *(name for name in b.told if name not in a.told)]:
        one, other = (normal(json.dumps(run.told.get(name))) for run in (a, b))
        if one != other:
            found.append(f"{name}: {short(one, other)}")
    return found


def normal(text: str) -> str:
    """Without addresses of objects, and the times and processes in logs of torch: nothing else may differ."""
    return LOGGED.sub("…", re.sub(r"0x[0-9a-f]{6,}", "0x…", text))


def lines(one: str, other: str) -> str:
    import difflib

    return "\n".join(list(difflib.unified_diff(one.splitlines(), other.splitlines(), lineterm="", n=1))[2:60])


def short(one: str, other: str) -> str:
    """Both, from shortly before the first character in which they differ."""
    first = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    start = max(0, first - 60)
    return f"…{one[start : first + 300]} → …{other[start : first + 300]}"


class Runs:
    """Of one device. One bare run serves all modes; where something differs, a second shows whether bare runs do."""

    def __init__(self, device: str, environment: Mapping[str, str], folder: Path, native: Path | None) -> None:
        self.device = device
        self._folder = folder
        self._bare: dict[str, Run] = {}
        self._servers: dict[bool, subprocess.Popen[str]] = {}
        self._environment = {
            **{k: v for k, v in environment.items() if not k.startswith(("GPUMON_", "COVERAGE_", "PYTEST_"))},
            "PYTHONHASHSEED": "0",
            "OMP_NUM_THREADS": "1",
            "XDG_RUNTIME_DIR": str(folder / "run"),
            "HOME": str(folder / "home"),
            "TMPDIR": str(folder / "tmp"),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "SAME_DEVICE": device,
            "SAME_OUT": str(folder / "told.jsonl"),
            "SAME_WATCH": "0",
        }
        for name in ("run", "home", "tmp", "inductor"):
            (folder / name).mkdir(mode=0o700)
        if native is not None:
            (folder / "home" / ".cache" / "gpumon").mkdir(parents=True, mode=0o700)
            shutil.copytree(native.parent, folder / "home" / ".cache" / "gpumon" / "native")

    def compare(self, script: Script, mode: str) -> None:
        """Fail with everything in which a watched run differs from a bare one, if a second bare one does not."""
        check(script)
        bare = self._bare_run(script, 0)
        if bare.code is None:
            pytest.fail("the bare run hangs", pytrace=False)
        watched = self._run(script, mode)
        if watched.worked and not watched.worked["events"]:
            pytest.fail("the agent saw nothing", pytrace=False)
        if watched.worked and watched.worked["off"]:
            pytest.fail(f"parts of the agent are off: {', '.join(watched.worked['off'])}", pytrace=False)
        found = differences(bare, watched)
        if found and (itself := differences(bare, self._bare_run(script, 1))):
            pytest.fail("two bare runs differ:\n" + "\n".join(itself), pytrace=False)
        if found:
            pytest.fail("\n".join(found), pytrace=False)

    def _bare_run(self, script: Script, number: int) -> Run:
        name = f"{script.name} {number}"
        if name not in self._bare:
            self._bare[name] = self._run(script, "bare")
        return self._bare[name]

    def _run(self, script: Script, mode: str) -> Run:
        environment = {**self._environment}
        if mode.startswith("watch"):
            environment["SAME_WATCH"] = "1"
        environment["GPUMON_GOVERNOR"] = "off" if mode.endswith("-off") else "on"
        environment["GPUMON_NATIVE"] = "on" if mode.startswith("run") else "off"
        cwd = self._folder / "cwd"
        shutil.rmtree(cwd, ignore_errors=True)
        cwd.mkdir()
        told = Path(environment["SAME_OUT"])
        told.unlink(missing_ok=True)
        out, err, worked = (self._folder / name for name in ("out.txt", "err.txt", "worked.json"))
        worked.unlink(missing_ok=True)
        under_run = mode.startswith("run")
        if script.fresh:
            code = self._fresh(script, environment, cwd, out, err, under_run=under_run)
        else:
            code = self._forked(script, environment, cwd, out, err, worked, under_run=under_run)
        run = Run(code, out.read_text(errors="replace"), err.read_text(errors="replace"))
        for line in told.read_text().splitlines() if told.exists() else ():
            name, value = json.loads(line)
            run.told.setdefault(name, []).append(value)
        if worked.exists():
            run.worked = json.loads(worked.read_text())
        return run

    def _fresh(
        self, script: Script, environment: dict[str, str], cwd: Path, out: Path, err: Path, *, under_run: bool
    ) -> int | None:
        command = [*script.options.get("command", "").split(), *script.argv()]
        first = [sys.executable, "-m", "gpumon", "run"] if under_run else [sys.executable]
        if under_run and not command[0].endswith(".py"):
            first.append(sys.executable)
        with out.open("w") as stdout, err.open("w") as stderr:
            process = subprocess.Popen(
                [*first, *command], env=environment, cwd=cwd, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
                start_new_session=True,
            )  # fmt: skip
            try:
                return process.wait(HUNG_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()
                return None

    def _forked(
        self, script: Script, environment: dict[str, str], cwd: Path, out: Path, err: Path, worked: Path,
        *, under_run: bool,
    ) -> int | None:  # fmt: skip
        server = self._server(under_run)
        if under_run:
            environment = launch.environment(environment)
        job = {
            "argv": script.argv(), "env": environment, "cwd": str(cwd), "out": str(out), "err": str(err),
            "timeout": HUNG_S, "worked": str(worked), "whole": "whole" in script.options,
        }  # fmt: skip
        assert server.stdin is not None
        assert server.stdout is not None
        print(json.dumps(job), file=server.stdin, flush=True)
        code: int | None = json.loads(server.stdout.readline())["code"]
        return code

    def _server(self, under_run: bool) -> subprocess.Popen[str]:
        if under_run not in self._servers:
            environment = launch.environment(self._environment) if under_run else self._environment
            begin = f"import sys; sys.path.insert(0, {str(FOLDER)!r}); import zygote; zygote.serve()"
            self._servers[under_run] = subprocess.Popen(
                [sys.executable, "-c", begin],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        return self._servers[under_run]

    def close(self) -> None:
        for server in self._servers.values():
            server.communicate()


def check(script: Script) -> None:
    """Skip what this environment does not have."""
    if "needs" in script.options:
        pytest.importorskip(script.options["needs"])


def each(device: str) -> Iterator[Any]:
    """A parameter for each script and mode. All but one mode, and its opposite on the other device, are `long`."""
    elsewhere = {script.name for script in scripts("cuda" if device == "cpu" else "cpu")}
    for script in scripts(device):
        on_the_cpu = zlib.crc32(script.name.encode()) % len(MODES)
        opposite = len(MODES) - 1 - on_the_cpu
        normally = {on_the_cpu if device == "cpu" else opposite}
        if script.name not in elsewhere:
            normally = {on_the_cpu, opposite}
        for at, mode in enumerate(MODES):
            marks = () if at in normally else pytest.mark.long
            yield pytest.param(script, mode, id=f"{script.name}-{mode}", marks=marks)
