"""The words of a user's command behind `gpumon run` and `gpumon dryrun`: which are options meant for gpumon."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

import click

_PYTHONS = re.compile(r"-[bBcdEhiImOPqRsStuvVWxX?]")
_PYTHONS_LONG = ("--check-hash-based-pycs",)


def own_options_only(words: Sequence[str]) -> None:
    """Raises NoSuchOption if the first word is an option of neither gpumon nor Python (`-m pkg.train`, `-u x.py`).

    Python would answer for gpumon otherwise.
    """
    if not words or not words[0].startswith("-") or words[0] == "-":
        return
    name = words[0].partition("=")[0]
    if name in _PYTHONS_LONG or (not name.startswith("--") and _PYTHONS.match(name)):
        return
    context = click.get_current_context()
    ours = [each for parameter in context.command.get_params(context) for each in parameter.opts if each[0] == "-"]
    near = difflib.get_close_matches(name, [each for each in ours if each.startswith("--")])
    if name.startswith("--help"):
        near = ["--help"]
    raise click.NoSuchOption(name, possibilities=near, ctx=context)
