"""`gpumon report`: the page in a real headless browser, its figures against the run's, and bad input."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from leaking import census, group, leaking
from synthetic import GIB, MIB, Run
from webdriver import Browser, needs_browser

from gpumon import link
from gpumon.analysis import units
from gpumon.cli import main
from gpumon_agent import wire

EXAMPLE = Path(__file__).parents[1] / "data" / "json-example.gpumon"  # a real training that ran out of memory
HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror=window.hacked=2>"
VOID = {"meta"}

Record = Callable[..., Path]


@pytest.fixture
def record(tmp_path: Path) -> Record:
    """Records the streams of one or more ranks."""

    def record(*streams: Iterator[wire.Received], name: str = "run.gpumon") -> Path:
        with link.Recording(tmp_path / name, force=True) as recording:
            for stream in streams:
                for received in stream:
                    recording.write(received)
        return tmp_path / name

    return record


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("browser"))
    yield browser
    browser.close()


@pytest.fixture
def browser(started: Browser) -> Browser:
    started.emulate("clearDeviceMetricsOverride")
    started.emulate("setEmulatedMedia", media="", features=[])
    return started


def report(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["report", *map(str, arguments)])


def made(recording: Path) -> Path:
    done = report(recording)
    assert done.exit_code == 0, done.output
    return recording.with_suffix(".html")


class Steady(Run):
    """A long run is made faster if each step's reserved is the same."""

    def reserved(self, step: int) -> int:
        return 2 * GIB


