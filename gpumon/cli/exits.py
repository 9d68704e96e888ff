"""Exit codes of the verbs that say whether something fits. (Usage errors: 2, by click.)"""

from __future__ import annotations

import click

FITS, FITS_NOT, UNKNOWN = 0, 1, 3


class CannotTell(click.ClickException):
    """No answer: prints one sentence, exit code 3."""

    exit_code = UNKNOWN


def of(fits: bool | None) -> int:
    """0: it fits. 1: it does not, or will not. 3: unknown."""
    return UNKNOWN if fits is None else FITS if fits else FITS_NOT
