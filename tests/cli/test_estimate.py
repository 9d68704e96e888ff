"""`gpumon estimate`: its three interfaces, what it says of a device, and how it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from transformers_configs import MODELS, bert

from gpumon.cli.checked import ESTIMATE
from gpumon.cli.estimate import command

GIB = 2**30


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A tenth of bert-large's layers: what is said of a device does not need them all."""
    return written(tmp_path / "config.json", bert("SequenceClassification", 1024, 2, 16, 4096))


def written(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content))
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


def told(*arguments: object) -> list[dict[str, Any]]:
    done = run(*arguments, "--json")
    said = [json.loads(line) for line in done.stdout.splitlines()]
    device = said[0].get("device")
    if "--compare" in arguments:
        assert done.exit_code == 0, done.output
    elif len(said) == 1 and "ledger" not in said[0]:
        assert done.exit_code == (3 if device is None else 0 if device["fits"] else 1), done.output
    else:
        assert done.exit_code in (0, 1, 3), done.output
    return said


def test_bert_large_is_1278_47_mib_raw(tmp_path: Path) -> None:
    config = written(tmp_path / "config.json", MODELS["bert-large"][0])
    (said,) = told("--config", config, "--batch", 4, "--sequence", 512, "--inference")
    load = said["phases"][0]
    assert load["ledger"]["weights"] / 2**20 == pytest.approx(1278.47, abs=0.005)
    assert (said["parameters"], said["sources"]["weights"]) == (335_143_938, "exact")


def test_every_ledger_adds_up_to_its_phase(config: Path) -> None:
    (said,) = told("--config", config, "--batch", 4, "--precision", "bf16-autocast", "--world-size", 2)
    for phase in said["phases"]:
        for lines, sum_ in ((phase["ledger_peak"], "allocated_peak"), (phase["ledger"], "allocated")):
            assert sum(size for name, size in lines.items() if name != "allocated") == phase[sum_] == lines["allocated"]
    assert said["peak"] == max(phase["allocated_peak"] for phase in said["phases"])


def test_a_device_is_told_what_fits(config: Path) -> None:
    (said,) = told("--config", config, "--batch", 4, "--device", "v100-16")
    device = said["device"]
    assert device["fits"] is device["floor_fits"] is True
    assert 40 < device["largest_batch"] < 200
    batch = device["largest_batch"]
    assert told("--config", config, "--batch", batch, "--device", "v100-16")[0]["device"]["fits"]
    assert not told("--config", config, "--batch", batch + batch // 100 + 1, "--device", "v100-16")[0]["device"]["fits"]


def test_no_batch_beyond_a_million_is_searched(tmp_path: Path) -> None:
    tiny = {"model_type": "gpt2", "n_embd": 4, "n_layer": 1, "n_head": 1, "vocab_size": 4, "n_positions": 2}
    (said,) = told("--config", written(tmp_path / "config.json", tiny), "--device", "64 GiB")
    assert said["device"]["largest_batch"] == 1 << 20


def test_a_device_that_is_too_small_is_told_at_once(config: Path) -> None:
    done = run("--config", config, "--device", "1 GiB")
    assert "does not fit 1 GiB" in done.output
    assert told("--config", config, "--device", "1 GiB")[0]["device"]["largest_batch"] == 0


def test_remedies_are_computed_and_sorted(config: Path) -> None:
    (said,) = told("--config", config, "--batch", 8, "--device", "t4")
    remedies = {remedy["code"]: remedy for remedy in said["remedies"]}
    assert {"checkpointing", "autocast", "fused", "8-bit", "accumulation", "embedding-on-cpu", "zero-3"} <= set(
        remedies
    )
    assert [r["saves"] for r in said["remedies"]] == sorted((r["saves"] for r in said["remedies"]), reverse=True)
    (with_it,) = told("--config", config, "--batch", 8, "--device", "t4", "--checkpointing")
    assert with_it["peak"] == remedies["checkpointing"]["peak"] == said["peak"] - remedies["checkpointing"]["saves"]


def test_what_is_on_already_is_not_advised(config: Path) -> None:
    (said,) = told("--config", config, "--checkpointing", "--optimizer", "adamw8bit", "--precision", "bf16-autocast")
    assert {remedy["code"] for remedy in said["remedies"]}.isdisjoint({"checkpointing", "8-bit", "autocast", "fused"})


def test_zero_divides_as_in_the_papers_first_figure() -> None:
    said = told("--parameters", 7_500_000_000, "--world-size", 64, "--zero", "0..3")
    gigabytes = [line["ledger"]["allocated"] / 1e9 for line in said]
    assert gigabytes == pytest.approx([120, 31.4, 16.6, 1.9], abs=0.05)
    assert [line["workload"]["zero"] for line in said] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("arguments", "each"),
    [
        (["--precision", "fp32"], 16),
        (["--precision", "bf16-autocast"], 18),
        (["--precision", "bf16-master"], 16),
        (["--precision", "bf16"], 8),
        (["--precision", "fp32", "--inference"], 4),
        (["--precision", "bf16-autocast", "--inference"], 6),
        (["--precision", "fp32", "--optimizer", "adamw8bit"], 10.03125),
        (["--precision", "fp32", "--optimizer", "sgd"], 8),
        (["--precision", "fp32", "--optimizer", "sgd,momentum=0.9"], 12),
    ],
)
def test_bytes_a_parameter_are_the_known_rules(arguments: list[str], each: float) -> None:
    (said,) = told("--parameters", 1_000_000, *arguments)
    assert said["ledger"]["allocated"] / 1_000_000 == each


