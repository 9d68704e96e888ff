"""`gpumon run` becomes the command: whatever it prints, returns and sees of itself is as without."""

from __future__ import annotations

import signal
import sys

import pytest

from gpumon_agent.shim import launch

RAISES_AT_ONCE = "raise ValueError('on line 1')\n"
EXITS_WITH_7 = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(7)\n"
KILLS_ITSELF = "import os, signal; os.kill(os.getpid(), signal.SIGTERM)\n"
SAYS_WHERE_IT_IS = "import sys; print(__name__, __file__, sys.argv, sys.path, 'sitecustomize' in sys.modules)\n"
FAILS_IN_AN_IMPORT = "import torch.no_such_part\n"
FAILS_IN_AN_OPTIMIZER = "import torch\ntorch.optim.AdamW([])\n"
FAILS_IN_BACKWARD = """
import torch
class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2
    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("in backward")
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
Fails.apply(model(torch.zeros(1, 2))).sum().backward()
"""
SHOWS_TORCH_AS_IMPORTED = "import torch; print(type(torch.__spec__), type(torch.__loader__), torch.__spec__.origin)\n"
SYNTAX_ERROR = "def f(:\n"


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(text, id=name.lower())
        for name, text in {**globals()}.items()
        if name.isupper() and name.startswith(("RAISES", "EXITS", "SAYS", "FAILS", "SHOWS", "SYNTAX"))
    ],
)
def test_output_traceback_and_exit_code_are_the_scripts_own(commands, text):
    script = commands.exact(text)
    without = commands.plain(sys.executable, script, "--epochs", "3")
    with_gpumon = commands.watched(script, "--epochs", "3")
    assert with_gpumon.stderr == without.stderr
    assert with_gpumon.stdout == without.stdout
    assert with_gpumon.returncode == without.returncode


def test_a_signal_ends_the_command_itself(commands):
    assert commands.watched(commands.exact(KILLS_ITSELF)).returncode == -signal.SIGTERM


def test_the_agent_alone_starts_a_script_too(commands):
    script = commands.exact(EXITS_WITH_7)
    done = commands.plain(sys.executable, "-m", "gpumon_agent", "--name", "night run", script, "--name", "theirs")
    assert (done.returncode, done.stdout, done.stderr) == (7, "out\n", "err\n")


def test_a_module_and_an_explicit_python_run_as_they_are(commands):
    (commands.folder / "pkg").mkdir()
    commands.exact("import sys; print(sys.argv[1:])", "pkg/train.py")
    assert commands.watched("-m", "pkg.train", "-m", "--name", "x").stdout == "['-m', '--name', 'x']\n"
    assert commands.watched("python", "-u", "pkg/train.py", "-h").stdout == "['-h']\n"


def test_without_torch_nothing_of_ours_is_loaded(commands):
    script = commands.exact("import sys; print(sorted(sys.modules))")
    assert commands.watched(script).stdout == commands.plain(sys.executable, script).stdout


def test_a_sitecustomize_and_a_usercustomize_of_the_users_own_still_run(commands):
    commands.exact("import sys; sys.users_own = __file__", "sitecustomize.py")
    script = commands.exact("import sys, sitecustomize; print(sys.users_own, sitecustomize.__file__)")
    folder = str(commands.folder)
    without = commands.plain(sys.executable, script, PYTHONPATH=folder)
    assert commands.watched(script, PYTHONPATH=folder).stdout == without.stdout
    assert "sitecustomize.py" in without.stdout


def test_a_sitecustomize_that_raises_is_reported_as_without_gpumon(commands):
    commands.exact("raise RuntimeError('theirs')", "sitecustomize.py")
    script = commands.exact("print('goes on')")
    environment = {"PYTHONPATH": str(commands.folder)}
    without = commands.plain(sys.executable, script, **environment)
    with_gpumon = commands.plain(sys.executable, script, **launch.environment(environment))
    assert "theirs" in without.stderr
    assert (with_gpumon.stderr, with_gpumon.stdout) == (without.stderr, without.stdout)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["missing.py", "--epochs", "3"], "missing.py: no such file"),
        (["python", "missing.py"], "missing.py: no such file"),
        (["no-such-launcher", "train.py"], "neither a script nor a command"),
        (["python", "-I", "train.py"], "-I starts the script without the agent"),
        (["-uE", "train.py"], "-E starts the script without the agent"),
        (["-m"], "needs a value"),
        ([], "nothing to run"),
    ],
)
def test_what_cannot_start_is_told_in_one_sentence(commands, words, says):
    commands.exact("print('started')")
    done = commands.watched(*words)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("gpumon: ")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_command_that_may_not_be_executed_ends_with_1(commands):
    path = commands.folder / "torchrun"
    path.write_bytes(b"\x7fELF nothing that can run")
    path.chmod(0o755)
    done = commands.watched("./torchrun", "train.py")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("before", "after"),
    [(None, []), ("", []), ("/a", ["/a"]), ("/a:", ["/a", ""]), (f"{launch.ON_PATH}:/a", ["/a"])],
)
def test_pythonpath_keeps_what_it_held(before, after):
    outer = {} if before is None else {"PYTHONPATH": before}
    assert launch.environment(outer)["PYTHONPATH"].split(":") == [launch.ON_PATH, *after]


def test_options_travel_in_the_environment():
    inner = launch.environment({"A": "1"}, name="night run", track_cpu=True)
    assert inner["A"] == "1"
    assert inner["GPUMON_NAME"] == "night run"
    assert inner["GPUMON_TRACK_CPU"] == "1"
