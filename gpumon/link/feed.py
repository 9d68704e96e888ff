"""Puts one agent's stream in order: snapshot before live, each message once, gaps repaired or reported. No sockets."""

from __future__ import annotations

from msgspec.structs import replace

from gpumon.session.incoming import Incoming, MessageRun
from gpumon_agent import wire
from gpumon_agent.wire import Packet, Received

HELD_FRAMES_MAX = 4096  # that wait in the socket, or for the snapshot: a whole snapshot, and minutes of live ones
_PATIENCE_NS = 5_000_000_000  # between two repairs, and between two notices of what could not be repaired


class Feed:
    """Turns packets into events, in order of `seq`.

    While a snapshot is arriving live packets are held. A gap in live packets (this viewer was too slow, or the
    connection broke) sets `wants_snapshot`: the agent's history may still contain the missing events. What stays
    missing is counted in `missed` and reported as a Notice. Gaps made by the agent itself (its queue was full) cannot
    be repaired, so repairs are requested every five seconds at most.

    `via`, `ahead_ns`: of an agent on another machine (Descriptor). Its Hello then names the machine as this viewer's
    user does, so that no reading of another one is taken for its own, and relates its clock to this machine's.
    """

    def __init__(self, source: str, via: str = "", ahead_ns: int = 0) -> None:
        self.source = source
        self._via = via
        self._ahead_ns = ahead_ns
        self.missed = 0
        self.wants_snapshot = True
        self.synced = False  # a snapshot was completed or given up
        self.hello: wire.Hello | None = None
        self.heartbeat: wire.Heartbeat | None = None
        self._holding = True
        self._held: list[Packet] = []
        self._last = -1
        self._t_ns = 0  # the agent's clock at its last heartbeat
        self._repaired_ns = 0
        self._reported = 0
        self._reported_ns = 0

    def requested(self) -> None:
        """A snapshot was requested: live packets are held until it is complete."""
        self.wants_snapshot = False
        self._holding = True

    def take(self, packet: Packet, unix_ns: int, *, answer: bool) -> list[Incoming]:
        """Events now in order. `answer`: the packet belongs to the requested snapshot. Raises ProtocolMismatch."""
        if self._holding and not answer:
            if len(self._held) < HELD_FRAMES_MAX:
                self._held.append(packet)
            return []
        out: list[Incoming] = []
        self._events(packet, unix_ns, answer, out)
        if self.missed != self._reported:
            self._report_lost(unix_ns, out)
        return out

    def go_on(self, unix_ns: int) -> list[Incoming]:
        """Continues live, first with held packets. Called when the end of a snapshot did not arrive in time."""
        out: list[Incoming] = []
        self._let_go(unix_ns, out)
        return out

    def _let_go(self, unix_ns: int, out: list[Incoming]) -> None:
        self._holding = False
        self.synced = True
        held, self._held = self._held, []
        for index, packet in enumerate(held):
            self._events(packet, unix_ns, False, out)
            if self._holding:
                self._held.extend(held[index + 1 :])
                return

    def _events(self, packet: Packet, unix_ns: int, answer: bool, out: list[Incoming]) -> None:
        seq, source, replayed = packet.seq, self.source, packet.replayed
        if seq >= 0 and seq == self._last + 1:  # the usual case: the next events of the stream, none missing
            out.append(MessageRun(source, unix_ns, packet.events, seq, replayed))
            self._last += len(packet.events)
            return
        gap = seq - self._last - 1 if seq >= 0 and self._last >= 0 else 0
        if gap > 0 and not answer and unix_ns - self._repaired_ns >= _PATIENCE_NS:
            self._repaired_ns = unix_ns
            self.wants_snapshot = self._holding = True
            self._held.append(packet)
            return
        self.missed += max(0, gap)
        for number, event in enumerate(packet.events, start=seq):
            if seq >= 0:
                if number > self._last:
                    self._last = number
                    out.append(Received(source, unix_ns, event, number, replayed))
                continue
            if isinstance(event, wire.Hello):
                wire.check_protocol(event)
                if self._via:
                    clock = wire.Clock(event.clock.monotonic_ns, max(0, event.clock.unix_ns + self._ahead_ns))
                    event = replace(event, host=self._via, clock=clock)
                self.hello = event
                self.source = source = event.nonce
            elif isinstance(event, wire.Heartbeat):
                self.heartbeat = event
                self._t_ns = event.t_ns
            out.append(Received(source, unix_ns, event, -1, replayed))
            if answer and isinstance(event, wire.Synced):
                self._let_go(unix_ns, out)

    def _report_lost(self, unix_ns: int, out: list[Incoming]) -> None:
        lost = self.missed - self._reported
        if lost and not self._holding and unix_ns - self._reported_ns >= _PATIENCE_NS:
            self._reported, self._reported_ns = self.missed, unix_ns
            notice = wire.Notice(self._t_ns, f"{lost} messages did not reach this viewer")
            out.append(Received(self.source, unix_ns, notice))
