"""The agent of one process: what hooks, phases, probes, recorder and publisher have to do with one another."""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import ContextDecorator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

from gpumon_agent import wire
from gpumon_agent._version import __version__
from gpumon_agent.forecast.outlook import Followed, Outlooks, expandable
from gpumon_agent.governor import Governor
from gpumon_agent.guard import Guard
from gpumon_agent.launched import launched
from gpumon_agent.oom.lastwords import LastWords
from gpumon_agent.probe import Probe
from gpumon_agent.steps.phases import Phases, Reader
from gpumon_agent.viewers import endpoint, farewell
from gpumon_agent.viewers.control import Control
from gpumon_agent.viewers.errands import Errands
from gpumon_agent.viewers.publisher import Publisher
from gpumon_agent.viewers.recorder import Recorder

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer

    from gpumon_agent.probe.cpu import StorageTracker

_REDESCRIBED_AFTER = (0, 4)  # steps with a model: the first makes optimizer state, by the fifth DDP logged its buckets
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_DEVICES_LOOKED_FOR_EVERY = 200  # steps: a model may move
_HELD_S = 30.0  # at most; a signal ends it


class Agent:
    """Everything that watches this process. Made by the first `watch()`, or when the shim finds a model."""

    def __init__(self, name: str | None = None, *, tracker: StorageTracker | None = None, publish: bool = True) -> None:
        from gpumon_agent.leaks.evidence import Evidence
        from gpumon_agent.ledger import describe
        from gpumon_agent.ledger.accounts import Accounts
        from gpumon_agent.steps.hooks import Hooks
        from gpumon_agent.steps.wrappers import unwrapped

        opened_ns = time.monotonic_ns()
        self.pid = os.getpid()
        self.recorder = Recorder()
        self.governor = Governor(off=os.environ.get("GPUMON_GOVERNOR") == "off")
        self.guard = Guard(self.notice)
        self._describe = describe
        self._unwrapped = unwrapped
        self._bounds = os.environ.get("GPUMON_PEAKS") == "bounds"
        self._models: list[_Watched] = []
        self._probes: dict[str, Probe] = {}
        self._tracker = tracker
        self._publishers = int(publish)  # threads of ours
        if tracker is None and os.environ.get("GPUMON_TRACK_CPU") == "1":
            from gpumon_agent.probe.cpu import StorageTracker

            self._tracker = StorageTracker()
            self._tracker.start()
        self._new_roots: list[weakref.ref[Module]] = []
        self._devices: tuple[wire.Device, ...] = ()
        self._fractions: dict[str, str] = {}  # of a device's total, where the user set one
        self._describing: Iterator[bool] | None = None
        self._redescribed_at = set(_REDESCRIBED_AFTER)
        self._launched = launched()
        self._hold_after = int(os.environ.get("GPUMON_HOLD_AFTER", 0))
        self._descriptor = endpoint.describe(
            name or os.environ.get("GPUMON_NAME") or _script(),
            unix_ns=time.time_ns(),
            rank=self._launched.rank,
            local_rank=self._launched.local_rank,
            world_size=self._launched.world_size,
            run_id=self._launched.run_id,
        )
        self._clock = wire.Clock(time.monotonic_ns(), time.time_ns())
        self._probe_cuda()
        self.accounts = accounts = Accounts(
            self.recorder,
            self.governor,
            lambda: [(watched.index, model) for watched in self._models if (model := watched.model()) is not None],
            say=lambda events: self.publisher.say(events),
            tell=self.notice,
            limited=os.environ.get("GPUMON_GOVERNOR") != "off",
        )
        self.inventory = accounts.inventory
        self.evidence = Evidence(
            self.guard,
            self.governor,
            accounts,
            models=lambda: [(w.index, model) for w in self._models if (model := w.model()) is not None],
            say=lambda events: self.publisher.say(events),
            tell=self.notice,
            now=lambda: self.recorder.now,
            devices=lambda: [(where.type, index) for _, index, where in self.phases.readers or ()],
            limited=os.environ.get("GPUMON_GOVERNOR") != "off",
        )
        self.ask_census = self.evidence.ask
        self.last_words = self._last_words()
        self.errands = Errands(
            self.guard,
            now=lambda: self.recorder.now,
            say=lambda events: self.publisher.say(events),
            tell=self.notice,
            rang=self._rang,
            census=self.ask_census,
        )
        self.room = self.errands.room
        self.outlooks = Outlooks(
            self.recorder.append,
            self.room,
            expandable=expandable(os.environ.get(name, "") for name in _ALLOCATOR),
            keep=self.last_words.ahead,
            functions=_listeners,
        )
        self.phases: Phases = Phases(
            self.recorder,
            self.governor,
            find_readers=self._find_readers,
            read_ledger=self.guard.protect("ledger", accounts.boundary),
            step_closes=self.guard.protect("peak", self._step_closes),
            step_closed=self.guard.protect("description", self._step_closed),
            opened_ns=opened_ns,
            carry_out=self.errands.carry_out,
            batch_comes=None if self._bounds else self.guard.protect("outlook", self.outlooks.batch),
        )
        self.hooks = Hooks(
            self.phases,
            self.guard,
            inputs=accounts.inputs,
            rooted=self._rooted,
            entered=self.look_for_devices,
            notice=self.notice,
            graph=accounts,
            outlooks=self.outlooks,
        )
        self.publisher: Publisher = Publisher(
            Followed(self.recorder.drain, self.guard.protect("outlook's learning", self.outlooks.drained)),
            self.picture,
            self.heartbeat,
            self._descriptor,
            control=Control(self._descriptor.nonce, self.errands.take),
            work=self.errands.work,
        )
        self._farewell = farewell.Farewell(self.leave)
        if publish:
            self.publisher.start()

    # ------------------------------------------------------------------------------------------------ what is watched

    def adopt(self, model: Module, optimizer: Any = None, *, name: str | None = None, found: bool = False) -> None:
        """Watch `model` too, or one more optimizer of a model already watched. What watch() and the shim both call."""
        optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
        # accelerate's wrapper, and those like it, hold the one that steps
        optimizers = [_innermost(each) for each in optimizers if each is not None]
        watched = next((w for w in self._models if w.covers(model)), None)
        if watched is None:
            own = self._unwrapped(model)
            watched = _Watched(len(self._models), model, own, name or self._descriptor.name, found)
            self._models.append(watched)
            self.hooks.watch(model)
            self.accounts.changed()
            self._redescribe_soon()
        watched.add(optimizers)
        self.inventory.watch(model, optimizers)
        for each in optimizers:
            if not hasattr(each, "_optimizer_step_pre_hooks"):
                self.notice(f"steps of {type(each).__name__} cannot be seen: it is no torch.optim.Optimizer")
        self.phases.know(optimizers)
        for _ in watched.describe(self._describe):
            pass
        self.publisher.announce()

    def _redescribe_soon(self) -> None:
        step = self.recorder.now[0]
        self._redescribed_at |= {step + later for later in _REDESCRIBED_AFTER}

    def _rooted(self, module: Module) -> None:
        self._new_roots.append(weakref.ref(module))

    def _follow_wrappers(self) -> None:
        """A wrapper becomes the model at its first forward: as it is registered, what it wraps is not yet in it."""
        roots = [module for ref in self._new_roots if (module := ref()) is not None]
        self._new_roots.clear()
        for module in roots:
            for watched in self._models:
                if watched.wrapped_by(module, self._unwrapped):
                    self.inventory.watch(module)
                    self.accounts.changed()
                    self._describing = watched.describe(self._describe)
                    self._redescribe_soon()

    def look_for_devices(self) -> None:
        self._follow_wrappers()
        self.phases.readers = self._find_readers()
        self._devices = tuple(device for probe in self._probes.values() for device in probe.devices())
        self._look_for_limits()
        cuda = self._probes.get("cuda")
        if cuda is not None:
            cuda.observe_oom()  # type: ignore[attr-defined]
        self.publisher.announce(self._ranked())

    def _look_for_limits(self) -> None:
        """What no allocation can exceed: a device's total, or the share of it that the user set for this process."""
        import torch

        fraction = getattr(torch._C, "_cuda_getMemoryFraction", None)  # since torch 2.6
        for _, index, where in self.phases.readers or ():
            if where.type != "cuda":
                continue
            total = next((d.total_bytes for d in self._devices if d.index == index and d.kind in ("cuda", "hip")), None)
            if total is None:
                continue
            share = fraction(index) if fraction is not None else 1.0
            self.outlooks.limits[index] = int(share * total)
            if share < 1:
                self._fractions[f"memory_fraction:{index}"] = f"{share:.6f}"

    def _ranked(self) -> endpoint.Descriptor | None:
        """A new descriptor where `init_process_group` told a rank that no launcher did: mp.spawn's children."""
        distributed = sys.modules.get("torch.distributed")
        if self._descriptor.rank is not None or distributed is None or not distributed.is_available():
            return None
        if not distributed.is_initialized() or distributed.get_world_size() < 2:
            return None
        self._descriptor = msgspec.structs.replace(
            self._descriptor, rank=distributed.get_rank(), world_size=distributed.get_world_size()
        )
        return self._descriptor

    def device_taken(self) -> None:
        """CUDA has just been initialized: an allocation may fail long before a model is known."""
        self._probes["cuda"].observe_oom(began=True)  # type: ignore[attr-defined]

    def _find_readers(self) -> tuple[Reader, ...]:
        """The devices the models live on; where they are on none, the one CUDA computes on (offloading), or the CPU."""
        import torch

        devices = {
            (tensor.device.type, tensor.device.index or 0)
            for watched in self._models
            if (model := watched.model()) is not None
            for tensors in (model.parameters(), model.buffers())
            for tensor in tensors
        }
        chosen = {device for device in devices if device[0] not in ("cpu", "meta")}
        if not chosen and torch.cuda.is_initialized():
            chosen = {("cuda", torch.cuda.current_device())}
        if not chosen:
            chosen = {("cpu", 0)}
        return tuple((self._probe(kind).boundary, index, torch.device(kind, index)) for kind, index in sorted(chosen))

    def _probe(self, kind: str) -> Probe:
        probe = self._probes.get(kind)
        if probe is None:
            if kind == "cpu":
                from gpumon_agent.probe.cpu import CpuProbe

                probe = CpuProbe(self._tracker)
            else:
                from gpumon_agent.probe.accelerator import AcceleratorProbe

                probe = AcceleratorProbe(kind)
            self._probes[kind] = probe
        return probe

    def _probe_cuda(self) -> None:
        from torch import _C

        if hasattr(_C, "_cuda_memoryStats"):
            from gpumon_agent.probe.cuda import CudaProbe
            from gpumon_agent.probe.peaks import Peaks

            peaks = Peaks(bounds=self._bounds, own_threads=self._publishers)
            self._probes["cuda"] = CudaProbe(peaks, self.guard.protect("oom", self._oom))

    # ------------------------------------------------------------------------------------------- during the training

    def _step_closes(self, step: int) -> None:
        self.accounts.close_step(step)
        self.evidence.step_closes(self.phases.reads)

    def _step_closed(self, step: int) -> None:
        if step + 1 == self._hold_after:  # a dry run has seen enough: it ends this process from here
            time.sleep(_HELD_S)
        self.accounts.begin_step()
        self.evidence.step_closed(step)
        if step in self._redescribed_at:
            self._redescribed_at.discard(step)
            self._describing = _each(watched.describe(self._describe) for watched in self._models)
        elif not step % _DEVICES_LOOKED_FOR_EVERY:
            self.look_for_devices()
        if self._describing is not None and next(self._describing, None) is None:  # one slice a step
            self._describing = None
            self.publisher.announce()

    def _oom(self, device: int, requested: int, total: int, free: int) -> None:
        step, phase, _ = self.recorder.now
        probe = self._probes["cuda"]
        allocated, reserved = probe.now(device)  # type: ignore[attr-defined]
        oom = wire.Oom(step, phase, device, time.monotonic_ns(), requested, total, free, allocated, reserved)
        self.recorder.append(self.last_words.of(oom))
        self.errands.out_of_memory(device)

    def _rang(self) -> None:
        """Something was asked for: the next window that closes gives way to it."""
        self.phases.asked = True

    def _last_words(self) -> LastWords:
        return LastWords(
            self.guard,
            self.notice,
            self._hello,
            lambda: [(model, watched.whole) for watched in self._models if (model := watched.model()) is not None],
            lambda: self.accounts.ledgers,
            lambda: self.accounts.inventory.groups(),
        )

    def notice(self, text: str) -> None:
        self.recorder.append(wire.Notice(time.monotonic_ns(), text, self.recorder.now[0]))

    # --------------------------------------------------------------------------------- called by the publisher's thread

    def picture(self) -> list[wire.Event | bytes]:
        events: list[wire.Event | bytes] = [self._hello()]
        for watched in self._models:
            events += watched.described
        events += self.accounts.ledgers.copy().values()
        for layers in self.accounts.layers.copy().values():
            events += layers
        return events + self.evidence.picture() + self.errands.picture()

    def heartbeat(self) -> wire.Heartbeat:
        now = time.monotonic_ns()
        step, phase, since = self.recorder.now
        self.evidence.resident_bytes = rss = _rss()
        return wire.Heartbeat(
            now,
            step,
            phase,
            max(0, now - since),
            self.recorder.dropped,
            self.governor.sample_every,
            self.governor.boundary_cost_ns,
            rss,
            tuple(index for _, index, _ in self.phases.readers or ()),
        )

    def _hello(self) -> wire.Hello:
        import torch

        d = self._descriptor
        devices = self._devices
        return wire.Hello(
            protocol=(wire.PROTOCOL_MAJOR, wire.PROTOCOL_MINOR),
            agent=__version__,
            nonce=d.nonce,
            name=d.name,
            host=d.host,
            pid=d.pid,
            start_time=d.start_time,
            boot_id=d.boot_id,
            argv=d.argv,
            python=sys.version.split()[0],
            clock=self._clock,
            backend=devices[0].kind if devices else "",
            torch=str(torch.__version__),
            devices=devices,
            rank=d.rank,
            local_rank=d.local_rank,
            world_size=d.world_size,
            run_id=d.run_id,
            settings=self._settings(),
            node=self._launched.node,
            local_world_size=self._launched.local_world_size,
            restarts=self._launched.restarts,
        )

    def _settings(self) -> dict[str, str]:
        settings = {
            name: os.environ[name]
            for name in (*_ALLOCATOR, "GPUMON_GOVERNOR", "GPUMON_TRACK_CPU")
            if name in os.environ
        }
        settings |= self._fractions
        settings["peaks"] = "bounds" if self._bounds else "shadow"
        return settings

    # ----------------------------------------------------------------------------------------------------- the end

    def leave(self, reason: str, detail: str = "") -> None:
        """Take everything out of torch and say goodbye: at exit, or when asked to stop."""
        global _agent
        if os.getpid() != self.pid:
            return
        if _agent is self:
            _agent = None
        self.guard.protect("goodbye", self.phases.finish)()
        self.hooks.remove()
        self.evidence.stop()
        self.accounts.stop()
        for probe in self._probes.values():
            probe.stop()
        self._farewell.remove()
        step, phase, _ = self.recorder.now
        if reason == "exception" and self.phases.aborted is not None:
            phase = self.phases.aborted
        goodbye = wire.Goodbye(reason, time.monotonic_ns(), step, phase, detail)
        self.recorder.append(goodbye)
        self.publisher.close(goodbye)

    def disown(self) -> None:
        """In a forked child: the hooks are the parent's. Puts back what is torch's, touches no socket."""
        self.hooks.remove()
        self.accounts.disown()
        self.accounts.stop()
        self.evidence.disown()
        for probe in self._probes.values():
            probe.stop()
        self._farewell.remove()


