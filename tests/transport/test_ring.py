"""The rings: what is taken was put, whole and in order, whoever is killed, interrupts, overruns or scribbles."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gpumon_agent
from gpumon_agent.transport.memory import EVENTS_HEAD, LONG_HEAD, LONG_TAIL, PAGE_BYTES, Memory
from gpumon_agent.transport.ring import CHUNK_BYTES, LONGEST, LongReader, LongWriter, Reader, Writer

RING = 4 * PAGE_BYTES
TIMES = int(os.environ.get("GPUMON_FUZZ_TIMES", "1"))


@pytest.fixture
def memory() -> Iterator[Memory]:
    memory = Memory.create(RING, RING)
    yield memory
    memory.close()


def record(number: int, length: int | None = None) -> bytes:
    """A payload that says which it is, all along."""
    length = length or number * 7919 % 300 + 1
    return (b"%d." % number * (length // 2 + 1))[:length]


def said(script: str, *arguments: object, interpreter: str = sys.executable, timeout_s: float = 300) -> str:
    """What a process of its own prints; it ends well and says nothing else."""
    folder = str(Path(gpumon_agent.__file__).parent.parent)
    done = subprocess.run(
        [interpreter, "-c", script, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, "PYTHONPATH": folder},
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout.strip()


# ------------------------------------------------------------------------------------------------------------- events


def test_what_is_put_is_taken_with_its_number(memory: Memory) -> None:
    writer, reader = Writer(memory), Reader(memory)
    assert reader.take() == []
    payloads = [b"\0", b"a" * 7, b"b" * 8, b"c" * 9, b"d" * LONGEST, b"e"]
    assert [writer.put(payload) for payload in payloads] == list(range(6))
    assert reader.take() == list(enumerate(payloads))
    assert reader.take() == []
    assert writer.put(b"f") == writer.number - 1 == 6
    assert reader.take() == [(6, b"f")]
    assert reader.lost == 0


@pytest.mark.parametrize("length", [0, LONGEST + 1, 1 << 20])
def test_a_payload_that_is_no_record_is_refused(memory: Memory, length: int) -> None:
    writer = Writer(memory)
    with pytest.raises(ValueError, match=f"a record of {length} bytes"):
        writer.put(bytes(length))
    writer.put(b"next")
    assert Reader(memory).take() == [(0, b"next")]


def test_records_of_any_length_go_round_the_ring(memory: Memory) -> None:
    """Each of these ends pages, and the ring, at another place."""
    writer, reader = Writer(memory), Reader(memory)
    for length in (*range(1, 1100, 13), *range(1100, LONGEST, 499), LONGEST - 8, LONGEST - 1, LONGEST):
        put = []
        for number in range(writer.number, writer.number + RING // (length + 16) + 9):
            put.append((number, record(number, length)))
            writer.put(put[-1][1])
            if number % 8 == 0:
                assert reader.take() == put
                put = []
        assert reader.take() == put
    assert reader.lost == 0


@pytest.mark.parametrize("bit", range(128))
def test_each_bit_of_a_records_head_is_checked(memory: Memory, bit: int) -> None:
    """One that is believed with too high a number would end all reading: no later record is new then."""
    writer, reader = Writer(memory), Reader(memory)
    for number in range(20):
        writer.put(record(number, 40))
    memory.events[bit // 8] ^= 1 << bit % 8
    assert reader.take() == []
    for number in range(20, 3000):
        writer.put(record(number, 40))
    assert reader.take()[-1] == (2999, record(2999, 40))


@pytest.mark.parametrize("rest", [*range(0, 80, 8), 1000, LONGEST - 8, LONGEST, LONGEST + 8, LONGEST + 16])
def test_a_page_may_end_anywhere(memory: Memory, rest: int) -> None:
    """`rest` bytes of a page are left as records come that just fit, or just do not."""
    writer, reader = Writer(memory), Reader(memory)
    put = []

    def puts(size: int) -> None:
        payload = record(writer.number, size - 16)
        put.append((writer.put(payload), payload))

    def fill(left: int) -> None:
        """Records of so many bytes in all."""
        while left:
            size = min(left, LONGEST + 16)
            size -= 24 if 0 < left - size < 24 else 0
            puts(size)
            left -= size

    for size in (rest - 8, rest, rest + 8, 24, LONGEST + 16):
        puts(LONGEST + 16)
        puts(LONGEST + 16)
        fill(-writer._at % PAGE_BYTES if -writer._at % PAGE_BYTES >= 24 else 0)
        fill(PAGE_BYTES - rest)
        assert -writer._at % PAGE_BYTES == rest % PAGE_BYTES
        if 24 <= size <= LONGEST + 16:
            puts(size)
        puts(32)
        assert reader.take() == put
        put.clear()
    assert reader.lost == 0


def test_a_reader_that_was_overrun_goes_on_at_the_oldest_page_and_counts_what_it_lost(memory: Memory) -> None:
    writer, slow = Writer(memory), Reader(memory)
    payloads = [record(number) for number in range(10_000)]
    for payload in payloads[:100]:
        writer.put(payload)
    assert len(slow.take()) == 100
    for payload in payloads[100:]:
        writer.put(payload)
    taken = slow.take()
    numbers = [number for number, _ in taken]
    assert numbers == list(range(numbers[0], 10_000))
    assert all(payloads[number] == payload for number, payload in taken)
    assert slow.lost == numbers[0] - 100
    assert sum(16 + (len(payload) + 7 & -8) for _, payload in taken) > RING - 3 * PAGE_BYTES
    late, oldest = Reader(memory), Reader.oldest(memory)
    assert late.take() == oldest.take() == taken
    assert (late.lost, oldest.lost) == (numbers[0], 0)


def test_pages_can_be_taken_one_at_a_time(memory: Memory) -> None:
    writer, reader = Writer(memory), Reader(memory)
    for number in range(1000):
        writer.put(record(number))
    parts = [reader.take(max_pages=1) for _ in range(4)]
    assert [number for part in parts for number, _ in part] == list(range(1000))
    assert all(sum(16 + len(payload) for _, payload in part) <= PAGE_BYTES for part in parts)
    assert all(parts[:-1])
    assert reader.take() == []


def test_a_new_memory_goes_on_where_the_old_one_was(memory: Memory) -> None:
    """As for a helper that is started again."""
    writer = Writer(memory)
    for number in range(3000):
        writer.put(record(number))
    copy = memory.copied()
    try:
        writer.put(b"by another thread, into the old memory, when it was copied already")
        after = Writer(copy, after=writer)
        memory.close()
        reader = Reader.oldest(copy)
        numbers = [number for number, _ in reader.take()]
        assert numbers == list(range(numbers[0], 3000))
        assert after.put(record(3001)) == 3001
        assert reader.take() == [(3001, record(3001))]
        assert reader.lost == 1
        with pytest.raises(TypeError):
            writer.put(b"too late")
    finally:
        copy.close()


KILLED = """
import os, random, signal, sys, time
from gpumon_agent.transport.memory import ANSWER, Memory
from gpumon_agent.transport.pages import Pages, Status
from gpumon_agent.transport.ring import LongReader, LongWriter, Reader, Writer

