"""`%%gpumon` in real kernels, and what a browser shows of it.

One notebook is run three times: with the magic, without it, and with the magic where there is no CUDA device.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import virtual

from gpumon import virtual_gpu as vgpu

pytestmark = [pytest.mark.integration, pytest.mark.torch]
nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

MIB = 1 << 20
BIG = 1000 * 1000 * 4  # bytes of the tensors that are let go of
EXAMPLE = Path(__file__).parents[2] / "examples" / "notebook.ipynb"

CELLS = {
    "begin": """
        import gc
        import torch
        zeros = lambda *shape: torch.zeros(*shape, device="cuda")
        allocated = torch.cuda.memory_allocated
        highest = torch.cuda.max_memory_allocated
        """,
    "allocates": """
        x = zeros(1024, 1024)
        temporary = zeros(4096, 1024); del temporary
        print(highest(), allocated())
        """,
    "allocates less": """
        y = zeros(512)
        views = [y[:100], y[100:]]
        print(highest())  # of the cell before
        """,
    "resets": """
        torch.cuda.reset_peak_memory_stats()
        temporary = zeros(2048, 1024); del temporary
        print(highest() - allocated())
        torch.cuda.reset_peak_memory_stats()
        print(highest() - allocated())
        """,
    "trains": """
        model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256)).cuda()
        optimizer = torch.optim.Adam(model.parameters())
        for step in range(5):
            loss = model(zeros(64, 256)).square().mean()
            loss.backward()
            optimizer.step()
            if step < 4:
                optimizer.zero_grad()
        """,
    "trains on": """
        losses = []
        for step in range(3):
            optimizer.zero_grad()
            loss = model(zeros(64, 256)).square().mean()
            losses.append(loss)
        loss.backward()
        optimizer.step()
        """,
    "trains long": """
        for step in range(150):
            model(zeros(64, 256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
    "shows": """
        zeros(1000, 1000)
        """,
    "lets go of what it shows": "hinted()",
    "shows a variable": """
        k = zeros(1000, 1000)
        k
        """,
    "lets go of the variable": "hinted()",
    "shows a dict": """
        value = zeros(1000, 1000)
        {"a": value}
        """,
    "lets go of the dict": "hinted()",
    "raises": """
        def inner(n):
            deep = zeros(n, n)
            raise KeyError(n)
        def outer(n):
            wide = zeros(n, n)
            try:
                inner(n)
            except KeyError as error:
                raise ValueError("no") from error
        outer(1000)
        """,
    "lets go of the exception": "hinted()",
    "makes a cycle": """
        gc.disable()
        class Node: pass
        node = Node(); node.itself = node; node.kept = zeros(1000, 1000); del node
        """,
    "collects": "hinted()",
    "runs out of memory": """
        def fill(n):
            kept = []
            while True:
                kept.append(zeros(n))
        fill(1 << 28)
        """,
    "is asynchronous": """
        import asyncio
        await asyncio.sleep(0.01)
        awaited = zeros(1000)
        awaited.shape
        """,
    "is captured": """
        %%capture said
        print("hidden")
        captured = zeros(1000)
        """,
    "has markup": """
        globals()["<b>bold</b>"] = {"<img src=x onerror=hurt()>": zeros(5000)}
        """,
    "controls the terminal": """
        globals()["\\x1b[31m"] = zeros(5000)
        """,
    "forks": """
        import os, threading
        threads = [threading.Thread(target=zeros, args=(1000,)) for _ in range(4)]
        [each.start() for each in threads], [each.join() for each in threads]
        child = os.fork()
        if child == 0:
            os._exit(3)
        os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        """,
    "is no Python": """
        for = 3
        """,
    "exits": """
        raise SystemExit
        """,
    "says what was shown": "print(said.stdout, _, __, type(Out[7]).__name__ if 7 in Out else None, In[2])",
}
MEASURED = "%%gpumon\n"
UNMEASURED = ("begin", "says what was shown")


def _source(name: str) -> str:
    return textwrap.dedent(CELLS[name]).strip()


def _with(magic: str, source: str) -> str:
    """Below a magic that is there already."""
    first, newline, rest = source.partition("\n")
    return f"{first}{newline}{magic}{rest}" if first.startswith("%%") else magic + source


class Ran:
    """A notebook's outputs, by cell."""

    def __init__(self, folder: Path, environment: dict[str, str], sources: dict[str, str]) -> None:
        self.notebook = nbformat.v4.new_notebook(
            cells=[nbformat.v4.new_code_cell(source) for source in sources.values()],
            metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
        )
        self._at = {name: at for at, name in enumerate(sources)}
        self._environment = environment
        self._client = nbclient.NotebookClient(
            self.notebook, timeout=300, allow_errors=True, resources={"metadata": {"path": str(folder)}}
        )

    def run(self, hints: bool) -> Ran:
        with self._client.setup_kernel(env=self._environment):
            for at, cell in enumerate(self.notebook.cells):
                if cell.source == "hinted()" and hints:
                    cell.source = self._hint(self.notebook.cells[at - 1])
                self._client.execute_cell(cell, at)
        return self

    @staticmethod
    def _hint(cell: Any) -> str:
        hints = dict.fromkeys(re.findall(r"free it: (.*)", _view(cell)))
        steps = [step for hint in hints for code in re.findall(r"`([^`]*)`", hint) for step in code.split("; ")]
        return "\n".join(["gc.disable()", "before = allocated()", *steps, "gc.enable()", "before - allocated()"])

    def view(self, name: str) -> str:
        return _view(self.notebook.cells[self._at[name]])

    def html(self, name: str) -> str:
        (html,) = [each.data["text/html"] for each in self._views(name)]
        return str(html)

    def _views(self, name: str) -> list[Any]:
        return [each for each in self.notebook.cells[self._at[name]].outputs if each.output_type == "display_data"]

    def outputs(self, name: str) -> list[Any]:
        """All others."""
        outputs = [each for each in self.notebook.cells[self._at[name]].outputs if each.output_type != "display_data"]
        return [each for each in outputs if "[virtual GPU]" not in each.get("text", "")]

    def text(self, name: str) -> str:
        return "".join(
            each.get("text", "") or each.get("data", {}).get("text/plain", "") for each in self.outputs(name)
        )


def _view(cell: Any) -> str:
    (shown,) = [each for each in cell.outputs if each.output_type == "display_data"]
    return str(shown.data["text/plain"])


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="nb", ignore_cleanup_errors=True) as made:
        yield Path(made)


