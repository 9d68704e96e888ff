"""torch's debug server with a page of gpumon's: `start_debug_server(handlers=gpumon_agent.debug_server.handlers())`.

The server, a process of rank 0, asks every rank's worker server: `figures` answers there, `page` makes the table here.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

from gpumon_agent.debug_server.figures import ENDPOINT, answer
from gpumon_agent.guard import pass_on
from gpumon_agent.logged import Logged
from gpumon_agent.loop import Loop, guarded
from gpumon_agent.registry import REGISTRY

_NEEDS = "gpumon's page needs torch 2.12 or newer, whose debug server takes handlers"
_LIBRARIES = ("jinja2", "tabulate")


def handlers() -> list[Any]:
    """torch's default handlers and gpumon's, for `torch.distributed.debug.start_debug_server`. Call it on every rank.

    From here on this process is watched, unless `gpumon run` or `watch` does already, and the page's peaks are counted.
    Raises ImportError if torch is too old, a newer torch has changed what the page uses, or a library is missing.
    """
    try:
        page, default_handlers, register = _torchs()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        pass_on(error)
        raise _unusable(error) from None
    if REGISTRY.debug_figures is None:
        figures = Logged()
        if REGISTRY.agent is not None:
            guarded(REGISTRY.agent.read_for, figures)
        REGISTRY.followers.add(figures)
        register(ENDPOINT, _lasting(partial(answer, figures)))
        REGISTRY.debug_figures = figures
    Loop("").begin()
    return [page, *default_handlers()]  # torch does not wrap its links: the last ones may be outside the window


def _torchs() -> tuple[Any, Any, Any]:
    """(the page, default_handlers, _register_handler). Raises if one of torch's parts is missing or takes other
    arguments than it is called with: all but `start_debug_server` are private."""
    from torch._C._distributed_c10d import _register_handler, _Response
    from torch.distributed import debug
    from torch.distributed.debug import _debug_handlers, _frontend

    calls: tuple[tuple[Any, tuple[Any, ...], dict[str, Any]], ...] = (
        (debug.start_debug_server, (), {"handlers": []}),
        (_debug_handlers.default_handlers, (), {}),
        (_frontend.fetch_all, ("",), {"timeout": 1.0}),
        (_frontend.Route, ("", print), {}),
        (_frontend.NavLink, ("", ""), {}),
        (_frontend.FrontendServer.render_template, (None, ""), {"name": ""}),
        *(
            (getattr(_frontend.DebugHandler, name), (None,), {})
            for name in ("routes", "nav_links", "templates", "dump")
        ),
        (_frontend.DebugHandler.dump_filename, (None,), {}),
    )
    for function, arguments, named in calls:
        try:
            inspect.signature(function).bind(*arguments, **named)
        except TypeError as error:
            raise TypeError(f"{function.__qualname__}: {error}") from None
    if not isinstance(_frontend.DebugHandler.fetch_timeout, float):
        raise TypeError("DebugHandler.fetch_timeout is no float")
    if "{% block content %}" not in _frontend.BASE_TEMPLATE:
        raise ValueError("BASE_TEMPLATE has no block named content")
    for name in ("set_content", "set_status"):
        getattr(_Response, name)
    if not (_register_handler.__doc__ or "").startswith("_register_handler(name: str, handler: "):
        raise TypeError("_register_handler takes other arguments")
    from gpumon_agent.debug_server.page import Page

    return Page(), _debug_handlers.default_handlers, _register_handler


def _unusable(error: Exception) -> ImportError:
    import torch

    if isinstance(error, ModuleNotFoundError) and error.name in _LIBRARIES:
        return ModuleNotFoundError(
            f"torch's debug server needs {error.name}: pip install jinja2 tabulate aiohttp", name=error.name
        )
    return ImportError(f"{_NEEDS}: torch {torch.__version__} does not fit ({error})")


def _lasting(handler: Any) -> Any:
    """`handler`, which is never freed: torch's registry drops its reference as the process exits, without the GIL, and
    the interpreter would abort if it were the last one."""
    handler.lasts = handler
    return handler
