"""HTML elements. Text cannot become markup: what is not made here is escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


class Html(str):
    """Markup, made by the functions below."""

    __slots__ = ()


def el(name: str, *content: str, **attributes: object) -> Html:
    """An element. `content` that is not Html is text, and is escaped; so are attributes (`class_` is `class`)."""
    named = "".join(f' {_named(key)}="{escaped(str(value))}"' for key, value in attributes.items())
    inner = "".join(part if isinstance(part, Html) else escaped(part) for part in content)
    return Html(f"<{name}{named}>{inner}</{name}>")


def _named(key: str) -> str:
    return key.rstrip("_").replace("_", "-")


def together(made: Iterable[Html]) -> Html:
    return Html("\n".join(made))


def escaped(text: str) -> str:
    return html.escape(plain(text))


def plain(text: str) -> str:
    """Only printable characters: no control characters, nothing that changes the reading direction."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else " " if c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int]) -> Html:
    """`numbers`: the columns that are aligned to the right. A cell may be markup."""
    kinds = ["number" if at in numbers else "text" for at in range(len(heads))]
    made = [el("tr", *(el("th", text, scope="col", class_=kinds[at]) for at, text in enumerate(heads)))]
    made += [el("tr", *(el("td", text, class_=kinds[at]) for at, text in enumerate(row))) for row in rows]
    return el("div", el("table", *made), class_="wide")


def facts(pairs: Iterable[tuple[str, str]]) -> Html:
    """Names and what they are; what is empty is left out."""
    return el("dl", *(part for name, value in pairs if value for part in (el("dt", name), el("dd", value))))