class _Watched:
    """One model, held weakly, and what was last said of it."""

    def __init__(self, index: int, model: Module, own: Module, name: str, found: bool) -> None:
        self.index = index
        self.name = name
        self.found = found
        self.described: list[wire.Event] = []
        self.model = weakref.ref(model)
        self._own = weakref.ref(own)  # inside every wrapper: it outlives those that are thrown away
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._revision = 0

    @property
    def whole(self) -> wire.Model | None:
        """The model's own message of the newest description."""
        return next((each for each in self.described if isinstance(each, wire.Model)), None)

    def covers(self, model: Module) -> bool:
        return model in (self.model(), self._own())

    def add(self, optimizers: list[Any]) -> None:
        known = [ref() for ref in self._optimizers]
        self._optimizers += [weakref.ref(each) for each in optimizers if all(each is not k for k in known)]

    def wrapped_by(self, wrapper: Module, unwrapped: Any) -> bool:
        inner = self.model()
        if inner is None:  # never its truth: a compiled model asks the user's for its length
            inner = self._own()
        if inner is None or wrapper is inner or unwrapped(wrapper) is not unwrapped(inner):
            return False
        self.model = weakref.ref(wrapper)
        return True

    def describe(self, describe: Any) -> Iterator[bool]:
        """Yields after each slice of work."""
        model = self.model()
        if model is None:
            return
        optimizers = [each for ref in self._optimizers if (each := ref()) is not None]
        for described in describe.parts(
            model, optimizers, index=self.index, revision=self._revision, name=self.name, found=self.found
        ):
            if described is not None:
                whole, modules = described
                self.described = [whole, *modules]
                self._revision += 1
            yield True


