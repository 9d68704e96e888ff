"""The terms on the screen with their meanings and formulas. Source of the help and explain pages."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Term:
    word: str
    meaning: str
    formula: str = ""


_TERMS = (
    Term("allocated", "Bytes in blocks that tensors hold now, as PyTorch's allocator counts them.",
         "weights + buffers + gradients + optimizer + buckets + inputs + activations + workspaces + checkpoints"
         " + unexplained + rounding"),
    Term("reserved", "Bytes the allocator took from the device and keeps for reuse.", "allocated + slack"),
    Term("slack", "Reserved but in no tensor: free for this process, lost to others.", "reserved − allocated"),
    Term("rounding", "What block sizes add to what was asked for (multiples of 512 B, unsplit remainders).",
         "allocated − requested"),
    Term("context", "The driver's bytes of this process outside the allocator: CUDA context, kernels, libraries.",
         "the process's bytes by the driver − reserved"),
    Term("other processes", "Bytes on this device that the driver books to other processes.", "used − this process"),
    Term("free", "What the driver says nobody has taken.", "total − reserved − context − other processes"),
    Term("weights", "Parameters of the watched models, tied ones once."),
    Term("buffers", "Registered buffers of the watched models (running means, masks)."),
    Term("gradients", "The .grad of the parameters."),
    Term("optimizer", "State tensors of the optimizers (Adam: two per parameter)."),
    Term("buckets", "DDP's or FSDP's communication buckets and shards, and what a communication hook keeps."),
    Term("inputs", "Tensors handed to the model's forward."),
    Term("activations", "Saved for backward by autograd. Read on sampled steps only."),
    Term("still held", "What a step leaves of its activations as it ends: outputs in a variable, in a list, in a log."),
    Term("step adds", "How far forward and backward rise above what was allocated as forward began: activations, the"
                      " gradients so far and temporaries together."),
    Term("update adds", "How far the optimizer's step rises above what is allocated as it ends: its temporaries."),
    Term("temporaries", "Alive at the peak only: intermediate results of the operation that was running."),
    Term("workspaces", "Scratch space of libraries (cuBLAS, cuDNN)."),
    Term("checkpoints", "Tensors of a loaded checkpoint that are still alive."),
    Term("other models", "Weights and buffers of models in the process that nobody watches: an EMA, a teacher."),
    Term("variables", "What no other line has, and variables of the functions around the model hold: an EMA kept as a"
                      " list, data kept on the device. Also what a census found that grows, and who holds it."),
    Term("unexplained", "Allocated, and gpumon cannot name the owner. Never spread over the other lines."),
    Term("unattributed", "On steps that were not sampled: activations and unexplained together."),
    Term("module", "A torch.nn.Module of the watched model, by its path. Figures of an open one, and of one that holds"
                   " others, are with everything below it."),
    Term("parameters", "How many numbers the module's parameters are; tied ones count where they turn up first."),
    Term("tied", "The module's parameters are another module's too (= its path), and are counted there, once."),
    Term("total", "All bytes of the line that are known.", "weights + buffers + gradients + optimizer + activations"),
    Term("share", "How much of the whole model's total this line has."),
    Term("phase", "load, forward, backward, optimizer, between, eval, or a name the script gives. Phases follow each"
                  " other without a gap: each starts where the one before it ended. rollout ×300: so many forwards"
                  " without a graph in one step, of a model in training mode."),
    Term("start", "Allocated as the phase began.", "end of the phase before it"),
    Term("peak", "The highest allocated within the phase."),
    Term("end", "Allocated as the phase closed."),
    Term("Δ", "What the phase left behind.", "end − start"),
    Term("time", "How long the phase took on the training thread's clock (kernels may still run)."),
    Term("step", "One iteration; it closes at the end of optimizer.step()."),
    Term("device", "All bytes taken on the device, every process, as the driver counts them; known from the moment"
                   " this viewer came."),
    Term("capacity", "The device's total."),
    Term("estimate", "What the line should be, in closed form, from the model's and the optimizer's description;"
                     " activations (what forward or backward adds to what stood as forward began) are learnt from"
                     " the first iterations."),
    Term("measured", "What it is in the newest step: owners at its end; activations: the most that forward or backward"
                     " added; temporaries: what the optimizer added to what stood at its end."),
    Term("difference", "How far reality is from the estimate.", "measured − estimate"),
    Term("source", "exact: closed form. learnt: from the first iterations. measured: read, not derived. bound: an upper"
                   " bound in closed form."),
    Term("next peak", "The next iteration's highest allocated; in nineteen of twenty cases within the interval."),
    Term("headroom", "What is left above the next peak before an allocation fails.",
         "reserved + free, by the driver − next peak − bytes stranded in segments that stay in use"),
    Term("fits · tight · OOM ahead", "tight: the interval's upper end leaves under 5 % of the device, or an allocation"
                                     " fails with more than 1 % probability. OOM ahead: with 50 % or more."),
    Term("batch factor", "The largest batch, as a multiple of the present one, whose peak still fits."),
    Term("finding", "Something that grows, fails or will fail (warning, critical), or a fact worth knowing (info), with"
                    " its evidence and a remedy."),
    Term("growth", "How fast a figure rises from step to step, taken where every step ends, with a 95 % interval; since"
                   " which step; how much it has become. A figure that settles in, follows the batch, or comes and goes"
                   " does not grow."),
    Term("live blocks", "How many blocks of the allocator are in use at the end of the step: the smallest leak is one"
                        " more a step."),
    Term("census", "One walk over the process's objects: live tensors that no owner of the ledger claims, alike ones"
                   " together, and who holds them."),
    Term("tensors", "How many there are of the group; views of one storage are one."),
    Term("grown", "How many more than at the census before."),
    Term("bytes/step", "What the group grew by, for each step between two censuses.",
         "grown × bytes of one ÷ steps between the two"),
    Term("graph", "kept: the tensors have a grad_fn, and what autograd saved for them lives on with them."),
    Term("held by", "The name through which the tensors are reached: a variable, an attribute, an entry of a list or"
                    " dict, a closure. [*] stands for any entry. Never a guess: where nobody was found, it says so."),
    Term("made at", "The line of the script that made the newest of them; known after the agent has watched some steps'"
                    " allocations."),
    Term("segment", "A piece of the device's memory that the allocator took in one call and cuts into blocks."),
    Term("block", "A part of a segment: in use, waiting, or free."),
    Term("pool", "Segments that serve the same requests: small (up to 1 MiB) or large, of one stream, private (of a"
                 " CUDA graph or MemPool) or not."),
    Term("waiting", "Freed by the script, but a stream may still use it: not free yet."),
    Term("inactive split", "Free blocks beside used ones in a segment: of use for what fits into them, never given"
                           " back to the device."),
    Term("unused", "Segments without any used block: torch.cuda.empty_cache() would give them back.",
         "reserved − allocated − waiting − inactive split"),
    Term("largest free block", "What can be had without a new segment, in one piece. A request looks only into the pool"
                               " of its size and stream."),
    Term("fragmentation", "The share of reserved that is inactive split.", "inactive split ÷ reserved"),
    Term("requested", "What the allocation that failed asked for."),
    Term("verdict", "Why an allocation failed. capacity: what is alive and what is asked for do not fit. fragmentation:"
                    " enough is unused, in no piece large enough. leak: more stays from step to step. other-process:"
                    " somebody else's bytes make the difference."),
    Term("RSS", "The process's resident host memory."),
    Term("pinned", "Host memory that torch's own allocator keeps page-locked for copies (pin_memory): in use or cached,"
                   " in the powers of two it asks for. Older torch does not tell."),
    Term("CPU", "Share of one core: 200 % is two cores busy."),
    Term("workers", "Child processes, such as DataLoader workers."),
    Term("GPU", "Utilization (share of time in which a kernel ran), temperature and power, by the driver."),
    Term("it/s", "Closed steps a second, over the last ones."),
    Term("spread", "How far this rank's peak is from the median of all ranks.", "peak − median peak"),
    Term("lost events", "Messages that this viewer missed: a gap in their numbers. Training never waits for a viewer."),
    Term("sampled", "A step on which owners and activations were read; how often follows the agent's time budget."),
)  # fmt: skip

TERMS = {term.word: term for term in _TERMS}
