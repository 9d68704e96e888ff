"""The readings of several makers' drivers as one; AMD's own: tests/integrations/test_amd.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from gpumon.host import amd_smi, nvml
from gpumon.host.drivers import together
from gpumon.host.sampler import Driver

NVIDIA = {"driver": "580.1", "devices": [["GPU-1"]], "why": None}
AMD = {"driver": "amdgpu 6.10.5", "devices": [["GPU-2"]], "why": None}
WITH_AMDSMI = "import sys; parent, *sys.path[:] = sys.argv[1:]; from gpumon.host.drivers import main; main(int(parent))"
WITHOUT_AMDSMI = f"import sys; sys.modules['amdsmi'] = None; {WITH_AMDSMI}"
NVML_ALONE = """
import json, sys
sys.path[:] = sys.argv[1:]
from gpumon.host.nvml import Reader
print(json.dumps(Reader().read()))
"""


def test_both_makers_devices_are_in_one_reading():
    assert together([NVIDIA, AMD]) == {"driver": "580.1, amdgpu 6.10.5", "devices": [["GPU-1"], ["GPU-2"]], "why": None}


@pytest.mark.parametrize("why", [nvml.NO_LIBRARY, nvml.NO_DRIVER, nvml.NO_DEVICE])
def test_that_there_is_nothing_of_nvidia_is_not_told_beside_amd_s_devices(why):
    assert together([{"why": why}, AMD]) == AMD


@pytest.mark.parametrize("why", [amd_smi.NO_MODULE, amd_smi.NO_LIBRARY, amd_smi.NO_DRIVER, amd_smi.NO_DEVICE])
def test_that_there_is_nothing_of_amd_is_not_told_beside_nvidia_s_devices(why):
    assert together([NVIDIA, {"why": why}]) == NVIDIA


def test_what_fails_is_told_beside_devices_and_all_of_it_without():
    assert together([NVIDIA, {"why": "no permission"}])["why"] == "no permission"
    assert together([{"why": nvml.NO_LIBRARY}, {"why": amd_smi.NO_LIBRARY}]) == {
        "driver": None, "devices": [], "why": f"{nvml.NO_LIBRARY}; {amd_smi.NO_LIBRARY}",
    }  # fmt: skip


def test_a_uuid_is_written_as_torch_writes_it():
    """torch.cuda.get_device_properties on an MI300X (github.com/ROCm/ROCm/issues/4203), and its ASCII as a number."""
    assert amd_smi.torch_uuid(0xF330DC4D00DEE22B) == "GPU-66333330-6463-3464-3030-646565323262"


@pytest.mark.skipif(Path(amd_smi.KFD).exists(), reason="this machine has an AMD GPU")
@pytest.mark.parametrize("folder", [False, True])
async def test_without_amdsmi_the_reading_is_nvml_s(tmp_path, folder):
    """A folder named amdsmi is a package for Python."""
    (tmp_path / "amdsmi").mkdir()
    if folder and (spec := find_spec("amdsmi")) is not None and spec.origin is not None:
        pytest.skip("amdsmi is installed")
    code = WITH_AMDSMI if folder else WITHOUT_AMDSMI
    driver = Driver(lambda: [sys.executable, "-c", code, str(os.getpid()), str(tmp_path), *sys.path], patience_s=30)
    try:
        reading = await driver.read(30)
    finally:
        await driver.aclose()
    # not in this process, whose environment another test may have changed after NVML was loaded
    alone = json.loads(subprocess.check_output([sys.executable, "-c", NVML_ALONE, *sys.path]))
    assert (reading.why, reading.driver) == (alone["why"], alone.get("driver"))
    assert len(reading.devices) == len(alone.get("devices", ()))
