"""The command group: lazy, quick, and clear about what it does not know."""

import os
import subprocess
import sys

import pytest

from gpumon import __version__
from gpumon.cli import VERBS

HEAVY = ("torch", "textual", "rich", "zmq", "pynvml", "psutil", "numpy", "_ssl")


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


@pytest.mark.parametrize("args", [("attach", "nobody"), ("replay", "nothing.gpumon")])
def test_a_viewer_speaks_no_tls(args):
    assert "_ssl" not in imported_by(*args)


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


def test_bash_completes_verbs_and_options_with_what_completion_prints(tmp_path):
    (tmp_path / "gpumon").write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{ENTRY}" "$@"\n')
    (tmp_path / "gpumon").chmod(0o755)
    script = """eval "$(gpumon completion bash)" && complete -p gpumon
        for words in "gpumon rec" "gpumon ls --wa"; do
            COMP_WORDS=($words); COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
            COMPREPLY=(); _gpumon_completion gpumon; echo "${COMPREPLY[@]}"
        done"""
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env={"PATH": path}, timeout=300)
    assert done.stdout.splitlines()[1:] == ["record", "--watch"], done.stderr
    assert done.stderr == ""


ENTRY = "from gpumon.cli import main; main(prog_name='gpumon')"


@pytest.mark.parametrize(
    ("shell", "part"), [("zsh", "compdef _gpumon_completion gpumon"), ("fish", "complete --no-files")]
)
def test_other_shells_are_told_what_to_load(shell, part):
    shown = gpumon("completion", shell)
    assert (shown.returncode, part in shown.stdout, shown.stderr) == (0, True, "")


def test_a_shell_that_is_not_known_is_told_the_known_ones():
    shown = gpumon("completion", "tcsh")
    assert shown.returncode == 2
    assert shown.stderr.endswith("'tcsh' is not one of 'bash', 'zsh', 'fish'.\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--help-me",), "No such option '--help-me'. Did you mean '--help'?"),
        (("--nmae", "x", "train.py"), "No such option '--nmae'. Did you mean '--name'?"),
        (("--nmae=x", "train.py"), "No such option '--nmae'. Did you mean '--name'?"),
        (("--track-cpu", "-z", "train.py"), "No such option '-z'."),
        (("--", "--help-me"), "No such option '--help-me'. Did you mean '--help'?"),
    ],
)
def test_an_option_that_run_has_not_is_answered_by_gpumon(words, said):
    shown = gpumon("run", *words)
    assert shown.returncode == 2
    assert shown.stderr.splitlines()[-1] == f"Error: {said}"
    assert shown.stderr.startswith("Usage: python -m gpumon run ")


@pytest.mark.parametrize("before", [(), ("-u",), ("--check-hash-based-pycs", "default")])
def test_python_s_own_options_are_passed_on(before):
    shown = gpumon("run", *before, "-c", "print(1)")
    assert (shown.returncode, shown.stdout) == (0, "1\n"), shown.stderr
