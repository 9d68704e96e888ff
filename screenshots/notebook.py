"""Runs examples/notebook.ipynb on the virtual GPU and takes the picture notebook.png of two of its cells.

    python screenshots/notebook.py [dark]

Needs nbclient, nbconvert, ipykernel and a headless Chromium. `dark` makes notebook-dark.png, to look at. What the
virtual GPU itself says is left out.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbconvert import HTMLExporter

from gpumon import virtual_gpu

HERE = Path(__file__).parent
NOTEBOOK = HERE.parent / "examples" / "notebook.ipynb"
SIZE = (900, 1680)
SHOWN = ("model = ", "def evaluate")


def main(theme: str = "light") -> None:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("There is no Chromium.")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    session = virtual_gpu.environment(memory="16GiB")
    try:
        NotebookClient(notebook, timeout=300).execute(env=session)
    finally:
        virtual_gpu.remove_session(session["VGPU_SESSION"])
    notebook.cells = [cell for cell in notebook.cells if any(text in cell.source for text in SHOWN)]
    for cell in notebook.cells:
        cell.outputs = [each for each in cell.outputs if each.get("name") != "stderr"]
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        page.write_text(HTMLExporter(theme=theme).from_notebook_node(notebook)[0])
        picture = HERE / ("notebook.png" if theme == "light" else f"notebook-{theme}.png")
        root = ["--no-sandbox"] if os.geteuid() == 0 else []
        subprocess.run(
            [chromium, "--headless=new", *root, "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={folder}/home",
             "--window-size={},{}".format(*SIZE), f"--screenshot={picture}", page.as_uri()],
            check=True, capture_output=True, timeout=300,
        )  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