def test_shapes_in_a_file_do_too(tmp_path: Path) -> None:
    shapes = written(tmp_path / "shapes.json", {"embedding": [1000, 64], "bias": [64]})
    (said,) = told("--parameters", shapes)
    assert said["parameters"] == 64_064
    assert said["ledger_peak"]["activations"] == 0
    assert "activations" not in said["sources"]


def test_lbfgs_is_told_with_what_its_step_holds_and_what_of_it_is_a_bound(tmp_path: Path) -> None:
    shapes = written(tmp_path / "shapes.json", {"weight": [1000, 64], "bias": [64]})
    given = ("--parameters", shapes, "--optimizer", "lbfgs,history_size=10")
    (said,) = told(*given)
    flat = 4 * 64_064
    # the last gradient and direction, ten old directions and steps with two numbers each; at the peak the pair to come
    kept = flat * (2 + 2 * 10) + 2 * 4 * 10
    assert (said["phases"][-1]["ledger"]["optimizer"], said["ledger_peak"]["optimizer"]) == (kept, kept + 2 * flat)
    assert said["peak_phase"] == "optimizer"
    assert said["sources"]["optimizer"] == "exact"
    assert said["sources"]["temporaries"] == "traced"
    searching = ("--parameters", shapes, "--optimizer", "lbfgs,history_size=10,line_search_fn=strong_wolfe")
    (row,) = (line for line in run(*searching).output.splitlines() if line.startswith("temporaries "))
    assert row.endswith("at most")
    for setting in ("history_size=0", "max_iter=-1", "history_size=many"):
        refused = run("--parameters", shapes, "--optimizer", f"lbfgs,{setting}")
        assert refused.exit_code == 2
        assert "whole number above 0" in refused.output


def test_a_setting_that_no_optimizer_has_is_refused(tmp_path: Path) -> None:
    shapes = written(tmp_path / "shapes.json", {"weight": [1000, 64]})
    for setting, said in (
        ("momentun=0.9", "did you mean 'momentum'?"),
        ("momentum=much", "a number, or true or false"),
    ):
        refused = run("--parameters", shapes, "--optimizer", f"sgd,{setting}")
        assert refused.exit_code == 2
        assert said in " ".join(refused.output.split())


def test_which_fsdp_was_meant_is_said(tmp_path: Path) -> None:
    shapes = written(tmp_path / "shapes.json", {"weight": [1000, 64]})
    given = ("--parameters", shapes, "--world-size", 2, "--zero", 3)
    assert [told(*given, *more)[0]["workload"]["fsdp1"] for more in ((), ("--fsdp1",))] == [False, True]


def test_two_vocabularies_are_compared_layer_by_layer(tmp_path: Path) -> None:
    small = bert("MaskedLM", 832, 2, 13, 3072)
    files = [written(tmp_path / f"{size}.json", {**small, "vocab_size": size}) for size in (2_912, 867_813)]
    (said,) = told("--compare", *files)
    assert said["parameters_per_entry"] == 833
    different = {row["layer"]: row["second"] - row["first"] for row in said["layers"] if row["second"] != row["first"]}
    entries = 867_813 - 2_912
    assert sorted(different.values()) == [entries, 832 * entries]
    assert said["parameters"][1] - said["parameters"][0] == 833 * entries
    assert "entries of 833 parameters each" in run("--compare", *files).output


