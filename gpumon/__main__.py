"""`python -m gpumon` is `gpumon`."""

from gpumon.cli import main

if __name__ == "__main__":
    main(prog_name="python -m gpumon")