@pytest.fixture(scope="module")
def places(folder: Path) -> dict[str, str]:
    """What keeps a kernel's files out of the user's folders."""
    names = ("XDG_RUNTIME_DIR", "XDG_STATE_HOME", "IPYTHONDIR", "JUPYTER_RUNTIME_DIR")
    return {**dict.fromkeys(names, str(folder)), "JPY_SESSION_NAME": f"{folder}/train.ipynb"}


@pytest.fixture(scope="module")
def environment(places: dict[str, str]) -> Iterator[dict[str, str]]:
    made = virtual.environment(sys.executable, memory="8GiB")
    yield {**made, **places}
    vgpu.remove_session(made["VGPU_SESSION"])


def _example() -> list[str]:
    cells = nbformat.read(EXAMPLE, as_version=4).cells
    assert not any(cell.get("outputs") for cell in cells)
    return [cell.source for cell in cells if cell.cell_type == "code"]


@pytest.fixture(scope="module")
def measured(folder: Path, environment: dict[str, str]) -> Ran:
    magic = {name: "" if name in UNMEASURED or CELLS[name] == "hinted()" else MEASURED for name in CELLS}
    sources = {
        "no torch": "%load_ext gpumon_agent\n%gpumon forget",
        "without torch": "%%gpumon\n1 + 1",
        **{name: _with(magic[name], _source(name)) for name in CELLS},
        "forget": "%gpumon forget",
        **{f"example {at}": source for at, source in enumerate(_example())},
        "ls": "import subprocess, sys\ncommand = [sys.executable, '-m', 'gpumon', 'ls', '--json']\n"
        "print(subprocess.run(command, capture_output=True, text=True).stdout)",
        "facts": "from gpumon.cli.home_jobs import facts\nprint(facts(__import__('os').getpid()).command)",
        "unload": "%unload_ext gpumon_agent\nprint(get_ipython().input_transformers_cleanup[-1].__name__)",
        "after": "%%gpumon\n1",
    }
    return Ran(folder, environment, sources).run(hints=True)


