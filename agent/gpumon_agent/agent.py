"""The agent of one process. Long: it is the one place where all parts are created and connected.

It describes model and devices and passes each step's end to the parts, in order. The functions that a script calls
(`watch`, `step`, `phase`, `stop`) are below.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ContextDecorator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

from gpumon_agent import endpoint, environment, wire
from gpumon_agent._version import __version__
from gpumon_agent.allocator import Read
from gpumon_agent.allocator.cpu import resident_bytes
from gpumon_agent.allocator.cuda import pinned_bytes
from gpumon_agent.allocator.devices import Devices
from gpumon_agent.governor import Governor
from gpumon_agent.guard import guard, protect, say
from gpumon_agent.hooks.phases import Phases
from gpumon_agent.hooks.recorder import Recorder
from gpumon_agent.launched import launched
from gpumon_agent.noted import Newest, Noted, flat
from gpumon_agent.oom.oom_reporter import OomReporter
from gpumon_agent.oom.recorded_phases import RecordedPhases
from gpumon_agent.quiet_mark import QuietMark
from gpumon_agent.registry import REGISTRY
from gpumon_agent.shape_model.outlook import Followed, Outlooks
from gpumon_agent.shape_model.verdict import expandable
from gpumon_agent.thread_clock import ThreadClock
from gpumon_agent.trackers import TrackersUsed
from gpumon_agent.transport import exit_reason, messages
from gpumon_agent.transport.requests import Requests
from gpumon_agent.transport.trainer import Transport
from gpumon_agent.watched import Watched, innermost

if TYPE_CHECKING:
    from torch.nn import Module

    from gpumon_agent.allocator.cpu import StorageTracker
    from gpumon_agent.leaks.loads import Loads
    from gpumon_agent.logged import Logged

_REDESCRIBED_AFTER = (0, 4)  # steps: the first makes optimizer state, by the fifth DDP has logged its buckets
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_DEVICES_LOOKED_FOR_EVERY = 200  # steps: a model may move
_DESCRIBED_AT_ONCE_NS = 30_000_000  # when a model or optimizer is added
_DESCRIBED_IN_A_STEP_NS = 2_000_000
_RESIDENT_EVERY_NS = 1_000_000_000
_ASKED_NS = 20_000_000  # for encoding what a viewer requested; the rest takes a slice a boundary
_AT_OOM_NS = 300_000_000  # for block maps: the process may be about to end
_NEWEST = 256  # events: with them a loop's first figures are those of some 40 steps
_HELD_S = 30.0  # at most; a signal ends it


class Agent:
    """Watches this process. Made by the first `watch()`, or when the shim finds a model or CUDA is initialized."""

    def __init__(self, name: str | None = None, *, tracker: StorageTracker | None = None, publish: bool = True) -> None:
        import torch

        from gpumon_agent.attribution import describe, loop_variables
        from gpumon_agent.attribution.caller_frames import engine_of
        from gpumon_agent.hooks.wrappers import unwrapped
        from gpumon_agent.leaks import loads

        opened_ns = time.monotonic_ns()
        self.pid = os.getpid()
        self._torch = torch
        self._told_hello: wire.Hello | None = None
        self._told_models: dict[int, list[wire.Event]] = {}
        self._resident_ns = self._parts_off = 0
        self._pinned: int | None = None
        self._progress: wire.Progress | None = None
        self._loop_says = False  # by a callback, or `gpumon_agent.progress`
        self._position = loop_variables.Position()
        self._newest = Newest(_NEWEST)
        self._ask_pinned = protect("pinned host memory", pinned_bytes)
        self._trackers_used = protect("trackers", TrackersUsed().changed)
        self._in_loop = protect("loop", loop_variables.of_callers)
        self.recorder = Recorder()
        self.governor = Governor(off=environment.value("GPUMON_GOVERNOR") == "off")
        self.guard = guard
        self._describe = describe
        self._unwrapped = unwrapped
        self._engine_of = engine_of
        self._bounds = environment.value("GPUMON_PEAKS") == "bounds"
        self._models: list[Watched] = []
        self._new_roots: list[weakref.ref[Module]] = []
        self._describing: Iterator[bool] | None = None
        self._describing_until = ThreadClock(0)
        self._redescribed_at = set(_REDESCRIBED_AFTER)
        self._launched = launched()
        self._devices_looked_for_at = _DEVICES_LOOKED_FOR_EVERY
        self._hold_after = int(environment.value("GPUMON_HOLD_AFTER") or 0)
        self._descriptor = endpoint.describe(
            name or environment.value("GPUMON_NAME") or _script(),
            unix_ns=time.time_ns(),
            rank=self._launched.rank,
            local_rank=self._launched.local_rank,
            world_size=self._launched.world_size,
            run_id=self._launched.run_id,
        )
        self._clock = wire.Clock(time.monotonic_ns(), time.time_ns())
        self.devices = Devices(
            self._alive,
            self.guard.protect("oom", self._oom),
            bounds=self._bounds,
            tracker=tracker,
            tell=self.notice,
        )
        self._wire_attribution(loads.install())
        self.ask_census = self.leaks.ask
        self.oom_reporter = self._make_oom_reporter()
        self.requests = self._make_requests()
        self.budget = self.requests.budget
        self.recorded_phases = RecordedPhases(lambda: self.accounts.history.theirs)
        self.outlooks = Outlooks(
            self.recorder.append,
            self.budget,
            expandable=expandable(os.environ.get(name, "") for name in _ALLOCATOR),
            functions=REGISTRY.listeners,
        )
        self._make_mark = self._load_hooks()
        self.phases = self._make_phases(opened_ns)
        self._catch_up = self.guard.protect("forward", self.phases.catch_up)
        if self.devices.peaks is not None:
            self.devices.peaks.before_reset = self.guard.protect("forward", self.phases.stir)
        self._wire_hooks()
        self.transport = self._make_transport()
        self._flush_ring = self.guard.protect("transport", self.transport.flush)
        self._tell_status = self.guard.protect("transport", self.transport.tell)
        self._exit_reason = exit_reason.ExitReason(self.leave)
        self.guard.listen(self.notice)
        if publish:
            self.guard.protect("transport", self.transport.start)()

    # ------------------------------------------------------------------------------------------------------- the parts
    # Parts get methods of the agent, never other parts: what a method needs may be created after the part.

    def _wire_attribution(self, followed: Loads) -> None:
        from gpumon_agent.attribution.accounts import Accounts
        from gpumon_agent.leaks.leak_monitor import LeakMonitor

        limited = environment.value("GPUMON_GOVERNOR") != "off"
        self.accounts = Accounts(
            self.recorder,
            self.governor,
            self._indexed,
            say=self._say,
            tell=self.notice,
            loads=followed,
            limited=limited,
        )
        self.inventory = self.accounts.inventory
        self.leaks = LeakMonitor(
            self.guard,
            self.governor,
            self.accounts,
            followed,
            models=self._indexed,
            say=self._say,
            tell=self.notice,
            now=self._now,
            devices=self._read_devices,
            limited=limited,
        )

    def _make_oom_reporter(self) -> OomReporter:
        return OomReporter(
            self.guard,
            self.notice,
            self._hello,
            self._described,
            lambda: self.accounts.ledgers,
            self.inventory.groups,
            lambda annotations, device: self.recorded_phases.annotated(annotations, self._now(), device),
        )

    def _make_requests(self) -> Requests:
        return Requests(
            self.guard,
            now=self._now,
            say=self._say,
            write_file=self._write_file,
            tell=self.notice,
            rang=self._rang,
            recording=self.accounts.history.on,
            census=self.ask_census,
            owned=lambda device: self.accounts.owned_now(device, self.leaks.census.found),
            walked=lambda: self.accounts.walked,
            graph_to_come=lambda: self.accounts.graph_to_come,
            await_graph=self._await_graph,
        )

    def _load_hooks(self) -> Callable[[], QuietMark]:
        from gpumon_agent.hooks import native_hooks

        return self.guard.protect("forward", native_hooks.load)() or QuietMark

    def _make_phases(self, opened_ns: int) -> Phases:
        return Phases(
            self.recorder,
            self.governor,
            find_readers=self.devices.readers,
            read_ledger=self.guard.protect("ledger", self.accounts.boundary),
            step_closes=self.guard.protect("peak", self.accounts.close_step),
            step_closed=self.guard.protect("description", self._step_closed),
            opened_ns=opened_ns,
            step_begins=self.guard.protect("ledger", self._step_begins),
            work=self.guard.protect("description", self._go_on),
            read_end=self.devices.end,
            take_ends=self._take_ends,
            carry_out=self._carry_out,
            asked=self._asked,
            on_batch=None if self._bounds else self.guard.protect("outlook", self.outlooks.batch),
            on_noted=self.outlooks.noted,
            notes_of=self.devices.noted if not self._hold_after else lambda _: None,  # every step of a dry run counts
            make_mark=self._make_mark,
            flush=self.flush,
            tell=self._tell,
        )

    def _wire_hooks(self) -> None:
        from gpumon_agent.hooks.by_hand import ByHand
        from gpumon_agent.hooks.idle_hooks import IdleHooks
        from gpumon_agent.hooks.torch_hooks import Hooks

        self.hooks = Hooks(
            self.phases,
            self.guard,
            self.governor,
            inputs=self.accounts.inputs,
            rooted=self._rooted,
            entered=self._entered,
            notice=self.notice,
            graph=self.accounts,
            outlooks=self.outlooks,
        )
        by_hand = ByHand(
            self.hooks,
            self.phases,
            watched=lambda: bool(self._models),
            adopt=lambda model, optimizers: self.adopt(model, optimizers, found=True),
            notice=self.notice,
        )
        self.hooks.backward_ended = self.guard.protect("updates by hand", by_hand.backward_ended)
        timed = IdleHooks(self.guard, self.outlooks, self._make_mark).timed
        self.phases.time_idle = self.guard.protect("cost", timed)

    def _make_transport(self) -> Transport:
        return Transport(
            Followed(self.recorder.drain, self.guard.protect("outlook's learning", self._drained)).drain,
            self.picture,
            self._state,
            self._descriptor,
            now=self._now,
            counters=self._counters,
            take=self.requests.take,
            mark=self.phases.quiet_mark,
        )

    def _drained(self, events: list[tuple[int, wire.NumberedEvent | Noted]]) -> None:
        self.outlooks.drained(events)
        self.recorded_phases.drained(events)
        self._newest.extend(events)
        if REGISTRY.followers:
            each = list(flat(events))
            for follower in REGISTRY.followers:
                follower.drained(each)

    def _now(self) -> tuple[int, str, int]:
        return self.phases.where()

    def _say(self, events: Iterable[wire.Event | bytes | None]) -> None:
        self.transport.say(events)

    def _write_file(self, pieces: Iterable[bytes], step: int, t_ns: int) -> None:
        self.transport.write_file(pieces, step, t_ns)

    def flush(self) -> None:
        """Drains the events recorded so far."""
        self._catch_up()
        self._flush_ring()

    def _tell(self) -> None:
        self._tell_status()

    def _read_devices(self) -> list[tuple[str, int]]:
        return [(where.type, index) for _, index, where in self.phases.readers or ()]

    def _described(self) -> list[tuple[Module, wire.Model | None]]:
        return [(model, watched.whole) for watched in self._models if (model := watched.model()) is not None]

    # ------------------------------------------------------------------------------------------------ what is watched

    def adopt(self, model: Module, optimizer: Any = None, *, name: str | None = None, found: bool = False) -> None:
        """Watches `model`, or another optimizer of a watched model. Called by watch() and the shim."""
        optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
        optimizers = [innermost(each) for each in optimizers if each is not None]
        watched = next((w for w in self._models if w.covers(model)), None)
        if watched is None:
            own = self._unwrapped(model)
            watched = Watched(len(self._models), model, own, name or self._descriptor.name, found)
            self._models.append(watched)
            self.hooks.watch(model)
            self.accounts.changed()
            self._redescribe_soon()
        watched.add(optimizers)
        self.inventory.watch(model, optimizers)
        for each in optimizers:
            if hasattr(each, "_optimizer_step_pre_hooks"):
                self.leaks.follow(each)
            else:
                self.notice(f"steps of {type(each).__name__} are not visible: it is no torch.optim.Optimizer")
        self.phases.know(optimizers)
        self.accounts.measure()
        self._describe_at_once(watched)
        self._announce()

    def _announce(self, descriptor: endpoint.Descriptor | None = None) -> None:
        """Sends what changed in the descriptions of this process, its models and devices."""
        hello = self._hello()
        if hello != self._told_hello:
            self._told_hello = hello
            self.transport.say((hello,))
        for watched in self._models:
            if watched.described is not self._told_models.get(watched.index):
                self._told_models[watched.index] = watched.described
                self.transport.say(watched.described)
        self.transport.announce(descriptor)

    def _describe_at_once(self, watched: Watched) -> None:
        """Describes as much as the time limit allows; the rest in slices, one a step."""
        describing = watched.describe(self._describe, self._description_rests)
        self._describing_until = ThreadClock(_DESCRIBED_AT_ONCE_NS)
        while next(describing, None) is not None:
            if self.accounts.many and self._describing_until.over():
                self._describing = _each(iter((*filter(None, (self._describing,)), describing)))
                break

    def _alive(self) -> list[Module]:
        return [model for _, model in self._indexed()]

    def _indexed(self) -> list[tuple[int, Module]]:
        return [(watched.index, model) for watched in self._models if (model := watched.model()) is not None]

    def _redescribe_soon(self) -> None:
        step = self._now()[0]
        self._redescribed_at |= {step + later for later in _REDESCRIBED_AFTER}

    def _rooted(self, module: Module) -> None:
        self._new_roots.append(weakref.ref(module))

    def _follow_wrappers(self) -> None:
        """A wrapper becomes the model at its first forward: when registered, it does not contain the model yet."""
        roots = [module for ref in self._new_roots if (module := ref()) is not None]
        self._new_roots.clear()
        for module in roots:
            for watched in self._models:
                if watched.wrapped_by(module, self._unwrapped):
                    self.inventory.watch(module)
                    self.accounts.changed()
                    self._describing = watched.describe(self._describe, self._description_rests)
                    self._redescribe_soon()

    def _entered(self, model: Module) -> None:
        engine = self._engine_of(model)
        if engine is not None:
            self._rooted(engine)
        self.look_for_devices()

    def look_for_devices(self) -> None:
        self._follow_wrappers()
        self.phases.readers = self.devices.readers()
        self.devices.look(self.phases.readers)
        self.outlooks.limits |= self.devices.limits
        self.devices.observe_oom()
        self._announce(self._ranked())

    def _ranked(self) -> endpoint.Descriptor | None:
        """A new descriptor if `init_process_group` shows what no launcher set: the rank of mp.spawn's children, the
        rendezvous of Lightning's first rank, which starts the others.
        """
        distributed = sys.modules.get("torch.distributed")
        if distributed is None or not distributed.is_available():
            return None
        if not distributed.is_initialized() or distributed.get_world_size() < 2:
            return None
        known = self._descriptor
        rank, world_size = known.rank, known.world_size
        if rank is None:
            rank, world_size = distributed.get_rank(), distributed.get_world_size()
        descriptor = msgspec.structs.replace(known, rank=rank, world_size=world_size, rendezvous=endpoint.rendezvous())
        if descriptor == known:
            return None
        self._descriptor = descriptor
        return descriptor

    def device_taken(self) -> None:
        """CUDA has just been initialized: an allocation may fail long before a model is known."""
        self.devices.observe_oom(began=True)

    # ------------------------------------------------------------------------------------------- during the training

    def _step_closed(self, step: int, reads: list[tuple[int, Read]]) -> None:
        now = self._now()[2]
        if now - self._resident_ns > _RESIDENT_EVERY_NS:
            self._resident_ns = now
            self.leaks.resident_bytes = resident_bytes()
            self._pinned = self._ask_pinned()
            used = self._trackers_used(now)
            if used is not None:
                self.transport.say((used,))
            at = None if self._loop_says else self._in_loop()
            if at is not None and at != self._position:
                self._position = at
                self._tell_progress("", "", at.epoch, at.batch, None)
        if len(guard.off) != self._parts_off:
            self._parts_off = len(guard.off)
            if "transport" in guard.off:
                self.transport.disown()  # messages would wait for ever
            self.transport.announce()
        if step + 1 == self._hold_after:  # a dry run has seen enough: it ends this process now
            self.flush()
            time.sleep(_HELD_S)
        self._step_begins()
        self.leaks.step_closed(step, reads)
        if self._hold_after:  # a dry run is short, and every step of it counts
            self.governor.quiet = False
        self._work(step)

    def _step_begins(self) -> None:
        if self.governor.ledger:
            self.accounts.begin_step()

    def _take_ends(self, ends: list[wire.QuietEnd]) -> None:
        self.leaks.ends(ends)
        self.phases.works = self.phases.works or self.leaks.census.at_work

    def _go_on(self, step: int) -> None:
        """A quiet step closed, and something is done in slices."""
        self.leaks.go_on(step)
        self._work(step)

    def _work(self, step: int) -> None:
        looked = self.devices.looking
        readers = self.devices.look_on()
        if readers is not None:
            self.phases.readers = readers
            self.devices.look(readers)
        if self._describing is None and self._redescribed_at and step >= min(self._redescribed_at):
            self._redescribed_at = {later for later in self._redescribed_at if later > step}
            self._describing = _each(
                watched.describe(self._describe, self._description_rests) for watched in self._models
            )
        elif step >= self._devices_looked_for_at and not looked:
            self._devices_looked_for_at = step + _DEVICES_LOOKED_FOR_EVERY
            self.look_for_devices()
        if self._describing is not None and not looked:  # one of the two in a step
            self._describe_on(self._describing)
        self.phases.works = self._describing is not None or self.devices.looking or self.leaks.census.at_work

    def _description_rests(self) -> bool:
        """Whether the time for describing is used up."""
        return self._describing_until.over()

    def _describe_on(self, describing: Iterator[bool]) -> None:
        self._describing_until = ThreadClock(_DESCRIBED_IN_A_STEP_NS)
        while next(describing, None) is not None:
            if self._describing_until.over():
                return
        self._describing = None
        self._announce()

    def _oom(self, device: int, requested: int, total: int, free: int) -> None:
        step, phase, _ = self._now()
        self.phases.read_soon()
        self.flush()  # the report's snapshot has the phases before this one
        allocated, reserved = self.devices.now(device)
        oom = wire.Oom(step, phase, device, time.monotonic_ns(), requested, total, free, allocated, reserved)
        self.recorder.append(self.oom_reporter.of(oom))
        self.requests.out_of_memory(device)
        self.flush()
        self.transport.pump(ThreadClock(_AT_OOM_NS))  # the process may be about to end

    def _rang(self) -> None:
        """There is a request: the next window that closes carries it out."""
        self.phases.request_waits = True

    def _await_graph(self, awaited: bool) -> None:
        """A map of the allocator's blocks waits for the end of a forward whose graph is read."""
        self.accounts.map_awaited = awaited
        if awaited:
            self.phases.read_soon()
            self.governor.sample_soon()

    def _asked(self) -> bool:
        return self.transport.running and (self.transport.asked or self.recorder.waits)

    def _carry_out(self) -> None:
        self.requests.carry_out()
        self.phases.works = True  # a census goes on in slices
        self.transport.pump(ThreadClock(_ASKED_NS))

    def notice(self, text: str) -> None:
        self.recorder.append(wire.Notice(time.monotonic_ns(), text, self._now()[0]))
        self.flush()

    # ----------------------------------------------------------------------------------------- what viewers are told

    def picture(self) -> list[wire.Event | bytes]:
        events: list[wire.Event | bytes] = [self._hello()]
        for watched in self._models:
            events += watched.described
        events += self.accounts.ledgers.copy().values()
        for layers in self.accounts.layers.copy().values():
            events += layers
        told = [] if self._progress is None else [self._progress]
        return events + self.leaks.picture() + self.requests.picture() + told

    def say_progress(self, library: str, stage: str, epoch: int | None, batch: int | None, batches: int | None) -> None:
        """Where the training loop is. Sent at once: no step closes while a library validates."""
        self._loop_says = True
        self._tell_progress(library, stage, epoch, batch, batches)
        self.flush()

    def _tell_progress(
        self, library: str, stage: str, epoch: int | None, batch: int | None, batches: int | None
    ) -> None:
        step, now = self._now()[0], time.monotonic_ns()
        self._progress = progress = wire.Progress(step, now, library, stage, epoch, batch, batches)
        self.transport.say((progress,))

    def read_for(self, logged: Logged) -> None:
        """Has `logged` know all up to now. The open window tells of steps that are not read: it began before them,
        unless the step after them has begun."""
        self.flush()
        if logged not in REGISTRY.followers:
            logged.drained(self._newest)
            REGISTRY.followers.add(logged)
        logged.quiet(self.phases.quiet_peaks)
        for _, index, where in self.phases.readers or ():
            window = self.devices.window(where)
            if window is not None:
                logged.device(index).reads(*window)

    def _state(self) -> messages.State:
        """What heartbeats repeat."""
        devices = tuple(index for _, index, _ in self.phases.readers or ())
        return messages.State(devices, tuple(wire.PartOff(*off) for off in list(guard.off.values())))

    def _counters(self) -> tuple[int, int, bool, int | None]:
        governor = self.governor
        cost = governor.cost
        return (
            governor.read_every,
            cost.packed() if cost is not None else 0,
            self._torch.cuda.is_initialized(),
            self._pinned,
        )

    def _hello(self) -> wire.Hello:
        d = self._descriptor
        devices = self.devices.found
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
            torch=str(self._torch.__version__),
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
        settings = {name: os.environ[name] for name in _ALLOCATOR if name in os.environ}
        own = ("GPUMON_GOVERNOR", "GPUMON_TRACK_CPU")
        settings |= {name: value for name in own if (value := environment.value(name))}
        settings |= self.devices.fractions
        settings["peaks"] = "bounds" if self._bounds else "shadow"
        settings["reader"] = "native" if self.devices.native else "torch"
        return settings

    # ----------------------------------------------------------------------------------------------------- the end

    def leave(self, reason: str, detail: str = "") -> None:
        """Removes everything from torch and sends Goodbye: at exit, or on `stop`."""
        if os.getpid() != self.pid:
            return
        if REGISTRY.agent is self:
            REGISTRY.agent = None
        self.guard.protect("goodbye", self.phases.finish)()
        self.hooks.remove()
        self.leaks.stop()
        self.accounts.stop()
        self.devices.stop()
        self._exit_reason.remove()
        self.guard.forget(self.notice)
        step, phase, _ = self._now()
        if reason == "exception" and self.phases.aborted is not None:
            phase = self.phases.aborted
        self.recorder.append(wire.Goodbye(reason, time.monotonic_ns(), step, phase, detail))
        self.guard.protect("goodbye", self.transport.close)(exits=reason != "stopped")

    def in_child(self) -> None:
        """In a forked child, at once. `disown` follows if the child is watched itself."""
        self.hooks.mute()

    def disown(self) -> None:
        """In a forked child: restores torch's attributes and touches nothing of the parent's."""
        self.hooks.remove()
        self.accounts.disown()
        self.accounts.stop()
        self.leaks.disown()
        self.transport.disown()
        self.devices.stop()
        self._exit_reason.remove()
        self.guard.forget(self.notice)