class Page(HTMLParser):
    """Reads a page; raises if an element is not closed by its own end tag, or an id occurs twice."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.cells: list[list[str]] = []  # of all tables, by row
        self.words: list[str] = []
        self._open: list[str] = []
        self.ids: list[str] = []
        self.data: Any = None
        self.feed(page)
        self.close()
        assert self._open == []
        assert len(set(self.ids)) == len(self.ids)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        assert len(named) == len(attrs)
        self.tags.append((tag, named))
        self.ids += [str(named["id"])] if "id" in named else []
        if tag == "tr":
            self.cells.append([])
        elif tag in ("td", "th"):
            self.cells[-1].append("")
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1:] == ["script"] and self.tags[-1][1].get("id") == "data":
            self.data = json.loads(data)
        elif "td" in self._open or "th" in self._open:
            self.cells[-1][-1] += data
        if self._open[-1:] not in (["script"], ["style"]):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())

    @property
    def steps(self) -> list[list[Any]]:
        steps: list[list[Any]] = self.data["timelines"][0]["steps"]
        return steps


def read(recording: Path) -> Page:
    return Page(made(recording).read_text())


def with_peaks(run: Run, steps: int, every: int = 1) -> Iterator[wire.Received]:
    """The run, with the owners at the peak of every so many steps."""
    for received in run.stream(steps):
        event = received.event
        if isinstance(event, wire.Phase) and event.phase == "backward" and event.step % every == 0:
            saved = event.allocated_peak - run.start(event.step) - run.weights // 4  # type: ignore[operator]
            composed = wire.Ledger(
                event.step, "backward", 0, 0, event.allocated_peak, event.allocated_peak - run.rounding, None,  # type: ignore[operator]
                weights=run.weights, buffers=run.buffers, gradients=run.weights // 4,
                optimizer=run.state if event.step else 0,
                inputs=run.input_bytes(event.step), activations=saved, peak=True, module="body",
            )  # fmt: skip
            yield run.received(composed, event.step)
        yield received


def renamed(stream: Iterator[wire.Received]) -> Iterator[wire.Received]:
    """Hostile names wherever the user or a library can choose one."""
    for received in stream:
        event = received.event
        if isinstance(event, wire.Phase) and event.phase == "between":
            event = msgspec.structs.replace(event, phase=HOSTILE)
        elif isinstance(event, wire.Ledger) and event.peak:
            event = msgspec.structs.replace(event, module=HOSTILE)
        elif isinstance(event, wire.Hello):
            event = msgspec.structs.replace(event, host=HOSTILE, argv=(HOSTILE,), torch=HOSTILE)
        yield received if event is received.event else msgspec.structs.replace(received, event=event)


# ------------------------------------------------------------------------------------------------------- what it says


def test_the_page_is_well_formed_and_states_answer_machine_and_versions(tmp_path: Path) -> None:
    shutil.copy(EXAMPLE, tmp_path / "run.gpumon")
    done = report(tmp_path / "run.gpumon")
    page = tmp_path / "run.html"
    assert done.output == f"{page}: {page.stat().st_size / 1024:,.0f} KiB\n"
    parsed = Page(page.read_text())
    command = [sys.executable, "-m", "gpumon", "replay", str(EXAMPLE), "--json", "--once"]
    answered = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    said = next(each for line in answered.splitlines() if (each := json.loads(line))["type"] == "answer")
    assert said["state"] == "out-of-memory"
    assert f"OUT OF MEMORY: {said['what']}" in parsed.text
    assert f"To do: {said['do']}." in parsed.text
    *_, hello = (each.event for each in link.replay(EXAMPLE) if isinstance(each.event, wire.Hello))
    driver = next(each.event.driver for each in link.replay(EXAMPLE) if isinstance(each.event, wire.Host))
    for stated in (hello.host, str(hello.pid), hello.torch, hello.python, hello.devices[0].name, driver):
        assert stated is not None
        assert stated in parsed.text


def test_the_highest_peak_adds_up_to_the_byte(record: Record) -> None:
    run = Run(activations=lambda step: (500 if step == 7 else 300) * MIB)
    page = read(record(with_peaks(run, 12)))
    at = next(n for n, row in enumerate(page.cells) if row[1:] and row[1] == "line")
    total = next(n for n, row in enumerate(page.cells) if n > at and row[1] == "allocated")
    exact = {row[1]: int(row[4].rstrip(" B").replace(",", "")) for row in page.cells[at + 1 : total + 1]}
    assert exact.pop("allocated") == sum(exact.values()) == run.peak(7)
    assert exact["activations"] == 500 * MIB
    assert f"{units.size(run.peak(7))} in backward of step 7, while body ran." in page.text


def test_a_highest_peak_that_was_not_read_by_owner_says_which_one_is_shown(record: Record) -> None:
    run = Run(activations=lambda step: (500 if step == 7 else 310 if step == 4 else 300) * MIB)
    text = read(record(with_peaks(run, 12, every=4))).text
    assert f"The highest peak, {units.size(run.peak(7))} in step 7, was not read by owner." in text
    assert f"{units.size(run.peak(4))} in backward of step 4" in text


def test_each_step_has_its_phases_batch_and_owners(record: Record) -> None:
    run = Run(activations=lambda step: (300 + step) * MIB)
    page = read(record(with_peaks(run, 9)))
    names = page.data["text"]
    for number, step in enumerate(page.steps):
        assert step[0] == number
        assert step[2] == run.peak(number)
        assert step[3] == run.reserved(number)
        assert names[step[5]] == "8×8192"
        assert {names[phase[0]]: phase[3] for phase in step[7]} == run.peaks(number)
        starts, ends = [phase[2] for phase in step[7]], [phase[4] for phase in step[7]]
        assert starts == [run.end(number - 1) if number else None, *ends[:-1]]
        assert names[step[8][0]] == "at its peak, in body"
        assert {names[name]: value for name, value in step[8][1]}["activations"] == (300 + number) * MIB


def test_a_phase_that_occurs_often_is_one_row(record: Record) -> None:
    def twice() -> Iterator[wire.Received]:
        seq = 0
        for received in Run().stream(3):
            events = [received.event]
            if isinstance(received.event, wire.Phase) and received.event.phase == "forward":
                higher = received.event.allocated_peak + MIB  # type: ignore[operator]
                events = [msgspec.structs.replace(received.event, allocated_peak=higher),
                          msgspec.structs.replace(received.event, index=7, flags=wire.MERGED)]  # fmt: skip
            for event in events:
                yield msgspec.structs.replace(received, event=event, seq=seq if received.seq >= 0 else -1)
                seq += received.seq >= 0

    page = read(record(twice()))
    row = next(phase for phase in page.steps[1][7] if page.data["text"][phase[0]] == "forward")
    assert row[1] == 8  # the second stands for seven
    assert row[3] == Run().peaks(1)["forward"] + MIB
    assert row[4] == Run().start(1) + 300 * MIB


def test_a_finding_has_holder_line_begin_and_documentation(record: Record) -> None:
    found = census(100, group(90))
    page = read(record(leaking(2 * MIB, found).stream(120)))
    holder = found.groups[0].holders[0]
    assert holder.where is not None
    held = f"holder{holder.text} ({holder.where})"
    for stated in (held, "linetrain.py:57", "sincestep 2, 2023-11-14 ", "growth2.00 MiB a step", "About tensor-leak"):
        assert stated in page.text
    assert [mark["step"] for mark in page.data["timelines"][0]["marks"]] == [2]


def test_the_plot_reaches_up_to_the_capacity_only_if_a_quarter_of_it_is_reserved(record: Record) -> None:
    reserved = Run().reserved(3)
    near = read(record(Run(total=reserved * 10 // 3).stream(4)))
    far = read(record(Run(total=reserved * 10 // 2).stream(4)))
    assert near.data["timelines"][0]["to_capacity"] is True
    assert far.data["timelines"][0]["to_capacity"] is False
    assert "(above the plot)" in far.text
    assert "(above the plot)" not in near.text


def test_a_part_of_a_bar_has_its_letter_if_there_is_room(record: Record) -> None:
    page = made(record(with_peaks(Run(buffers=25 * MIB, input_bytes=lambda step: 10 * MIB), 4))).read_text()
    bars = re.findall(r'<rect [^>]*width="([\d.]+)%"[^>]*class="l-(\w+)"><title>[^<]*</title></rect>(<text)?', page)
    widths = {float(width): bool(letter) for width, _, letter in bars}
    assert any(3 < width < 6 for width in widths)
    assert any(1 < width < 3 for width in widths)
    assert all(letter == (width >= 3) for width, letter in widths.items())


# -------------------------------------------------------------------------------------------------------- how large


def test_of_a_long_run_two_thousand_steps_are_shown_and_the_highest_is_among_them(record: Record) -> None:
    high = 1_716  # the first of two neighbours
    run = Steady(activations=lambda step: (700 if step == high else 300 + step % 7) * MIB)
    page = read(record(run.stream(4_000)))
    assert 2_000 <= len(page.steps) <= 2_002
    assert max(page.steps, key=lambda step: step[2])[:3:2] == [high, run.peak(high)]
    assert [page.steps[0][0], page.steps[-1][0]] == [0, 3_999]
    assert f"{len(page.steps):,} of 4,000 steps are shown; the highest peak is among them." in page.text
    assert "thinned for this page" in page.text


def test_a_page_beyond_two_megabytes_is_thinned_further(record: Record) -> None:
    def many_phases() -> Iterator[wire.Received]:
        seq = 0
        for received in Steady().stream(2_100):
            events = [received.event]
            if isinstance(received.event, wire.Phase) and received.event.phase == "between":
                events = [msgspec.structs.replace(received.event, phase=f"part {n}") for n in range(24)]
            for event in events:
                yield msgspec.structs.replace(received, event=event, seq=seq if received.seq >= 0 else -1)
                seq += received.seq >= 0

    page = made(record(many_phases()))
    assert 1_000 <= len(Page(page.read_text()).steps) <= 1_002
    assert 1_000_000 < page.stat().st_size <= 2_000_000


def test_with_many_ranks_each_keeps_fifty_steps(record: Record) -> None:
    ranks = [Steady(rank=n, world_size=45, run_id="j", nonce=f"n{n}", pid=4000 + n) for n in range(45)]
    page = read(record(*(run.stream(60) for run in ranks)))
    assert {50 <= len(line["steps"]) <= 52 for line in page.data["timelines"]} == {True}
    assert len(page.data["timelines"]) == 45


# --------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no.gpumon: No such file or directory; give a file made by `gpumon record`."),
        (b"", "no.gpumon is not a recording of gpumon; give a file made by `gpumon record`."),
        (b"hello", "no.gpumon is not a recording of gpumon; give a file made by `gpumon record`."),
        (EXAMPLE.read_bytes()[:12], "no.gpumon has no training process: there is nothing to report."),
    ],
)
def test_what_is_no_recording_gets_one_sentence(tmp_path: Path, content: bytes | None, said: str) -> None:
    path = tmp_path / "no.gpumon"
    if content is not None:
        path.write_bytes(content)
    done = report(path)
    assert done.exit_code == 1
    assert done.output.splitlines()[-1] == f"Error: {tmp_path}/{said}"
    assert "Traceback" not in done.output
    assert not (tmp_path / "no.html").exists()


def test_a_job_that_does_not_run_gets_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    done = report("nobody")
    assert done.exit_code == 1
    assert re.fullmatch(r"Error: .*\n", done.output)


def test_a_damaged_recording_says_so_on_the_page_too(tmp_path: Path) -> None:
    path = tmp_path / "run.gpumon"
    path.write_bytes(EXAMPLE.read_bytes()[: EXAMPLE.stat().st_size // 2])
    done = report(path)
    assert done.exit_code == 0
    assert "is damaged or cut off at byte" in done.output
    assert "is damaged or cut off at byte" in Page((tmp_path / "run.html").read_text()).text


def test_an_output_that_cannot_be_written_gets_one_sentence(tmp_path: Path) -> None:
    for where, why in (
        (tmp_path / "no" / "page.html", "No such file or directory"),
        (tmp_path, "Is a directory"),
        (Path("/dev/full"), "No space left on device"),
    ):
        done = report(EXAMPLE, "-o", where)
        assert (done.exit_code, done.output) == (1, f"Error: {where} cannot be written: {why}.\n")
    assert list(tmp_path.iterdir()) == []


def test_neither_the_recording_nor_a_page_of_another_program_is_overwritten(record: Record, tmp_path: Path) -> None:
    path = record(Run().stream(3))
    before = path.read_bytes()
    assert "is the recording itself" in report(path, "-o", path).output
    assert path.read_bytes() == before
    page = tmp_path / "run.html"
    page.write_text("my own")
    done = report(path)
    assert done.exit_code == 1
    assert "is no page of gpumon report" in done.output
    assert page.read_text() == "my own"
    assert report(path, "-o", page).exit_code == 0
    assert report(path).exit_code == 0  # its own page may be made again


def test_a_dash_writes_the_page_to_stdout(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gpumon", "report", str(EXAMPLE), "-o"]
    to_stdout = subprocess.run([*command, "-"], capture_output=True, check=True, cwd=tmp_path)
    assert Page(to_stdout.stdout.decode()).data["timelines"]
    assert to_stdout.stderr == b""
    assert list(tmp_path.iterdir()) == []
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run([*command, "-"], stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 1
    assert done.stderr == b"Error: the output cannot be written: No space left on device.\n"


def test_the_page_follows_the_umask(record: Record, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        page = made(record(Run().stream(3)))
    finally:
        os.umask(before)
    assert page.stat().st_mode & 0o777 == 0o640


# ---------------------------------------------------------------------------------------------------- a running job


def test_a_running_job_is_reported_with_all_its_ranks() -> None:
    folder = Path(tempfile.mkdtemp(prefix="gm"))  # short enough for a socket's path
    env = {**os.environ, "XDG_RUNTIME_DIR": str(folder), "TMPDIR": str(folder)}
    script = str(Path(__file__).with_name("speaking_ranks.py"))
    ranks = subprocess.Popen([sys.executable, script, str(MIB)], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert ranks.stdout is not None
        ranks.stdout.readline()
        command = [sys.executable, "-m", "gpumon", "report", "grow.py", "-o", str(folder / "now.html")]
        begun = False
        while not begun:
            subprocess.run(command, env=env, check=True, capture_output=True, timeout=120)
            page = Page((folder / "now.html").read_text())
            begun = all(line is not None and len(line["steps"]) > 5 for line in page.data["timelines"])
    finally:
        ranks.communicate(b"")
        shutil.rmtree(folder)
    assert "made this page of a running job" in page.text
    assert len(page.data["timelines"]) == 2
    for stated in ("rank 0 · cpu", "rank 1 · cpu", "live", "missing"):
        assert stated in page.text


# ------------------------------------------------------------------------------------------------------- in a browser


@needs_browser
def test_the_page_asks_for_nothing_and_runs_nothing_but_its_own_script(browser: Browser, record: Record) -> None:
    page = made(record(renamed(with_peaks(Run(name=HOSTILE), 6))))
    browser.open(page)
    assert browser.requests() == [page.as_uri()]
    assert browser.log("browser") == []
    assert browser.run("return window.hacked") is None
    assert browser.text("h1") == HOSTILE
    assert HOSTILE in browser.text(".chosen")  # the phase, and the module at the peak
    assert browser.text("body").count(HOSTILE) >= 6
    browser.run(
        "const s = document.createElement('script'); s.textContent = 'window.hacked = 3'; document.body.append(s);"
        "const i = document.createElement('img'); i.src = 'http://127.0.0.1:9/x.png'; document.body.append(i);"
        "document.body.setAttribute('style', 'color: red')"
    )
    assert browser.run("return window.hacked") is None
    refused = "\n".join(browser.log("browser"))
    for directive in ("script-src", "default-src", "style-src"):
        assert directive in refused


@needs_browser
def test_the_cursor_moves_by_keys_mouse_and_touch(browser: Browser, record: Record) -> None:
    run = Run(activations=lambda step: (500 if step == 17 else 300 + step % 5) * MIB)
    browser.open(made(record(with_peaks(run, 41))))

    def chosen() -> int:
        line = browser.text(".chosen h3")
        step = int(re.match(r"Step (\d+): peak", line)[1])  # type: ignore[index]
        assert line == f"Step {step}: peak {units.size(run.peak(step))}"
        assert browser.run("return document.querySelector('svg.plot').getAttribute('aria-valuenow')") == str(step)
        return step

    assert chosen() == 17  # the highest peak, at first
    places = {"ArrowRight": 18, "ArrowUp": 19, "ArrowLeft": 18, "ArrowDown": 17, "PageUp": 27, "PageDown": 17,
              "Home": 0, "End": 40}  # fmt: skip
    for key, step in places.items():
        browser.press("svg.plot", key)
        assert chosen() == step, key
    browser.press("svg.plot", "ArrowRight")
    assert chosen() == 40
    browser.click("button.highest")
    assert chosen() == 17

    def place(step: int) -> tuple[float, float]:
        browser.press("svg.plot", "Home", *["ArrowRight"] * step)
        x, y = browser.run(
            "const c = document.querySelector('.cursor').getBoundingClientRect(); return [c.x, c.y + c.height / 2]"
        )
        return x, y

    ten, thirty = place(10), place(30)
    browser.press("svg.plot", "Home")
    browser.drag([ten])
    assert chosen() == 10
    browser.drag([ten, thirty])
    assert chosen() == 30
    browser.press("svg.plot", "Home")
    browser.drag([ten, (thirty[0], thirty[1] + 5)], kind="touch")
    assert chosen() == 30


@needs_browser
def test_the_chosen_step_shows_what_python_would_write(browser: Browser, record: Record) -> None:
    """The page's own script writes sizes and durations as `units` does."""
    sizes = [
        1,
        1023,
        1024,
        10_235,
        10_240,
        102_400,
        MIB - 1,
        MIB,
        9 * MIB + 999_999,
        1023 * MIB + 999_999,
        GIB,
        99 * GIB,
    ]
    spans = [
        0,
        999,
        18_400,
        999_600,
        1_000_000,
        3_249_000,
        9_960_000,
        450_400_000,
        999_600_000,
        1_254_000_000,
        42 * 10**9,
    ]

    def varied() -> Iterator[wire.Received]:
        for received in Run().stream(len(sizes)):
            event = received.event
            if isinstance(event, wire.Phase):
                event = msgspec.structs.replace(
                    event, allocated_peak=sizes[event.step], duration_ns=spans[event.step % len(spans)]
                )
            elif isinstance(event, wire.Ledger):
                continue
            yield msgspec.structs.replace(received, event=event, seq=received.seq)

    browser.open(made(record(varied())))
    browser.press("svg.plot", "Home")
    for step, size in enumerate(sizes):
        rows = browser.text(".chosen table").splitlines()
        row = next(row for row in rows if row.startswith("optimizer")).split("\t")
        assert row[2] == units.size(size), size
        assert row[5] == units.duration(spans[step % len(spans)] / 1e9)
        browser.press("svg.plot", "ArrowRight")


