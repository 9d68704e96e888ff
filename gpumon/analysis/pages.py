"""The catalogue's pages: what each finding means, its evidence, and what to do. The single source for all outputs.

`gpumon explain CODE` prints a page; docs/make_findings.py writes all of them to docs/findings/.
"""

from __future__ import annotations

import textwrap

import msgspec

from gpumon.analysis.rules import Rule

WIDTH = 80


class FindingPage(msgspec.Struct, frozen=True):
    """One finding's page. `silent`: when it is not reported."""

    means: str
    evidence: str
    do: str
    silent: str = ""


PAGES = {
    "near-capacity": FindingPage(
        "The next peak is expected to leave less than 5 % of the device free. The run goes on, but a longer batch, an "
        "evaluation or a copy for a checkpoint may be one allocation too many.",
        "The forecast's headroom: free on the device, plus reserved by PyTorch, minus the next peak, minus free pieces "
        "that the allocator cannot use.",
        "Lower the peak: a smaller batch with gradient accumulation, activation checkpointing, autocast; fused=True if "
        "the optimizer step is the peak. If reserved is far above allocated, use expandable segments.",
        "In the first iterations, and while oom-ahead is open.",
    ),
    "oom-ahead": FindingPage(
        "Memory will run out: the peak grows and gpumon can count the steps until it no longer fits, or the coming "
        "iteration alone is likely not to fit.",
        "The agent's outlook for the batch now in forward; the growth of the peak, either from bytes that are kept (a "
        "leak) or from what a step needs (batches sorted by length); the probability from the forecast's interval.",
        "If bytes are kept: find the list, dict or closure that keeps losses or outputs (`.item()`, `.detach()`). If "
        "steps need more: run the longest batch first, to see at once whether it fits.",
    ),
    "allocator-retries": FindingPage(
        "cudaMalloc failed; PyTorch released its cached blocks and tried again, this time with success. Each retry "
        "waits for the device and is slow; the next one may fail for good.",
        "num_alloc_retries of torch.cuda.memory_stats has increased since the previous check.",
        "Lower the peak; use expandable segments if fragmentation is the cause, or a device without other processes.",
    ),
    "bucket-copy": FindingPage(
        "DistributedDataParallel reduces gradients in buckets and keeps the buckets beside the gradients: one more "
        "copy of every trained parameter.",
        "The bucket sizes that DDP itself reports, without gradient_as_bucket_view.",
        "DistributedDataParallel(..., gradient_as_bucket_view=True): gradients become views of the buckets. Remove "
        "code that calls detach_() on gradients.",
    ),
    "dominant-embedding": FindingPage(
        "One embedding holds most of the model's parameters. Its rows cost weights, gradients and optimizer state "
        "whether a batch uses them or not. So the vocabulary decides whether training fits, not the batch.",
        "The embedding's share of the parameters' bytes, and which layers share its table.",
        "A smaller vocabulary: bin numbers, hash rare values, split long identifiers. A tied output layer, if there "
        "are two tables. The table on the CPU, or sparse gradients with SparseAdam.",
        "If its gradients are sparse already.",
    ),
    "foreach-peak": FindingPage(
        "The optimizer step is the peak: with foreach it makes lists of temporaries as large as all parameters "
        "together.",
        "The optimizer phase has the highest peak. Its temporaries are its peak minus what is allocated at its end.",
        "fused=True (Adam, AdamW, SGD, Adagrad on CUDA) needs no temporaries; foreach=False needs those of one "
        "parameter at a time.",
        "If another phase peaks as high: then nothing would be saved.",
    ),
    "stray-context": FindingPage(
        "A process of the same job that trains on another device holds a CUDA context on this one: some hundred "
        "megabytes without use. On device 0 there is often one for each other rank.",
        "The driver lists the rank's process on a device on which it ran no phase.",
        "torch.cuda.set_device(local_rank) before anything touches CUDA, or one CUDA_VISIBLE_DEVICES for each rank. "
        'Usual causes: a tensor made on plain "cuda" before the device is chosen, torch.load without map_location, '
        "dist.barrier without device_ids.",
        "If the driver does not list processes (some containers), and until the other rank has closed a phase.",
    ),
    "rank-skew": FindingPage(
        "One rank of a job peaks far above the others. It limits the batch, and if it runs out of memory, all others "
        "stop.",
        "The rank's median recent peak, compared with the median of all ranks' medians.",
        "Look for longer batches on that rank (sort or bucket by length), outputs gathered to it, a checkpoint loaded "
        "there, other ranks' contexts on its device.",
        "It has no meaning for pipeline stages, which differ by design.",
    ),
    "other-process": FindingPage(
        "A process that is not part of this run holds memory on a device that the run uses.",
        "The driver's list of processes, without this job's processes and their children.",
        "Find it with nvidia-smi: an old run, a notebook's kernel, another user's job. End it, or choose another "
        "device with CUDA_VISIBLE_DEVICES.",
        "In containers that hide process ids.",
    ),
    "tensor-leak": FindingPage(
        "Tensors are kept from step to step. The bytes allocated at the end of a step grow without limit, until an "
        "allocation fails that has always fitted.",
        "Three figures at the end of each optimizer phase: allocated bytes, live blocks, unexplained bytes. One of "
        "them must rise through six parts of the window in a row, by more than noise (Kendall's test), and neither "
        "because batches get longer nor because of owners that gpumon knows. A census then finds the tensors, the line "
        "that made them and the variable that holds them, or that only a reference cycle keeps them.",
        "Look at the variable that holds them. A list or dict: clear it each epoch, or bound it (deque(maxlen=…)). "
        "Results for later: .cpu(), or numbers with .item(). A cache: maxsize. An exception: keep str(error), since "
        "its traceback holds every function's variables. A hook: overwrite, or handle.remove(). A cycle: a weakref.",
        "If a figure has risen for fewer than 30 steps, or was as high within the last 1,000 steps (a list emptied "
        "each epoch). A deque with maxlen that is not full yet is only info; so is a list that has not reached the "
        "length at which its own code shortens it (if len(x) > N: x.pop(0); x = x[-N:]; del x[:-N]). Another buffer "
        "that fills slowly is reported as a leak until it is full.",
    ),
    "retained-graph": FindingPage(
        "Tensors are kept together with their autograd graph. A loss after backward() costs a block of 512 bytes a "
        "step and every node of its graph. An output before backward(), or with retain_graph=True, keeps all that "
        "autograd saved for it: the activations of a whole step, again in each step.",
        "As for tensor-leak; the tensors that grow in number have a grad_fn.",
        "Store numbers: loss.item(), or loss.detach() and one .cpu() for many. Store outputs with .detach(). Sum up "
        "with `total += loss.item()`: `total += loss` keeps every step's graph in one tensor.",
        "For the graph of the current step. A loss can keep more than itself: an elementwise loss with reduction "
        "(such as mse_loss) may keep a storage as large as all of the batch's losses.",
    ),
    "retained-checkpoint": FindingPage(
        "Tensors from torch.load are still alive on the device, steps after load_state_dict has copied them: one more "
        "copy of the weights, and of the optimizer state if the file holds it, for the whole run.",
        "gpumon follows the loaded tensors themselves. Those that a model or optimizer has taken over "
        "(load_state_dict(assign=True)) do not count. If a library read the file again and loaded that copy, the "
        "script's own copy counts only if a variable leads to it, nothing has written to it, and it is no parameter.",
        'del the variable after load_state_dict, or load inside a function. With torch.load(..., map_location="cpu") '
        "the copy is never on the device; with mmap=True the file is not even read whole.",
        "If load_state_dict was not called after the load: the tensors may be data. If less than a tenth is alive.",
    ),
    "checkpoint-device": FindingPage(
        "A file was loaded onto a device on which this process trains nothing. torch.load puts tensors back on the "
        "device they were saved from: with several ranks, all of them load onto rank 0's device, each with a context "
        "of some hundred megabytes.",
        "The devices of the loaded tensors, compared with those of the watched models.",
        'torch.load(..., map_location="cpu"), or map_location=f"cuda:{local_rank}".',
    ),
    "grad-in-eval": FindingPage(
        "The model was in eval mode, and its forward recorded a graph that no backward used. model.eval() changes "
        "dropout and batch norm, not autograd: activations are saved as in training, and an evaluation can be the "
        "highest peak.",
        "The forward's output requires gradients, and no backward follows before the next forward.",
        "with torch.inference_mode(): around the evaluation, or torch.no_grad() if its results enter autograd later.",
        "If a backward follows, as in training with frozen batch norm, or for saliency maps.",
    ),
    "outlier-batch": FindingPage(
        "One batch is far larger than the others and alone decides how much memory the run needs.",
        "Bytes of the model's inputs and the peak of the same step, over the last 512 steps: the batch has 1.5 times "
        "the bytes of the 95th percentile, and its peak is a quarter above the 95th percentile of the peaks.",
        "Cut samples at a high percentile of their length, drop the few that are longer, or batch by tokens instead of "
        "samples. The saving given is the difference to the highest peak within that percentile.",
        "In the first ten steps, and if sizes are spread evenly.",
    ),
    "fragmentation": FindingPage(
        "The allocator has reserved far more than was ever allocated at once: its cached free blocks do not fit the "
        "requests, so it reserves more. cudaMalloc can fail while memory is unused.",
        "When reserved rises, at least 40 % of it is above the highest peak of allocated so far.",
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True lets segments grow. Fewer different sizes: pad lengths to "
        "multiples, run the largest batch first.",
        "Below 128 MiB.",
    ),
    "zeroed-gradients": FindingPage(
        "Gradients of the previous step are still allocated during the next forward: as zeros, with "
        "zero_grad(set_to_none=False), or because zero_grad() comes after the forward. They add to the forward's peak.",
        "The gradients in the breakdown as the first forward of a step begins, in steps with one forward.",
        "optimizer.zero_grad() before the forward, with set_to_none=True (the default since torch 2.0).",
        "With gradient accumulation, where gradients have to be kept.",
    ),
    "host-leak": FindingPage(
        "The resident memory of the training process, or of one of its children (DataLoader workers), grows from step "
        "to step. When the machine is full, the kernel kills a process without an error message from Python.",
        "The resident memory of each process, about once a second, tested as for tensor-leak. If torch's pinned memory "
        "grows too, the finding says by how much.",
        "In the process: look for lists of samples, logs, decoded files; tracemalloc names lines. In a worker: a cache "
        "in __getitem__, or Python objects whose pages are copied when their reference counts change; use arrays "
        "instead of lists.",
        "In the first readings. Pages of a mapped file count as resident once they are read: that growth ends. It is "
        "only info if the process grows no faster than allocated on its device: with unified memory, or a virtual "
        "GPU, a leak on the device is also one on the host.",
    ),
    "agent-part-off": FindingPage(
        "A part of gpumon's agent failed five times in the training process and is off for the rest of the run. "
        "Training is not affected. The finding says which figures are missing from then on.",
        "The agent reports it once a second, with the exception and its line.",
        "Report it with the finding's text: it is a bug in gpumon. The part is on again after the training is "
        "restarted. Other figures stay right.",
    ),
}