class phase(ContextDecorator):
    """A phase named by the user: `with gpumon_agent.phase("eval"): …`. Without an agent it does nothing."""

    def __init__(self, name: str) -> None:
        self._name = wire.clean(str(name))
        self._agents: list[Agent | None] = []

    def __enter__(self) -> phase:
        agent = REGISTRY.agent
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


def running(name: str | None = None, *, tracker: StorageTracker | None = None) -> Agent:
    """This process's agent, created if needed. It takes over a `tracker` of CPU storages that already runs."""
    if REGISTRY.agent is not None and REGISTRY.agent.pid != os.getpid():
        REGISTRY.agent.disown()
        REGISTRY.agent = None
    if REGISTRY.agent is None:
        REGISTRY.agent = Agent(name, tracker=tracker)
    agent: Agent = REGISTRY.agent
    return agent


OF_OPTIMIZER, OF_ITERATION = "optimizer", "iteration"
"""What ends a step: the optimizer, or a call of `step()`."""


def on_outlook(function: Any) -> None:
    if not callable(function):
        raise TypeError(f"on_outlook() takes a function, not {type(function).__name__}")
    REGISTRY.listeners.append(function)


def watch(
    model: Any, optimizer: Any = None, *, name: str | None = None, steps: str = OF_OPTIMIZER, found: bool = False
) -> None:
    def adopt() -> None:
        from torch.nn import Module

        if not isinstance(model, Module):
            say(f"watch() takes a torch.nn.Module, not {type(model).__name__}: nothing is watched")
            return
        agent = running(name)
        agent.adopt(model, optimizer, name=name, found=found)
        if steps == OF_ITERATION:
            agent.phases.marked = True
        elif steps != OF_OPTIMIZER:
            say(
                f'watch() counts steps="{OF_OPTIMIZER}" or "{OF_ITERATION}", not {steps!r}: optimizer steps are counted'
            )

    protect("watch", adopt)()