def test_modules_and_shapes_are_compared_like_configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    (tmp_path / "recommending.py").write_text(
        "from torch import nn\n"
        "def model(rows):\n"
        "    return nn.ModuleDict({'goods': nn.Embedding(rows, 16), 'head': nn.Linear(16, rows)})\n"
        "def small():\n    return model(1000)\n"
        "def large():\n    return model(5000)\n"
    )
    monkeypatch.chdir(tmp_path)
    shapes = written(
        tmp_path / "small.json", {"goods.weight": [1000, 16], "head.weight": [1000, 16], "head.bias": [1000]}
    )
    for first in ("recommending:small", shapes):
        (said,) = told("--compare", first, "recommending:large")
        assert said["parameters"] == [33_000, 165_000]
        assert (said["vocabulary"], said["parameters_per_entry"]) == ([1000, 5000], 33)
        assert [row["layer"] for row in said["layers"]] == ["goods", "head"]


def test_keys_and_values_grow_with_what_is_generated(tmp_path: Path) -> None:
    config = written(tmp_path / "config.json", {**MODELS["llama-1b"][0], "num_hidden_layers": 2})
    arguments = ("--config", config, "--inference", "--precision", "bf16", "--batch", 4, "--kv-cache")
    caches = [told(*arguments, tokens)[0]["kv_cache"] for tokens in (512, 1024)]
    assert caches[1] == 2 * caches[0] == 2 * 2 * 8 * 64 * 4 * 1024 * 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give one of --config, --model, --parameters or --compare"),
        (["--parameters", "7", "--config", "c.json"], "give one of --config"),
        (["--parameters", "0"], "a number above 0"),
        (["--parameters", "7", "--zero", "4"], "not a stage of ZeRO: write 0, 1, 2, 3 or 0..3"),
        (["--parameters", "7", "--zero", "3..1"], "not a stage of ZeRO"),
        (["--parameters", "7", "--zero", "2"], "give their number with --world-size"),
        (["--parameters", "7", "--optimizer", "adamv"], "did you mean 'adam'?"),
        (["--parameters", "7", "--optimizer", "radam:fused"], "torch has no fused radam"),
        (["--parameters", "7", "--optimizer", "adam:quick"], "write adam:foreach, adam:fused or adam:loop"),
        (["--parameters", "7", "--optimizer", "adafactor"], "depends on shapes"),
        (["--parameters", "7", "--precision", "fp8"], "is not a precision: choose from fp32"),
        (["--parameters", "7", "--device", "a1000"], "is not a device profile"),
        (["--parameters", "7", "--device", "1 MiB"], "smaller than the context of a process"),
        (["--parameters", "7", "--inference", "--optimizer", "adam"], "--inference has no optimizer"),
        (["--parameters", "7", "--kv-cache", "9"], "--kv-cache needs --inference"),
        (["--parameters", "7", "--loss", "a:b"], "--input and --loss need --model"),
        pytest.param(["--model", "nowhere"], "takes package.module:function", marks=pytest.mark.torch),
    ],
)
def test_wrong_arguments_are_told_in_a_sentence(arguments: list[str], said: str) -> None:
    done = run(*arguments)
    assert (done.exit_code, said in done.output) == (2, True), done.output


@pytest.mark.parametrize(
    ("option", "most"),
    [
        ("--parameters", 10**15),
        ("--world-size", 1 << 20),
        *((option, 10**9) for option in ("--batch", "--sequence", "--accumulation")),
    ],
)
def test_no_figure_beyond_what_anyone_trains_with_is_taken(option: str, most: int) -> None:
    rest = () if option == "--parameters" else ("--parameters", "7")
    assert run(option, most, *rest).exit_code == 3
    assert run(option, most + 1, *rest).exit_code == 2


def test_more_tokens_than_there_are_positions_are_refused(config: Path) -> None:
    done = run("--config", config, "--sequence", 513)
    assert done.exit_code == 2
    assert "more than the 512 that this model takes" in done.output


def test_fsdp1_shards_a_layer_in_one_piece_and_is_told_apart(config: Path) -> None:
    how = ("--config", config, "--world-size", 8, "--zero", 3)
    second, first = (said["phases"] for said in (*told(*how), *told(*how, "--fsdp1")))
    assert first[0]["ledger"]["weights"] < second[0]["ledger"]["weights"]  # FSDP2 rounds each parameter's share up
    for phases in (first, second):
        gathered = [phase["ledger"]["buckets"] for phase in phases if phase["phase"] == "forward"]
        assert gathered[1] > 4 * 30_522 * 1024  # the embedding, in no layer, stays gathered until its backward
    assert "ZeRO 3 by FSDP1" in " ".join(run(*how, "--fsdp1").output.split())
    refused = run("--config", config, "--fsdp1")
    assert (refused.exit_code, "needs --zero 3" in refused.output) == (2, True)


