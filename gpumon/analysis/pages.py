"""The catalogue's pages: what each finding means, its evidence, and what to do. The single source for all outputs.

`gpumon explain CODE` prints a page; docs/make_findings.py writes all of them to docs/findings/.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from gpumon.analysis.rules import Rule

WIDTH = 80


@dataclass(frozen=True, slots=True)
class FindingPage:
    """One finding's page. `silent`: when it says nothing."""

    means: str
    evidence: str
    do: str
    silent: str = ""


PAGES = {
    "near-capacity": FindingPage(
        "The next peak is expected to come close to what the device has. The run goes on, but a longer batch, an "
        "evaluation, or a checkpoint's copy may be one allocation too many.",
        "The forecast's headroom: what the driver counts as free, plus what PyTorch has reserved, less the next peak.",
        "Shrink the peak: a smaller batch with accumulation, activation checkpointing, autocast; where the "
        "optimizer's step makes the peak, fused=True. If reserved stands far above allocated, expandable segments.",
        "Until a few iterations are learnt from, and once oom-ahead says more.",
    ),
    "oom-ahead": FindingPage(
        "Memory will run out: the peak grows and the steps until it no longer fits can be counted, or the coming "
        "iteration alone is likely not to fit.",
        "The trend of the peaks over steps, told apart by what grows: bytes that stay (a leak), or what a step needs "
        "(batches sorted by length). The probability is that of the forecast's interval.",
        "Where bytes stay: find the list, dict or closure that keeps losses or outputs (`.item()`, `.detach()`). "
        "Where steps need more: the longest batch first tells at once whether it fits.",
    ),
    "allocator-retries": FindingPage(
        "cudaMalloc failed, PyTorch gave back everything it could and tried again, this time with success. Each retry"
        " waits for the device and is slow; the next one may fail for good.",
        "num_alloc_retries of torch.cuda.memory_stats has grown since the look before.",
        "A smaller peak; expandable segments, if fragmentation is the cause; a device without other processes.",
    ),
    "bucket-copy": FindingPage(
        "DistributedDataParallel reduces gradients in buckets, and keeps the buckets beside the gradients: one more "
        "copy of every trained parameter.",
        "The bucket sizes DDP itself reports, without gradient_as_bucket_view.",
        "DistributedDataParallel(..., gradient_as_bucket_view=True): gradients become views of the buckets. Code that"
        " calls detach_() on gradients has to go.",
    ),
    "dominant-embedding": FindingPage(
        "One embedding owns most of the model's parameters. Its rows cost weights, gradients and optimizer state "
        "whether a batch uses them or not, so the vocabulary decides whether it fits, and the batch does not.",
        "The share of the parameters' bytes, and which layers share the table.",
        "A smaller vocabulary: bin numbers, hash rare values, split long identifiers. A tied output layer, if there "
        "are two tables. The table on the CPU, or sparse gradients with SparseAdam.",
        "Where its gradients are sparse already.",
    ),
    "foreach-peak": FindingPage(
        "The optimizer's step itself makes the peak: with foreach it builds lists of temporaries as large as all "
        "parameters together.",
        "The optimizer phase's peak stands above every other phase's, and its temporaries are what is above its end.",
        "fused=True (Adam, AdamW, SGD, Adagrad on CUDA) needs no temporaries; foreach=False needs one parameter's.",
        "Where another phase peaks as high: then nothing would be saved.",
    ),
    "stray-context": FindingPage(
        "A process of the same job, which trains on another device, holds a CUDA context on this one: some hundred "
        "megabytes for nothing, on device 0 once for every other rank.",
        "The driver lists the rank's process on a device on which none of its phases ran.",
        "torch.cuda.set_device(local_rank) before anything touches CUDA, or CUDA_VISIBLE_DEVICES a rank. Usual ways "
        'in: a tensor made on plain "cuda" before the device is chosen, torch.load without map_location, dist.barrier'
        " without device_ids.",
        "Where the driver does not list processes (some containers), and until the other rank has closed a phase.",
    ),
    "rank-skew": FindingPage(
        "One rank of a job peaks far above the others. It decides what batch fits, and all others wait for it if it "
        "runs out of memory.",
        "The median of its recent peaks against the median of the ranks, both steady over some steps.",
        "Longer batches on that rank (sort or bucket by length), outputs gathered to it, a checkpoint loaded there, "
        "other ranks' contexts on its device.",
        "Pipeline stages differ by design: there it means nothing.",
    ),
    "other-process": FindingPage(
        "Somebody else's process holds memory of a device that this run uses.",
        "The driver's list of processes, without this job's and without its children.",
        "nvidia-smi names it: an old run, a notebook's kernel, another user's job. End it, or take another device "
        "with CUDA_VISIBLE_DEVICES.",
        "In containers that hide process ids, nothing can be said.",
    ),
    "tensor-leak": FindingPage(
        "Tensors are kept from step to step: what is allocated at the end of a step grows without end, and one day an"
        " allocation fails that has always fitted.",
        "Allocated, live blocks and what the ledger cannot name, each at the end of the optimizer: they must rise "
        "through six parts of the window in a row, faster than noise (Kendall's test), and not because batches get "
        "longer or owners the ledger names come to life. Which tensors, made where and held by whom, a census tells; "
        "where no name leads to them any more, whether only a reference cycle keeps them.",
        "Look at the name that holds them. A list or dict: clear it each epoch, or bound it (deque(maxlen=…)). "
        "Results for later: .cpu(), or numbers with .item(). A cache: maxsize. An exception: keep str(error), for its"
        " traceback holds every function's variables. A hook: overwrite, or handle.remove(). A cycle: a weakref.",
        "While a figure rises for fewer than 30 steps; where it has been as high within the last 1,000 steps, as with"
        " a list emptied each epoch. A deque with maxlen that fills is told as information, and so is a list that is "
        "shorter than the length at which its own code shortens it (if len(x) > N: x.pop(0); x = x[-N:]; del x[:-N]). "
        "Another buffer that fills for longer is told as a leak until it is full, then it is gone.",
    ),
    "retained-graph": FindingPage(
        "Tensors are kept together with the graph they came from. A loss after backward() costs a block of 512 bytes "
        "a step and every node of its graph; an output before backward(), or with retain_graph=True, keeps all that "
        "autograd saved for it: a whole step's activations, each step anew.",
        "As for tensor-leak; the tensors that grow in number have a grad_fn.",
        "Store numbers: loss.item(), or loss.detach() and one .cpu() for many. Store outputs with .detach(). Sum up "
        "as `total += loss.item()`: `total += loss` keeps every step's graph in one tensor.",
        "For the graph of the step under way. Note that a loss can keep more than itself: an elementwise loss with "
        "reduction (mse_loss and its like) may keep a storage as large as all of the batch's losses.",
    ),
    "retained-checkpoint": FindingPage(
        "Tensors that torch.load made are still alive on the device, steps after load_state_dict has copied them: one"
        " more copy of the weights, of the optimizer's state too where the file holds it, for the whole run.",
        "The loaded tensors are followed by identity. Those that a model or an optimizer has taken over "
        "(load_state_dict(assign=True)) do not count. Nor does a copy beside another one that was given to"
        " load_state_dict, where something writes to it, a parameter has it, or no name leads to it.",
        'del the variable after load_state_dict, or load inside a function. torch.load(..., map_location="cpu") never'
        " puts the copy on the device at all; mmap=True does not even read it whole.",
        "Where load_state_dict has not been called since: it may be data. Where less than a tenth of it is alive.",
    ),
    "checkpoint-device": FindingPage(
        "A file was loaded onto a device on which this process trains nothing. torch.load puts tensors back to where "
        "they were saved from: with several ranks that is rank 0's device for all of them, with a context of some "
        "hundred megabytes for each.",
        "The devices of the loaded tensors against those of the watched models.",
        'torch.load(..., map_location="cpu"), or map_location=f"cuda:{local_rank}".',
    ),
    "grad-in-eval": FindingPage(
        "The model was in eval mode and its forward recorded a graph that no backward used. model.eval() changes "
        "dropout and batch norm, not autograd: activations are saved as in training, and an evaluation can be the "
        "highest peak.",
        "The forward's output requires gradients, and no backward follows before the next forward.",
        "with torch.inference_mode(): around the evaluation, or torch.no_grad() where its results enter autograd "
        "later.",
        "Where a backward follows, as in training with frozen batch norm, or for saliency maps.",
    ),
    "outlier-batch": FindingPage(
        "One batch is far larger than the others and alone decides how much memory the run needs.",
        "Bytes handed to the model against the peak of the same step, over the last 512 steps: 1.5 times as large as "
        "95 of 100 others, and peaking at least a quarter above theirs.",
        "Cut samples at a high percentile of their length, drop the few that are longer, or make batches by tokens "
        "rather than by samples. The saving that is stated is that of the largest batch within the percentile.",
        "In the first ten steps, and where the sizes are spread evenly.",
    ),
    "fragmentation": FindingPage(
        "The allocator has reserved far more than was ever allocated at once: the free blocks it caches do not fit "
        "what is asked for, so it reserves more beside them. cudaMalloc fails while memory stands unused.",
        "As reserved rises, it stands above the highest peak of allocated so far by more than 40 %.",
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True lets segments grow. Few different sizes: lengths padded to "
        "multiples, the largest batch first.",
        "Below 128 MiB, and where the highest peak lies before the steps that are known.",
    ),
    "zeroed-gradients": FindingPage(
        "Gradients of the step before are still there while the next forward runs: as zeros, with "
        "zero_grad(set_to_none=False), or because zero_grad() comes after the forward. Their bytes are then part of "
        "the forward's peak.",
        "The ledger as the first forward of a step begins, in steps with one forward.",
        "optimizer.zero_grad() before the forward, with set_to_none=True (the default since torch 2.0).",
        "With gradient accumulation, where gradients have to stay.",
    ),
    "host-leak": FindingPage(
        "The resident memory of the training process, or of one of its children (DataLoader workers), grows step on "
        "step. When the machine is full, the kernel ends a process without a word from Python.",
        "Resident memory at each reading, about once a second; every process for itself. The same test as for "
        "tensor-leak, at 24 MiB and more. Where torch's pinned memory grows too, it says by how much.",
        "In the process: lists of samples, logs, decoded files; tracemalloc names lines. In a worker: a cache in "
        "__getitem__, or Python objects whose pages are copied as their reference counts change: arrays instead of "
        "lists.",
        "In the first readings. Pages of a mapped file count as resident as they are read: that growth ends. It is "
        "information where the process grows no faster than what is allocated on its device: with unified memory, or a "
        "virtual GPU, a leak on the device is one of the host's too.",
    ),
    "agent-part-off": FindingPage(
        "A part of gpumon's agent failed five times in the training process and is switched off for the rest of the "
        "run. Training is not affected. What the part delivers is missing from then on; the finding says what that is.",
        "The agent says so itself, once a second, with the exception and the line it came from.",
        "Report it with the finding's text: it is a bug of gpumon. After a restart of the training the part is on "
        "again. Other figures stay right.",
    ),
}


