"""What the two processes write for each other: whatever is there instead, it is a message or is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumon_agent import wire
from gpumon_agent.transport import messages

PART = wire.PartOff("hook", "ValueError: x", "a.py:1", 5)
SOUND = [
    messages.encode(messages.State((0, 1), (PART,))),
    messages.encode(messages.Piece(3, 5, b"abc")),
    messages.encode(messages.FromHelper(True, True, True, ((1, wire.Request("census", "ab12")),), ((2, "a line"),), 7)),
    messages.encode([msgspec.Raw(wire.encode_event(wire.Notice(1, "x")))] * 3),
    msgspec.json.encode({"path": ["/a"], "descriptor": {}, "seq": 1}),
]
DECODERS: tuple[Callable[[bytes], object], ...] = (
    messages.decode_start,
    messages.decode_state,
    messages.decode_piece,
    messages.decode_answer,
    messages.decode_events,
)
REFUSES = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What the guard of the training process and the helper's restart are for."""


def decoded(raw: bytes) -> None:
    for decode in DECODERS:
        try:
            told = decode(raw)
        except REFUSES:
            continue
        if isinstance(told, list):
            for each in told:
                try:
                    wire.decode_event(bytes(each))
                except wire.WireError:
                    continue
        elif isinstance(told, messages.FromHelper):
            for number, request in told.requests:
                assert isinstance(number, int)
                assert isinstance(request, wire.Request)
            assert all(isinstance(text, str) for _, text in told.said)


def test_what_is_sound_is_read() -> None:
    assert messages.decode_state(SOUND[0]) == messages.State((0, 1), (PART,))
    assert messages.decode_piece(SOUND[1]) == messages.Piece(3, 5, b"abc")
    assert messages.decode_answer(SOUND[2]).said == ((2, "a line"),)
    assert len(messages.decode_events(SOUND[3])) == 3


@given(st.binary(max_size=500))
def test_any_bytes_are_a_message_or_refused(raw: bytes) -> None:
    decoded(raw)


@given(st.sampled_from(SOUND), st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), max_size=8))
def test_a_message_with_changed_bytes_is_a_message_or_refused(sound: bytes, changes: list[tuple[int, int]]) -> None:
    raw = bytearray(sound)
    for at, value in changes:
        raw[at % len(raw)] = value
    decoded(bytes(raw))


ANSWERS = """
import json
from gpumon_agent import endpoint, wire
from gpumon_agent.transport import messages
from gpumon_agent.transport.helper import Helper
from gpumon_agent.transport.memory import ANSWER, Memory
from gpumon_agent.transport.pages import Pages
memory = Memory.create()
descriptor = endpoint.describe("train.py")
helper = Helper(memory, messages.Start([], descriptor))
for number in range(9):
    helper.tell(chr(0x1F600 + number) * 1000)
for device in range(9):
    helper.take(wire.Request(wire.ROOM, descriptor.nonce, device, 1 << 60))
answer = messages.decode_answer(Pages(memory, ANSWER).read())
devices = [each.device for _, each in answer.requests]
print(json.dumps([devices, [[ord(text[0]), len(text)] for _, text in answer.said]]))
"""


def test_the_newest_eight_requests_and_lines_fit_an_answer_however_long() -> None:
    """The training may be in one long phase, and reads them after it."""
    done = subprocess.run([sys.executable, "-c", ANSWERS], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    assert json.loads(done.stdout) == [list(range(1, 9)), [[0x1F600 + number, 400] for number in range(1, 9)]]


@pytest.mark.parametrize("deep", [b"\x91", b"\x81\x01", b"[", b'{"a":'])
def test_nesting_ends_in_a_refusal(deep: bytes) -> None:
    decoded(deep * 60_000)
