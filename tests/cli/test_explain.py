"""`gpumon explain` as a person calls it: a message, a log, a pipe, a report on disk, a finding's code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tabformer
from click.testing import CliRunner, Result

from gpumon.analysis.findings import RULES
from gpumon.analysis.pages import PAGES
from gpumon.cli import main

DATA = Path(__file__).parents[1] / "data"
MESSAGE = (
    "RuntimeError: CUDA out of memory. Tried to allocate 2.69 GiB (GPU 0; 14.76 GiB total capacity; 12.32 GiB already "
    "allocated; 835.88 MiB free; 13.06 GiB reserved in total by PyTorch)"
)
LOG = f"""\
epoch 1:  12%|█▏        | 120/1000 [00:40<04:50,  3.03it/s]
[rank0]: Traceback (most recent call last):
[rank0]:   File "/home/me/main.py", line 180, in <module>
[rank0]:     main(opts)
[rank0]:   File "/home/me/main.py", line 151, in main
[rank0]:     trainer.train(model_path=model_path)
[rank0]:   File "/opt/lib/python3.7/site-packages/transformers/trainer.py", line 736, in train
[rank0]:     self.optimizer.step()
[rank0]:   File "/opt/lib/python3.7/site-packages/torch/optim/lr_scheduler.py", line 67, in wrapper
[rank0]:     return wrapped(*args, **kwargs)
[rank0]:   File "/opt/lib/python3.7/site-packages/transformers/optimization.py", line 220, in step
[rank0]:     denom = exp_avg_sq.sqrt().add_(group["eps"])
[rank0]: {MESSAGE}
"""


def explain(*arguments: str | Path, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, ["explain", *map(str, arguments)], input=stdin)


def test_the_first_line_is_the_verdict_and_no_line_is_longer_than_80_columns() -> None:
    done = explain(MESSAGE, "--parameters", DATA / "tabformer-867813.json", "--optimizer", "adamw")
    assert done.exit_code == 0
    lines = done.output.splitlines()
    assert " ".join(lines).startswith(
        "OUT OF MEMORY: Capacity: 2.69 GiB requested, 1.56 GiB left: 1.13 GiB too little. To do: "
    )
    assert max(map(len, lines)) <= 80
    said = " ".join(done.output.split())
    assert "word_embeddings.weight (867,813 × 832, fp32, 2.69 GiB): its second-moment square root" in said
    assert "By then 12.31 GiB is allocated" in said
    assert "The batch does not matter" in said
    assert "Each entry of the vocabulary has 897 parameters" in said


def test_a_log_gives_the_phase_and_the_line_too(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text("x" * 100_000 + "\n" + LOG)
    done = explain("--log", log, "--parameters", DATA / "tabformer-867813.json", "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.output)
    assert (told["verdict"], told["phase"], told["where"]) == ("capacity", "optimizer", "main.py:151")
    assert told["suspects"][0]["shape"] == [867_813, 832]
    assert told["suspects"][0]["optimizer"] == "reach"
    assert len(told["saves"]) == len(told["remedies"]) == len(told["enough"])


def test_a_config_tells_the_tensors_too(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(
            {
                "model_type": "gpt2", "vocab_size": 50_257, "n_positions": 1024, "n_embd": 768, "n_layer": 12,
                "n_head": 12,
            }
        )
    )  # fmt: skip
    message = (
        "CUDA out of memory. Tried to allocate 148.00 MiB. GPU 0 has a total capacity of 1.20 GiB of which 100.00 MiB "
        "is free. Of the allocated memory 1.07 GiB is allocated by PyTorch, and 20.00 MiB is reserved by PyTorch but "
        "unallocated."
    )
    done = explain(message, "--config", config)
    assert done.exit_code == 0, done.output
    assert "transformer.wte.weight (50,257 × 768, fp32, 147.24 MiB)" in " ".join(done.output.split())


@pytest.mark.torch
def test_a_factory_of_the_user_s_gives_the_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_explained.py").write_text(
        "from torch import nn\n\ndef make():\n    return nn.Sequential(nn.Linear(4096, 9000, bias=False))\n"
    )
    monkeypatch.chdir(tmp_path)
    message = MESSAGE.replace("2.69 GiB", "142.00 MiB")
    done = explain(message, "--model", "mine_explained:make")
    assert done.exit_code == 0, done.output
    assert "0.weight (9,000 × 4,096, fp32, 140.62 MiB)" in " ".join(done.output.split())


def test_it_reads_a_pipe() -> None:
    for arguments in (["-"], []):
        done = subprocess.run(
            [sys.executable, "-m", "gpumon", "explain", *arguments],
            input=LOG, capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("OUT OF MEMORY: Capacity: ")


def test_a_pipe_is_given_up_after_a_gibibyte() -> None:
    """It is copied to the disk, where a training may be about to write its checkpoint."""
    with subprocess.Popen(["head", "-c", str((1 << 30) + 1), "/dev/zero"], stdout=subprocess.PIPE) as pipe:
        done = subprocess.run(
            [sys.executable, "-m", "gpumon", "explain", "-"],
            stdin=pipe.stdout, capture_output=True, text=True, check=False, timeout=600,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("Error: more than 1 GiB came through the pipe; write it to a file")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["all is well"], 1, "no out-of-memory in this text"),
        (["-"], 1, "no out-of-memory in the text from the pipe"),
        (["--log", "/nowhere/train.log"], 1, "No such file"),
        (["--session", "/nowhere/run.gpumon"], 1, "No such file"),
        (["no-such-finding"], 1, "there are agent-part-off, "),
        ([MESSAGE, "--optimizer", "adan"], 2, "known are adam, adamw"),
        ([MESSAGE, "--optimizer", "sgd:reach"], 2, "it has loop, foreach, fused"),
        ([MESSAGE, "--last"], 2, "give one of"),
        ([MESSAGE, "--parameters", "a", "--config", "b"], 2, "give one of --parameters"),
        ([MESSAGE, "--parameters", "/nowhere.json"], 1, "No such file"),
        pytest.param(
            [MESSAGE, "--model", "no_such_module_here:make"],
            2,
            "no module 'no_such_module_here'",
            marks=pytest.mark.torch,
        ),
    ],
)
def test_a_mistake_is_one_sentence(arguments: list[str], code: int, said: str) -> None:
    done = explain(*arguments, stdin="")
    assert done.exit_code == code, done.output
    assert said in done.output
    assert "Traceback" not in done.output


def test_a_file_s_name_instead_of_a_message_says_how_to_read_it(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(LOG)
    done = explain(str(log))
    assert done.exit_code == 1
    assert f"gpumon explain --log {log}" in done.output


@pytest.mark.parametrize("code", sorted(rule.code for rule in RULES if rule.code in PAGES))
def test_a_code_s_page_names_its_severity_and_what_to_do(code: str) -> None:
    done = explain(code)
    severity = next(rule.severity for rule in RULES if rule.code == code)
    assert done.exit_code == 0
    assert done.output.startswith(f"{code}  ({severity})\n")
    assert "\nWhat to do\n" in done.output
    assert max(map(len, done.output.splitlines())) <= 80


def test_tabformer_s_small_twin_is_not_mistaken_for_it() -> None:
    done = explain(MESSAGE, "--parameters", DATA / f"tabformer-{tabformer.SMALL}.json", "--json")
    assert json.loads(done.output)["suspects"] == []
