"""`gpumon doctor` says what is there, what is not, and what to do; its exit code tells scripts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from gpumon.cli.doctor import judge_torch
from gpumon_agent import patching

SCHEMA = jsonschema.Draft202012Validator(
    json.loads((Path(__file__).parents[2] / "docs" / "json.schema.json").read_text(encoding="utf-8"))
)


def doctor(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gpumon", "doctor", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **env},
        timeout=300,
    )


def lines(text: str) -> dict[str, tuple[str, str]]:
    """Subject → (verdict, text), of the last line of each subject."""
    return {line[7:20].strip(): (line[:5].strip(), line[20:]) for line in text.splitlines()}


@pytest.mark.torch
def test_a_machine_without_a_gpu_is_fit_for_the_cpu(tmp_path):
    shown = doctor(XDG_RUNTIME_DIR=str(tmp_path), CUDA_VISIBLE_DEVICES="")
    seen = lines(shown.stdout)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert seen["torch"][0] == seen["gpumon"][0] == seen["Python"][0] == "ok"
    assert seen["devices"][0] == "note"
    assert seen["runtime dir"] == ("ok", str(tmp_path / "gpumon"))
    assert seen["agents"] == ("ok", "none runs now; start one with: gpumon run train.py")
    assert seen["terminal"][0] == "note"


def test_a_virtual_device_is_seen(virtual_gpu, tmp_path):
    gpu = virtual_gpu(devices=2, profile="a100-40")
    shown = gpu.run(
        "import runpy, sys; sys.argv = ['gpumon', 'doctor']; runpy.run_module('gpumon', run_name='__main__')"
    )
    seen = lines(shown.stdout)
    assert seen["devices"] == ("ok", "torch sees 2")
    assert seen["driver"][0] == "ok"
    assert "A100" in seen["device"][1]
    assert "torch._C" in seen["peaks"][1]
    assert seen["virtual GPU"][0] == "ok"


def test_torch_2_4_is_new_enough():
    seen = next(iter(judge_torch({"version": "2.4.0", "cuda": "12.4", "hip": None, "devices": 1})))
    assert (seen.verdict, seen.text) == ("ok", "2.4.0, built for CUDA 12.4")


def test_an_old_torch_is_a_failure():
    (seen,) = judge_torch({"version": "2.3.1+cu118", "cuda": "11.8", "hip": None, "devices": 1})
    assert (seen.verdict, seen.text) == ("fails", "2.3.1+cu118 is too old: gpumon reads torch 2.4 and newer")


def test_no_usable_runtime_directory_is_a_failure(tmp_path):
    open_to_all = tmp_path / "shared"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    shown = doctor(XDG_RUNTIME_DIR=str(open_to_all), TMPDIR=str(open_to_all))
    assert shown.returncode == 1
    verdict, text = lines(shown.stdout)["runtime dir"]
    assert verdict == "fails"
    assert text.endswith("set XDG_RUNTIME_DIR to a folder of yours")


def test_no_color_means_none(tmp_path):
    assert "\x1b" not in doctor(NO_COLOR="1", FORCE_COLOR="1").stdout


def test_what_is_replaced_is_listed_without_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('not for this')")
    shown = subprocess.run(
        [sys.executable, "-m", "gpumon", "doctor", "--replaced"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        timeout=300,
    )
    assert (shown.returncode, shown.stderr) == (0, "")
    for name in [*patching.LIST, "_forward_hooks", "sys.meta_path"]:
        assert name in shown.stdout


@pytest.mark.torch
def test_json_says_the_same_line_by_line(tmp_path):
    open_to_all = tmp_path / "shared"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    refusing = {"XDG_RUNTIME_DIR": str(open_to_all), "TMPDIR": str(open_to_all), "CUDA_VISIBLE_DEVICES": ""}
    shown, told = doctor(**refusing), doctor("--json", **refusing)
    assert (told.returncode, told.stderr) == (shown.returncode, "") == (1, "")
    objects = [json.loads(line) for line in told.stdout.splitlines()]
    for each in objects:
        SCHEMA.validate(each)
        assert list(each) == list(SCHEMA.schema["$defs"]["check"]["properties"])
    read = {each["subject"]: (each["verdict"], each["text"]) for each in objects}
    assert read == lines(shown.stdout)
    assert read["runtime dir"][0] == "fails"


def test_json_lists_what_is_replaced():
    told = doctor("--replaced", "--json")
    objects = [json.loads(line) for line in told.stdout.splitlines()]
    for each in objects:
        SCHEMA.validate(each)
    assert [each["name"] for each in objects if each["where"] is not None] == [e.name for e in patching.LIST.values()]
    assert [each["name"] for each in objects if each["where"] is None] == [e.name for e in patching.STAYS]
