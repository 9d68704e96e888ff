"""`python -m gpumon_agent train.py ARGS…`: as `gpumon run`, if only the agent is installed."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

from gpumon_agent._version import __version__


def main() -> NoReturn:
    parser = argparse.ArgumentParser(
        prog="python -m gpumon_agent",
        usage="python -m gpumon_agent [--name NAME] [--track-cpu] COMMAND …",
        description="Run a training script with the agent inside, its code unchanged.",
        epilog="COMMAND is a script, -m MODULE, or a launcher: torchrun …, accelerate launch …, python train.py",
    )
    parser.add_argument("--name", help="what viewers call this job (default: the script's file name)")
    parser.add_argument("--track-cpu", action="store_true", help="exact bytes of CPU tensors; slows small operations")
    parser.add_argument("--version", action="version", version=__version__)
    ours, words = _split(sys.argv[1:])
    options = parser.parse_args(ours)

    from gpumon_agent.shim import launch

    try:
        launch.execute(words, name=options.name, track_cpu=options.track_cpu)
    except launch.Refused as refusal:
        print(f"gpumon: {refusal}", file=sys.stderr)
        sys.exit(refusal.exit_code)


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Splits our options from the command, which begins at the first word that is no option."""
    position = 0
    while position < len(words):
        word = words[position]
        if word == "--":
            return words[:position], words[position + 1 :]
        if word == "--name":
            position += 2
        elif word.startswith("--") or word == "-h":
            position += 1
        else:
            break
    return words[:position], words[position:]


if __name__ == "__main__":
    main()
