"""Errors between a viewer and an agent: one sentence each, and a remedy."""

from __future__ import annotations

from gpumon_agent import wire


class LinkError(Exception):
    """`what` happened and the `remedy`; as text, both in one sentence."""

    def __init__(self, what: str, remedy: str) -> None:
        self.what = wire.clean(what, wire.TEXT_CHARS_MAX)  # it may contain a file name or received text
        self.remedy = wire.clean(remedy, wire.TEXT_CHARS_MAX)
        super().__init__(f"{self.what}; {self.remedy}")


class NoJob(LinkError):
    """Nothing to attach to, under this name or at all."""


class NoAgent(NoJob):
    """A process of this user, without an agent."""

    def __init__(self, pid: int) -> None:
        super().__init__(
            f"process {pid} has no gpumon agent",
            f"`gpumon attach {pid} --inject` loads it while the process runs; or restart it under `gpumon run`",
        )
        self.pid = pid


class NotAnswering(LinkError):
    """There is an agent, but it does not answer."""


class NotGpumon(LinkError):
    """Something listens there that is no gpumon agent."""


class ForeignUser(LinkError):
    """The process belongs to another user."""


class OtherProtocol(LinkError):
    """The agent speaks another major version."""


class BadRecording(LinkError):
    """A file that is no gpumon recording."""


class RecordingFailed(LinkError):
    """The recording could not be continued; what was written stays valid."""
