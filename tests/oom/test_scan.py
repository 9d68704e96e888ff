"""A log of any size, read as a stream: the same as if it were read whole."""

from __future__ import annotations

import io
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumon.analysis.diagnosis import scan as scanning
from gpumon.analysis.diagnosis.log import Story, read
from gpumon.analysis.diagnosis.scan import scan

MESSAGE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {}.00 GiB. GPU 0 has a total capacity of 39.49 GiB "
    "of which 900.00 MiB is free. "
    "Of the allocated memory 36.90 GiB is allocated by PyTorch, and 1.48 GiB is reserved by "
    "PyTorch but unallocated.\n"
)
TRACEBACK = (
    "step 3 of 9\nTraceback (most recent call last):\n"
    '  File "/home/me/train.py", line 58, in step\n    loss.backward()\n' + MESSAGE.format(2)
)
PIECES = (
    TRACEBACK,
    MESSAGE.format(3),
    MESSAGE.format(4).replace(" ", "\n[rank0]: ", 12),
    "Killed\n",
    "x" * 30_000,
    "memory 35.1 GiB of 39.5\n" * 500,
    "\repoch 2:  12%|█▏ | 120/1000 [00:40<04:50]" * 300,
    "\x1b[31mRuntimeError: CUDA error: out of memory\x1b[0m\n",
    "numpy.core._exceptions.MemoryError: Unable to allocate 2.00 GiB for an array with shape (1, 2)\n",
    "\n",
)


def told(story: Story | None) -> tuple[object, ...] | None:
    return None if story is None else (story.message, story.frames, story.phase, story.times, story.progress)


@given(st.lists(st.sampled_from(PIECES), max_size=12), st.sampled_from((4096, 50_000, 1 << 20)))
@settings(max_examples=80)
def test_a_stream_gives_what_the_whole_text_gives(pieces: list[str], chunk: int) -> None:
    text = "".join(pieces)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scanning, "CHUNK_BYTES", chunk)
        assert told(scan(io.BytesIO(text.encode()))) == told(read(text))


@given(st.binary(max_size=3000), st.binary(max_size=3000))
def test_any_bytes_can_be_around_a_message(before: bytes, after: bytes) -> None:
    story = scan(io.BytesIO(before + b"\n" + TRACEBACK.encode() + after))
    assert story is not None
    assert story.message.requested is not None


@given(st.text(st.sampled_from("0123456789. GMKiB(){}[]/:;'\"`File, line in step of batch│\n\t\x1b\x9b"), max_size=300))
@settings(max_examples=300)
def test_any_text_in_the_words_of_a_message_is_read_or_not(text: str) -> None:
    for head in ("CUDA out of memory. Tried to allocate 2.00 GiB", "Unable to allocate ", "GPU ", 'File "'):
        read(head + text + head)
        read(text + TRACEBACK)


@pytest.mark.parametrize(
    "text",
    [
        "Tried to allocate " + "9" * 6000 + " GiB",
        'File "a.py", line ' + "9" * 6000 + ", in f\n" + MESSAGE.format(2),
        "step " + "9" * 6000 + "\n" + MESSAGE.format(2),
        "9" * 6000 + "/" + "9" * 6000 + " [00:00\n" + MESSAGE.format(2),
        MESSAGE.format("9" * 6000),
        MESSAGE.format(2).replace("GPU 0", "GPU " + "9" * 6000),
    ],
)
def test_a_number_of_thousands_of_digits_is_no_number(text: str) -> None:
    read(text)


def test_weak_signs_by_the_megabyte_do_not_hide_the_message_with_figures() -> None:
    noise = "Killed\nexitcode : -9\n" * 100_000
    story = scan(io.BytesIO((TRACEBACK + noise + "out of memory\n" * 100_000).encode()))
    assert story is not None
    assert story.where == "train.py:58"
    assert story.phase == "backward"


def test_thousands_of_messages_are_counted_and_the_last_is_read() -> None:
    log = io.BytesIO(b"".join(MESSAGE.format(at % 30).encode() for at in range(5000)) + TRACEBACK.encode())
    story = scan(log)
    assert story is not None
    assert story.times == 5001
    assert story.where == "train.py:58"


def test_a_log_is_read_by_the_mebibyte_and_half_of_one_is_kept_of_each_kind_of_word() -> None:
    """Of signs 12 kB apart ten kB each are kept: 52 of a hundred."""
    asked = []

    class Log(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            asked.append(size)
            return super().read(size)

    story = scan(Log(("RuntimeError: CUDA error: out of memory\n" + "x" * 12_000 + "\n").encode() * 100))
    assert story is not None
    assert 50 <= story.times <= 52
    assert max(asked) == 1 << 20


def test_what_is_kept_of_a_large_log_is_bounded() -> None:
    log = io.BytesIO(MESSAGE.format(2).encode() * 60_000)  # 20 MB
    tracemalloc.start()
    assert scan(log) is not None
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 150 << 20
