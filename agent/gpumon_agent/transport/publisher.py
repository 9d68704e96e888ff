"""Owns the sockets, encodes its source's events and answers viewers, on the helper's main thread.

ZeroMQ drops frames for slow viewers, which notice by the gap in `seq`.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Protocol

import msgspec
import zmq

from gpumon_agent import endpoint, wire
from gpumon_agent.guard import protect, say
from gpumon_agent.transport import auth
from gpumon_agent.transport.control import Control
from gpumon_agent.transport.history import History

FLUSH_S = 0.1
MANY_RANKS, FLUSHES_OF_MANY = 32, 2  # from 32 ranks on each sends every other time: a viewer receives all of them
HEARTBEAT_S = 1.0
_GOODBYE_S = 5.0  # time for viewers to receive it, at nice 19 on a busy machine; nothing waits for it


class Source(Protocol):
    """The source of numbered events. Bytes: an encoded one."""

    def drain(self) -> Sequence[tuple[int, wire.NumberedEvent | bytes]]: ...


class Publisher:
    """Publishes one agent's stream."""

    def __init__(
        self,
        recorder: Source,
        picture: Callable[[], Iterable[wire.Event | bytes]],
        heartbeat: Callable[[], wire.Heartbeat],
        descriptor: endpoint.Descriptor,
        *,
        control: Control | None = None,
        tell: Callable[[str], object] = say,
    ) -> None:
        """`tell` prints a line in the training's terminal."""
        self.history = History()
        self.descriptor = descriptor
        self.unsent = 0  # frames or events that could not be sent
        # Callbacks run guarded: they must not end the helper.
        self._drain = protect("recorder", lambda: sorted(recorder.drain(), key=itemgetter(0)))
        self._picture = protect("picture", lambda: list(picture()))
        self._heartbeat = protect("heartbeat", heartbeat)
        self._tell = tell
        self._encode = protect("encoding", wire.encode_event, stays_on=True)
        self._control = control
        self._place: endpoint.Place | None = None
        self._homeless = False  # already reported: no place for the socket
        self._announce = False
        self._says: deque[tuple[wire.Event | bytes, ...]] = deque()
        self._redescribe = False
        self._closing = False
        self._goodbye: wire.Goodbye | None = None
        self.ready = False  # viewers can attach, or none ever can
        self.answered = False  # a viewer has the whole picture, or none can attach
        self.watched = False  # a viewer subscribed LIVE: XPUB reports only the last to leave
        self._unsaid: list[tuple[int, bytes]] = []  # drained, in the history, and not yet sent
        self._flushes = 1 if (descriptor.world_size or 1) < MANY_RANKS else FLUSHES_OF_MANY
        self._held = 0  # flushes since something was sent
        # pending snapshots; a viewer whose request was dropped asks again
        self._requests: deque[bytes] = deque(maxlen=auth.SUBSCRIPTIONS_MAX)
        self._turnstile = auth.Turnstile()
        self._publish: zmq.Socket[bytes]

    def leave(self, goodbye: wire.Goodbye | None) -> None:
        """Called by `drain`: this turn is the last."""
        self._goodbye = goodbye
        self._closing = True

    def announce(self, descriptor: endpoint.Descriptor | None = None) -> None:
        """The static picture changed: viewers get it with the next flush. A new `descriptor` replaces the file."""
        if descriptor is not None:
            self.descriptor = msgspec.structs.replace(
                descriptor,
                endpoint=self.descriptor.endpoint,
                control=self.descriptor.control,
                pid=self.descriptor.pid,
                nonce=self.descriptor.nonce,
            )
            self._redescribe = True
        self._announce = True

    def say(self, events: tuple[wire.Event | bytes, ...]) -> None:
        """This part of the static picture changed: viewers get it with the next flush. Bytes: an encoded event."""
        self._says.append(events)

    def serve(self) -> None:
        """Runs until `drain` calls `leave`."""
        context = zmq.Context()
        try:
            asks, self._publish = auth.open_gate(context), auth.open_publisher(context)
            poller = zmq.Poller()
            try:
                if self._control is not None:
                    self._control.open(context, poller)
                self._settle(self._publish)
                self.ready = True
                self._serve(asks, poller)
            finally:
                if self._control is not None:
                    self._control.close()
                self._publish.close(linger=0)
                asks.close(linger=0)
        except zmq.ZMQError as error:
            self._tell(f"no viewer can attach to this process: {error}")
        finally:
            if self._place is not None:
                self._place.remove()
            context.term()  # no socket is open
            self.ready = self.answered = True

    def _serve(self, asks: zmq.Socket[bytes], poller: zmq.Poller) -> None:
        publish = self._publish
        poller.register(asks, zmq.POLLIN)
        poller.register(publish, zmq.POLLIN)
        answer: Iterator[bytes] | None = None
        next_flush = next_heartbeat = time.monotonic()
        while not self._closing:
            wait_s = 0.0 if answer or self._requests else max(0.0, next_flush - time.monotonic())
            ready = dict(poller.poll(math.ceil(wait_s * 1000)))
            if asks in ready:
                auth.admit(asks, self._turnstile)
            if publish in ready and not self._hear(publish):
                publish, answer = self._begin_anew(poller), None
            now = time.monotonic()
            if self._control is not None:
                self._control.hear(now, ready)
            if now >= next_flush:
                next_flush = now - now % FLUSH_S + FLUSH_S  # all ranks of a machine together: a viewer wakes up once
                self._flush(publish)
            if now >= next_heartbeat or self._redescribe:
                next_heartbeat = now + HEARTBEAT_S
                self._settle(publish)
                beat = self._heartbeat()
                if beat is not None:
                    self.history.beat(beat)
                if self.watched:
                    self._send(publish, [beat])
            if answer is None and self._requests:
                answer = self._answer(self._requests.popleft())
            if answer is not None and not self._continue(publish, answer):
                answer = None
                self.answered = True
        self._leave(asks, publish, poller, answer)

    def _settle(self, publish: zmq.Socket[bytes]) -> None:
        """Creates socket and descriptor file, again if they are gone: a logout empties XDG_RUNTIME_DIR."""
        try:
            if self._place is None or self._place.lacks_socket():
                if self._place is not None:
                    self._place.remove()
                place = endpoint.claim(self.descriptor)
                publish.bind(place.endpoint)  # do not unbind the old one: libzmq would remove the new file
                place.close_to_others()
                if place.instead and not (self._place and self._place.instead):
                    self._tell(place.instead)
                self._place = place
                self._redescribe = True
            if self._control is not None and self._place.lacks_control():
                self._bind(self._control, self._place)
            if self._redescribe or self._place.lacks_descriptor():
                self._redescribe = False
                self.descriptor = msgspec.structs.replace(
                    self.descriptor,
                    endpoint=self._place.endpoint,
                    control=f"ipc://{self._place.control}" if self._control is not None else "",
                )
                self._place.publish(self.descriptor)
            self._homeless = False
        except (endpoint.Unavailable, zmq.ZMQError) as error:
            if not self._homeless:
                self._tell(f"no viewer can attach to this process: {error}")
            self._homeless = True

    def _bind(self, control: Control, place: endpoint.Place) -> None:
        """Without a control socket viewers see everything but cannot send requests."""
        self._redescribe = True
        try:
            control.bind(f"ipc://{place.control}")
            place.close_to_others()
        except zmq.ZMQError as error:
            self._tell(f"viewers cannot send requests to this process: {error}")
            control.close()
            self._control = None

    def _leave(
        self, asks: zmq.Socket[bytes], publish: zmq.Socket[bytes], poller: zmq.Poller, answer: Iterator[bytes] | None
    ) -> None:
        """Sends the rest and Goodbye. Viewers unsubscribe after it; XPUB reports the last one."""
        end = time.monotonic() + _GOODBYE_S
        if self._place is not None:
            self._place.remove()  # no new viewers; connected ones stay
        while answer is not None and self._continue(publish, answer):
            pass
        self._flush(publish)
        if self._goodbye is not None and self.watched:
            self._send(publish, [self._goodbye])
            while self.watched and (left := end - time.monotonic()) > 0:
                ready = dict(poller.poll(math.ceil(left * 1000)))
                if asks in ready:
                    auth.admit(asks, self._turnstile)
                if publish in ready and not self._hear(publish):
                    return

    def _hear(self, publish: zmq.Socket[bytes]) -> bool:
        """Reads subscriptions. First byte 1: subscribed; 0: the last subscriber of a topic left.

        False: a peer floods.
        """
        for _ in range(auth.SUBSCRIPTIONS_MAX):
            try:
                frame = publish.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return True
            message = frame.bytes
            begins, topic = message[:1] == b"\x01", message[1:]
            if begins and not self._turnstile.passes(auth.subscriber(frame), time.monotonic()):
                return False
            if topic == wire.LIVE:
                self.watched = begins
            elif begins and wire.is_request(topic) and topic not in self._requests:
                self._requests.append(topic)
        return True

    def _begin_anew(self, poller: zmq.Poller) -> zmq.Socket[bytes]:
        """Replaces the socket by one without connections. The flooding peer is not admitted again."""
        old = self._publish
        context = old.context
        poller.unregister(old)
        old.close(linger=0)
        self.watched = False
        self._requests.clear()
        self._publish = publish = auth.open_publisher(context)
        poller.register(publish, zmq.POLLIN)
        if self._place is not None:
            self._place.give_up_socket()  # new connections find the new one
        self._settle(publish)
        return publish

    def _flush(self, publish: zmq.Socket[bytes]) -> None:
        encoded = self._unsaid
        self._held += 1
        turn = int(time.monotonic() / FLUSH_S + 0.01)
        due = turn % self._flushes == 0 or self._held > self._flushes or self._closing
        new = list(self._encoded(self._drain() or ()))
        self.history.extend(new)
        encoded += new
        thinned = self.history.thin()
        if thinned is not None:
            encoded.append((-1, wire.encode_event(thinned)))  # in order, between earlier and later steps
        if self._announce:
            self._announce = False
            if self.watched:
                self._send(publish, self._picture() or ())
        while self._says:
            said = self._says.popleft()
            if self.watched:
                self._send(publish, said)
        if due or not self.watched:
            self._unsaid, self._held = [], 0
            if self.watched:
                for packet in wire.pack(encoded, replayed=False):
                    self._put(publish, wire.frame(packet))

    def _answer(self, topic: bytes) -> Iterator[bytes]:
        """Frames for one request. History and its newest seq are read together: what is newer goes LIVE."""
        glance = topic[:1] == wire.GLANCE
        past, packets = ([], []) if glance else (self.history.past(), self.history.packets())
        newest = self.history.newest
        picture = (self._picture() or [])[: 1 if glance else None]  # Hello is first
        for packet in wire.pack(self._encoded((-1, event) for event in (*picture, *past)), replayed=True):
            yield wire.frame(packet, topic)
        for packet in packets:
            yield wire.frame(packet, topic)
        for packet in wire.pack(self._encoded([(-1, self._heartbeat()), (-1, wire.Synced(newest))]), replayed=True):
            yield wire.frame(packet, topic)

    def _continue(self, publish: zmq.Socket[bytes], answer: Iterator[bytes]) -> bool:
        """Sends the next frame of an answer; False when it is complete. Between two frames the sockets are polled."""
        frame = next(answer, None)
        if frame is None:
            return False
        self._put(publish, frame)
        return True

    def _send(self, publish: zmq.Socket[bytes], events: Iterable[wire.Event | bytes | None]) -> None:
        for packet in wire.pack(self._encoded((-1, event) for event in events), replayed=False):
            self._put(publish, wire.frame(packet))

    def _encoded(self, events: Iterable[tuple[int, wire.Event | bytes | None]]) -> Iterator[tuple[int, bytes]]:
        for seq, event in events:
            if event is None:
                continue
            data = event if isinstance(event, bytes) else self._encode(event)
            if data is None or len(data) > wire.EVENT_BYTES_MAX:
                self.unsent += 1
            else:
                yield seq, data

    def _put(self, publish: zmq.Socket[bytes], frame: bytes) -> None:
        try:
            publish.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            self.unsent += 1
