"""The command group: lazy, quick, and clear about what it does not know."""

import os
import subprocess
import sys

import pytest

from gpumon import __version__
from gpumon.cli import VERBS

HEAVY = ("torch", "textual", "rich", "zmq", "pynvml", "psutil", "numpy")


def gpumon(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gpumon", *args], capture_output=True, text=True, env={**os.environ, **env}, timeout=300
    )


def imported_by(*args: str) -> set[str]:
    """The heavy modules in memory after `gpumon ARGS` ended."""
    code = (
        "import sys\nfrom gpumon.cli import main\n"
        f"try:\n    main({list(args)!r}, prog_name='gpumon')\nexcept SystemExit:\n    pass\n"
        f"print('imported:', *sorted(set({HEAVY!r}) & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    return set(done.stderr.rsplit("imported:", 1)[1].split())


@pytest.mark.parametrize("args", [(), ("--help",), ("--version",), ("nonsense",)])
def test_help_imports_no_verb(args):
    assert imported_by(*args) == set()


def test_ls_imports_neither_torch_nor_the_screen():
    assert not imported_by("ls") & {"torch", "textual", "numpy", "pynvml"}


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself(verb):
    shown = gpumon(verb, "--help")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("Usage: python -m gpumon " + verb)
    assert not shown.stderr


@pytest.mark.parametrize("verb", VERBS)
def test_no_help_needs_torch(verb):
    assert "torch" not in imported_by(verb, "--help")


def test_version():
    assert gpumon("--version").stdout == f"gpumon {__version__}\n"


def test_a_mistyped_verb_is_answered_with_the_nearest():
    shown = gpumon("atach")
    assert shown.returncode == 2
    assert "No such command 'atach'. Did you mean 'attach'?" in shown.stderr


@pytest.mark.parametrize("verb", ["--help", "doctor"])
def test_a_full_disk_behind_the_output_is_one_sentence(verb):
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" -m gpumon "$1" >/dev/full', sys.executable, verb],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, "Error: the output cannot be written: No space left on device.\n")


@pytest.mark.parametrize("verb", ["--help", pytest.param("doctor", marks=pytest.mark.torch)])
def test_a_closed_output_is_written_to_nobody(verb):
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" -m gpumon "$1" >&-', sys.executable, verb],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def completing(**env: str) -> str:
    """What the shell hears when it asks the entry point `gpumon`."""
    code = "from gpumon.cli import main; main(prog_name='gpumon')"
    asked = {"PATH": os.environ["PATH"], **env}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=asked, timeout=300).stdout


def test_the_shell_completes_verbs():
    verbs = completing(_GPUMON_COMPLETE="bash_complete", COMP_WORDS="gpumon re", COMP_CWORD="1")
    assert verbs.split() == ["plain,record", "plain,replay", "plain,report"]


def test_the_shell_is_told_what_to_load():
    assert "_GPUMON_COMPLETE=zsh_complete gpumon" in completing(_GPUMON_COMPLETE="zsh_source")
