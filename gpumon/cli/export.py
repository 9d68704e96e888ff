"""`gpumon export prometheus`: one exporter a machine, all its jobs, for a Prometheus server to scrape."""

from __future__ import annotations

import click

from gpumon.cli.attach import sentence

DEFAULT_LISTEN = "127.0.0.1:9464"


@click.group("export")
def command() -> None:
    """Hand what gpumon states on to other systems."""


@command.command("prometheus")
@click.option(
    "--listen", default=DEFAULT_LISTEN, metavar="HOST:PORT", show_default=True,
    help="Where to serve /metrics. Any other host than this one lets others read what your trainings use.",
)  # fmt: skip
@click.option("--once", is_flag=True, help="Print the metrics of the jobs that run now, and end.")
def prometheus(listen: str, once: bool) -> None:
    """Serve the memory of every job on this machine as Prometheus metrics, until a signal ends it.

    Jobs may come and go; without one it serves an empty list. docs/prometheus holds a scrape configuration and rules.
    """
    try:
        import prometheus_client  # noqa: F401
    except ImportError:
        raise click.ClickException(
            "prometheus_client is not installed; it comes with the extra: pip install -e '.[prometheus]'."
        ) from None
    from gpumon.cli import exporting

    host, port = address(listen)
    try:
        code = exporting.print_once() if once else exporting.serve(host, port)
    except OSError as error:
        raise click.ClickException(sentence(f"nothing can listen at {listen}: {error.strerror or error}")) from None
    raise click.exceptions.Exit(code)


def address(text: str) -> tuple[str, int]:
    """ "HOST:PORT", "[::1]:PORT" or ":PORT" (every address of this machine). Raises click's error."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise click.UsageError(f"--listen takes HOST:PORT, as {DEFAULT_LISTEN}, not {text!r}")
    return host.removeprefix("[").removesuffix("]") or "0.0.0.0", int(port)
