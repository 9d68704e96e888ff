"""One self-contained HTML page of a run: answer, timeline, findings, breakdown, estimate, machine.

Nothing is computed here: figures come from reports and the history. The page loads nothing, and its policy forbids it
to: the one style and the one script are named by their hashes, and the steps are a block of data. `markup.el`
escapes all text, so a name from a recording cannot become markup.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import NamedTuple

from gpumon.analysis.answer import Answer
from gpumon.analysis.job_findings import JobFinding, job_findings
from gpumon.analysis.reports import RankReport
from gpumon.analysis.types import DRIVER, OWNERS, REST
from gpumon.export.markup import el, escaped, plain, together
from gpumon.export.report_sections import (
    LETTER_FROM,
    Subject,
    answer,
    chooser,
    finding,
    machine,
    named,
    ranks,
    section,
    when,
)
from gpumon.export.report_steps import Texts, records, thinned, timeline
from gpumon.session.frame import Frame, StepRecord
from gpumon_agent._version import __version__

STEPS_MOST = 2_000
"""Steps on a page: more than a screen has columns."""

STEPS_LEAST = 50
"""Steps of each device that stay, however large the page."""

PAGE_BYTES = 2_000_000
"""If a page is larger, it is made again with half the steps: it must go through mail, and open on a phone."""

_HERE = Path(__file__).parent


class Colours(NamedTuple):
    """Role or line of the ledger → colour, on a light and a dark background; line → its letter."""

    light: Mapping[str, str]
    dark: Mapping[str, str]
    letters: Mapping[str, str]


def page(
    frame: Frame, reports: Sequence[RankReport], said: Answer, colours: Colours, unix_s: float, note: str = ""
) -> bytes:
    """The page in UTF-8. `unix_s`: when it is made; `note`: a sentence on what is missing, shown at the top."""
    by_source = {report.source: report for report in reports}
    subjects: list[Subject] = []
    for rank in frame.ranks:
        whole = by_source.get(rank.source)
        devices = whole.devices if whole is not None else ()
        subjects += [Subject(rank, whole, device, records(rank, device.device), colours.letters) for device in devices]
        if not devices:
            subjects.append(Subject(rank, whole, None, [], colours.letters))
    found = job_findings(frame, reports)
    most = max(STEPS_LEAST, STEPS_MOST // max(1, len(subjects)))
    while True:
        made = _page(frame, subjects, found, said, colours, unix_s, note, most)
        if len(made) <= PAGE_BYTES or most <= STEPS_LEAST:
            return made
        most = max(STEPS_LEAST, most // 2)


def _page(
    frame: Frame,
    subjects: Sequence[Subject],
    found: Sequence[JobFinding],
    said: Answer,
    colours: Colours,
    unix_s: float,
    note: str,
    most: int,
) -> bytes:
    text = Texts()
    timelines, sections = [], []
    for subject in subjects:
        line = None
        chosen: list[StepRecord] = []
        if subject.report is not None and subject.known:
            chosen = thinned(subject.known, subject.report.device, most)
            line = timeline(subject.rank, subject.report, subject.known, chosen, text)
            if line is not None:
                line["marks"] = [
                    {"step": each.finding.step, "text": plain(each.finding.title)}
                    for each in found
                    if subject.rank.source in each.sources and each.finding.step is not None
                    and each.finding.severity != "info"
                ]  # fmt: skip
        timelines.append(line)
        sections.append(section(subject, chosen, line))
    names = [subject.name for subject in subjects]
    job_name = frame.ranks[0].hello.name if frame.ranks else "run"
    body = together(
        [
            el("h1", job_name),
            el("p", when(frame, unix_s), class_="dim"),
            *([el("p", note, class_="warning")] if note else []),
            answer(said),
            *ranks(frame),
            *chooser(names, named(subjects, said)),
            *sections,
            el("h2", "Findings"),
            *(finding(each, subjects) for each in found),
            *([] if found else [el("p", "None.", class_="dim")]),
            el("h2", "Machine and versions"),
            machine(frame),
        ]
    )
    data = {
        "text": [plain(each) for each in text.all],
        "timelines": timelines,
        "letters": dict(colours.letters),
        "letter_from": LETTER_FROM,
    }
    style = _colours(colours) + _read("report.css")
    script = _read("report.js")
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; base-uri 'none'; "
        "form-action 'none'"
    )
    encoded = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    filled = Template(_read("report.html")).substitute(
        policy=policy, version=escaped(__version__), title=escaped(f"{job_name}: gpumon report"), style=style,
        body=body, data=encoded, script=script,
    )  # fmt: skip
    return filled.encode()


def _read(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _colours(colours: Colours) -> str:
    lines = [*OWNERS, *REST, *DRIVER]

    def variables(each: Mapping[str, str]) -> str:
        return "".join(f"--{name}: {value};" for name, value in each.items())

    fills = "".join(f".l-{line} {{ fill: var(--line-{line}); }}\n" for line in lines)
    paper, ink = "--background: #fcfcfa; --surface: #f3f4f1;", "--background: #0f1419; --surface: #151b22;"
    return (
        f":root {{ {paper} {variables(colours.light)} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {ink} {variables(colours.dark)} }} }}\n{fills}"
    )
