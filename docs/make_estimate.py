"""Runs the commands of docs/estimate.md and puts what they print below them: `python docs/make_estimate.py`."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

PAGE = Path(__file__).with_name("estimate.md")
BLOCK = re.compile(r"^```console\n\$ (gpumon [^\n]*)\n.*?^```$", re.MULTILINE | re.DOTALL)
CONFIG = re.compile(r"^<!-- (\S+\.json): (\{.*?\}) -->$", re.MULTILINE)


def written() -> str:
    """The page with its outputs as they are now."""
    text = PAGE.read_text()
    with tempfile.TemporaryDirectory() as folder:
        for name, content in CONFIG.findall(text):
            (Path(folder) / name).write_text(json.dumps(json.loads(content)))

        def run(block: re.Match[str]) -> str:
            words = shlex.split(block[1], comments=True)[1:]
            done = subprocess.run(
                [sys.executable, "-m", "gpumon", *words], cwd=folder, capture_output=True, text=True, check=False
            )
            assert done.returncode in (0, 1, 3), done.stderr
            return f"```console\n$ {block[1]}\n{_shortened(done.stdout)}```"

        return BLOCK.sub(run, text)


def _shortened(printed: str) -> str:
    """Of JSON, one object with the first of each list and one line of lists."""
    if not printed.startswith("{"):
        return printed
    content = json.loads(printed.splitlines()[0])
    for name in ("phases", "remedies", "layers"):
        if name in content:
            content[name] = content[name][:1]
    text = json.dumps(content, indent=1)
    return re.sub(r"\n {2,}", " ", text) + "\n"


if __name__ == "__main__":
    PAGE.write_text(written())