@needs_browser
def test_one_rank_is_shown_at_a_time(browser: Browser, record: Record) -> None:
    ranks = [
        Run(
            rank=n, world_size=2, run_id="j", nonce=f"n{n}", pid=4000 + n, activations=lambda step, n=n: (300 + n) * MIB
        )
        for n in range(2)
    ]
    browser.open(made(record(*(run.stream(8) for run in ranks))))
    visible = "return [...document.querySelectorAll('.subject')].map(each => each.offsetHeight > 0)"
    assert browser.run(visible) == [True, False]
    browser.press("#subject", "ArrowDown")
    assert browser.run(visible) == [False, True]
    assert units.size(ranks[1].peak(5)) in browser.text(".subject:not([hidden]) .chosen")
    assert browser.run("return document.querySelectorAll('svg.plot').length") == 2


@needs_browser
def test_it_follows_the_readers_colours_and_prints_in_light_ones_with_all_findings_open(
    browser: Browser, record: Record
) -> None:
    browser.open(made(record(leaking(2 * MIB, census(100, group(90))).stream(120))))
    ground = "return getComputedStyle(document.body).backgroundColor"

    def media(media: str, scheme: str) -> str:
        browser.emulate("setEmulatedMedia", media=media, features=[{"name": "prefers-color-scheme", "value": scheme}])
        colour: str = browser.run(ground)
        return colour

    light, dark = media("screen", "light"), media("screen", "dark")
    assert light != dark
    assert media("print", "dark") == light
    stroke = "return getComputedStyle(document.querySelector('polyline.peak')).stroke"
    assert browser.run(stroke) == "rgb(43, 140, 196)"  # of the light palette
    closed = "document.querySelectorAll('details:not([open])').length"
    browser.run(f"addEventListener('beforeprint', () => {{ window.printed = {closed} }})")
    assert browser.run(f"return {closed}") > 0
    assert browser.pdf().startswith(b"%PDF")
    assert browser.run("return window.printed") == 0
    assert browser.run(f"return {closed}") > 0