@pytest.mark.torch
def test_a_padding_token_beyond_the_smaller_vocabulary_is_no_obstacle(tmp_path: Path) -> None:
    llama = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 128_256, "pad_token_id": 128_004,
    }  # fmt: skip
    done = run("--config", written(tmp_path / "llama.json", llama), "--sequence", 16, "--device", "t4")
    assert (done.exit_code, "a vocabulary of 32,000 instead of 128,256" in done.output) == (0, True), done.output


@pytest.mark.torch
def test_what_cannot_be_read_is_told_in_a_sentence(tmp_path: Path) -> None:
    unknown = written(tmp_path / "unknown.json", {"model_type": "no_such_model"})
    for arguments, code, said in (
        (("--config", tmp_path / "none.json"), 3, "cannot be read"),
        (("--config", unknown), 3, "--model pkg.module:factory"),
        (("--config", written(tmp_path / "none_named.json", {})), 3, "has no model_type"),
        (
            ("--config", written(tmp_path / "wide.json", {"model_type": "llama", "hidden_size": "wide"})),
            3,
            "'hidden_size'",
        ),
        (("--config", written(tmp_path / "act.json", {"model_type": "bert", "hidden_act": "swoosh"})), 3, "swoosh"),
        (("--config", written(tmp_path / "head.json", {"model_type": "bert", "architectures": ["Mine"]})), 3, "'Mine'"),
        (("--config", written(tmp_path / "speech.json", {"model_type": "whisper"})), 3, "not tokens or images"),
        (("--parameters", tmp_path / "none.json"), 3, "cannot be read"),
        (("--model", "nowhere_to_be_found:make"), 2, "there is no module 'nowhere_to_be_found'"),
    ):
        done = run(*arguments)
        assert (done.exit_code, said in done.output) == (code, True), done.output


def test_how_the_figures_were_checked_is_said_as_text_and_as_json(config: Path) -> None:
    for arguments in (("--config", config), ("--config", config, "--world-size", 8, "--zero", "0..3")):
        _, told_last = run(*arguments).output.split("\nchecked: ")
        assert " ".join(told_last.split()) == ESTIMATE
        assert {each["checked"] for each in told(*arguments)} == {ESTIMATE}


def test_text_below_the_answer_fits_80_columns(config: Path) -> None:
    for arguments in (
        ("--config", config, "--batch", 4, "--device", "v100-16", "--world-size", 8),
        ("--config", config, "--world-size", 8, "--zero", "0..3"),
        ("--parameters", 7_500_000_000, "--world-size", 64, "--zero", "0..3"),
        ("--parameters", 10**12),
    ):
        wide = [line for line in run(*arguments).output.splitlines()[1:] if len(line) > 80]
        assert not wide


# ------------------------------------------------------------------------------------------------------ code of theirs

THEIRS = """
import sys, torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.out = torch.nn.Linear(256, 4096), torch.nn.Linear(4096, 10)

    def forward(self, x):
        return self.out(torch.relu(self.wide(x)))

def make():
    print("made", file=sys.stderr)
    return Net()

class Bound(Net):
    def __init__(self):
        super().__init__()
        self.narrow = lambda x: self.out(torch.relu(self.wide(x)))  # a copy's would still use this module's layers

    def forward(self, x):
        return self.narrow(x)

def bound():
    print("made", file=sys.stderr)
    return Bound()
def batch(size): return torch.zeros(size, 256)
def loss(output): return output.square().mean()
def number(): return 7
def three(output): return 3
def broken(): return deeper()
def deeper(): return Net().nothing
constant = 3
"""


@pytest.fixture
def theirs(tmp_path: Path) -> Any:
    (tmp_path / "theirs.py").write_text(THEIRS)

    def estimate(*arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "gpumon", "estimate", *map(str, arguments)],
            capture_output=True, text=True, cwd=tmp_path, timeout=300, check=False,
        )  # fmt: skip

    return estimate


