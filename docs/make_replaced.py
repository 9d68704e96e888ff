"""Writes docs/what-is-replaced.md from the agent's own list."""

from __future__ import annotations

from pathlib import Path

from gpumon_agent.patching import LIST, STAYS

TARGET = Path(__file__).with_name("what-is-replaced.md")
HEAD = """# What is replaced

The agent runs inside the training process and replaces some of these attributes there, depending on the version of
torch and on how it was started (*When*). It replaces nothing in the standard library, in sys or in builtins. Made by
`python docs/make_replaced.py`; `gpumon doctor --replaced` prints the same list.

Each replacement calls the original with the same arguments and returns its result. An exception passes through without
a frame of the agent, a warning names your line, and `torch.compile` sees only the original. If you replace the same
attribute after the agent, your function stays when the agent stops; the agent's function inside yours then only calls
the original.
"""
ADDED = """# What is added

The agent also adds these entries to registries of torch and Python.
"""


def text() -> str:
    """The page."""
    lines = [HEAD]
    for each in LIST.values():
        lines += _entry(each.name, ("When", each.where), ("Why", each.why), ("You could notice", each.noticed),
                        ("Restored", each.restored))  # fmt: skip
    lines.append("#" + ADDED)
    for added in STAYS:
        lines += _entry(added.name, ("Why", added.why), ("You could notice", added.noticed), ("Removed", added.removed))
    return "\n".join(lines).rstrip("\n") + "\n"


def _entry(name: str, *parts: tuple[str, str]) -> list[str]:
    return [f"- **{name.replace('_', chr(92) + '_')}**", *(f"  - {what}: {said}" for what, said in parts), ""]


if __name__ == "__main__":
    TARGET.write_text(text())
