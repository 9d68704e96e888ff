"""Every leak script by name: which code it must raise, whose name the finding must hold, and where its line is.

The line is the one marked "made" in the function of that name (or marked "made NAME"); where none is marked, any line
of the script will do.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
STEPS = 150  # a machine of 2 GHz takes that long to name most of them; a fast one names them after 40


@dataclass(frozen=True)
class Leak:
    """One script. `holder`: the names of which the finding must hold one, "-" where no name leads to the tensors;
    `steps`: after which it must be found."""

    name: str
    code: str
    holder: tuple[str, ...]
    file: str
    steps: int

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.file}.py"

    @property
    def arguments(self) -> tuple[str, ...]:
        return () if self.file == self.name else (self.name,)

    @property
    def lines(self) -> frozenset[int]:
        """The marked lines."""
        marked, inside = set(), ""
        for number, line in enumerate(self.path.read_text().splitlines(), 1):
            if line.startswith(("def ", "class ", "@")):
                inside = line.removeprefix("def ").partition("(")[0]
            _, is_marked, whose = line.partition("# made")
            if is_marked and (whose.strip() or inside) == self.name:
                marked.add(number)
        return frozenset(marked)


def _leaks(file: str, **each: str) -> tuple[Leak, ...]:
    """NAME="code holder steps", holders that are as good behind a slash, steps if more than usual."""
    split = ((name, [*text.split(), STEPS]) for name, text in each.items())
    return tuple(
        Leak(name, str(code), tuple(str(holders).split("/")), file, int(steps))
        for name, (code, holders, steps, *_) in split
    )


LEAKS = (
    *_leaks(
        "containers",
        losses_to_plot="retained-graph losses",
        running_list="tensor-leak train_curve",
        predictions_by_step="tensor-leak predictions",
        rows_of_tuples="retained-graph rows",
        metrics_by_name="tensor-leak metrics",
        window_without_end="tensor-leak window",
        concatenated="tensor-leak all_outputs",
        seen_values="tensor-leak seen",
        per_class="tensor-leak board",
        recent_outputs="tensor-leak recent",
        every_fifth="tensor-leak samples 250",
    ),
    *_leaks(
        "objects",
        trainer_history="retained-graph history",
        shared_meter="tensor-leak readings",
        metric_never_reset="tensor-leak preds/target/accuracy",
        replay_buffer="tensor-leak transitions",
        dataclass_field="retained-graph values",
        named_tuples="tensor-leak journal",
        singleton="tensor-leak store",
        module_attribute="tensor-leak remembered",
        memory_bank="tensor-leak bank",
        nested_attributes="tensor-leak logs",
        table_in_a_global="tensor-leak columns/RESULTS",
        hard_examples="tensor-leak worst",
    ),
    *_leaks(
        "functions",
        closure="retained-graph entries/log",
        cached_function="tensor-leak normalized",
        default_argument="tensor-leak remember/so_far",
        partial_function="tensor-leak keep",
        generator="tensor-leak smooth/received",
        batches_in_a_generator="tensor-leak ahead/prefetcher",
        caught_exceptions="tensor-leak problems",
        context_variable="tensor-leak TRACE/trace",
        writer_thread="tensor-leak pending",
        weak_with_a_strong_twin="tensor-leak strong",
        jobs_kept="tensor-leak jobs",
        cycles_without_gc="tensor-leak cycle",
        exceptions_in_cycles="tensor-leak -",
        running_total="retained-graph total",
        shifting_chain="retained-graph previous/loss",
        nested_spans="tensor-leak tracer/forward",
    ),
    *_leaks(
        "training",
        forward_hook="tensor-leak features",
        gradient_hook="tensor-leak norms",
        outputs_before_backward="retained-graph probed",
        retained_by_backward="retained-graph penalties",
        averaged_weights="tensor-leak snapshots",
        copies_of_the_model="tensor-leak checkpoints 250",
        optimizer_each_epoch="tensor-leak old 250",
        gradients_kept="tensor-leak grads",
        autograd_context="retained-graph contexts",
        summary_writer="retained-graph events",
        log_records="tensor-leak memory/log/buffer",
        checkpoint_in_a_name="retained-checkpoint restored",
        checkpoint_beside_a_library="retained-checkpoint mine",
    ),
    *_leaks("script", script="retained-graph epoch_loss"),
)
