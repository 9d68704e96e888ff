"""Runs public training scripts, unmodified, and writes what came of each: `public.py FOLDER [NAME …]`.

FOLDER holds the clones of the repositories that SCRIPTS names. What a script would download is made up here, in its
place. A script runs as the cases do (_run.py): bare and under `gpumon dryrun`, and counts go beside figures. Its rows
go into docs/compatibility.md, with the commit that was run. By hand, not in CI: the scripts are not ours.
"""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "_shared"))

from wild._document import PAGE, PUBLIC, row
from wild._run import run
from wild.catalogue import Case

TRUTH = Path(__file__).with_name("_public_truth.py")


@dataclass(frozen=True, eq=False)
class Script(Case):
    """A file of a repository, with the arguments it is run with."""

    repository: str = ""
    folder: str = "."
    says: bool = False
    prepare: Callable[[Path], None] | None = None
    """Makes the data that the script would fetch, in the folder it runs in."""
    clones: Path = Path()
    marked_after: str = ""
    """The line of an update by hand, behind which a copy of the script calls gpumon_agent.step()."""
    leaves: bool = False
    """It leaves behind what its next run finds: it runs in a folder of its own."""

    @property
    def place(self) -> Path:
        """Where it runs."""
        return self.clones / self.repository.rpartition("/")[2] / self.folder

    def command(self) -> list[str]:
        """As `Case.command`, counted."""
        head = super().command()
        at = head.index(next(part for part in head if part.endswith(f"{self.script}.py")))
        script = f"{self.script}.py"
        if self.marked_after:
            text = (self.place / script).read_text()
            assert text.count(self.marked_after) == 1
            script = f"{self.script}_marked.py"
            indented = " " * (len(self.marked_after) - len(self.marked_after.lstrip()) - 4)
            marked = f"{self.marked_after}{indented}__import__('gpumon_agent').step()\n"
            (self.place / script).write_text(text.replace(self.marked_after, marked))
        where = [".", str(self.place / script)] if self.leaves else [str(self.place), script]
        return [*head[:at], str(TRUTH), *where, *self.args]


def tokens(folder: Path) -> None:
    """nanoGPT's train.bin and val.bin: 65 characters, at random."""
    import pickle

    import numpy

    data = folder / "data" / "shakespeare_char"
    for name, count in (("train.bin", 100_000), ("val.bin", 10_000)):
        numpy.random.default_rng(0).integers(0, 65, count, dtype=numpy.uint16).tofile(data / name)
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 65, "itos": {}, "stoi": {}}))


def words(folder: Path) -> None:
    """word_language_model's training text: the beginning of its validation text."""
    data = folder / "data" / "wikitext-2"
    lines = (data / "valid.txt").read_text().splitlines(keepends=True)
    for name in ("train.txt", "test.txt", "valid.txt"):
        (data / name).write_text("".join(lines[:200]))


def digits(folder: Path) -> None:
    """MNIST's four files, at random, where torchvision looks for them."""
    import numpy

    random = numpy.random.default_rng(0)
    for data in (folder.parent / "data", folder / "data"):
        raw = data / "MNIST" / "raw"
        raw.mkdir(parents=True, exist_ok=True)
        for part, count in (("train", 1024), ("t10k", 256)):
            images = random.integers(0, 256, (count, 28, 28), dtype=numpy.uint8).tobytes()
            labels = random.integers(0, 10, count, dtype=numpy.uint8).tobytes()
            (raw / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 2051, count, 28, 28) + images)
            (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, count) + labels)


NANOGPT = (
    "config/train_shakespeare_char.py", "--compile=False", "--max_iters=20", "--eval_interval=10", "--eval_iters=3",
    "--batch_size=16", "--dropout=0.1",
)  # fmt: skip
EXAMPLES = "pytorch/examples"
CLEANRL = "vwxyzjn/cleanrl"
RL = ("--total-timesteps", "400", "--learning-starts", "100")

