"""What a late viewer gets besides the past: the newest description of each thing."""

from __future__ import annotations

from gpumon_agent import wire

_CHECKPOINTS_MAX = 256
_ORDER = {"hello": 0, "model": 1, "module": 2}


class Picture:
    """Encoded events. A newer one replaces the older about the same thing."""

    def __init__(self) -> None:
        self.hello: wire.Hello | None = None
        self._kept: dict[tuple[object, ...], bytes] = {}

    def add(self, event: wire.Event, raw: bytes) -> None:
        kept = self._kept
        match event:
            case wire.Hello():
                self.hello = event
                kept["hello",] = raw
            case wire.Model():
                self._drop("module", event.model)
                kept["model", event.model] = raw
            case wire.Module():
                kept["module", event.model, event.path] = raw
            case wire.Ledger():
                kept["ledger", event.device] = raw
            case wire.Layers():
                if not event.part:
                    self._drop("layers", event.model, event.device)
                kept["layers", event.model, event.device, event.part] = raw
            case wire.Census():
                kept["census", event.number] = raw
                for key in [key for key in kept if key[0] == "census"][: -wire.CENSUSES_KEPT]:
                    del kept[key]
            case wire.Checkpoint():
                kept["checkpoint", event.number, event.device] = raw
                known = [key for key in kept if key[0] == "checkpoint"]
                for key in known[:-_CHECKPOINTS_MAX]:
                    del kept[key]
            case wire.Segments():
                if not event.part:
                    self._drop("segments", event.device)
                kept["segments", event.device, event.part] = raw
            case wire.Snapshot():
                kept["snapshot",] = raw
            case wire.Progress():
                kept["progress",] = raw
            case wire.Trackers():
                kept["trackers",] = raw
            case _:
                pass  # part of the past

    def _drop(self, *start: object) -> None:
        for key in [key for key in self._kept if key[: len(start)] == start]:
            del self._kept[key]

    def events(self) -> list[bytes]:
        """Hello first, which all others need, then the models that later ones refer to."""
        in_order = sorted(self._kept.items(), key=lambda item: _ORDER.get(str(item[0][0]), len(_ORDER)))
        return [raw for _, raw in in_order]