THRESHOLDS = {
    "headroom_share_of_device": "headroom below {:.0%} of the device",
    "least_steps_learnt": "from {} steps learnt",
    "p_oom": "probability of a failed allocation from {:.0%}",
    "critical_steps_to_oom": "critical if memory is full within {} steps",
    "steps_to_oom": "full within {} steps if kept bytes grow",
    "steps_to_oom_by_batch": "within {} if the need of a step grows",
    "as_before": "a peak up to {} times one that fitted counts as fitting",
    "alone_steps": "without a holder after {} steps of growth",
    "least_share_of_growth": "info below {:.0%} of the growth",
    "share_of_parameters": "from {:.0%} of the parameters' bytes",
    "saving_share_of_peak": "saves at least {:.0%} of the peak",
    "excess_share_of_median": "at least {:.0%} above the median",
    "steps_after_use": "{} steps after load_state_dict",
    "share_of_loaded": "at least {:.0%} of what was loaded",
    "warning_share_of_device": "a warning from a peak of {:.0%} of the device",
    "kept_steps": "listed for {} steps",
    "unused_share_of_reserved": "at least {:.0%} of reserved",
    "least_bytes": "at least {:,} bytes",
    "least_share_of_peak": "at least {:.0%} of the peak",
}
"""What each threshold of a rule means."""


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
        parts = [("What it means", written.means), ("How gpumon detects it", written.evidence)]
        parts.append(("What to do", written.do))
        if written.silent:
            parts.append(("When it is not reported", written.silent))
    parts.append(("Thresholds", "; ".join(_thresholds(rule)) + "."))
    return parts


def _thresholds(rule: Rule) -> list[str]:
    """The rule's own data, in words."""
    opens, closes = _checks(rule.opens_after), _checks(rule.closes_after)
    said = [f"opens after {opens} that {_find(rule.opens_after)} it, closes after {closes} without it"]
    own = ((name, getattr(rule, name)) for name in rule.__struct_fields__[4:])
    return [*said, *(THRESHOLDS[name].format(value).replace("%", " %") for name, value in own if value)]


def _checks(count: int) -> str:
    return "one check" if count == 1 else f"{count} checks in a row"


def _find(count: int) -> str:
    return "finds" if count == 1 else "find"
