"""The terms on the screen with their meanings and formulas. Source of the help and explain pages."""

from __future__ import annotations

import msgspec


class Term(msgspec.Struct, frozen=True):
    word: str
    meaning: str
    formula: str = ""


_WORDS = (
    Term("allocated", "Bytes in blocks that tensors hold now, as PyTorch's allocator counts them.",
         "weights + buffers + gradients + optimizer + buckets + inputs + activations + workspaces + checkpoints"
         " + unexplained + rounding"),
    Term("reserved", "Bytes the allocator took from the device and keeps for reuse.", "allocated + cached"),
    Term("cached", "Reserved, but in no tensor: this process can use it, others cannot. In JSON: slack.",
         "reserved − allocated"),
    Term("context", "Bytes of this process outside the allocator: CUDA context, kernels, libraries.",
         "the process's bytes by the driver − reserved"),
    Term("weights", "Parameters of the watched models, tied ones once."),
    Term("gradients", "The .grad of the parameters."),
    Term("optimizer", "State tensors of the optimizers (Adam: two per parameter)."),
    Term("buckets", "DDP's or FSDP's communication buckets and shards, and what a communication hook keeps."),
    Term("activations", "Saved for backward by autograd. Read on sampled steps only."),
    Term("kept after the step", "Activations still alive as the step ends: outputs in a variable, a list, a log."),
    Term("temporaries", "Alive at the peak only: intermediate results of the operation that was running."),
    Term("unexplained", "Allocated, and gpumon cannot name the owner. Never spread over the other lines."),
    Term("phase", "load, forward, backward, optimizer, data (in JSON: between), eval, or a name the script"
                  " gives. Phases follow each other without a gap: each starts where the one before it ended."
                  " rollout ×300: 300 forwards without a graph in one step, with the model in training mode."),
    Term("peak", "The highest allocated within the phase."),
    Term("step", "One iteration; it closes at the end of optimizer.step()."),
    Term("capacity", "The device's total."),
    Term("estimate", "What the line should be, in closed form, from the model's and the optimizer's description."
                     " Activations (the most that forward or backward adds) are learnt from the first iterations."),
    Term("measured", "The newest step's figure: owners at its end; activations: the most that forward or backward"
                     " added; temporaries: the optimizer's peak minus what is allocated at its end."),
    Term("next peak", "The highest allocated of the next iteration, with a 95 % interval."),
    Term("headroom", "What is left above the next peak before an allocation fails.",
         "reserved + free − next peak − free pieces in segments that stay in use"),
    Term("fits · tight · OOM ahead", "tight: the interval's upper end leaves under 5 % of what the process can have."
                                     " OOM ahead: the whole interval does not fit or, once enough forecasts were"
                                     " checked, the next peak does not."),
    Term("answer", "The state of the whole job, worst first: OUT OF MEMORY, ENDED, WILL NOT FIT, LEAK, TIGHT (less than"
                   " 5 % would be left), UNKNOWN, OK. Of several ranks the worst is named."),
    Term("finding", "Something that grows, fails or will fail (warning, critical), or a fact worth knowing (info), with"
                    " its evidence and a remedy."),
    Term("growth", "How fast a figure at the end of each step rises, with a 95 % interval; since which step; by how"
                   " much so far. A figure that settles, follows the batch, or rises and falls does not grow."),
    Term("census", "One walk over the process's objects: live tensors without a known owner, grouped by shape, and"
                   " the variables that hold them."),
    Term("held by", "The name that leads to the tensors: a variable, an attribute, an entry of a list or dict, a"
                    " closure. [*] is any entry. Never a guess: if no holder was found, it says so."),
    Term("made at", "The line of the script that made the newest of them; known once the agent has recorded the"
                    " allocations of some steps."),
    Term("segment", "Device memory that the allocator took in one call and splits into blocks."),
    Term("block", "A part of a segment: in use, waiting, or free."),
    Term("fragmentation", "The share of reserved that is inactive split.", "inactive split ÷ reserved"),
    Term("costs", "What gpumon costs the training, as a share of the mean step's time: what steps that are read take"
                  " longer than the others, and the hooks of the others. ±: a 95 % interval. ≤: not measured, because"
                  " too few steps were quiet or their durations vary too much; then it is six times what the agent's"
                  " own clock saw. Nothing is shown if GPUMON_GOVERNOR is off."),
    Term("sampled", "A step in which owners and activations were read; how often depends on the agent's time budget."),
)  # fmt: skip