class phase(ContextDecorator):
    """A phase with a name of the user's: `with gpumon_agent.phase("eval"): …`. Without an agent it does nothing."""

    def __init__(self, name: str) -> None:
        self._name = wire.clean(str(name))
        self._agents: list[Agent | None] = []

    def __enter__(self) -> phase:
        agent = _agent
        self._agents.append(agent)
        if agent is not None and agent.hooks.fires:
            agent.guard.protect("phase", agent.phases.user_begins)(self._name)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        agent = self._agents.pop()
        if agent is not None and agent.hooks.fires:
            agent.guard.protect("phase", agent.phases.user_ends)(aborted=kind is not None)


_agent: Agent | None = None


def running(name: str | None = None, *, tracker: StorageTracker | None = None) -> Agent:
    """This process's agent, begun if there is none. A `tracker` of CPU storages that already runs becomes its own."""
    global _agent
    if _agent is not None and _agent.pid != os.getpid():
        _agent.disown()
        _agent = None
    if _agent is None:
        _agent = Agent(name, tracker=tracker)
    return _agent


_listeners: list[Any] = []  # functions of the user's; the agent may begin after they are given


def on_outlook(function: Any) -> None:
    if not callable(function):
        raise TypeError(f"on_outlook() takes a function, not {type(function).__name__}")
    _listeners.append(function)


