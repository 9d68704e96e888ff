"""Pages over a screen: help from the bindings, a panel's figures explained, a finding in full, the full OOM report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen

from gpumon.analysis.job_findings import JobFinding
from gpumon.analysis.units import size
from gpumon.tui.glossary import TERMS, WORDS, Term
from gpumon.tui.styles import Glyphs
from gpumon.tui.text_layout import EMPTY, Line, left, words
from gpumon.tui.view import View
from gpumon.tui.widgets.findings_strip import details_of
from gpumon.tui.widgets.panel import Panel
from gpumon.tui.widgets.prose import Prose

if TYPE_CHECKING:
    from gpumon.analysis.diagnosis.oom_report import OomReport

Key = tuple[str, str, str]
"""(group, key as written, what it does)"""

GROUPS = ("Everywhere", "This screen", "This panel")

CLOSE = Binding("escape,q,enter,question_mark,e", "dismiss", "Close", id="page.close", key_display="esc",
                tooltip="Back to the screen")  # fmt: skip


class HelpText(Prose):
    def compose_lines(self, slice_: Any, width: int, glyphs: Glyphs) -> list[Line]:
        raise NotImplementedError

    def on_mount(self) -> None:
        self._fresh = True
        self.call_after_refresh(self._redraw)

    def pick(self, view: View) -> Any:
        return self._slice


class HelpPage(HelpText):
    def __init__(self, keys: tuple[Key, ...]) -> None:
        super().__init__(id="page")
        self._slice = keys

    def compose_lines(self, slice_: tuple[Key, ...], width: int, glyphs: Glyphs) -> list[Line]:
        lines: list[Line] = [((" Keys", "title"),)]
        group = ""
        for name, key, what in slice_:
            if name != group:
                lines += [EMPTY, ((f" {name}", "strong"),)]
                group = name
            rows = words(what, "text", max(20, width - 20))
            lines.append(((left(f"   {key}", 18), "key"), *rows[0]))
            lines += [((" " * 18, ""), *row) for row in rows[1:]]
        lines += [EMPTY, ((" Words", "title"), ("  e explains the rows and columns of a panel", "dim"))]
        for term in WORDS.values():
            lines += term_lines(term, width)
        return lines


class ExplainPage(HelpText):
    def __init__(self, title: str, sums: list[str], terms: tuple[str, ...]) -> None:
        super().__init__(id="page")
        self._slice = (title, tuple(sums), terms)

    def compose_lines(
        self, slice_: tuple[str, tuple[str, ...], tuple[str, ...]], width: int, glyphs: Glyphs
    ) -> list[Line]:
        title, sums, terms = slice_
        lines: list[Line] = [((f" {title}", "title"),)]
        for text in sums:
            lines.append(EMPTY)
            lines += [((" ", ""), *row) for row in words(text, "strong", width - 3)]
        for word in terms:
            lines += term_lines(TERMS[word], width)
        return lines


class OomPage(HelpText):
    def __init__(self, report: OomReport) -> None:
        super().__init__(id="page")
        self._slice = report

    def compose_lines(self, slice_: OomReport, width: int, glyphs: Glyphs) -> list[Line]:
        from gpumon.analysis.diagnosis.render import text

        first, *rest = text(slice_, max(24, width - 2)).splitlines()
        lines: list[Line] = [((" Out of memory", "title"),), EMPTY, ((f" {first}", "strong"),)]
        lines += [((f" {row}", "text" if row.startswith(" ") else "key"),) for row in rest]
        if slice_.message:
            lines += [EMPTY, ((" What PyTorch said", "key"),)]
            lines += [(("   ", ""), *row) for row in words(slice_.message, "dim", width - 5)]
        return lines


def term_lines(term: Term, width: int) -> list[Line]:
    lines: list[Line] = [EMPTY, ((f" {term.word}", "key"), (f"  = {term.formula}" if term.formula and
                                                             len(term.formula) + len(term.word) + 6 < width else "",
                                                             "text"))]  # fmt: skip
    if term.formula and len(term.formula) + len(term.word) + 6 >= width:
        lines += [(("   = ", "text"), *row) for row in words(term.formula, "text", width - 7)]
    lines += [(("   ", ""), *row) for row in words(term.meaning, "dim", width - 5)]
    return lines


class FindingText(HelpText):
    """One of the job's findings: what was seen, where, since when, what to do, and what its kind means."""

    def __init__(self, found: JobFinding, at: int, of: int) -> None:
        super().__init__(id="page")
        self._slice = (found, at, of)

    def take(self, found: JobFinding, at: int, of: int) -> None:
        self._slice = (found, at, of)
        self.action_scroll_lines(-self._all)

    def compose_lines(self, slice_: tuple[JobFinding, int, int], width: int, glyphs: Glyphs) -> list[Line]:
        each, at, of = slice_
        finding = each.finding
        count = f"  {at + 1} of {of}" if of > 1 else ""
        lines: list[Line] = [((f" {finding.code}", "title"), (f"  {finding.severity}{count}", "dim")), EMPTY]
        lines += [((" ", ""), *row) for row in words(finding.title, "strong", width - 3)]
        for name, text in finding_facts(each):
            lines += [EMPTY, ((f" {name}", "key"),)]
            lines += [(("   ", ""), *row) for row in words(text, "text", width - 5)]
        return lines