_COLUMNS = (
    Term("rounding", "Bytes that block sizes add to the requests (multiples of 512 B, unsplit remainders).",
         "allocated − requested"),
    Term("other processes", "Memory that other processes use on this device.", "used − this process"),
    Term("free", "Free on the device, by the driver.", "total − reserved − context − other processes"),
    Term("buffers", "Registered buffers of the watched models (running means, masks)."),
    Term("inputs", "Tensors handed to the model's forward."),
    Term("step adds", "The most that forward and backward add to the bytes allocated at forward's start: activations,"
                      " gradients so far and temporaries together."),
    Term("update adds", "The optimizer phase's peak minus what is allocated at its end: its temporaries."),
    Term("workspaces", "Scratch space of libraries (cuBLAS, cuDNN)."),
    Term("checkpoints", "Tensors of a loaded checkpoint that are still alive."),
    Term("other models", "Weights and buffers of models in the process that are not watched: an EMA, a teacher."),
    Term("variables", "Tensors that no other line has and that variables of the functions around the model hold: an EMA"
                      " kept as a list, data on the device. Also tensors that a census found to grow."),
    Term("unattributed", "On steps that were not sampled: activations and unexplained together."),
    Term("module", "A torch.nn.Module of the watched model, by its path. Its figures"
                   " include all modules below it."),
    Term("parameters", "Number of elements of the module's parameters; tied ones count at their first module."),
    Term("tied", "The module shares its parameters with another one (= its path), which counts them."),
    Term("total", "All known bytes of the line.", "weights + buffers + gradients + optimizer + activations"),
    Term("share", "This line's part of the whole model's total."),
    Term("start", "Allocated when the phase began.", "end of the phase before it"),
    Term("end", "Allocated when the phase ended."),
    Term("Δ", "What the phase added and did not free.", "end − start"),
    Term("time", "How long the phase took on the training thread's clock (kernels may still run)."),
    Term("device", "Bytes used on the device by all processes, by the driver; known since this viewer started."),
    Term("difference", "How far the measured figure is from the estimate.", "measured − estimate"),
    Term("source", "exact: closed form. learnt: from the first iterations. measured: read. bound: an upper"
                   " bound in closed form."),
    Term("batch factor", "The largest batch, as a multiple of the present one, whose peak still fits."),
    Term("live blocks", "Blocks of the allocator in use at the end of the step; the smallest leak adds one a step."),
    Term("tensors", "Number of tensors in the group; views of one storage count once."),
    Term("grown", "How many more than at the previous census."),
    Term("bytes/step", "The group's growth between two censuses, per step.",
         "grown × bytes of one ÷ steps between the two"),
    Term("graph", "kept: the tensors have a grad_fn, which keeps what autograd saved for them alive."),
    Term("pool", "Segments for the same kind of request: small (up to 1 MiB) or large, of one stream, private (of a"
                 " CUDA graph or MemPool) or not."),
    Term("unowned", "Blocks in use whose owner is not known: no tensor that gpumon can find uses them. Without the"
                    " step's graph, activations are among them."),
    Term("waiting", "Freed by the script, but a stream may still use it: not free yet."),
    Term("inactive split", "Free blocks beside used ones in a segment: reused by requests that fit, never returned"
                           " to the device."),
    Term("unused", "Segments without a used block: torch.cuda.empty_cache() would return them to the device.",
         "reserved − allocated − waiting − inactive split"),
    Term("largest free block", "The largest request that fits without a new segment. A request uses only the pool of"
                               " its size and stream."),
    Term("requested", "The size of the allocation that failed."),
    Term("verdict", "Why an allocation failed. capacity: live bytes plus the request do not fit. fragmentation:"
                    " enough is unused, but no piece is large enough. leak: bytes are kept from step to step."
                    " other-process: it would fit without the memory of other processes."),
    Term("RSS", "The process's resident host memory."),
    Term("pinned", "Host memory that torch's own allocator keeps page-locked for copies (pin_memory): in use or cached,"
                   " in powers of two. Unknown in older versions of torch."),
    Term("CPU", "Percent of one core: 200 % is two busy cores."),
    Term("workers", "Child processes, such as DataLoader workers."),
    Term("GPU", "Utilization (share of time in which a kernel ran), temperature and power, by the driver."),
    Term("it/s", "Completed steps a second, over the newest ones."),
    Term("spread", "How far this rank's peak is from the median of all ranks.", "peak − median peak"),
    Term("memory", "As a bar up to the device's capacity: the process's peak in its newest step, what it has reserved"
                   " beyond that, other memory in use there, and free. Of a process without an agent: its bytes by the"
                   " driver."),
    Term("age", "How long the process has been running. pid is its number, rank its number in a job of several."),
    Term("no agent", "A process that the driver lists on a GPU and that no agent reports: gpumon knows its bytes only."
                     " GPU is the driver's number of the device, which torch's need not be."),
    Term("lost events", "Messages that this viewer missed: a gap in their numbers. Training never waits for a viewer."),
)  # fmt: skip

WORDS = {term.word: term for term in _WORDS}
"""Those of every screen, which the help lists."""

COLUMNS = {term.word: term for term in _COLUMNS}
"""Rows and columns of one panel, and rarer words: on its explain page."""

TERMS = WORDS | COLUMNS
