"""Which rank of which job a process is, by what launchers put into its environment."""

from __future__ import annotations

import pytest

from gpumon_agent import endpoint, wire
from gpumon_agent.launched import Launched, launched

TORCHRUN = {
    "RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1",
    "TORCHELASTIC_RUN_ID": "night", "TORCHELASTIC_RESTART_COUNT": "2",
}  # fmt: skip
SRUN = {
    "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NTASKS": "7", "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0",
    "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "4,3", "SLURM_STEP_NUM_TASKS": "7",
}  # fmt: skip
BATCH = {"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, Launched()),
        (TORCHRUN, Launched(5, 1, 8, "night", "1", 4, 2)),
        (SRUN, Launched(5, 1, 7, "77.0", "1", 3, None)),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, Launched(5, 1, 7, "77.0", "1", 4, None)),
        ({**SRUN, **TORCHRUN}, Launched(5, 1, 8, "night", "1", 4, 2)),  # srun torchrun: SLURM's are the launcher's
        ({"SLURM_JOB_ID": "77", "RANK": "0"}, Launched(0, run_id="77")),
        ({"SLURM_JOB_ID": "77"}, Launched()),  # two scripts in one allocation are two jobs
        # a batch script's own python is one process, whatever NTASKS says
        (BATCH, Launched(0, 0, None, "77")),
        ({"RANK": "x", "WORLD_SIZE": "-1"}, Launched()),
        # larger than any job: a viewer would count the missing ranks for ever
        ({"RANK": "0", "WORLD_SIZE": "9" * 15, "LOCAL_RANK": "5000", "LOCAL_WORLD_SIZE": "9" * 5000}, Launched(0)),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "4(x99999999999)"}, Launched(5, 1, 7, "77.0", "1", None, None)),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "4(x1000000),3", "SLURM_NODEID": "1000000"},
         Launched(5, 1, 7, "77.0", "1000000", 3, None)),
    ],
    ids=["nothing", "torchrun", "srun", "evenly", "srun torchrun", "own launcher", "allocation", "batch", "nonsense",
         "endless", "endless tasks", "many nodes"],
)  # fmt: skip
def test_the_launcher_is_understood(environment, expected):
    assert launched(environment) == expected


@pytest.mark.parametrize(
    ("session", "name"),
    [
        ("/home/me/train.ipynb", "train.ipynb"),
        ("work/train.ipynb-jvsc-3f1e", "train.ipynb"),  # VS Code's
        ("", "notebook in work"),
        ("console-1", "notebook in work"),
        (".ipynb", "notebook in work"),
        ("/home/me/\x1b[31m.ipynb", "\N{REPLACEMENT CHARACTER}[31m.ipynb"),
        ("n" * 1000 + ".ipynb", "n" * (wire.NAME_CHARS_MAX - 1) + "…"),
    ],
)
def test_a_kernel_is_called_by_its_notebook(session: str, name: str) -> None:
    assert endpoint.notebook({"JPY_SESSION_NAME": session}, "/home/me/work") == name
    assert endpoint.notebook({}, "/") == "notebook in /"