def step() -> None:
    def mark() -> None:
        from gpumon_agent.hooks import model_discovery

        agent = REGISTRY.agent
        if agent is None and model_discovery.tops() is not None:
            agent = running()  # launched by `gpumon run`, and no optimizer was built
        if agent is not None and agent.hooks.fires:
            agent.phases.mark()

    protect("step", mark)()


def stop() -> None:
    """Also ends what `gpumon run` started before there was an agent: the search for models, the tracking."""
    for begun in (*REGISTRY.finders, *REGISTRY.trackers):
        begun.stop()
    if REGISTRY.loads is not None:
        REGISTRY.loads.stop()
    agent = REGISTRY.agent
    if agent is not None and agent.pid == os.getpid():
        agent.leave("stopped")


def _each(iterators: Iterator[Iterator[bool]]) -> Iterator[bool]:
    for iterator in iterators:
        yield from iterator


def _script() -> str:
    """What viewers call this process: its notebook or its script."""
    kernel = sys.modules.get("ipykernel.kernelapp")
    if kernel is not None and kernel.IPKernelApp.initialized():
        named = vars(sys.modules["__main__"]).get("__vsc_ipynb_file__")  # VS Code's, which starts kernels itself
        environ = {"JPY_SESSION_NAME": named} if isinstance(named, str) else os.environ
        return endpoint.notebook(environ, str(Path("/proc/self/cwd").readlink()))
    return Path(sys.argv[0]).name if sys.argv and sys.argv[0] not in ("", "-c", "-m") else "python"
