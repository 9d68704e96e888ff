"""What a log's traceback tells: the phase, the user's own line, how far it came."""
# ruff: noqa: E501  messages stay as they were pasted

from __future__ import annotations

import pytest

from gpumon.analysis.diagnosis.log import FrameLine, phase_of, read

MESSAGE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 148.00 MiB. GPU 0 has a total capacity of 2.00 GiB of "
    "which 100.00 MiB is free. Of the allocated memory 1.07 GiB is allocated by PyTorch, and 20.00 MiB is reserved by "
    "PyTorch but unallocated."
)
TORCH = "/opt/venv/lib/python3.11/site-packages/torch"


def traceback(*frames: tuple[str, int, str, str], prefix: str = "") -> str:
    lines = ["Traceback (most recent call last):"]
    for file, line, function, code in frames:
        lines += [f'  File "{file}", line {line}, in {function}', f"    {code}"]
    return "\n".join(prefix + line for line in [*lines, MESSAGE])


USER = ("/home/me/train.py", 41, "main", "loss = step(model, batch)")
FORWARD = (f"{TORCH}/nn/modules/module.py", 1787, "_wrapped_call_impl", "return self._call_impl(*args, **kwargs)")
LINEAR = (f"{TORCH}/nn/modules/linear.py", 134, "forward", "return F.linear(input, self.weight, self.bias)")
BACKWARD = (f"{TORCH}/_tensor.py", 623, "backward", "torch.autograd.backward(")
ENGINE = (f"{TORCH}/autograd/graph.py", 1113, "_engine_run_backward", "return Variable._execution_engine.run_backward(")
STEP = (f"{TORCH}/optim/adam.py", 183, "_init_group", 'state["exp_avg_sq"] = torch.zeros_like(')
CLIP = (f"{TORCH}/nn/utils/clip_grad.py", 36, "clip_grad_norm_", "norms = torch._foreach_norm(grads)")
MOVE = (f"{TORCH}/nn/modules/module.py", 1329, "convert", "return t.to(")
CHECKPOINT = (f"{TORCH}/utils/checkpoint.py", 1100, "unpack_hook", "frame.recompute_fn(*args)")
LOADER = (f"{TORCH}/utils/data/_utils/pin_memory.py", 50, "do_one_step", "data = pin_memory(data, device)")


@pytest.mark.parametrize(
    ("frames", "phase"),
    [
        ([USER, FORWARD, LINEAR], "forward"),
        ([USER, BACKWARD, ENGINE], "backward"),
        ([USER, BACKWARD, ENGINE, CHECKPOINT, FORWARD, LINEAR], "backward"),
        ([USER, STEP], "optimizer"),
        ([USER, CLIP], "optimizer"),
        ([USER, STEP, ("/home/me/train.py", 60, "closure", "loss = model(x)"), FORWARD, LINEAR], "forward"),
        ([USER, MOVE], "load"),
        ([("/home/me/train.py", 9, "main", "model.to('cuda')")], "load"),
        ([USER, LOADER], "between"),
        ([("/home/me/train.py", 80, "evaluate", "logits = model(x)"), FORWARD, LINEAR], "eval"),
        ([("/home/me/train.py", 80, "main", "x = torch.zeros(10)")], None),
        ([("/home/me/model.py", 12, "forward", "scores = q @ k.transpose(-1, -2)")], "forward"),
    ],
)
def test_the_frames_tell_the_phase(frames: list[tuple[str, int, str, str]], phase: str | None) -> None:
    story = read(traceback(*frames))
    assert story is not None
    assert story.phase == phase


@pytest.mark.parametrize(
    "prefix", ["", "[rank3]: ", "(Worker_TP0 pid=17) ERROR 07-29 21:48:54 [x.py:962] ", "2026-01-01 12:00:00 "]
)
def test_the_user_s_own_line_is_the_innermost_that_is_not_installed(prefix: str) -> None:
    story = read(traceback(USER, FORWARD, LINEAR, prefix=prefix))
    assert story is not None
    assert story.where == "train.py:41"
    assert story.phase == "forward"
    assert story.code is not None
    assert story.code.endswith("loss = step(model, batch)")


def test_a_notebook_s_cell_and_rich_s_frame_are_lines_too() -> None:
    notebook = f"File ~/lib/python3.11/site-packages/torch/x.py:5, in f(a)\nCell In[11], line 3\n      1 a\n----> 3 b\n{MESSAGE}"
    story = read(notebook)
    assert story is not None
    assert story.where == "cell 11:3"
    rich = f"│ /home/me/train.py:41 in main                  │\n{MESSAGE}"
    story = read(rich)
    assert story is not None
    assert story.where == "train.py:41"


def test_the_newest_traceback_and_the_progress_before_it() -> None:
    text = (
        traceback(("/home/me/old.py", 1, "main", "x"), BACKWARD)
        + "\n 12%|█▏        | 120/1000 [00:40<04:50,  3.03it/s]\n"
        + traceback(USER, FORWARD, LINEAR)
    )
    story = read(text)
    assert story is not None
    assert (story.times, story.progress, story.where) == (2, (120, 1000), "train.py:41")


@pytest.mark.parametrize(
    ("chars", "where", "progress"),
    [(19_000, "train.py:41", (7, 9)), (21_000, None, (7, 9)), (190_000, None, (7, 9)), (201_000, None, None)],
)
def test_a_traceback_lies_just_above_and_a_step_not_far(
    chars: int, where: str | None, progress: tuple[int, int] | None
) -> None:
    lines = traceback(USER).removesuffix(MESSAGE)
    story = read(f"step 7 of 9\n{lines}{'x' * (chars - len(lines))}\n{MESSAGE}")
    assert story is not None
    assert (story.where, story.progress) == (where, progress)


def test_figures_2500_characters_after_a_message_are_not_its_own() -> None:
    head, figures = MESSAGE.split(" Of the ")
    known = [read(f"{head} {'x ' * more} Of the {figures}") for more in (1000, 1300)]
    assert [each and each.message.allocated is not None for each in known] == [True, False]


def test_steps_are_counted_from_words_too() -> None:
    story = read(f"epoch 2 step: 4500/9000 loss 0.3\n{MESSAGE}")
    assert story is not None
    assert story.progress == (4500, 9000)


def test_windows_paths_are_files_too() -> None:
    frame = FrameLine(r"C:\conda\lib\site-packages\torch\optim\adam.py", 5, "step")
    assert frame.foreign
    assert frame.place == "adam.py:5"
    assert phase_of((frame,)) == "optimizer"