def record(number):
    return b"%d." % number * (number % 40 + 1)

def message(number):
    return b"%d." % number * (number * 7919 % 20_000)

def trains(memory):
    writer, long, status, pages = Writer(memory), LongWriter(memory), Status(memory), Pages(memory, ANSWER)
    for number in range(40_000):  # no more than the ring holds
        writer.put(record(number))
        if number % 8 == 0:
            status.write(number, "phase %d" % number, number, number, number, number, number, number)
            long.put(number // 8, message(number // 8))
            long.pump(3)
            pages.write(message(number // 8)[:8000])
    while True:
        long.pump(3)

events = messages = 0
cut = [0, 0]
for times in range(int(sys.argv[1])):
    memory = Memory.create(events_bytes=8 << 20)
    reader, long, pages, status = Reader(memory), LongReader(memory), Pages(memory, ANSWER), Status(memory)
    pid = os.fork()
    if not pid:
        trains(memory)
    taken, whole = [], []
    ends = time.monotonic() + random.uniform(0, 0.06)
    while time.monotonic() < ends:
        taken += reader.take()
        whole += long.take()
        page, now = pages.read(), status.read()
        assert page is None or page == message(int(page.split(b".")[0] or 0))[:8000], page
        assert now is None or now == (now.step, "phase %d" % now.step, now.step, (now.step,) * 5), now
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    taken += reader.take()
    whole += long.take()
    assert taken == [(number, record(number)) for number in range(len(taken))], len(taken)
    assert reader.lost == 0
    assert whole == [(number, message(number)) for number in range(len(whole))], len(whole)
    assert reader.take() == long.take() == []
    again, late = Reader(memory), Status(memory).read()
    assert again.take() == taken
    assert 0 <= len(taken) - (late.step if late else 0) <= 9, (len(taken), late)
    events += len(taken)
    messages += len(whole)
    memory.close()
print(events > 100 * times, messages > times)
"""


def test_of_a_writer_that_is_killed_all_is_there_that_it_put() -> None:
    """Events are an unbroken row, long messages too, at a hundred random moments."""
    assert said(KILLED, 100 * TIMES) == "True True"


STRESSED = """
import gc, signal, sys, threading
if sys.argv[1] == "locked":
    sys._is_gil_enabled = lambda: False
from gpumon_agent.transport.memory import Memory
from gpumon_agent.transport.pages import Status
from gpumon_agent.transport.ring import LongReader, LongWriter, Reader, Writer

THREADS, PUTS = 4, 4_000

class Late(Exception):
    pass

def record(key, most):
    return (b"%d;" % key) * (key % most // 4 + 1)

class Cyclic:
    "Put by the garbage collector."
    def __init__(self, key):
        self.itself, self.key = self, key
    def __del__(self):
        try:
            puts(self.key)
        except Late:
            pass

def puts(key):
    payload = record(key, 100 if key % 32 else 8_000)  # of the longer ones CRC-32 is taken without the GIL
    number = writer.put(payload)
    assert number not in put, number
    put[number] = payload
    if key % 8 == 0:
        status.write(key, str(key), key, key, key, key, key, key)
        message = key, record(key, 9_000)
        sent.append(message)
        assert long.put(*message)
        queued.append(message)
        long.pump(2)

def handler(number, frame):
    global raised, nested, depth
    if depth == 3:
        return
    depth += 1
    nested += 1
    puts(10_000_000 + nested)
    depth -= 1
    if nested % 3 == 0 and "transport" in frame.f_code.co_filename and not depth:
        raised += 1
        raise Late

def works(first):
    for key in range(first, first + PUTS):
        try:
            puts(key)
            if key % 50 == 0:
                Cyclic(key + 500_000)
        except Late:
            pass

gc.set_threshold(5)
sys.setswitchinterval(1e-6)
signal.signal(signal.SIGALRM, handler)
rounds = interrupted = escaped = 0
while rounds < int(sys.argv[2]) or interrupted <= 10 or escaped <= 3:  # on a busy machine few signals come in a round
    rounds += 1
    memory = Memory.create(32 << 20, 8 << 20)
    writer, long, status = Writer(memory), LongWriter(memory), Status(memory)
    put, sent, queued, raised, nested, depth = {}, [], [], 0, 0, 0
    threads = [threading.Thread(target=works, args=(number * 1_000_000,)) for number in range(1, THREADS)]
    for thread in threads:
        thread.start()
    signal.setitimer(signal.ITIMER_REAL, 3e-4, 3e-4)
    works(0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    for thread in threads:
        thread.join()
    gc.collect()
    reader, long_reader, whole = Reader(memory), LongReader(memory), []
    taken, now = reader.take(), Status(memory).read()
    for _ in range(1000):
        long.pump(1000)
        whole += long_reader.take()
    numbers = [number for number, _ in taken]
    assert numbers == sorted(set(numbers))
    took = dict(taken)
    missing = [number for number in put if number not in took]
    assert not missing, ("missing", len(missing), len(put))
    unknown = sum(number not in put for number in numbers)  # the exception came as it was put already
    assert all(payload == put.get(number, payload) for number, payload in taken), "another payload"
    assert unknown <= raised and reader.lost <= raised, (unknown, reader.lost, raised)
    assert len(whole) == len(set(whole)), "a message came twice"
    assert set(queued) <= set(whole) <= set(sent), "a message is missing, or changed"
    assert long.waiting_bytes == 0, long.waiting_bytes
    assert now == (now.step, str(now.step), now.step, (now.step,) * 5), now
    interrupted, escaped = interrupted + nested, escaped + raised
    memory.close()
print("whole")
"""


@pytest.mark.parametrize("how", ["as it is", "locked"])
def test_threads_signal_handlers_and_finalizers_put_at_once(how: str) -> None:
    """Handlers put in the middle of a `put`, and every third raises. `locked`: as without a GIL."""
    for interpreter in [sys.executable]:
        assert said(STRESSED, how, 3 * TIMES, interpreter=interpreter) == "whole", interpreter


RAISES = """
import sys
from gpumon_agent.transport import ring
from gpumon_agent.transport.memory import ANSWER, PAGE_BYTES, Memory
from gpumon_agent.transport.pages import Pages, Status
from gpumon_agent.transport.ring import CHUNK_BYTES, LongReader, LongWriter, Reader, Writer

class Stop(Exception):
    pass

FILES = {ring.__file__, sys.modules[Pages.__module__].__file__}
left = 0

def tracer(frame, event, argument):
    return line if frame.f_code.co_filename in FILES else None

def line(frame, event, argument):
    global left
    if event == "line":
        left -= 1
        if left == 0:
            raise Stop
    return line

def until(at, call):
    "Whether that many lines of ours were run: then the last one raised."
    global left
    left = at
    sys.settrace(tracer)
    try:
        call()
    except Stop:
        return True
    finally:
        sys.settrace(None)
    return False

at = 0
while True:
    at += 1
    memory = Memory.create(4 * PAGE_BYTES, 4 * PAGE_BYTES)
    writer, long, status = Writer(memory), LongWriter(memory), Status(memory)
    back = Pages(memory, ANSWER)
    reader, long_reader = Reader(memory), LongReader(memory)
    put = []

    def puts(count):
        for _ in range(count):
            payload = b"%d" % len(put) * 400
            put.append(payload)
            writer.put(payload)

    def work():
        puts(3)
        status.write(1, "forward", 2, 3, 4, 5, 6)
        back.read()
        for length in (10, 2 * CHUNK_BYTES):
            put.append(bytes([length % 251]) * length)
            long.put(7, put[-1])
            long.pump(8)

    # so that the records after it begin a page, and go round the ring
    puts(4 * PAGE_BYTES // 1000)
    reader.take()
    while writer._page_end - writer._at > 3000:
        puts(1)
    raised = until(at, work)
    before = len(put)
    puts(200)
    taken = [payload for _, payload in reader.take()]
    assert all(payload in put for payload in taken), "a record is not whole"
    assert taken[-100:] == put[-100:], "readers do not go on"
    status.write(9, "backward", 2, 3, 4, 5, 6)
    assert status.read().step == 9
    last = b"last" * CHUNK_BYTES
    for _ in range(3):  # the rest of a page without its record is not read
        long.put(8, last)
        long.pump(8)
        queued = long_reader.take()
        assert all(payload in put or payload == last for _, payload in queued), "a message is not whole"
        if (8, last) in queued:
            break
    else:
        raise AssertionError("messages do not go on")
    memory.close()
    if not raised:
        break
print(at > 100 or at)
"""


def test_an_exception_at_any_line_costs_records_and_nothing_else() -> None:
    """Of a tracer, which may raise where signal handlers cannot: what comes after it is whole, and is read."""
    assert said(RAISES) == "True"


STRAIGHT = """
import dis
from gpumon_agent.transport.pages import Status
from gpumon_agent.transport.ring import Writer

# A jump that is not taken is none. What is not in here may run other code, or did nobody look at yet.
KNOWN = ("LOAD_", "STORE_", "BINARY_", "COMPARE_OP", "POP_JUMP_IF_FALSE", "POP_JUMP_FORWARD_IF_FALSE", "PUSH_NULL",
         "PRECALL", "INPLACE_", "COPY", "SWAP", "NOT_TAKEN", "DUP_TOP", "ROT_", "RESUME", "CACHE", "NOP")

def straight(function, *stores, reads=0):
    "Of a function, from the time that it reads `_number` or `_page_end` after so many others, to the next call."
    code = list(dis.get_instructions(function))
    begin = [at for at, each in enumerate(code) if each.argval in ("_number", "_page_end")][reads]
    ends = (at for at, each in enumerate(code) if at > begin and each.opname.startswith(("CALL", "RETURN")))
    part = code[begin:next(ends)]
    stored = [each.argval for each in part if each.opname.startswith("STORE_ATTR")]
    return stored == list(stores), [each.opname for each in part if not each.opname.startswith(KNOWN)]

assert "pack_into" in str(Writer.put.__code__.co_varnames)
print(straight(Writer.put, "_number", "_at", reads=1), straight(Status.write, "_number"),
      straight(Writer._begin_page, "_lap", "_at", "_page_end"))
"""


def test_nothing_comes_between_a_records_number_and_its_bytes() -> None:
    """What the writer does without a lock is compiled to what the interpreter does at once."""
    for interpreter in [sys.executable]:
        assert said(STRAIGHT, interpreter=interpreter) == " ".join(["(True, [])"] * 3), interpreter


# ------------------------------------------------------------------------------------------------------ long messages


def messages(count: int, longest: int) -> list[tuple[int, bytes]]:
    return [(number, record(number, number * 7919 % longest + 1)) for number in range(count)]


def test_long_messages_come_whole_and_in_order_whatever_their_length(memory: Memory) -> None:
    writer, reader = LongWriter(memory), LongReader(memory)
    lengths = [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 4 * CHUNK_BYTES, RING, 3 * RING, 5, 10 * RING]
    sent = [(1 << 31 | at, record(at, length) if length else b"") for at, length in enumerate(lengths)]
    for message in sent:
        assert writer.put(*message)
    assert writer.waiting_bytes == sum(lengths)
    whole = []
    while writer.waiting_bytes:
        writer.pump()
        whole += reader.take()
    assert whole == sent
    assert reader.take() == []


def test_no_more_than_64_mib_wait_in_the_training(memory: Memory) -> None:
    writer, mib = LongWriter(memory), bytes(1 << 20)
    assert all(writer.put(1, mib) for _ in range(64))
    assert not writer.put(1, b"x")


@pytest.mark.parametrize("length", [5, 1000, CHUNK_BYTES, 70_000])
@pytest.mark.parametrize("pages_read", [0, 1, 3])
def test_what_was_not_read_is_never_overwritten(memory: Memory, length: int, pages_read: int) -> None:
    """The reader comes late, when there is no more room; before that it may have read a part."""
    writer, reader = LongWriter(memory), LongReader(memory)
    sent = [(at, record(at, length)) for at in range(3 * RING // length + 9)]
    for message in sent:
        assert writer.put(*message)
    whole: list[tuple[int, bytes]] = []
    writer.pump(pages_read * PAGE_BYTES // (length + 28) + 1)
    whole += reader.take()
    for _ in range(100):
        writer.pump(1_000_000)
        assert writer.waiting_bytes or whole
        whole += reader.take()
    assert whole == sent
    assert writer.waiting_bytes == 0


def test_a_pump_copies_no_more_chunks_than_it_may(memory: Memory) -> None:
    writer, reader = LongWriter(memory), LongReader(memory)
    writer.put(1, bytes(20 * CHUNK_BYTES))
    for chunks in (0, 1, 2, 4):
        before = memory.words[LONG_HEAD]
        writer.pump(chunks)
        assert memory.words[LONG_HEAD] - before == chunks * (LONGEST + 16)
    writer.pump(1000)
    assert memory.words[LONG_HEAD] == RING  # all the room there is
    assert writer.waiting_bytes == 20 * CHUNK_BYTES
    assert reader.take() == []
    writer.pump(1000)
    assert reader.take() == [(1, bytes(20 * CHUNK_BYTES))]


def test_beyond_the_limit_messages_are_refused_until_there_is_room(memory: Memory) -> None:
    writer, reader = LongWriter(memory, limit_bytes=RING), LongReader(memory)
    assert writer.put(1, bytes(RING - 10))
    assert not writer.put(2, bytes(11))
    assert writer.put(3, bytes(10))
    assert writer.waiting_bytes == RING
    writer.pump(1000)
    reader.take()
    writer.pump(1000)
    assert writer.put(4, b"again")
    writer.pump()
    assert [kind for kind, _ in reader.take()] == [1, 3, 4]
    for kind in (-1, 1 << 32):
        with pytest.raises(ValueError, match=f"kind {kind}"):
            writer.put(kind, b"")


def test_a_new_helper_takes_what_the_old_one_did_not(memory: Memory) -> None:
    """Also a message of which only a part was sent, or read."""
    writer, reader = LongWriter(memory), LongReader(memory)
    sent = messages(5, 50_000)
    for message in sent:
        writer.put(*message)
    writer.pump(3)
    taken = reader.take()
    writer.pump(2)
    copy = memory.copied()
    after = LongWriter(copy, after=writer)
    memory.close()
    again = LongReader(copy)
    assert after.waiting_bytes == sum(len(message.payload) for message in after._waiting)
    for _ in range(100):
        after.pump()
        taken += again.take()
    copy.close()
    assert taken == sent
    assert after.waiting_bytes == 0


# --------------------------------------------------------------------------------------------------- scribbled memory


BYTES = st.binary(min_size=1, max_size=64)
EXTREME = st.sampled_from(
    [0, 1, 7, 8, PAGE_BYTES, RING, RING + 1, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 8, (1 << 64) - 1]
)
ACTIONS = st.one_of(
    st.tuples(st.just("put"), st.integers(1, 900)),
    st.tuples(st.just("send"), st.integers(0, 40_000)),
    st.tuples(st.just("take"), st.none()),
    st.tuples(st.just("anywhere"), st.tuples(st.floats(0, 1, exclude_max=True), BYTES)),
    st.tuples(st.just("ring"), st.tuples(st.floats(0, 1, exclude_max=True), BYTES)),
    st.tuples(st.just("record"), st.tuples(st.integers(0, 40), BYTES)),
    st.tuples(
        st.just("word"),
        st.tuples(st.sampled_from([EVENTS_HEAD, LONG_HEAD, LONG_TAIL]), EXTREME | st.integers(0, 1 << 20)),
    ),
)


@settings(max_examples=150 * TIMES)
@given(st.lists(ACTIONS, max_size=40))
def test_of_scribbled_memory_only_what_was_put_is_taken_and_the_ring_goes_on(actions: list[tuple[str, object]]) -> None:
    memory = Memory.create(RING, RING)
    writer, long = Writer(memory), LongWriter(memory)
    reader, long_reader = Reader(memory), LongReader(memory)
    put: dict[int, bytes] = {}
    sent: list[tuple[int, bytes]] = []

    def puts(count: int) -> None:
        for _ in range(count):
            payload = record(len(put))
            put[writer.put(payload)] = payload

    def sends(length: int) -> None:
        sent.append((len(sent), record(len(sent), length) if length else b""))
        assert long.put(*sent[-1])
        long.pump()

    def takes(*others: Reader) -> list[int]:
        began = time.monotonic()
        for each in (reader, *others):
            before = -1
            for number, payload in each.take():
                assert put[number] == payload
                assert number > before
                before = number
                seen.add(number)
        whole = long_reader.take()
        assert all(message in sent for message in whole)
        assert time.monotonic() - began < 10
        return [kind for kind, _ in whole]

    def scribbles(at: int, what: bytes) -> None:
        at %= len(memory.view)
        what = what[: len(memory.view) - at]
        memory.view[at : at + len(what)] = what

    seen: set[int] = set()
    whole: list[int] = []
    start = len(memory.view) - 2 * RING
    do: dict[str, Callable[..., object]] = {
        "put": puts,
        "send": sends,
        "take": lambda _: whole.extend(takes(Reader(memory), Reader.oldest(memory))),
        "anywhere": lambda what: scribbles(int(what[0] * len(memory.view)), what[1]),
        "ring": lambda what: scribbles(start + int(what[0] * 2 * RING), what[1]),
        "record": lambda what: scribbles(start + memory.words[EVENTS_HEAD] % RING - 8 * what[0], what[1]),
        "word": lambda what: memory.words.__setitem__(*what),
    }
    try:
        for name, what in actions:
            do[name](what)
        for _ in range(10):  # in all more than a page
            puts(70)
            sends(10_000)
            whole.extend(takes())
        puts(1)
        sends(100)
        for _ in range(20):
            long.pump(1000)
            whole.extend(takes())
        assert len(put) - 1 in seen
        assert whole[-1:] == [len(sent) - 1]
        assert long.waiting_bytes == 0
    finally:
        memory.close()


SCRIBBLED = """
import os, random, signal, sys, time
from gpumon_agent.transport.memory import ANSWER, Memory
from gpumon_agent.transport.pages import Pages, Status
from gpumon_agent.transport.ring import LongReader, LongWriter, Reader, Writer

memory = Memory.create(1 << 18, 1 << 18)
pid = os.fork()
if not pid:
    while True:
        for _ in range(50):
            at = random.choice((random.randrange(len(memory.view) - 64), random.randrange(4096 + 512)))
            memory.view[at : at + 8] = random.randbytes(8)
        time.sleep(1e-4)
put, sent, pages_put = {}, set(), set()
writer, long, status, pages = Writer(memory), LongWriter(memory), Status(memory), Pages(memory, ANSWER)
reader, long_reader, pages_reader = Reader(memory), LongReader(memory), Pages(memory, ANSWER)
taken = whole = read = 0
ends = time.monotonic() + float(sys.argv[1])
number = 0
while time.monotonic() < ends:
    for _ in range(100):
        number += 1
        payload = b"%d." % number * (number % 50 + 1)
        put[writer.put(payload)] = payload
    message = number, b"%d." % number * (number % 999)
    sent.add(message)
    long.put(*message)
    long.pump(20)
    status.write(number, "forward", number)
    page = b"%d." % number * 9
    pages_put.add(page)
    pages.write(page)
    for key, payload in reader.take():
        assert put[key] == payload
        taken += 1
    for message in long_reader.take():
        assert message in sent
        whole += 1
    page = pages_reader.read()
    assert page is None or page in pages_put
    read += page is not None
    status.read()
os.kill(pid, signal.SIGKILL)
os.waitpid(pid, 0)
print(taken > number // 10, whole > 0, read > 0)
"""


def test_a_process_that_scribbles_all_over_the_memory_neither_stops_nor_fools_a_reader() -> None:
    assert said(SCRIBBLED, 2 * TIMES, timeout_s=60 + 20 * TIMES) == "True True True"