@pytest.fixture(scope="module")
def bare(folder: Path, environment: dict[str, str]) -> Ran:
    sources = {"no torch": "0;", "without torch": "#\n1 + 1", **{name: _blank(name) for name in CELLS}}
    return Ran(folder, environment, sources).run(hints=False)


def _blank(name: str) -> str:
    if CELLS[name] == "hinted()":
        return "0;"
    return _source(name) if name in UNMEASURED or CELLS[name].strip().startswith("%%") else "#\n" + _source(name)


def _bytes(view: str, what: str) -> dict[str, int]:
    (line,) = re.findall(rf"cuda:0 {what}: (.*)", view)
    found = re.findall(r"(\w+) (?:[\d.]+ \w+ \()?([\d,]+) bytes", line)
    return {when: int(nbytes.replace(",", "")) for when, nbytes in found}


def _rows(view: str) -> dict[str, tuple[int, str]]:
    """Holders → bytes, tensors."""
    found = re.findall(r"^  (?:[\d.]+ \w+ \()?([\d,]+) bytes\)?  (.*?)  (.*)$", view, re.MULTILINE)
    return {holders: (int(nbytes.replace(",", "")), tensors) for nbytes, tensors, holders in found}


def test_the_figures_are_those_of_the_cell_to_the_byte(measured: Ran) -> None:
    assert _bytes(measured.view("allocates"), "allocated") == {"before": 0, "peak": 20 * MIB, "after": 4 * MIB}
    reserved = _bytes(measured.view("allocates"), "reserved")
    assert (reserved["before"], reserved["peak"]) == (0, reserved["after"])
    assert reserved["peak"] >= 20 * MIB
    less = _bytes(measured.view("allocates less"), "allocated")
    assert less == {"before": 4 * MIB, "peak": 4 * MIB + 2048, "after": 4 * MIB + 2048}


def test_a_reset_within_the_cell_does_not_hide_its_peak(measured: Ran) -> None:
    figures = _bytes(measured.view("resets"), "allocated")
    assert figures["peak"] == figures["before"] + 8 * MIB


def _plain(outputs: list[Any]) -> str:
    return re.sub(r"\d+\.py", "CELL.py", json.dumps(outputs))  # IPython calls a file by a hash of its text


def test_a_cell_behaves_as_without_the_magic(measured: Ran, bare: Ran) -> None:
    """Values, prints, tracebacks, the figures that the user reads, `await`, `_` and `Out`."""
    for name in CELLS:
        if CELLS[name] != "hinted()" and name not in ("runs out of memory", "says what was shown"):
            assert _plain(measured.outputs(name)) == _plain(bare.outputs(name)), name
    (failed,) = measured.outputs("runs out of memory")
    assert failed.ename == "OutOfMemoryError"
    assert "hidden" in measured.text("says what was shown")


def test_names_are_those_of_the_user(measured: Ran) -> None:
    assert _rows(measured.view("allocates")) == {"x": (4 * MIB, "float32 1024×1024")}
    assert set(_rows(measured.view("allocates less"))) == {"y, views[*]"}
    trained = _rows(measured.view("trains"))
    weights = 2 * 256 * 512 * 4
    assert trained["model.*.weight, optimizer.param_groups[0]['params'][*]"] == (
        weights, "2 × float32 of several shapes"
    )  # fmt: skip
    assert trained["model.*.weight.grad, optimizer.param_groups[0]['params'][*].grad"][0] == weights
    assert trained["optimizer.state[*]['exp_avg']"] == (weights + 768 * 4, "4 × float32 of several shapes")
    graphs = _rows(measured.view("trains on"))
    saved = 64 * (512 + 256) * 4 + 64 * 256 * 4  # ReLU's result, the output and the batch
    assert graphs["the graph of losses[*]"] == (2 * saved, "6 saved for backward")