SCRIPTS = (
    Script("nanogpt-train", "train", NANOGPT, repository="karpathy/nanoGPT", prepare=tokens),
    Script("nanogpt-train-ddp", "train", (*NANOGPT, "--gradient_accumulation_steps=4"), ranks=2,
           repository="karpathy/nanoGPT", prepare=tokens),
    *(
        Script(f"word-language-{kind.lower()}", "main",
               ("--accel", "--epochs", "1", "--use-optimizer", "--model", kind), repository=EXAMPLES,
               folder="word_language_model", prepare=words)
        for kind in ("LSTM", "Transformer")
    ),
    Script("word-language-by-hand", "main", ("--accel", "--epochs", "1"), repository=EXAMPLES,
           folder="word_language_model", prepare=words, stepless=True),
    Script("word-language-marked", "main", ("--accel", "--epochs", "1"), repository=EXAMPLES,
           folder="word_language_model", prepare=words,
           marked_after="                p.data.add_(p.grad, alpha=-lr)\n"),
    Script("mnist", "main", ("--epochs", "2"), requires=("torchvision",), repository=EXAMPLES, folder="mnist",
           prepare=digits),
    Script("mnist-rnn", "main", ("--epochs", "2", "--accel"), requires=("torchvision",), repository=EXAMPLES,
           folder="mnist_rnn", prepare=digits),
    Script("vae", "main", ("--epochs", "2"), requires=("torchvision",), repository=EXAMPLES, folder="vae",
           prepare=digits),
    Script("siamese", "main", ("--epochs", "1", "--batch-size", "32"), requires=("torchvision",), repository=EXAMPLES,
           folder="siamese_network", prepare=digits),
    Script("dcgan", "main", ("--dataset", "fake", "--accel", "--niter", "1", "--workers", "0"),
           requires=("torchvision",), repository=EXAMPLES, folder="dcgan"),
    Script("forward-forward", "main", ("--epochs", "5", "--train_size", "512", "--test_size", "128"),
           requires=("torchvision",), repository=EXAMPLES, folder="mnist_forward_forward", prepare=digits),
    Script("ddp-single-gpu", "single_gpu", ("2", "1"), repository=EXAMPLES, folder="distributed/ddp-tutorial-series"),
    Script("ddp-torchrun", "multigpu_torchrun", ("2", "1"), ranks=2, repository=EXAMPLES,
           folder="distributed/ddp-tutorial-series", leaves=True),
    Script("fsdp2", "example", ranks=2, repository=EXAMPLES, folder="distributed/FSDP2", leaves=True),
    Script("tensor-parallel", "tensor_parallel_example", ranks=2, repository=EXAMPLES,
           folder="distributed/tensor_parallelism"),
    Script("sequence-parallel", "sequence_parallel_example", ranks=2, repository=EXAMPLES,
           folder="distributed/tensor_parallelism"),
    Script("cleanrl-ppo", "cleanrl/ppo", ("--total-timesteps", "1536", "--num-envs", "2"), requires=("gymnasium",),
           repository=CLEANRL),
    Script("cleanrl-dqn", "cleanrl/dqn", (*RL, "--train-frequency", "10"), requires=("gymnasium",),
           repository=CLEANRL),
    Script("cleanrl-c51", "cleanrl/c51", (*RL, "--train-frequency", "10"), requires=("gymnasium",),
           repository=CLEANRL),
    *(
        Script(f"cleanrl-{name}", f"cleanrl/{name}_continuous_action",
               ("--env-id", "Pendulum-v1", "--total-timesteps", "190", "--learning-starts", "140", *more),
               requires=("gymnasium",), repository=CLEANRL)
        for name, more in (("ddpg", ()), ("td3", ()), ("sac", ("--num-envs", "2")))
    ),
)  # fmt: skip


def main(clones: Path, names: list[str]) -> None:
    """Each script's row replaces the one it had."""
    from dataclasses import replace

    for script in SCRIPTS:
        if names and script.name not in names:
            continue
        script = replace(script, clones=clones.resolve())
        if script.prepare:
            script.prepare(script.place)
        commit = git(script.place, "rev-parse", "--short=8", "HEAD")
        seen = run(script)
        line = row(seen)
        print(line, flush=True)
        if not seen.ranks or not seen.ranks[0].steps:
            print(seen.output[-3000:], file=sys.stderr)
        first, *rest = line.removeprefix("| ").split(" | ")
        by_hand = ", with `gpumon_agent.step()` after each update" if script.marked_after else ""
        command = f"`{script.folder.removeprefix('.')}/{script.script}.py {' '.join(script.args)}`".replace("`/", "`")
        write(
            first,
            " | ".join([f"| {first}", f"{script.repository} {commit}", command.replace(" `", "`") + by_hand, *rest]),
        )


def write(name: str, line: str) -> None:
    """Into the page's second table, in the order of SCRIPTS."""
    text = PAGE.read_text()
    head, _, below = text.partition(PUBLIC)
    known = {old.split(" | ")[0].removeprefix("| "): old for old in below.splitlines() if old.startswith("| ")}
    known[name] = line
    PAGE.write_text(head + PUBLIC + "".join(f"{known[each.name]}\n" for each in SCRIPTS if each.name in known))


def git(folder: Path, *arguments: Any) -> str:
    return subprocess.run(["git", "-C", folder, *arguments], check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
