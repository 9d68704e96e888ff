"""Secrets in a command line are hidden, and nothing else is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumon_agent import endpoint, wire

SECRET = "hf_Jq3vX9secretvalue"

HIDDEN = [
    "--api-key hf_Jq3vX9secretvalue",
    "--api-key=hf_Jq3vX9secretvalue",
    "--api_key hf_Jq3vX9secretvalue",
    "--apiKey hf_Jq3vX9secretvalue",
    "--APIKEY hf_Jq3vX9secretvalue",
    "--wandbkey hf_Jq3vX9secretvalue",
    "--key hf_Jq3vX9secretvalue",
    "--my-key=hf_Jq3vX9secretvalue",
    "--token hf_Jq3vX9secretvalue",
    "-token hf_Jq3vX9secretvalue",
    "--hf_token hf_Jq3vX9secretvalue",
    "--HF-TOKEN=hf_Jq3vX9secretvalue",
    "--push_to_hub_token hf_Jq3vX9secretvalue",
    "--hftoken hf_Jq3vX9secretvalue",
    "--token2 hf_Jq3vX9secretvalue",
    "--secret hf_Jq3vX9secretvalue",
    "--client-secret-value hf_Jq3vX9secretvalue",
    "--aws-secret-access-key hf_Jq3vX9secretvalue",
    "--aws_access_key_id hf_Jq3vX9secretvalue",
    "--db.password hf_Jq3vX9secretvalue",
    "--db-passwd=hf_Jq3vX9secretvalue",
    "--passphrase hf_Jq3vX9secretvalue",
    "WANDB_API_KEY=hf_Jq3vX9secretvalue",
    "wandb_api_key=hf_Jq3vX9secretvalue",
    "-e HF_TOKEN=hf_Jq3vX9secretvalue",
    "+auth.token=hf_Jq3vX9secretvalue",
    "++logger.wandb.key=hf_Jq3vX9secretvalue",
    "auth.password=hf_Jq3vX9secretvalue",
    "--set auth.token=hf_Jq3vX9secretvalue",
    "--export=ALL,WANDB_API_KEY=hf_Jq3vX9secretvalue",
    "auth={user:me,token:hf_Jq3vX9secretvalue}",
    "https://user:hf_Jq3vX9secretvalue@host/path",
    "https://hf_Jq3vX9secretvalue@host/path",
    "--store postgres://me:a/hf_Jq3vX9secretvalue@host:5432/runs",
    "--store=postgres://me:hf_Jq3vX9secretvalue#1@host/runs",
    "https://a:hf_Jq3vX9secretvalue@one,https://b:hf_Jq3vX9secretvalue@two",
    "https://host/upload?token=hf_Jq3vX9secretvalue&part=3",
    "https://host/blob?sv=2024&sig=hf_Jq3vX9secretvalue",
    "https://host/blob?X-Amz-Signature=hf_Jq3vX9secretvalue",
    "https://user:hf_Jq3vX9secretvalue@host/key=hf_Jq3vX9secretvalue",
]
SHOWN = [
    "train.py --epochs 3 --lr 0.1",
    "--tokenizer gpt2",
    "--tokenizer-name=gpt2",
    "--max_tokens 512",
    "--max-new-tokens=512",
    "--tokens-per-batch 4096",
    "--num-key-value-heads 8",
    "--key-dim 64",
    "--key_padding_mask left",
    "--keyboard us",
    "--keypoints coco",
    "--monkey capuchin",
    "--token-dim 64",
    "--token-type-vocab-size 2",
    "--pad-token <pad>",
    "--pad-token [PAD]",
    "--eos_token </s>",
    "--mask-token MASK",
    "--use-auth-token True",
    "--use_token --lr 0.1",
    "--token 8",
    "--token-file FILE",
    "--api-key-file FILE",
    "--sort-key loss",
    "--label_key species",
    "--passes 3",
    "--compass north",
    "--secretary none",
    "+model.num_key_value_heads=8",
    "trainer.max_tokens=512",
    "https://host:8080/data@v2",
    "https://huggingface.co/gpt2?download=true",
    "s3://bucket/key",
    "ssh-add id",
    "data=/data/a=b",
    "--sort key:loss",
]


@pytest.mark.parametrize("command", HIDDEN)
def test_a_secret_is_hidden(command: str) -> None:
    said = wire.clean_argv(["train.py", *command.split(), "--after", "it"])
    assert SECRET not in " ".join(said)
    assert "***" in " ".join(said)
    assert (said[0], said[-2:]) == ("train.py", ("--after", "it"))
    assert wire.clean_argv(said) == said


@pytest.mark.parametrize("command", SHOWN)
def test_what_is_no_secret_stays(command: str) -> None:
    assert wire.clean_argv(command.split()) == tuple(command.split())


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("https://user:pass@host/x", "https://***@host/x"),
        ("--url=https://user:pass@host", "--url=https://***@host"),
        ("https://host/?a=1&token=abc&b=2", "https://host/?a=1&token=***&b=2"),
        ("+auth.token=abc", "+auth.token=***"),
        ('{"user": "me", "password": "two words", "lr": 1}', '{"user": "me", "password": "***", "lr": 1}'),
        ("Authorization: Bearer abc.def", "Authorization: Bearer ***"),
        ("https://host/?token=".ljust(16_384 - 4, "x") + "&b=2", "https://host/?token=***&b=2"),
        ("https://host/?token=".ljust(16_384, "x") + "&b=2", "https://host/?token=***"),  # the rest is not searched
    ],
)
def test_the_rest_of_an_argument_stays(argument: str, expected: str) -> None:
    assert wire.clean_argv([argument]) == (expected,)


def test_a_password_may_be_a_number_and_a_list_of_keys_is_hidden_whole() -> None:
    assert wire.clean_argv(["--password", "1234"]) == ("--password", "***")
    assert wire.clean_argv(["--api-keys", "a1b", "c2d", "--lr", "1"]) == ("--api-keys", "***", "***", "--lr", "1")


@given(st.lists(st.text(max_size=200), max_size=6))
def test_any_command_is_masked_and_masking_again_changes_nothing(argv: list[str]) -> None:
    once = wire.clean_argv(argv)
    assert wire.clean_argv(once) == once


@pytest.mark.parametrize("unit", ["a", "a:", "a=", "://", "@", "a://b@", "token=", "'", "Bearer ", "A"])
def test_a_hostile_argument_takes_no_time(unit: str) -> None:
    """Twice as long an argument takes about twice as long, so that this ends at all."""
    wire.clean_argv([unit * (1_000_000 // len(unit))] * 40)


def test_no_descriptor_hello_or_recording_holds_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--hf-token", SECRET, f"HF_TOKEN={SECRET}"])
    described = endpoint.describe("x")
    place = endpoint.claim(described)
    place.publish(described)
    file = place.socket.with_suffix(".json")
    assert SECRET.encode() not in file.read_bytes()

    older = msgspec.structs.replace(described, argv=tuple(sys.argv))  # written by a version that did not mask
    file.write_bytes(msgspec.json.encode(older))
    read = endpoint.read_descriptor(file)
    assert read is not None
    assert read.argv == ("train.py", "--hf-token", "***", "HF_TOKEN=***")
    place.remove()

    clock = wire.Clock(1, 2)
    hello = wire.Hello((1, 0), "0", "ab", "x.py", "h", 1, 2, "b", tuple(sys.argv), "3.12", clock)
    assert SECRET.encode() not in wire.encode_event(hello)


def test_gpumon_run_names_no_secret_where_a_command_cannot_start() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "gpumon", "run", f"HF_TOKEN={SECRET}", "python", "train.py"],
        capture_output=True, text=True, check=False, env=os.environ,
    )  # fmt: skip
    assert ran.returncode == 2
    assert SECRET not in ran.stdout + ran.stderr


@pytest.mark.parametrize(
    "line",
    [
        f'token = "{SECRET}"',
        f"api_key='{SECRET}', n=5",
        f'os.environ["WANDB_API_KEY"] = "{SECRET}"',
        f'os.environ.setdefault("HF_TOKEN", "{SECRET}")',
        f'wandb.login(key=f"{SECRET}")',
        f'settings = {{"api_key": "{SECRET}"}}',
        f'password = """{SECRET}',
        f'get("https://user:{SECRET}@host/path")',
        f'get(url, headers={{"Authorization": "Bearer {SECRET}"}})',
        f'system("train --api-key={SECRET}")',
        f"login()  # token: {SECRET}",
        "password = 24061",
        f'note = "it\\"s"; token = "\\"{SECRET}"',
    ],
)
def test_a_secret_in_a_line_of_source_is_hidden(line: str) -> None:
    shown = wire.masking.masked_code(line)
    assert "***" in shown
    assert SECRET not in shown
    assert "24061" not in shown
    assert wire.masking.masked_code(shown) == shown


@pytest.mark.parametrize(
    "line",
    [
        "key = self.key(x).view(b, t, 12, 64).transpose(1, 2)",
        "cache.append(y[:, :512].detach().clone())",
        "tokens, n = batch['input_ids'], 512",
        'pad_token = "<pad>"',
        "past_key_values[layer] = torch.cat((past, key), dim=2)  # (b, h, t, d)",
        "x = [1, 0x1F, 2.5e-3]; print('a' 'b', f\"{x}\")",
        "assert x, 'a text that does not end",
        "",
    ],
)
def test_a_line_of_source_without_a_secret_stays_as_it_is(line: str) -> None:
    assert wire.masking.masked_code(line) == line


def test_a_line_of_source_is_searched_up_to_16384_characters() -> None:
    """More would take longer than a report is worth."""
    assert len(wire.masking.masked_code("x" * 20_000)) == 16_384


@given(st.text(max_size=60))
def test_any_line_of_source_can_be_searched(line: str) -> None:
    shown = wire.masking.masked_code(line)
    assert wire.masking.masked_code(shown) == shown