def test_a_training_shows_the_peak_of_each_phase(measured: Ran) -> None:
    view = measured.view("trains")
    assert "Peak of each phase, 5 steps:" in view
    peaks = {
        name: int(text.replace(",", "")) for name, text in re.findall(r"^  (\w+): .*\(([\d,]+) bytes\)", view, re.M)
    }
    assert {"forward", "backward", "optimizer"} <= set(peaks)
    assert max(peaks.values()) == _bytes(view, "allocated")["peak"]
    assert peaks["forward"] < peaks["backward"]
    assert re.search(r"phase, 150 steps, \d+ of them read:", measured.view("trains long"))
    assert "phase" not in measured.view("shows")


@pytest.mark.parametrize(
    ("shows", "lets_go", "holders", "tensors"),
    [
        ("shows", "lets go of what it shows", {"Out[{n}], _"}, 1),
        ("shows a variable", "lets go of the variable", {"k, Out[{n}], _"}, 1),
        ("shows a dict", "lets go of the dict", {"value, Out[{n}]['a'], _['a']"}, 1),
        ("makes a cycle", "collects", {"no variable leads to it"}, 1),
    ],
)
def test_a_hint_frees_what_ipython_and_cycles_hold(
    measured: Ran, shows: str, lets_go: str, holders: set[str], tensors: int
) -> None:
    number = measured.notebook.cells[measured._at[shows]].execution_count
    assert set(_rows(measured.view(shows))) == {each.format(n=number) for each in holders}
    assert int(measured.text(lets_go)) >= tensors * BIG


def test_an_exception_is_named_and_let_go_of(measured: Ran) -> None:
    number = measured.notebook.cells[measured._at["raises"]].execution_count
    assert set(_rows(measured.view("raises"))) == {
        f"wide in outer(), cell {number} line 10, held by sys.last_traceback",
        f"deep in inner(), cell {number} line 4, held by sys.last_value.__cause__.__traceback__",
    }
    assert "free it: `%gpumon forget`" in measured.view("raises")
    assert int(measured.text("lets go of the exception")) >= 2 * BIG


def test_out_of_memory_says_what_held_it(measured: Ran) -> None:
    view = measured.view("runs out of memory")
    number = measured.notebook.cells[measured._at["runs out of memory"]].execution_count
    assert "Out of memory: CUDA out of memory. Tried to allocate 1024.00 MiB" in view
    rows = _rows(view)
    first = next(iter(rows))
    assert re.fullmatch(rf"kept\[\*\] in fill\(\), cell {number} line \d+", first)
    assert rows[first] == (7 << 30, "7 × float32 268435456")
    assert rows["x"][0] == 4 * MIB  # older ones too


def test_markup_and_control_characters_are_text(measured: Ran) -> None:
    html = measured.html("has markup")
    assert "&lt;b&gt;bold&lt;/b&gt;[&#x27;&lt;img src=x onerror=hurt()&gt;&#x27;]" in html
    assert "<img" not in html
    assert "<script" not in html
    assert "\x1b" not in measured.html("controls the terminal") + measured.view("controls the terminal")


def test_other_cells_are_measured_too(measured: Ran) -> None:
    assert "awaited" in _rows(measured.view("is asynchronous"))
    assert "captured" in _rows(measured.view("is captured"))
    for name in ("forks", "is no Python", "exits"):
        assert "no tensor on CUDA that this cell made" in measured.view(name)


def test_without_torch_it_says_so(measured: Ran) -> None:
    assert measured.text("without torch") == "2"
    assert measured.view("without torch").splitlines()[1:] == ["torch is not imported: there is nothing to measure."]


def test_the_kernel_is_called_by_its_notebook(measured: Ran) -> None:
    (agent,) = map(json.loads, measured.text("ls").split("\n")[:1])
    assert agent["name"] == "train.ipynb"
    assert measured.text("facts") == "('train.ipynb', '(Jupyter kernel)')\n"


def test_unloading_removes_the_magic(measured: Ran) -> None:
    assert "without_magic" not in measured.text("unload")
    assert "Cell magic `%%gpumon` not found" in measured.text("after")


