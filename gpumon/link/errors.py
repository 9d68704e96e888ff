"""What can go wrong between a viewer and an agent: one sentence each, and what to do about it."""

from __future__ import annotations

from gpumon_agent import wire


class LinkError(Exception):
    """`what` happened and the `remedy`; as text, both in one sentence."""

    def __init__(self, what: str, remedy: str) -> None:
        self.what = wire.clean(what, wire.TEXT_CHARS_MAX)  # it may name a file, or repeat what somebody sent
        self.remedy = wire.clean(remedy, wire.TEXT_CHARS_MAX)
        super().__init__(f"{self.what}; {self.remedy}")


class NoJob(LinkError):
    """Nothing to attach to, by this name or at all."""


class NotAnswering(LinkError):
    """An agent is there but says nothing."""


class NotGpumon(LinkError):
    """Something listens there that is no gpumon agent."""


class ForeignUser(LinkError):
    """The process belongs to another user."""


class OtherProtocol(LinkError):
    """The agent speaks another major version."""


class BadRecording(LinkError):
    """A file that is no recording of gpumon's."""


class RecordingFailed(LinkError):
    """The recording could not be written further; what was written stays valid."""