@needs_browser
@pytest.mark.parametrize("width", [360, 1000])
def test_nothing_is_wider_than_the_window(browser: Browser, tmp_path: Path, width: int) -> None:
    shutil.copy(EXAMPLE, tmp_path / "run.gpumon")
    browser.emulate("setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=2, mobile=width < 500)
    browser.open(made(tmp_path / "run.gpumon"))
    assert browser.run("return innerWidth") == width
    assert browser.run("return document.documentElement.scrollWidth") <= width
    outside = browser.run(
        "const plot = document.querySelector('svg.plot').getBoundingClientRect();"
        "return [...document.querySelectorAll('svg.plot text')].filter(each => {"
        "const text = each.getBoundingClientRect();"
        "return text.left < plot.left - 1 || text.right > plot.right + 1"
        " || text.top < plot.top - 1 || text.bottom > plot.bottom + 1 }).map(each => each.textContent)"
    )
    assert outside == []
    marks = "return [...document.querySelectorAll('svg.plot text.marked')].map(each => each.textContent)"
    assert browser.run(marks) == ["▾", "out of memory"]


@needs_browser
def test_a_finding_opens_with_its_documentation(browser: Browser, record: Record) -> None:
    browser.open(made(record(leaking(2 * MIB, census(100, group(90))).stream(120))))
    assert "to do" not in browser.text("main > details")
    browser.click("main > details > summary")
    assert "to do" in browser.text("main > details")
    assert "what it means" not in browser.text("main > details")
    browser.click("main > details > details > summary")
    assert "what it means" in browser.text("main > details")


@needs_browser
def test_without_javascript_all_but_the_timeline_is_there(browser: Browser, record: Record) -> None:
    page = made(record(*(Run(rank=n, world_size=2, run_id="j", nonce=f"n{n}", pid=4000 + n).stream(8) for n in (0, 1))))
    browser.emulate("setScriptExecutionDisabled", value=True)
    try:
        browser.open(page)
        text = browser.text("main")
    finally:
        browser.emulate("setScriptExecutionDisabled", value=False)
    for stated in ("UNKNOWN", "rank 0 · cuda:0", "rank 1 · cuda:0", "The timeline needs JavaScript.", "pid"):
        assert stated in text
