"""Alternating pages and the status: the newest that is whole, or nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumon_agent.transport.memory import ANSWER, PAGE_BYTES, START, STATUS_LATEST, STATUS_OFFSET, Memory, Pair
from gpumon_agent.transport.pages import PHASE_BYTES, Current, Pages, Status

RING = 4 * PAGE_BYTES
TIMES = int(os.environ.get("GPUMON_FUZZ_TIMES", "1"))
ALL = pytest.mark.parametrize("which", [START, ANSWER])


@pytest.fixture
def memory() -> Iterator[Memory]:
    memory = Memory.create(RING, RING)
    yield memory
    memory.close()


def said(script: str) -> str:
    """What a process of its own prints; it ends well and says nothing else."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


@ALL
def test_what_was_written_last_is_read_once(memory: Memory, which: Pair) -> None:
    writer, reader = Pages(memory, which), Pages(memory, which)
    assert reader.read() is None
    for payload in (b"a", b"", b"b" * writer.limit_bytes, b"c"):
        writer.write(payload)
        assert reader.read() == payload
        assert reader.read() is None
    writer.write(b"d")
    writer.write(b"e")
    assert reader.read() == b"e"
    assert Pages(memory, which).read() == b"e"
    assert which.page_bytes - 16 == writer.limit_bytes


@ALL
def test_too_long_a_payload_is_refused_and_what_was_written_stays(memory: Memory, which: Pair) -> None:
    pages = Pages(memory, which)
    pages.write(b"a")
    with pytest.raises(ValueError, match="are possible"):
        pages.write(bytes(pages.limit_bytes + 1))
    assert pages.read() == b"a"


def test_pages_and_status_and_rings_do_not_overlap(memory: Memory) -> None:
    """Each is filled with its own byte, then all are there."""
    every = [START, ANSWER]
    for at, which in enumerate(every):
        for _ in range(2):
            pages = Pages(memory, which)
            pages.write(bytes([at + 1]) * pages.limit_bytes)
    status = Status(memory)
    for _ in range(2):
        status.write(1, "x" * PHASE_BYTES, 2, 3, 4, 5, 6, 7)
    memory.events[:] = b"\xff" * RING
    memory.long[:] = b"\xff" * RING
    for at, which in enumerate(every):
        assert Pages(memory, which).read() == bytes([at + 1]) * (which.page_bytes - 16)
    assert Status(memory).read() == Current(1, "x" * PHASE_BYTES, 2, (3, 4, 5, 6, 7))
    again = Memory.open(os.dup(memory.fd))
    again.close()


def test_a_writer_on_a_copy_goes_on_with_the_numbers(memory: Memory) -> None:
    """So that what it writes is new to a reader that has read the old one's."""
    pages, status, reader = Pages(memory, ANSWER), Status(memory), Pages(memory, ANSWER)
    pages.write(b"a")
    status.write(1, "a", 1)
    assert reader.read() == b"a"
    Pages(memory, ANSWER).write(b"b")
    assert reader.read() == b"b"
    Status(memory).write(2, "b", 2)
    read = status.read()
    assert read is not None
    assert read.step == 2


@ALL
def test_a_corrupt_page_is_as_if_it_was_not_there(memory: Memory, which: Pair) -> None:
    writer, reader = Pages(memory, which), Pages(memory, which)
    for at in (0, 7, 8, 11, 12, 15, 16, 16 + 499):  # of the number, the length, the check, the payload
        writer.write(b"x" * 500)
        begin = which.offset + memory.words[which.latest] % 2 * which.page_bytes
        memory.view[begin + at] ^= 0x40
        assert reader.read() is None
        memory.view[begin + at] ^= 0x40
        assert reader.read() == b"x" * 500


def test_a_page_that_stays_corrupt_is_looked_at_three_times(memory: Memory) -> None:
    """The training thread would copy up to 256 KiB at each boundary."""
    writer, reader = Pages(memory, ANSWER), Pages(memory, ANSWER)
    writer.write(b"a" * 500)
    begin = ANSWER.offset + memory.words[ANSWER.latest] % 2 * ANSWER.page_bytes
    memory.view[begin + 100] ^= 1
    assert [reader.read() for _ in range(3)] == [None] * 3
    memory.view[begin + 100] ^= 1
    assert reader.read() is None
    writer.write(b"b")
    assert reader.read() == b"b"


