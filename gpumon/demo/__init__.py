"""The training process that `gpumon demo` starts and watches."""
