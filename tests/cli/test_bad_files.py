"""Files that are not what they should be: one sentence and an exit code, no traceback, nothing for a terminal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import hostile
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from gpumon.cli import main

FEW = hostile.examples(60)
HARM = "\x1b]52;c;aGk=\x07\x1b]0;title\x07\x9b31m\u202egpj.exe\u2066\x7f"
MESSAGE = (
    "RuntimeError: CUDA out of memory. Tried to allocate 2.69 GiB (GPU 0; 14.76 GiB total capacity; 12.32 GiB already "
    "allocated; 835.88 MiB free; 13.06 GiB reserved in total by PyTorch)"
)
DATA = Path(__file__).parents[1] / "data"
GPT = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 99, "n_positions": 64}


def call(*arguments: str | Path, stdin: bytes | None = None) -> Result:
    """In this process; a traceback is an exception here, and so is what takes far too long."""
    with hostile.within(60):
        done = CliRunner().invoke(main, [*map(str, arguments)], input=stdin)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert hostile.harm_in(done.output) == []
    assert "Traceback" not in done.output
    return done


def refused(*arguments: str | Path, code: int) -> str:
    """The sentence, with its exit code."""
    done = call(*arguments)
    assert done.exit_code == code, done.output
    *_, last = done.output.splitlines()
    assert last.startswith("Error: ")
    return last


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"n_layer": 10**9}, "n_layer is 1000000000, and may be 512 at most; correct the file"),
        ({"n_embd": 10**18}, "n_embd is 1000000000000000000, and may be 2,147,483,648 at most; correct the file"),
        ({"vocab_size": 10**400}, "vocab_size is a number of 1329 bits"),
        ({"n_embd": 10**9}, "a tensor would have more than 8 EiB"),
        ({"deep": [[[[[[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]]]]]}, "is nested too deeply to describe a model"),
    ],
)
def test_a_config_beyond_every_model_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**GPT, **change}))
    assert said in refused("estimate", "--config", config, code=2)


def test_a_parameter_of_more_than_a_petabyte_is_refused(tmp_path: Path) -> None:
    parameters = tmp_path / "shapes.json"
    parameters.write_text(json.dumps({"weight": [(1 << 50) + 1]}))
    assert "more elements than any parameter" in refused("estimate", "--parameters", parameters, code=2)


def test_brackets_by_the_thousand_and_endless_files_are_refused(tmp_path: Path) -> None:
    deep = tmp_path / "deep.json"
    deep.write_text("[" * 200_000)
    for option in ("--config", "--parameters"):
        assert "nested too deeply" in refused("estimate", option, deep, code=2)
        assert "larger than 64 MiB" in refused("estimate", option, Path("/dev/zero"), code=2)
    assert "nested too deeply" in refused("explain", MESSAGE, "--parameters", deep, code=2)
    assert "neither a file nor a pipe" in refused("explain", "--log", Path("/dev/zero"), code=1)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--parameters", "\N{SUPERSCRIPT TWO}"),
        ("--parameters", "9" * 5000),
        ("--parameters", "1000", "--world-size", "9" * 30),
        ("--parameters", "1000", "--batch", "9" * 30),
    ],
)
def test_a_number_beyond_every_model_is_refused(arguments: tuple[str, ...]) -> None:
    refused("estimate", *arguments, code=3 if arguments[1] == "\N{SUPERSCRIPT TWO}" else 2)


scalars = st.none() | st.booleans() | st.integers(-5, 200) | st.floats(allow_nan=False) | st.text(max_size=5)
values = (
    scalars
    | st.sampled_from((10**18, -(10**18), 1 << 31, HARM, "relu", "1", 0, [], {}, [64], ["a"], {"0": "x"}))
    | st.lists(scalars, max_size=3)
    | st.dictionaries(st.text(max_size=3), scalars, max_size=2)
)
KINDS = ("bert", "gpt2", "llama", "t5", "vit")
FIELDS = (
    "n_embd", "hidden_size", "n_layer", "num_hidden_layers",
    "n_head", "num_attention_heads", "vocab_size", "n_positions",
    "max_position_embeddings", "intermediate_size", "num_key_value_heads", "head_dim",
    "architectures", "d_model", "d_ff", "activation_function",
    "hidden_act", "torch_dtype", "id2label", "tie_word_embeddings",
    "resid_pdrop", "d_kv", "ncols", "hidden_dropout_prob",
    "image_size", "patch_size", "num_channels", "type_vocab_size",
    "num_decoder_layers", "use_cache", "feed_forward_proj", "word_embed_proj_dim",
    "dim", "n_layers", "n_heads", "hidden_dim",
    "dropout", "num_labels",
)  # fmt: skip


@given(st.sampled_from(KINDS), st.dictionaries(st.sampled_from(FIELDS), values, max_size=5))
@hostile.examples(15)  # each traces a model
def test_any_config_is_estimated_or_refused(tmp_path: Path, kind: str, content: dict[str, Any]) -> None:
    config = tmp_path / "config.json"
    small = dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "image_size"), 32)
    small |= dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2)
    small |= dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 2)
    small |= dict.fromkeys(("intermediate_size", "d_ff", "hidden_dim", "max_position_embeddings", "vocab_size"), 64)
    config.write_text(json.dumps({"model_type": kind, **small, **content}))
    assert call("estimate", "--config", config).exit_code in (0, 1, 2, 3)


@given(
    st.dictionaries(
        st.text(max_size=8) | st.just(HARM), values | st.lists(st.integers(0, 1 << 55), max_size=4), max_size=4
    )
)
@FEW
def test_any_parameters_are_estimated_and_explained_or_refused(tmp_path: Path, content: dict[str, Any]) -> None:
    shapes = tmp_path / "shapes.json"
    shapes.write_text(json.dumps(content))
    assert call("estimate", "--parameters", shapes).exit_code in (0, 1, 2, 3)
    assert call("explain", MESSAGE, "--parameters", shapes, "--optimizer", "adamw").exit_code in (0, 1, 2, 3)
    assert call("explain", MESSAGE, "--parameters", shapes, "--json").exit_code in (0, 1, 2, 3)


@given(st.binary(max_size=200))
@FEW
def test_any_bytes_are_refused_as_a_file_of_any_kind(tmp_path: Path, raw: bytes) -> None:
    file = tmp_path / "file"
    file.write_bytes(raw)
    for arguments in (
        ("estimate", "--config", file),
        ("estimate", "--parameters", file),
        ("explain", "--log", file),
        ("explain", "--session", file),
        ("replay", file, "--once"),
        ("whatif", "--session", file, "--batch", "2x"),
    ):
        assert call(*arguments).exit_code in (0, 1, 2, 3)  # "Killed" alone is a log


@given(st.data())
@FEW
def test_a_damaged_recording_is_read_as_far_as_it_goes(tmp_path: Path, data: st.DataObject) -> None:
    raw = bytearray((DATA / "json-example.gpumon").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    file = tmp_path / "damaged.gpumon"
    file.write_bytes(raw[: data.draw(st.integers(len(raw) // 2, len(raw)))])
    assert call("replay", file, "--once").exit_code in (0, 1)
    assert call("whatif", "--session", file, "--batch", "2x").exit_code in (0, 1)


def test_what_came_from_a_file_a_name_or_an_argument_cannot_act_on_the_terminal(tmp_path: Path) -> None:
    log = tmp_path / f"log{HARM}"
    log.write_text(
        f'Traceback (most recent call last):\n  File "/home/{HARM}/train{HARM}.py", line 5, in f{HARM}\n    {HARM}()\n'
        f"{MESSAGE} {HARM}\n"
    )
    shapes = tmp_path / f"shapes{HARM}.json"
    shapes.write_text(json.dumps({f"word{HARM}": [867_813, 832]}))
    assert call("explain", "--log", log, "--parameters", shapes, "--optimizer", "adamw").exit_code == 0
    assert call("explain", MESSAGE + HARM, "--parameters", shapes).exit_code == 0
    done = call("explain", "--log", log, "--parameters", shapes, "--json")
    assert done.exit_code == 0
    assert call("explain", "-", stdin=log.read_bytes()).exit_code == 0
    assert call("estimate", "--parameters", shapes).exit_code == 3  # whether it fits was not asked
    assert call("estimate", "--compare", shapes, shapes).exit_code == 0
    recording = tmp_path / f"session{HARM}.gpumon"
    recording.write_bytes((DATA / "json-example.gpumon").read_bytes()[:-5])
    assert call("replay", recording, "--once").exit_code == 0
    for arguments in (
        (HARM,),
        ("replay", HARM),
        ("replay", f"--{HARM}"),
        ("explain", HARM),
        ("explain", "--log", HARM),
        ("explain", "--session", HARM),
        ("explain", MESSAGE, "--optimizer", HARM),
        ("estimate", "--config", HARM),
        ("estimate", "--parameters", HARM),
        ("estimate", "--model", HARM),
        ("estimate", "--parameters", "7", "--optimizer", HARM),
        ("estimate", "--parameters", "7", "--device", HARM),
        ("whatif", "--session", HARM),
        ("attach", HARM, "--once"),
        ("record", tmp_path / "out", HARM),
        ("record", f"/{HARM}/x"),
        ("run", HARM),
    ):
        assert call(*arguments).exit_code in (1, 2, 3, 127), arguments


def test_the_environment_cannot_act_on_the_terminal_by_way_of_doctor_and_ls(tmp_path: Path) -> None:
    names = (
        "TMPDIR",
        "XDG_RUNTIME_DIR",
        "GPUMON_OOM_DIR",
        "CUDA_VISIBLE_DEVICES",
        "PYTORCH_CUDA_ALLOC_CONF",
        "TERM",
        "LANG",
    )
    environment = {**os.environ, **dict.fromkeys(names, f"/tmp/{HARM}")}
    for verb in (["doctor"], ["ls"], ["explain", "--last"], ["attach", "--once"]):
        done = subprocess.run(
            [sys.executable, "-m", "gpumon", *verb], env=environment, capture_output=True, timeout=120, check=False
        )
        text = (done.stdout + done.stderr).decode(errors="replace")
        coloured = text.replace("\x1b[32m", "").replace("\x1b[33m", "").replace("\x1b[31m", "").replace("\x1b[0m", "")
        assert hostile.harm_in(coloured) == [], verb
        assert "Traceback" not in text