def finding_facts(each: JobFinding) -> list[tuple[str, str]]:
    """(heading, text) of all that is known about a finding, in the order in which one would ask."""
    from gpumon.analysis.pages import PAGES

    finding = each.finding
    facts: list[tuple[str, str]] = []
    if finding.state != "open":
        facts.append(("State", "it is over: the last checks did not find it"))
    if each.ranks:
        facts.append(("Ranks", each.ranks))
    if finding.holder:
        by = finding.by
        where = f", in {_with_text(by.where, by.source_line)}" if by is not None and by.where else ""
        facts.append(("Held by", f"{finding.holder}{where}"))
    if finding.where:
        facts.append(("At", _with_text(finding.where, finding.source_line)))
    growth = [f"{size(finding.bytes_per_step)} a step"] if finding.bytes_per_step else []
    growth += [f"{size(finding.so_far)} so far"] if finding.so_far else []
    growth += [f"since step {finding.step:,}"] if finding.step is not None else []
    if growth:
        facts.append(("How much", ", ".join(growth)))
    if finding.remedy:
        facts.append(("What to do here", finding.remedy))
    page = PAGES.get(finding.code)
    if page is not None:
        facts += [
            (f"What {finding.code} means", page.means),
            ("What helps in general", page.do),
            ("How gpumon detects it", page.evidence),
        ]
    return facts


def markdown(each: JobFinding) -> str:
    """A finding as one would paste it into a chat or an issue."""
    finding = each.finding
    facts = "\n".join(f"- **{name}**: {text}" for name, text in finding_facts(each))
    return f"### {finding.code} ({finding.severity})\n\n{finding.title}\n\n{facts}\n"


def _with_text(where: str, source_line: str | None) -> str:
    """ "train.py:9: cache.append(y.detach())"."""
    return f"{where}: {source_line}" if source_line else where


class _Popup(ModalScreen[None]):
    AUTO_FOCUS = "#page"
    BINDINGS: ClassVar[list[BindingType]] = [CLOSE]

    def page(self) -> HelpText:
        raise NotImplementedError

    @property
    def hint(self) -> str:
        return "esc closes"

    def compose(self) -> ComposeResult:
        with Vertical(id="popup") as box:
            box.border_subtitle = self.hint
            yield self.page()


