"""Interpreters too old for the agent, started by a watched command: they run as if gpumon were not there."""

from __future__ import annotations

import ast
import shutil
import subprocess
from pathlib import Path

import pytest

from gpumon_agent import shim

SITECUSTOMIZE = Path(shim.__file__).parent / "on_path" / "sitecustomize.py"
OLD = ("2.7", "3.4", "3.5", "3.6", "3.7", "3.8", "3.9")
STARTS = """
import subprocess, sys
done = subprocess.run(sys.argv[1:], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
print(done.returncode, done.stdout.decode(), done.stderr.decode())
"""
CHILD = "import sys; print(sys.version_info[:2], sys.path, getattr(sys, 'users_own', None), len(sys.meta_path) < 6)"


def interpreters() -> list[str]:
    """Those on PATH, and pyenv's."""
    on_path = [found for version in OLD if (found := shutil.which(f"python{version}"))]
    of_pyenv = [path for version in OLD for path in Path.home().glob(f".pyenv/versions/{version}.*/bin/python")]
    here = sorted({str(path) for path in (*on_path, *of_pyenv)})
    return [path for path in here if subprocess.run([path, "-c", ""], capture_output=True).returncode == 0]


@pytest.mark.parametrize("users_own", [False, True])
def test_they_start_silently_and_run_the_sitecustomize_that_is_shadowed(commands, users_own):
    found = interpreters()
    if not found:
        pytest.skip("no Python older than 3.10 here")
    if users_own:
        (commands.folder / "own").mkdir()
        commands.exact("import sys; sys.users_own = __file__.rstrip('c')", "own/sitecustomize.py")
        commands.environment["PYTHONPATH"] = str(commands.folder / "own")
    commands.environment["PYTHONDONTWRITEBYTECODE"] = "1"
    script = commands.exact(STARTS, "starts.py")
    for interpreter in found:
        bare = commands.plain("python", script, interpreter, "-c", CHILD)
        watched = commands.watched(script, interpreter, "-c", CHILD)
        assert watched.stdout == bare.stdout
        assert watched.stdout.startswith("0 ")
        assert ("own/sitecustomize.py" in watched.stdout) == users_own
        assert watched.stderr == ""


def test_the_file_is_written_in_what_python_2_can_read():
    text = SITECUSTOMIZE.read_bytes().decode("ascii")  # without a coding line Python 2 takes nothing else
    for node in ast.walk(ast.parse(text)):
        assert not isinstance(node, (ast.JoinedStr, ast.AnnAssign, ast.NamedExpr, ast.AsyncFunctionDef, ast.Nonlocal))
        if isinstance(node, ast.FunctionDef):
            arguments = node.args
            assert node.returns is None
            assert not arguments.kwonlyargs
            assert not arguments.posonlyargs
            assert not any(each.annotation for each in arguments.args)
        if isinstance(node, ast.ClassDef):
            assert not node.keywords
        if isinstance(node, ast.Call):
            assert not (isinstance(node.func, ast.Name) and node.func.id == "print")
        if isinstance(node, ast.Raise):
            assert node.cause is None
