"""gpumon: what is in the GPU's memory, in which phase of training, and whether the next iteration will fit."""

from gpumon_agent._version import __version__

__all__ = ["__version__"]