def keys_of(app: App[int]) -> tuple[Key, ...]:
    """Every binding of the app, its screen and the focused panel, as (group, key, what it does)."""
    found: list[Key] = []
    seen: set[str] = set()
    nodes = zip(GROUPS, (app, app.screen, app.focused), strict=True)
    for group, node in nodes:
        if node is None:
            continue
        bindings = [b for bs in node._bindings.key_to_bindings.values() for b in bs]
        for binding in sorted(bindings, key=lambda b: not b.show):
            if binding.system or not binding.id or binding.id in seen or not binding.tooltip:
                continue
            name = binding.action.partition("(")[0].removeprefix("app.")
            if not node.check_action(name, _parameters(binding.action)):
                continue
            seen.add(binding.id)
            same = [b for b in bindings if b.id == binding.id]
            display = " ".join(dict.fromkeys(_spelled(app, b) for b in same))
            found.append((group, display, binding.tooltip))
    found.append(("Everywhere", "ctrl+p", "The command palette: every action by name"))
    return tuple(sorted(found, key=lambda key: GROUPS.index(key[0])))


def _parameters(action: str) -> tuple[object, ...]:
    _, _, inner = action.partition("(")
    return (inner.rstrip(")").strip("'"),) if inner else ()


def _spelled(app: App[int], binding: Binding) -> str:
    return app.get_key_display(Binding(binding.key, binding.action))


class HelpScreen(_Popup):
    """`?`"""

    def __init__(self, keys: tuple[Key, ...]) -> None:
        super().__init__()
        self._keys = keys

    def page(self) -> HelpPage:
        return HelpPage(self._keys)


class OomScreen(_Popup):
    """`o`"""

    def __init__(self, report: OomReport) -> None:
        super().__init__()
        self._report = report

    def page(self) -> HelpText:
        return OomPage(self._report)


class FindingScreen(_Popup):
    """Enter on the findings, and `n` anywhere: one finding in full. `n` and `N` go to the next and the previous one."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("n", "turn(1)", "Next", id="page.next", tooltip="The next finding"),
        Binding("N", "turn(-1)", "Previous", id="page.previous", tooltip="The finding before"),
        Binding("d", "details", "Details", id="page.details", tooltip="The screen with this finding's details"),
        Binding("y", "copy", "Copy", id="page.copy", tooltip="Copy this finding as Markdown"),
    ]

    def __init__(self, found: Sequence[JobFinding], at: int, open_details: Callable[[JobFinding], object]) -> None:
        super().__init__()
        self._found = tuple(found)
        self._at = at % len(self._found)
        self._open_details = open_details

    def page(self) -> FindingText:
        return FindingText(self._found[self._at], self._at, len(self._found))

    @property
    def hint(self) -> str:
        others = "n next  N previous  " if len(self._found) > 1 else ""
        return f"{others}{'d details  ' if details_of(self._found[self._at]) else ''}y copy  esc closes"

    def action_turn(self, by: int) -> None:
        self._at = (self._at + by) % len(self._found)
        self.query_one(FindingText).take(self._found[self._at], self._at, len(self._found))
        self.query_one("#popup").border_subtitle = self.hint

    def action_copy(self) -> None:
        self.app.copy_to_clipboard(markdown(self._found[self._at]))
        self.app.clear_notifications()
        self.notify("Copied as Markdown.", markup=False)

    def action_details(self) -> None:
        self.app.pop_screen()
        self._open_details(self._found[self._at])

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "turn":
            return len(self._found) > 1
        return action != "details" or details_of(self._found[self._at]) is not None


class FiguresScreen(_Popup):
    """Figures and terms that a panel gives, such as those of a clicked slice."""

    def __init__(self, title: str, sums: list[str], terms: tuple[str, ...]) -> None:
        super().__init__()
        self._page = title, sums, terms

    def page(self) -> HelpText:
        return ExplainPage(*self._page)


class ExplainScreen(_Popup):
    """`e`: explains the focused panel."""

    def __init__(self, panel: Panel) -> None:
        super().__init__()
        self._panel = panel

    def page(self) -> HelpText:
        panel = self._panel
        return ExplainPage(panel.NAME or "This panel", panel.sums(), panel.terms())
