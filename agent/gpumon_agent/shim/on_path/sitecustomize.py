"""Python imports this at startup, since `gpumon run` puts its folder first on PYTHONPATH: the way into a script.

It runs the sitecustomize that it shadows, and waits for torch: a process that never imports torch pays only for this
file. Every interpreter that the command starts reads it, Python 2 too: so no annotations, no f-strings, no print().
No pathlib, no typing: they take milliseconds to import.
"""
# ruff: noqa: PTH100, PTH118, PTH120, UP032, UP036

import os
import sys

TYPE_CHECKING = False  # `typing` itself would take milliseconds of every interpreter's start
if TYPE_CHECKING:
    from collections.abc import Sequence  # noqa: F401 - in the comments that give types
    from typing import Any, Optional  # noqa: F401

_HERE = os.path.dirname(os.path.abspath(__file__))
_PACKAGE = os.path.dirname(os.path.dirname(_HERE))  # gpumon_agent itself; never its parent, which has other packages


class _Finder:
    """Finds gpumon_agent beside this file, and notices when `import torch` is complete."""

    def find_spec(self, name, path=None, target=None):
        # type: (str, Optional[Sequence[str]], Any) -> Any
        if name == "gpumon_agent":
            from importlib.util import spec_from_file_location

            init = os.path.join(_PACKAGE, "__init__.py")
            return spec_from_file_location(name, init, submodule_search_locations=[_PACKAGE])
        if name in ("torch", "safetensors.torch") and target is None:
            for finder in sys.meta_path:
                find = None if finder is self else getattr(finder, "find_spec", None)
                spec = find and find(name, path, target)
                if spec is not None:
                    if type(spec) is _ModuleSpec:
                        spec.__class__ = _TorchSpec
                    return spec
        return None


_ModuleSpec = type(__spec__) if sys.version_info >= (3, 6) else object


class _TorchSpec(_ModuleSpec):  # type: ignore[misc,valid-type]
    """A ModuleSpec for one import: acts when the import system marks it complete, then becomes an ordinary one.

    A wrapper around the loader would appear in every traceback out of `import torch`; an attribute's setter does not.
    """

    def __setattr__(self, name, value):
        # type: (str, Any) -> None
        super().__setattr__(name, value)
        if name == "_initializing" and not value:
            self.__class__ = _ModuleSpec  # type: ignore[assignment]
            if self.name in sys.modules:  # the import system removes a module whose code raised
                if self.name == "torch":
                    _torch_is_here()
                elif "gpumon_agent.shim" in sys.modules:
                    sys.modules["gpumon_agent.shim"].safetensors()


def _torch_is_here():
    # type: () -> None
    if os.environ.get("GPUMON_SHIM") == "off" or _is_torch_helper():
        return
    problem = _unmet_need()
    if problem is None:
        try:
            from gpumon_agent import shim
        except (ImportError, OSError) as error:  # the installation changed or broke during the run
            problem = "its agent cannot be imported: {}".format(error)
    if problem is None:
        shim.begin()
    else:
        os.environ["GPUMON_SHIM"] = "off"  # child processes need not repeat it
        if sys.stderr is not None:
            sys.stderr.write("gpumon: " + problem + "; the run goes on unwatched\n")


def _is_torch_helper():
    # type: () -> bool
    """Compile and autotune workers of torch.compile: separate interpreters, started with torch's own files."""
    words = getattr(sys, "orig_argv", sys.argv)
    return any("_inductor" in word for word in words[1:4])


def _unmet_need():
    # type: () -> Optional[str]
    if sys.version_info < (3, 10):
        return "its agent needs Python 3.10 or newer, and this is {}.{}".format(*sys.version_info)
    from importlib.util import find_spec

    missing = [package for module, package in (("zmq", "pyzmq"), ("msgspec", "msgspec")) if find_spec(module) is None]
    if missing:
        install = "{} -m pip install {}".format(sys.executable, " ".join(missing))
        return "{} not found ({})".format(" and ".join(missing), install)
    return None


def _make_way():
    # type: () -> None
    """Runs the sitecustomize that this one shadows."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or os.curdir) != _HERE]
    sys.path_importer_cache.pop(_HERE, None)
    kept = sys.modules.pop("sitecustomize", None)  # Python 2 empties a module without references
    import sitecustomize  # type: ignore[import-not-found]  # noqa: F401 - `site` handles what it raises

    del kept


if sys.version_info >= (3, 6) and not any(
    type(finder).__name__ == "_Finder" and type(finder).__module__ == __name__ for finder in sys.meta_path
):
    sys.meta_path.insert(0, _Finder())
_make_way()
