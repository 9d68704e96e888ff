"""Writes docs/findings/: one page a finding, and their list."""

from __future__ import annotations

from pathlib import Path

from gpumon.analysis.findings import RULES
from gpumon.analysis.pages import PAGES, markdown

FOLDER = Path(__file__).parent / "findings"


def pages() -> dict[str, str]:
    """File name → text."""
    rules = {rule.code: rule for rule in RULES}
    lines = ["# Findings", "", "`gpumon explain CODE` prints a page.", ""]
    for code, rule in sorted(rules.items()):
        means = PAGES[code].means.split(". ")[0].rstrip(".") if code in PAGES else ""
        lines.append(f"- [{code}]({code}.md) ({rule.severity}): {means}.")
    return {"README.md": "\n".join(lines) + "\n", **{f"{code}.md": markdown(rule) for code, rule in rules.items()}}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text)