def test_without_a_device_it_names_tensors_on_the_cpu(folder: Path, places: dict[str, str]) -> None:
    sources = {
        "imports": "%load_ext gpumon_agent",
        "allocates": "%%gpumon\nimport torch\nx = torch.zeros(1024, 1024)",
        "trains": "%%gpumon\nmodel = torch.nn.Linear(8, 8); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "model(torch.zeros(2, 8)).sum().backward(); optimizer.step()",
    }
    ran = Ran(folder, {**os.environ, **places, "CUDA_VISIBLE_DEVICES": ""}, sources).run(hints=False)
    assert _rows(ran.view("allocates")) == {"x": (4 * MIB, "float32 1024×1024")}
    assert "torch was imported in this cell" in ran.view("allocates")
    assert {"model.weight.grad", "model.bias"} < {holders.split(",")[0] for holders in _rows(ran.view("trains"))}
    assert "torch has no statistics of CPU memory, so its peak is not known" in ran.view("trains")
    assert re.search(r"Host memory of this process: .* MiB → .* MiB resident", ran.view("trains"))


# -------------------------------------------------------------------------------------------------------- in a browser

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
LOOK = """
const all = (selector) => [...document.querySelectorAll(selector)];
const answer = {
  text: all('.gpumon').map((each) => each.innerText).join(' '),
  bars: all('.gpumon table')[0].querySelectorAll('.bar div').length,
  widths: [...all('.gpumon table')[0].querySelectorAll('.bar')].map(
    (bar) => bar.firstChild.getBoundingClientRect().width / bar.getBoundingClientRect().width),
  aligned: all('.gpumon td').map((each) => getComputedStyle(each).textAlign),
  colors: [...new Set(all('.gpumon td, .gpumon code').map((each) => getComputedStyle(each).color))],
  injected: all('.gpumon b, .gpumon img, .gpumon script').length,
  wide: document.documentElement.scrollWidth > window.innerWidth,
};
document.body.innerHTML = '';
document.body.textContent = '@@' + JSON.stringify(answer) + '@@';
"""


def _seen(folder: Path, html: str, style: str) -> dict[str, Any]:
    page = folder / "page.html"
    page.write_text(
        f"<!doctype html><meta charset=utf-8><style>{style}</style><body>"
        f"<div class='jp-RenderedHTMLCommon'>{html}</div><script>{LOOK}</script>"
    )
    root = ["--no-sandbox"] if os.geteuid() == 0 else []
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless=new", *root, "--disable-gpu", "--window-size=800,900",
               f"--user-data-dir={folder}/chromium", "--dump-dom", page.as_uri()]  # fmt: skip
    dom = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout
    seen: dict[str, Any] = json.loads(unescape(dom).split("@@")[1])
    return seen


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")
@pytest.mark.parametrize(
    ("background", "color"), [("#fff", "rgb(33, 33, 33)"), ("#111", "rgb(238, 238, 238)")], ids=["light", "dark"]
)
def test_a_browser_shows_it(measured: Ran, folder: Path, background: str, color: str) -> None:
    jupyters = (
        ".jp-RenderedHTMLCommon td, .jp-RenderedHTMLCommon th { text-align: right }"  # what JupyterLab says of tables
        f":root {{ --jp-content-font-color1: {color} }} body {{ background: {background} }}"
    )
    seen = _seen(folder, measured.html("allocates") + measured.html("has markup"), jupyters)
    most = _bytes(measured.view("allocates"), "reserved")["peak"]
    assert seen["widths"][:3] == pytest.approx([0, 20 * MIB / most, 4 * MIB / most], abs=0.01)
    assert "20,971,520" in seen["text"]
    assert "<b>bold</b>" in seen["text"]
    assert seen["injected"] == 0
    assert seen["colors"] == [color]
    assert seen["aligned"].count("right") == 2 * seen["aligned"].count("left") / 3
    assert not seen["wide"]


def test_the_example_runs(measured: Ran) -> None:
    trains, shows, raises = (measured.view(f"example {at}") for at in range(1, 4))
    assert "Peak of each phase, 20 steps" in trains
    assert "free it: `%xdel" in shows
    assert "free it: `%gpumon forget`" in raises
