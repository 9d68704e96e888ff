"""The finding that the agent reports about itself: agent-part-off. It needs no step, no device, no catalogue rule."""

from __future__ import annotations

from gpumon.analysis.rules import AGENT_PART_OFF
from gpumon.analysis.types import Finding
from gpumon.session.frame import RankFrame

MISSING = {
    "activations": "the activations that autograd saves are not counted",
    "backward": "no backward phase is seen",
    "blocks at out-of-memory": "there is no map of the blocks at an out-of-memory",
    "callback": "where the training loop is, and figures in the library's logger, are not told any more",
    "census": "the variables that hold leaked tensors are not found",
    "checkpoint": "recomputed forwards and loaded checkpoints are not followed",
    "checkpoints": "loaded checkpoints that stay alive are not reported",
    "cost": "what gpumon costs is not measured",
    "compile": "a model that is compiled in place shows no forward",
    "description": "layers, owners and leaks of new steps are missing",
    "devices": "devices that training moves to are not found",
    "encoding": "some events are missing",
    "find": "models and optimizers that are made from now on are not found",
    "forward": "no forward phase is seen",
    "goodbye": "the last step is missing",
    "graph capture": "whether a CUDA graph holds an optimizer step is not known",
    "graph replay": "replays of CUDA graphs are not seen",
    "heartbeat": "the state of the agent is no longer sent",
    "history": "a memory history that the script records may hold the agent's events",
    "last boundary on the disk": "`gpumon explain --last` knows nothing of this run if it is killed",
    "ledger": "bytes are not attributed to their owners",
    "notebook": "cells of the notebook are not measured",
    "oom": "an out-of-memory is not explained",
    "optimizer": "no optimizer phase is seen, and no step ends",
    "out-of-memory report": "no report is written at an out-of-memory",
    "out-of-memory scene": "the report of an out-of-memory names no line of your code",
    "out-of-memory's past on the disk": "`gpumon explain --last` does not know what grew before the failure",
    "outlook on the disk": "a batch that will not fit is not noted on the disk",
    "outlook": "there is no warning before a batch that will not fit",
    "outlook's learning": "the agent's forecast learns nothing more",
    "loop": "the loop's variables `epoch` and `batch_idx` are not read",
    "owners of blocks": "a map of the blocks does not show whose they are",
    "peak": "the breakdown of a step's peak is missing",
    "phase": "phases that you named are not seen",
    "picture": "viewers that attach from now on see no model",
    "pinned host memory": "torch's pinned host memory is not known",
    "recorder": "no new step is sent",
    "request carried out": "requests of viewers are not carried out",
    "request": "requests of viewers are not received",
    "scaler": "steps that the GradScaler skips are not seen",
    "shim": "models and devices may not be found",
    "snapshots": "memory snapshots that the script takes may show stacks that the agent kept",
    "step": "steps that the training code marks are not counted",
    "traceback": "an exception in the model's forward shows a frame of torch's hooks",
    "trackers": "`gpumon run --log-to` does not know which tracker the training uses",
    "transport": "no viewer gets anything from this process",
    "updates by hand": "parameters that are updated without an optimizer are not noticed",
    "watch": "models given to watch() from now on are not watched",
    "wrapper": "a wrapper around the model (DDP, torch.compile) is not followed",
}
"""What is missing while a part is off."""


def parts_off(rank: RankFrame) -> tuple[Finding, ...]:
    off = rank.heartbeat.off if rank.heartbeat is not None else ()
    return tuple(
        Finding(
            AGENT_PART_OFF.code,
            AGENT_PART_OFF.severity,
            None,
            f"{part.part} is off: {MISSING.get(part.part, 'what it does is missing')}",
            where=part.where or None,
            remedy=f"report {part.error}"
            + (f" ({part.where})" if part.where else "")
            + f" as a bug of gpumon-agent {rank.hello.agent}; training is not affected; a restart switches it on again",
            subject=part.part,
        )
        for part in off
    )
