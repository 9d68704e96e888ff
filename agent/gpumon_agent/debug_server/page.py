"""gpumon's page of torch's debug server: one table of all ranks. It runs in the server's process, beside rank 0.

The answers come over the network, and torch's templates do not escape: here every text is cleaned and escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec
from tabulate import tabulate
from torch.distributed.debug._frontend import DebugHandler, NavLink, Route, fetch_all

from gpumon_agent.debug_server.figures import ENDPOINT, DeviceFigures, RankFigures
from gpumon_agent.units import torch_size
from gpumon_agent.wire import clean

_NOT_FOUND = 404  # of a worker server without our handler
_UNKNOWN = "-"
_SENTENCE_CHARS_MAX = 300

TEMPLATE = """
{% extends "base.html" %}
{% block header %}
<h1>{% block title %}gpumon{% endblock %}</h1>
{% endblock %}
{% block content %}
{% autoescape true %}
<style>
  nav { flex-wrap: wrap; }
  section { max-width: none; }
  .gpumon { overflow-x: auto; }
  .gpumon table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
  .gpumon th, .gpumon td { padding: 4px 10px; border-bottom: 1px solid #8884; text-align: left; white-space: nowrap; }
  .gpumon td:last-child { white-space: normal; min-width: 14em; }
  .gpumon .bytes { text-align: right; }
  .gpumon .problem { color: #a4400a; }
  .gpumon .nearest { background: #ffe9b8; }
  @media (prefers-color-scheme: dark) {
    body { color: #d7dce0; background: #14181c; }
    nav { background: #262c33; }
    nav a { color: #8ab4f8; }
    .gpumon .problem { color: #ffb27a; }
    .gpumon .nearest { background: #4a3a10; }
  }
</style>
<p>{{ sentence }}</p>
<div class="gpumon"><table>
<tr>
{%- for header in headers %}<th{% if loop.index0 in bytes_at %} class="bytes"{% endif %}>{{ header }}</th>{% endfor -%}
</tr>
{% for row in rows %}
<tr{% if row.nearest %} class="nearest"{% endif %}>
{%- for cell in row.cells %}
{%- if row.problem and loop.last %}<td class="problem" colspan="{{ headers | length - loop.index0 }}">{{ cell }}</td>
{%- else %}<td{% if loop.index0 in bytes_at %} class="bytes"{% endif %}>{{ cell }}</td>
{%- endif %}{% endfor %}</tr>
{% endfor %}
</table></div>
<p>{{ notes }}</p>
{% endautoescape %}
{% endblock %}
"""
NOTES = (
    "forward, backward, optimizer: the highest allocated in these phases, in steps that were read; highest: in any "
    "phase and step, since handlers() was called. allocated, reserved: as the newest phase that was read ended. limit: "
    "the device's total, or the share of it that the process allows itself. next peak, headroom: the newest outlook's; "
    "headroom is known once a viewer has told the agent what the device has free. A dash: not known."
)


class Page(DebugHandler):  # type: ignore[misc]  # mypy does not look into torch
    """It has no state: torch may pickle it into the server's process."""

    def routes(self) -> list[Any]:
        return [Route(f"/{ENDPOINT}", self._page)]

    def nav_links(self) -> list[Any]:
        return [NavLink(f"/{ENDPOINT}", "gpumon")]

    def templates(self) -> dict[str, str]:
        return {"gpumon.html": TEMPLATE}

    def dump(self) -> str:
        """The same table as text."""
        ranks = self._ranks()
        closest = nearest(ranks)
        table = [row.cells for row in rows(ranks, closest)]
        aligned = ["right" if at in BYTES_AT else "left" for at in range(len(HEADERS))]
        text = tabulate(table, headers=HEADERS, tablefmt="plain", disable_numparse=True, colalign=aligned)
        return f"{_sentence(closest)}\n\n{text}\n\n{NOTES}\n"

    def dump_filename(self) -> str:
        return ENDPOINT

    def _page(self, request: Any) -> bytes:
        ranks = self._ranks()
        closest = nearest(ranks)
        page: bytes = request.frontend.render_template(
            "gpumon.html", sentence=_sentence(closest), headers=HEADERS, bytes_at=BYTES_AT, rows=rows(ranks, closest),
            notes=NOTES,
        )  # fmt: skip
        return page.decode().encode("ascii", "xmlcharrefreplace")  # torch names no charset

    def _ranks(self) -> list[Rank]:
        addresses, responses = fetch_all(ENDPOINT, timeout=self.fetch_timeout)
        return [
            read(number, address, response.status_code, response.text)
            for number, (address, response) in enumerate(zip(addresses, responses, strict=True))
        ]


class Rank(NamedTuple):
    number: int
    host: str
    figures: RankFigures | None
    problem: str  # why there are no figures


class Nearest(NamedTuple):
    rank: int
    device: str
    room: int  # bytes
    sentence: str


def read(number: int, address: str, status: int, text: str) -> Rank:
    """A rank's answer, or why there is none."""
    host = clean(urlsplit(address).hostname or "")
    if status == _NOT_FOUND:
        return Rank(number, host, None, "gpumon_agent.debug_server.handlers() was not called in this rank")
    if status != 200:
        return Rank(number, host, None, clean(f"did not answer ({status}): {text}", _SENTENCE_CHARS_MAX))
    try:
        figures = msgspec.json.decode(text, type=RankFigures)
    except (msgspec.DecodeError, RecursionError) as error:
        return Rank(number, host, None, clean(f"its answer cannot be read: {error}", _SENTENCE_CHARS_MAX))
    return Rank(
        number, host, figures, "no agent in this process: not begun, or stopped" if figures.agent is None else ""
    )


def nearest(ranks: Sequence[Rank]) -> Nearest | None:
    """The device with the least headroom. If not all headrooms are known: with the least bytes between its highest peak
    and its limit. None: nothing is known."""
    devices = [(rank, device) for rank in ranks if rank.figures is not None for device in rank.figures.devices]
    rooms = [(device.headroom, rank, device) for rank, device in devices if device.headroom is not None]
    what = "headroom"
    if len(rooms) < len(devices):
        rooms = [
            (device.limit - device.peak, rank, device)
            for rank, device in devices
            if device.limit is not None and device.peak is not None
        ]
        what = "between its highest peak and its limit"
    if not rooms:
        return None
    room, rank, device = min(rooms, key=lambda each: each[0])
    name = clean(device.device)
    return Nearest(
        rank.number, name, room, f"Rank {rank.number} ({name}) is closest to its limit: {_size(room)} {what}."
    )


HEADERS = (
    "rank", "host", "device", "step", "phase", "forward", "backward", "optimizer", "highest", "allocated", "reserved",
    "limit", "next peak", "headroom", "state",
)  # fmt: skip
BYTES_AT = range(HEADERS.index("forward"), HEADERS.index("state"))


class Row(NamedTuple):
    cells: tuple[str, ...]  # as HEADERS; of a problem, the last one says it
    problem: bool = False
    nearest: bool = False


def _sentence(closest: Nearest | None) -> str:
    return "Which rank is closest to its limit is not known." if closest is None else closest.sentence


def rows(ranks: Sequence[Rank], closest: Nearest | None) -> list[Row]:
    """One for each device of each rank."""
    found = []
    for rank in ranks:
        begin = (str(rank.number), rank.host)
        figures = rank.figures
        if rank.problem or figures is None:
            found.append(Row((*begin, rank.problem), problem=True))
            continue
        since = "" if figures.phase_s is None else f" for {figures.phase_s:.1f} s"
        where = (_UNKNOWN if figures.step is None else str(figures.step), clean(figures.phase) + since)
        notes = [clean(note, _SENTENCE_CHARS_MAX) for note in figures.notes]
        for device in figures.devices or (DeviceFigures(_UNKNOWN),):
            is_nearest = closest is not None and (rank.number, clean(device.device)) == closest[:2]
            bytes_ = (
                device.forward_peak, device.backward_peak, device.optimizer_peak, device.peak, device.allocated,
                device.reserved, device.limit, device.next_peak, device.headroom,
            )  # fmt: skip
            state = "; ".join([*([clean(device.verdict)] if device.verdict else []), *notes]) or _UNKNOWN
            name = clean(f"{device.device} {device.name}".strip())
            found.append(Row((*begin, name, *where, *map(_size, bytes_), state), nearest=is_nearest))
            notes = []  # of the rank: once
    return found


def _size(count: int | None) -> str:
    if count is None:
        return _UNKNOWN
    return torch_size(count) if count >= 0 else f"-{torch_size(-count)}"
