"""All I/O with agents and recordings: find agents, subscribe to them, record and replay their events."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .control import Asker, ask
    from .discovery import DiscoveredJob, SeveralJobs, alive, discover, jobs, resolve
    from .errors import (
        BadRecording,
        ForeignUser,
        LinkError,
        NoAgent,
        NoJob,
        NotAnswering,
        NotGpumon,
        OtherProtocol,
        RecordingFailed,
    )
    from .glancing import Glance, glance
    from .recording import Recording
    from .replaying import Replay, replay
    from .subscription import subscribe, subscribe_batches

_HOME = {
    "Asker": "control",
    "ask": "control",
    "DiscoveredJob": "discovery",
    "SeveralJobs": "discovery",
    "alive": "discovery",
    "discover": "discovery",
    "jobs": "discovery",
    "resolve": "discovery",
    "BadRecording": "errors",
    "ForeignUser": "errors",
    "LinkError": "errors",
    "NoAgent": "errors",
    "NoJob": "errors",
    "NotAnswering": "errors",
    "NotGpumon": "errors",
    "OtherProtocol": "errors",
    "RecordingFailed": "errors",
    "Glance": "glancing",
    "glance": "glancing",
    "Recording": "recording",
    "Replay": "replaying",
    "replay": "replaying",
    "subscribe": "subscription",
    "subscribe_batches": "subscription",
}

__all__ = [
    "Asker",
    "BadRecording",
    "DiscoveredJob",
    "ForeignUser",
    "Glance",
    "LinkError",
    "NoAgent",
    "NoJob",
    "NotAnswering",
    "NotGpumon",
    "OtherProtocol",
    "Recording",
    "RecordingFailed",
    "Replay",
    "SeveralJobs",
    "alive",
    "ask",
    "discover",
    "glance",
    "jobs",
    "replay",
    "resolve",
    "subscribe",
    "subscribe_batches",
]


def __getattr__(name: str) -> Any:
    """Imported on first use: `gpumon ls` needs no asyncio, whose import alone takes longer than listing."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value
