"""The one place that states the version of gpumon and its agent."""

__version__ = "0.1.0"
