"""What gpumon states, for other programs to read."""
