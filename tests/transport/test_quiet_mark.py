"""Step and phase of a step that is not read: one word, seen by the helper."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpumon_agent.quiet_mark import QuietMark
from gpumon_agent.transport.memory import CALLED, PAGE_BYTES, QUIET, Memory
from gpumon_agent.transport.pages import Status
from gpumon_agent.wire import BACKWARD, FORWARD


@pytest.fixture
def memory() -> Iterator[Memory]:
    memory = Memory.create(4 * PAGE_BYTES, 4 * PAGE_BYTES)
    yield memory
    memory.close()


def test_a_mark_is_shared_and_kept(memory: Memory) -> None:
    mark = QuietMark()
    assert mark.read() is None
    mark.begin(7, FORWARD)
    mark.share(memory.words, QUIET, CALLED)
    assert mark.read() == (7, FORWARD)
    mark.begin(8, BACKWARD)
    word = memory.words[QUIET]
    mark.keep()
    assert mark.read() == (8, BACKWARD)
    mark.end()
    assert mark.read() is None
    assert memory.words[QUIET] == word != 0


def test_the_status_has_the_marks_step_and_phase(memory: Memory) -> None:
    writer, reader, mark = Status(memory), Status(memory), QuietMark()
    mark.share(memory.words, QUIET, CALLED)
    writer.write(3, "optimizer", 17)
    mark.begin(4, FORWARD)
    first, again = reader.read(), reader.read()
    assert first is not None
    assert (first.step, first.phase) == (4, FORWARD)
    assert first.since_ns > 17
    assert again == first  # since when: as long as the mark stays
    mark.begin(5, FORWARD)
    changed = reader.read()
    assert changed is not None
    assert changed.step == 5
    assert changed.since_ns > first.since_ns
    mark.end()
    read = reader.read()
    assert read is not None
    assert (read.step, read.phase, read.since_ns) == (3, "optimizer", 17)
