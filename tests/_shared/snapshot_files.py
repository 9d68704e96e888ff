"""Snapshot files made by hand, in torch's format."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

KIB, MIB = 1 << 10, 1 << 20
BASE = 1 << 44


def frame(file: str, line: int = 1, name: str = "forward") -> dict[str, Any]:
    return {"filename": file, "line": line, "name": name}


def block(size: int, *, requested: int | None = None, state: str = "active_allocated", **more: Any) -> dict[str, Any]:
    return {"size": size, "requested_size": size if requested is None else requested, "state": state, **more}


def segment(*blocks: dict[str, Any], address: int = BASE, total: int | None = None, **more: Any) -> dict[str, Any]:
    """Its blocks get the addresses that follow each other."""
    at = address
    for each in blocks:
        each["address"] = at
        at += each["size"]
    return {
        "device": 0,
        "address": address,
        "total_size": at - address if total is None else total,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "blocks": list(blocks),
        **more,
    }


def event(action: str, address: int, size: int, **more: Any) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size, "stream": 0, "frames": [], **more}


def freed(address: int, size: int) -> list[dict[str, Any]]:
    return [event("free_requested", address, size), event("free_completed", address, size)]


def content(segments: list[dict[str, Any]], *events: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """`events`: of each device."""
    return {"segments": segments, "device_traces": list(events), **more}


def write(path: Path, root: Any) -> Path:
    path.write_bytes(pickle.dumps(root, 4))
    return path