def test_the_status_is_what_was_written_last(memory: Memory) -> None:
    writer, reader = Status(memory), Status(memory)
    assert reader.read() is None
    for step in range(5):
        writer.write(step - 1, f"phase {step}", 10 * step, step, 0, 2**64 - 1, 7, 8)
        expected = Current(step - 1, f"phase {step}", 10 * step, (step, 0, 2**64 - 1, 7, 8))
        assert reader.read() == reader.read() == expected


def test_of_a_phases_name_there_are_the_first_64_bytes(memory: Memory) -> None:
    status = Status(memory)
    cases = {"": "", "x" * 70: "x" * 64, "ä" * 40: "ä" * 32, "x" + "ä" * 40: "x" + "ä" * 31, "a\udc80b": "a?b"}
    for phase, kept in cases.items():
        status.write(1, phase, 1)
        read = status.read()
        assert read is not None
        assert read.phase == kept


def test_a_torn_status_is_none(memory: Memory) -> None:
    status = Status(memory)
    for end in (0, 8 + 16 + 64 + 40):  # its number stands at both ends
        status.write(1, "forward", 1)
        at = STATUS_OFFSET + memory.words[STATUS_LATEST] % 2 * 256 + end
        memory.view[at] ^= 1
        assert status.read() is None
        memory.view[at] ^= 1
        assert status.read() is not None


RACES = """
import os, signal, time
from gpumon_agent.transport.memory import ANSWER, Memory
from gpumon_agent.transport.pages import Pages, Status

def page(number):
    return b"%d." % number * (number * 7919 % 1_000 + 1)

memory = Memory.create(1 << 18, 1 << 18)
pid = os.fork()
if not pid:
    writer, status, number = Pages(memory, ANSWER), Status(memory), 0
    while True:
        number += 1
        status.write(number, "phase %d" % number, number, number, number, number, number, number)
        writer.write(page(number))
reader, status = Pages(memory, ANSWER), Status(memory)
newest = step = read = seen = 0
ends = time.monotonic() + 2
while time.monotonic() < ends:
    payload, now = reader.read(), status.read()
    if payload is not None:
        number = int(payload[: payload.index(b".")])
        assert payload == page(number) and number > newest, (number, newest)
        newest, read = number, read + 1
    if now is not None:
        assert now == (now.step, "phase %d" % now.step, now.step, (now.step,) * 5) and now.step >= step, now
        step, seen = now.step, seen + 1
os.kill(pid, signal.SIGKILL)
os.waitpid(pid, 0)
print(read > 20, seen > 20)
"""


def test_a_writer_at_full_speed_is_never_read_torn_nor_backwards() -> None:
    assert said(RACES) == "True True"


@settings(max_examples=200 * TIMES)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("write"), st.binary(max_size=300)),
            st.tuples(st.just("scribble"), st.tuples(st.integers(0, 400), st.binary(min_size=1, max_size=32))),
            st.tuples(st.just("latest"), st.sampled_from([0, 1, 2, 3, 1 << 62, (1 << 63) - 1, (1 << 64) - 1])),
        ),
        max_size=30,
    )
)
def test_of_scribbled_pages_only_what_was_written_is_read(actions: list[tuple[str, object]]) -> None:
    memory = Memory.create(RING, RING)
    try:
        writer, reader = Pages(memory, ANSWER), Pages(memory, ANSWER)
        status = Status(memory)
        written = set()
        for name, what in actions:
            if name == "write":
                assert isinstance(what, bytes)
                writer.write(what)
                status.write(len(written), "forward", 1)
                written.add(what)
            elif name == "latest":
                assert isinstance(what, int)
                memory.words[ANSWER.latest] = memory.words[STATUS_LATEST] = what
            else:
                assert isinstance(what, tuple)
                at, scribbled = what
                for begin in (ANSWER.offset + at % 2 * ANSWER.page_bytes, STATUS_OFFSET):
                    memory.view[begin + at : begin + at + len(scribbled)] = scribbled
            read = reader.read()
            assert read is None or read in written
            status.read()
        Pages(memory, ANSWER).write(b"begins anew, whatever the word says")
        writer.write(b"goes on")
        status.write(7, "goes on", 1)
        assert reader.read() in (b"goes on", None)
        writer.write(b"and on")
        assert reader.read() == b"and on"
        now = status.read()
        assert now is not None
        assert now.phase == "goes on"
    finally:
        memory.close()