@pytest.mark.torch
def test_a_module_of_theirs_is_estimated_without_a_gpu(theirs: Any) -> None:
    done = theirs("--model", "theirs:make", "--input", "theirs:batch", "--loss", "theirs:loss", "--batch", 64, "--json")
    assert done.returncode == 3, done.stderr
    said = json.loads(done.stdout)
    weights = 4 * (256 * 4096 + 4096 + 4096 * 10 + 10)
    assert said["phases"][0]["ledger"]["weights"] == weights
    assert said["sources"]["activations"] == "traced"
    forward = next(p for p in said["phases"] if (p["phase"], p["iteration"]) == ("forward", 2))
    assert forward["ledger_peak"]["activations"] >= 4 * 64 * 4096
    assert forward["ledger_peak"]["optimizer"] == 2 * weights
    assert done.stderr == "made\n"  # once, however much is traced


@pytest.mark.torch
def test_a_module_that_a_copy_would_lead_back_to_is_built_anew(theirs: Any) -> None:
    how = "--input", "theirs:batch", "--batch", 64, "--device", "4GiB", "--json"
    plain, bound = theirs("--model", "theirs:make", *how), theirs("--model", "theirs:bound", *how)
    assert (plain.returncode, bound.returncode) == (0, 0), bound.stderr
    assert plain.stderr == "made\n"
    assert bound.stderr.count("made\n") > 1
    one, two = json.loads(plain.stdout), json.loads(bound.stdout)
    assert (one.pop("model"), two.pop("model")) == ("Net", "Bound")
    assert one == two


@pytest.mark.torch
def test_a_factory_that_fails_gives_its_own_traceback_trimmed(theirs: Any) -> None:
    done = theirs("--model", "theirs:broken")
    assert done.returncode == 3
    frames = [line for line in done.stderr.splitlines() if line.startswith("  File")]
    assert [frame.rsplit(" ", 1)[1] for frame in frames] == ["broken", "deeper"]
    assert done.stderr.splitlines()[-1] == "AttributeError: 'Net' object has no attribute 'nothing'"


@pytest.mark.torch
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--loss", "theirs:three"), "--loss returned a int, and should return a tensor"),
        (("--checkpointing",), "--checkpointing needs a module with gradient_checkpointing_enable()"),
    ],
)
def test_what_cannot_be_traced_is_a_sentence(theirs: Any, arguments: tuple[str, ...], said: str) -> None:
    done = theirs("--model", "theirs:make", "--input", "theirs:batch", *arguments)
    assert (done.returncode, done.stdout, done.stderr) == (3, "", f"made\nError: {said}\n")


@pytest.mark.torch
@pytest.mark.parametrize(
    ("model", "code", "said"),
    [
        ("theirs:mkae", 2, "theirs has no 'mkae': did you mean 'make'?"),
        ("theirs:number", 2, "theirs:number returned a int, not a torch.nn.Module"),
        ("theirs:constant", 2, "theirs:constant is not a function but a int"),
    ],
)
def test_a_name_that_is_no_factory_is_told(theirs: Any, model: str, code: int, said: str) -> None:
    done = theirs("--model", model)
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr


@pytest.mark.parametrize(("device", "code"), [("a100-40", 0), ("1 GiB", 1)])
def test_the_exit_code_says_whether_it_fits(device: str, code: int, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "gpt2", "n_layer": 2, "n_head": 12, "n_embd": 768, "vocab_size": 50257}')
    command = [sys.executable, "-m", "gpumon", "estimate", "--config", str(config), "--device", device]
    assert subprocess.run(command, capture_output=True, timeout=300).returncode == code


STAGES = ("--world-size", 4, "--zero", "0..3")


@pytest.mark.parametrize(
    ("arguments", "starts", "code"),
    [
        (("--device", "t4"), "OK: it needs ", 0),
        (("--device", "1 GiB"), "WILL NOT FIT: it needs ", 1),
        ((), "UNKNOWN: it needs ", 3),
        ((*STAGES, "--device", "t4"), "OK: each of them fits t4 (14.6 GiB); the most is ", 0),
        (
            (*STAGES, "--device", "1400 MiB"),
            "OK: it fits 1400 MiB (1.37 GiB) with ZeRO 1, ZeRO 2 and ZeRO 3, not with DDP.",
            0,
        ),
        ((*STAGES, "--device", "600 MiB"), "WILL NOT FIT: each rank needs at least ", 1),
        (STAGES, "UNKNOWN: each rank needs ", 3),
    ],
)
def test_the_first_line_is_the_answer_and_the_exit_code_agrees(
    config: Path, arguments: tuple[object, ...], starts: str, code: int
) -> None:
    done = run("--config", config, *arguments)
    assert (done.stdout.splitlines()[0][: len(starts)], done.exit_code) == (starts, code), done.output
    assert done.stdout.splitlines()[0].endswith(".")
    assert run("--config", config, *arguments, "--json").exit_code == code