def watch(model: Any, optimizer: Any = None, *, name: str | None = None, found: bool = False) -> None:
    def adopt() -> None:
        from torch.nn import Module

        if not isinstance(model, Module):
            raise TypeError(f"watch() takes a torch.nn.Module, not {type(model).__name__}")
        running(name).adopt(model, optimizer, name=name, found=found)

    Guard(lambda text: None).protect("watch", adopt)()


def stop() -> None:
    from gpumon_agent import shim

    shim.end()
    if _agent is not None and _agent.pid == os.getpid():
        _agent.leave("stopped")


def _in_child() -> None:
    if _agent is not None:
        _agent.hooks.mute()


os.register_at_fork(after_in_child=_in_child)


def _innermost(optimizer: Any) -> Any:
    for _ in range(4):
        if hasattr(optimizer, "_optimizer_step_pre_hooks"):
            break
        inner = getattr(optimizer, "optimizer", None)
        if inner is None:
            break
        optimizer = inner
    return optimizer


def _each(iterators: Iterator[Iterator[bool]]) -> Iterator[bool]:
    for iterator in iterators:
        yield from iterator


def _script() -> str:
    return Path(sys.argv[0]).name if sys.argv and sys.argv[0] not in ("", "-c", "-m") else "python"


def _rss() -> int | None:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return None
