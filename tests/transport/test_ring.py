"""The rings: what is taken was put, whole and in order, whoever is killed, interrupts, overruns or scribbles."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpumon_agent
from gpumon_agent.transport.memory import PAGE_BYTES, Memory
from gpumon_agent.transport.ring import LONGEST, Reader, Writer

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
            status.write(number, "phase %d" % number, number, number, number, number, number)
            long.put(number // 8, message(number // 8))
            long.pump(3)
            pages.write(message(number // 8)[:8000])
    while True:
        long.pump(3)

events = messages = 0
cut = [0, 0]
for times in range(int(sys.argv[1])):
    memory = Memory.create()
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
        assert now is None or now == (now.step, "phase %d" % now.step, now.step, (now.step,) * 4), now
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
