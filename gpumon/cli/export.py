"""`gpumon export prometheus`: one exporter per machine, for all its jobs."""

from __future__ import annotations

import os
from pathlib import Path

import click

from gpumon.cli.attach import sentence

DEFAULT_LISTEN = "127.0.0.1:9464"


@click.group("export")
def command() -> None:
    """Export gpumon's figures to other systems."""


@command.command("prometheus")
@click.option(
    "--listen", default=DEFAULT_LISTEN, metavar="HOST:PORT", show_default=True,
    help="Where to serve /metrics. Every user of this machine can read it; at another address, other machines too.",
)  # fmt: skip
@click.option(
    "--token-file", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="Answer only clients with the bearer token in this file (one line).",
)  # fmt: skip
@click.option(
    "--socket", "socket_path", type=click.Path(path_type=Path), metavar="PATH",
    help="Serve on a UNIX socket that only you can open, instead of HOST:PORT.",
)  # fmt: skip
@click.option("--once", is_flag=True, help="Print the metrics of the current jobs, and exit.")
@click.pass_context
def prometheus(
    context: click.Context, listen: str, token_file: Path | None, socket_path: Path | None, once: bool
) -> None:
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
    from gpumon.export import serving

    if socket_path is not None and context.get_parameter_source("listen") is not click.core.ParameterSource.DEFAULT:
        raise click.UsageError("--socket and --listen exclude each other")
    host, port = address(listen)
    if once:
        raise click.exceptions.Exit(exporting.print_once())
    try:
        token = None if token_file is None else serving.read_token(token_file)
    except OSError as error:
        raise click.ClickException(sentence(f"{token_file} cannot be read: {error.strerror or error}")) from None
    except serving.RequestRefused as reason:
        raise click.ClickException(sentence(str(reason))) from None
    try:
        listening = serving.listen_at(host, port) if socket_path is None else serving.listen_on(socket_path)
    except OSError as error:
        where = listen if socket_path is None else socket_path
        raise click.ClickException(sentence(f"cannot listen at {where}: {_why(error)}")) from None
    except serving.RequestRefused as reason:
        raise click.ClickException(sentence(str(reason))) from None
    raise click.exceptions.Exit(exporting.serve(listening, token))


def _why(error: OSError) -> str:
    """The system's message, to which Python may add the address. Negative errnos are from name look-up."""
    return os.strerror(error.errno) if error.errno is not None and error.errno > 0 else error.strerror or str(error)


def address(text: str) -> tuple[str, int]:
    """Parses "HOST:PORT", "[::1]:PORT" or ":PORT" (all addresses). Raises UsageError."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise click.UsageError(f"--listen takes HOST:PORT, as {DEFAULT_LISTEN}, not {text!r}")
    return host.removeprefix("[").removesuffix("]") or "0.0.0.0", int(port)