def page(rule: Rule) -> str:
    """For a terminal: 80 columns."""
    blocks = [f"{rule.code}  ({rule.severity})"]
    for heading, body in _parts(rule):
        lines = textwrap.fill(body, WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
        blocks.append(f"{heading}\n{lines}")
    return "\n\n".join(blocks)


def markdown(rule: Rule) -> str:
    """For docs/findings/."""
    blocks = [f"# {rule.code}", f"Severity: {rule.severity}."]
    blocks += [f"## {heading}\n\n{textwrap.fill(body, 120, break_on_hyphens=False)}" for heading, body in _parts(rule)]
    return "\n\n".join(blocks) + "\n"


def _parts(rule: Rule) -> list[tuple[str, str]]:
    written = PAGES.get(rule.code)
    parts = []
    if written is not None:
        parts = [("What it means", written.means), ("What it is concluded from", written.evidence)]
        parts.append(("What to do", written.do))
        if written.silent:
            parts.append(("When it is silent", written.silent))
    parts.append(("Thresholds", "; ".join(_thresholds(rule)) + "."))
    return parts


def _thresholds(rule: Rule) -> list[str]:
    """The rule's own data; names carry the units."""
    said = [f"opens after {rule.opens_after} looks in a row, is gone after {rule.closes_after} without"]
    own = ((name, getattr(rule, name)) for name in rule.__struct_fields__[4:])
    return [*said, *(f"{name.replace('_', ' ')} {value:,}" for name, value in own if value)]
