# same: fresh; cases=process,modules,logging; on=cpu
"""What a script sees of its process: environment, paths, flags, modules, logging."""

import gc
import locale
import logging
import os
import resource
import sys
import warnings

if sys.argv[1] == "logging":
    logging.basicConfig(level=logging.DEBUG, format="%(name)s %(levelname)s %(message)s")

import numpy
import torch
from same import case, device, tell, watch

tell("before", [sys.argv, sys.path, sys.flags, list(sys.warnoptions)])
model = torch.nn.Linear(8, 8).to(device)
optimizer = torch.optim.AdamW(model.parameters())
watch(model, optimizer)
for _ in range(12):
    model(torch.ones(4, 8, device=device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
if case == "process":
    hidden = ("SAME_WATCH", "GPUMON_GOVERNOR", "GPUMON_NATIVE", "PYTHONPATH")
    tell("environment", sorted((k, v) for k, v in os.environ.items() if k not in hidden))
    tell("argv", [sys.argv, sys.path, sys.flags, sys.executable, sys.prefix, list(sys._xoptions)])
    tell("main", sorted(vars(sys.modules["__main__"])))
    tell("spec", [__name__, __file__, __spec__, __doc__])
    tell("cwd", [os.getcwd(), oct(os.umask(0o22)), os.listdir(".")])
    tell("locale", [locale.setlocale(locale.LC_ALL), sys.getfilesystemencoding(), sys.stdout.encoding])
    tell("switch", [sys.getswitchinterval(), sys.getrecursionlimit(), sys.dont_write_bytecode])
    tell(
        "limits", [resource.getrlimit(n) for n in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE, resource.RLIMIT_STACK)]
    )
    tell("priority", [os.getpriority(os.PRIO_PROCESS, 0), sorted(os.sched_getaffinity(0))])
    tell("group", [os.getpgrp() == os.getpid(), os.getsid(0) == os.getpid()])
    tell(
        "torch",
        [
            torch.get_num_threads(),
            torch.get_num_interop_threads(),
            torch.is_grad_enabled(),
            str(torch.get_default_dtype()),
        ],
    )
    tell(
        "settings",
        [
            torch.are_deterministic_algorithms_enabled(),
            torch.backends.cudnn.benchmark,
            torch.get_float32_matmul_precision(),
        ],
    )
    tell("numpy", [str(numpy.geterr()), numpy.get_printoptions()["precision"]])
    tell("filters", [str(each) for each in warnings.filters])
    tell("hooks", [sys.breakpointhook is sys.__breakpointhook__, sys.displayhook is sys.__displayhook__])
    tell(
        "tracers",
        [sys.gettrace(), sys.getprofile(), sys.get_asyncgen_hooks(), sys.get_coroutine_origin_tracking_depth()],
    )
    tell("gc", [gc.isenabled(), gc.get_threshold(), gc.get_freeze_count(), len(gc.callbacks)])
elif case == "modules":
    ours = ("gpumon", "zmq", "msgspec", "sitecustomize")
    tell(
        "modules of the user",
        sorted(
            n
            for n in sys.modules
            if "." not in n
            and getattr(sys.modules[n], "__file__", None)
            and os.path.dirname(__file__) in (sys.modules[n].__file__ or "")
        ),
    )
    tell(
        "torch",
        [type(torch.__spec__).__name__, type(torch.__loader__).__name__, torch.__spec__.origin == torch.__file__],
    )
    tell(
        "shadowed",
        [n for n in ("steps", "probe", "leaks", "wire", "agent", "guard", "launch", "ledger") if n in sys.modules],
    )
    tell("sitecustomize", getattr(sys.modules.get("sitecustomize"), "__file__", None))
    tell(
        "importer",
        sorted(type(f).__name__ for f in sys.meta_path if not isinstance(f, type) and type(f).__module__ not in ours),
    )
else:
    tell("root", [str(handler) for handler in logging.getLogger().handlers] + [logging.getLogger().level])
    tell(
        "loggers",
        sorted(
            n for n in logging.Logger.manager.loggerDict if n.split(".")[0] not in ("torch", "concurrent", "asyncio")
        ),
    )
    logging.getLogger("mine").warning("mine")
    logging.captureWarnings(True)
    warnings.warn("through logging")
