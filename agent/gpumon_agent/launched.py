"""Which rank of which job this process is, from the launcher's environment: torchrun's, else SLURM's.

torchrun (and accelerate, and others that set RANK) has priority: under `srun torchrun …` both set variables, and
SLURM's are the launcher's. SLURM sets PROCID 0 and NTASKS for batch scripts too, where python runs once and there is no
other rank: the number of ranks counts only inside a step started by srun.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from gpumon_agent import wire

_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")  # SLURM writes "4(x2),3": four tasks on each of two nodes, three on one


class Launched(NamedTuple):
    """Fields as in wire.Hello; all None without a launcher."""

    rank: int | None = None
    local_rank: int | None = None
    world_size: int | None = None
    run_id: str | None = None
    node: str | None = None
    local_world_size: int | None = None
    restarts: int | None = None


def launched(environment: Mapping[str, str] = os.environ) -> Launched:
    if "RANK" not in environment and environment.get("SLURM_PROCID", "").isdecimal():
        return _slurm(environment)
    return Launched(
        rank=_number(environment, "RANK"),
        local_rank=_number(environment, "LOCAL_RANK", wire.LOCAL_RANKS_MAX),
        world_size=_number(environment, "WORLD_SIZE"),
        run_id=environment.get("TORCHELASTIC_RUN_ID") or (_slurm_job(environment) if "RANK" in environment else None),
        node=environment.get("GROUP_RANK") or environment.get("SLURM_NODEID"),
        local_world_size=_number(environment, "LOCAL_WORLD_SIZE", wire.LOCAL_RANKS_MAX),
        restarts=_number(environment, "TORCHELASTIC_RESTART_COUNT"),
    )


def _slurm(environment: Mapping[str, str]) -> Launched:
    rank = _number(environment, "SLURM_PROCID")
    in_step = bool(rank) or "SLURM_STEP_ID" in environment or "SLURM_STEPID" in environment
    if not in_step:
        return Launched(
            rank=rank,
            local_rank=_number(environment, "SLURM_LOCALID", wire.LOCAL_RANKS_MAX),
            run_id=_slurm_job(environment),
        )
    node = environment.get("SLURM_NODEID")
    return Launched(
        rank=rank,
        local_rank=_number(environment, "SLURM_LOCALID", wire.LOCAL_RANKS_MAX),
        world_size=_number(environment, "SLURM_STEP_NUM_TASKS") or _number(environment, "SLURM_NTASKS"),
        run_id=_slurm_job(environment),
        node=node,
        local_world_size=_tasks_on(environment.get("SLURM_STEP_TASKS_PER_NODE", ""), node),
        restarts=_number(environment, "SLURM_RESTART_COUNT"),
    )


def _slurm_job(environment: Mapping[str, str]) -> str | None:
    """Job and step: two steps of one allocation are two jobs."""
    job = environment.get("SLURM_JOB_ID")
    step = environment.get("SLURM_STEP_ID") or environment.get("SLURM_STEPID")
    return f"{job}.{step}" if job and step else job or None


def _tasks_on(text: str, node: str | None) -> int | None:
    if node is None:
        return None
    at = _bounded(node, wire.RANKS_MAX)
    for found in _TASKS.finditer(text):
        count, nodes = _bounded(found[1], wire.LOCAL_RANKS_MAX), _bounded(found[2] or "1", wire.RANKS_MAX)
        if at is None or count is None or nodes is None:
            return None
        if at < nodes:
            return count
        at -= nodes
    return None


def _number(environment: Mapping[str, str], name: str, limit: int = wire.RANKS_MAX) -> int | None:
    return _bounded(environment.get(name, ""), limit)


def _bounded(text: str, limit: int) -> int | None:
    """None if it is no number or larger than any job: the environment may contain anything."""
    number = int(text) if text.isdecimal() and len(text) <= len(str(limit)) else None
    return number if number is not None and number < limit else None