def test_a_stage_that_fits_is_marked_in_its_row(config: Path) -> None:
    said = run("--config", config, *STAGES, "--device", "1400 MiB").stdout
    rows = [line for line in said.splitlines() if line.startswith(("DDP  ", "ZeRO "))]
    assert [row.endswith("  does not fit") for row in rows] == [True, False, False, False], said


@pytest.mark.parametrize(
    ("arguments", "starts", "code"),
    [
        ((), "UNKNOWN: weights, gradients and optimizer state take 52.2 GiB (bf16) to 117.3 GiB (bf16-autocast); ", 3),
        (
            ("--precision", "bf16", "--device", "a100-80"),
            "UNKNOWN: weights, gradients and optimizer state take 52.2 ",
            3,
        ),
        (("--inference", "--precision", "bf16", "--device", "t4"), "UNKNOWN: weights take 13.0 GiB (bf16) of t4 ", 3),
        (("--device", "t4"), "WILL NOT FIT: weights, gradients and optimizer state take at least 52.2 GiB (bf16), ", 1),
    ],
)
def test_a_number_alone_never_says_that_it_fits(arguments: tuple[str, ...], starts: str, code: int) -> None:
    done = run("--parameters", "7B", *arguments)
    assert (done.stdout.splitlines()[0][: len(starts)], done.exit_code) == (starts, code), done.output


@pytest.mark.parametrize(
    ("written", "count"),
    [
        ("7e9", 7 * 10**9),
        ("7E+09", 7 * 10**9),
        ("7B", 7 * 10**9),
        ("7.5b", 75 * 10**8),
        ("350M", 350 * 10**6),
        ("125 k", 125_000),
        ("1.3T", 13 * 10**11),
        ("7,000,000", 7 * 10**6),
        ("1_000", 1000),
    ],
)
def test_a_number_is_read_as_people_write_it(written: str, count: int) -> None:
    assert told("--parameters", written)[0]["parameters"] == count


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("7X", "'7X' is no number, such as 7e9, 7B or 350M; write a file's path as ./7X"),
        ("7GB", "'7GB' is no number"),
        ("1e-3", "'1e-3' is no number"),
        ("7.5", "'7.5' parameters are no whole number"),
        ("-7e9", "a number above 0"),
        ("0B", "a number above 0"),
        ("1e9999", "up to 1,000,000,000,000,000"),
        ("1e99999", "'1e99999' is no number"),
        ("7" * 5000 + "X", "is no number"),
    ],
)
def test_what_is_no_number_of_parameters_is_told(written: str, said: str) -> None:
    done = run("--parameters", written)
    assert (done.exit_code, said in done.output) == (2, True), done.output


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_a_config_without_what_builds_it_is_a_sentence(config: Path, missing: str) -> None:
    code = (
        "import importlib.util as util, sys\n"
        "find = util.find_spec\n"
        f"util.find_spec = lambda name, *more: None if name == {missing!r} else find(name, *more)\n"
        "from gpumon.cli.estimate import command\n"
        f"command(['--config', {str(config)!r}, '--device', 't4'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2
    assert f"--config needs {'PyTorch' if missing == 'torch' else missing}, which this Python lacks" in done.stderr
    assert f"pip install {missing}" in done.stderr


def test_a_number_of_parameters_needs_no_torch() -> None:
    code = (
        "import sys\nfrom gpumon.cli.estimate import command\n"
        "assert command(['--parameters', '7_000_000_000', '--device', 't4'], standalone_mode=False) == 1\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, capture_output=True)


def test_a_comparison_starts_with_the_difference(tmp_path: Path) -> None:
    small, large = (written(tmp_path / f"{n}.json", {"weight": [n, 64]}) for n in (10, 1000))
    for first, second, said in (
        (small, large, "B has 63,360 parameters more than A"),
        (large, small, "B has 63,360 parameters fewer than A"),
        (small, small, "A and B have the same number of parameters, 640"),
    ):
        done = run("--compare", first, second)
        assert (done.exit_code, done.stdout.splitlines()[0]) == (0, said), done.output
