"""Bytes that CUDA kernels allocate while they run, beside their outputs: workspaces, partial sums, sorted indices.

Model. One function per operator: from shapes and strides to the sizes alive together at its peak.

Source. ATen's CUDA sources, named at each function, and the requests that PyTorch's allocator got on the virtual GPU.
Cost. O(1) per operator.

Known limitations. Operators not listed need less than their outputs, or are unknown. cuDNN's workspaces depend on the
algorithm it chooses by timing; they count as 0, as on the virtual GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import msgspec

MIB = 1 << 20
CUBLAS_WORKSPACE = 8_519_680
CUBLAS_WORKSPACE_HOPPER = 33_554_432
CUBLASLT_WORKSPACE = MIB


class Hardware(msgspec.Struct, frozen=True):
    """The device properties that sizes depend on; defaults are an A100's."""

    multiprocessors: int = 108
    threads: int = 2048  # per multiprocessor
    cublas_workspace: int = CUBLAS_WORKSPACE


Rule = Callable[[Sequence[Any], Sequence[Any], Hardware], Sequence[int]]


def temporaries(name: str, args: Sequence[Any], outputs: Sequence[Any], hardware: Hardware) -> Sequence[int]:
    """Bytes of each temporary of an operator, by its name ("aten.mm.default"); `outputs`: what it returned."""
    rule = _RULES.get(name)
    return rule(args, outputs, hardware) if rule is not None else ()


def uses_handle(name: str) -> bool:
    """Whether the operator uses cuBLAS's handle, for which older versions allocate a workspace; cuBLASLt does too."""
    return name in _CUBLAS or name == "aten.addmm.default"


def uses_cublas(name: str, args: Sequence[Any]) -> bool:
    """Whether the operator uses cuBLAS's own workspace, which PyTorch may keep."""
    return name in _CUBLAS or (name == "aten.addmm.default" and not _is_lt(args))


# ---------------------------------------------------------------------------------------------------------- products

_CUBLAS = frozenset(
    f"aten.{name}.default" for name in ("mm", "bmm", "baddbmm", "mv", "addmv", "dot", "_addmm_activation")
)


def _is_lt(args: Sequence[Any]) -> bool:
    """Whether addmm goes through cuBLASLt, which adds the bias itself (aten/src/ATen/native/cuda/Blas.cpp)."""
    bias, _, second = args[:3]
    return bool(bias.dim() == 1 and bias.shape[0] == second.shape[1] and bias.is_contiguous() and min(second.shape) > 1)


def _addmm(args: Sequence[Any], outputs: Sequence[Any], hardware: Hardware) -> Sequence[int]:
    return (*_products(args[1:3], outputs, hardware), *((CUBLASLT_WORKSPACE,) if _is_lt(args) else ()))


def _products(args: Sequence[Any], _: Sequence[Any], hardware: Hardware) -> Sequence[int]:
    """Copies of the factors whose strides cuBLAS does not support."""
    return tuple(factor.numel() * factor.element_size() for factor in args[:2] if not _blas_can_take(factor))


def _blas_can_take(factor: Any) -> bool:
    rows, columns = factor.shape[-2:]
    down, across = factor.stride()[-2:]
    return bool((across == 1 and down >= max(1, columns)) or (down == 1 and across >= max(1, rows)))


# -------------------------------------------------------------------------------------------------------- reductions


def _power_of_two_below(value: int) -> int:
    return 1 << (max(1, value).bit_length() - 1)


def reduction(
    outputs: int,
    inputs: int,
    *,
    along_fastest: bool,
    one_dimension: bool,
    output_row: int,
    hardware: Hardware,
    width_of_sum: int = 4,
) -> Sequence[int]:
    """A sum split over blocks is combined in global memory: its buffer and semaphores
    (aten/src/ATen/native/cuda/Reduce.cuh, setReduceConfig). `inputs`: elements summed for each of `outputs`;
    `output_row`: length of the fastest remaining dimension; `width_of_sum`: bytes of the accumulator."""
    wide, high, vector = (inputs, outputs, 1) if along_fastest else (outputs, inputs, 1)
    if along_fastest and wide >= 128 and one_dimension:
        wide //= 4
    elif not along_fastest:
        vector = next(size for size in (4, 2, 1) if output_row % size == 0)
        wide //= vector
    most = 512 // vector
    wide_power, high_power = (min(most, _power_of_two_below(size)) for size in (wide, high))
    width = min(wide_power, 32)
    height = min(high_power, most // width)
    width = min(wide_power, most // height)
    step = width if along_fastest else 1
    per_thread = -(-inputs // step)
    if per_thread < min(height * 16, 256):
        return ()  # no reduction across warps, so none across blocks
    per_thread = -(-inputs // (step * height))
    grid = -(-(outputs // vector) // (1 if along_fastest else width))
    target = hardware.multiprocessors * (hardware.threads // (width * height))
    if per_thread < 256 or grid > target:
        return ()
    blocks = min(max(-(-target // grid), -(-per_thread // 256)), -(-per_thread // 16))
    if blocks <= 1:
        return ()
    return width_of_sum * outputs * blocks * (1 if along_fastest else width * vector), 4 * grid


def _sum(args: Sequence[Any], _: Sequence[Any], hardware: Hardware) -> Sequence[int]:
    return _over(args[0], _dimensions(args), hardware)


def _variance(args: Sequence[Any], _: Sequence[Any], hardware: Hardware) -> Sequence[int]:
    return _over(args[0], _dimensions(args), hardware, 16)  # mean, sum of squares and two counts


def _dimensions(args: Sequence[Any]) -> Sequence[int]:
    given = next((arg for arg in args[1:] if isinstance(arg, (list, tuple)) and arg), None)
    return range(args[0].dim()) if given is None else given


def _over(tensor: Any, dims: Sequence[int], hardware: Hardware, width_of_sum: int = 4) -> Sequence[int]:
    if not tensor.numel():
        return ()
    reduced = {dim % tensor.dim() for dim in dims} if tensor.dim() else set()
    count = prod(size for dim, size in enumerate(tensor.shape) if dim not in reduced)
    kept = [
        (stride, size)
        for dim, (stride, size) in enumerate(zip(tensor.stride(), tensor.shape, strict=True))
        if dim not in reduced and size > 1
    ]
    fastest = min((tensor.stride(dim) for dim in reduced if tensor.shape[dim] > 1), default=1)
    return reduction(
        count,
        tensor.numel() // count,
        along_fastest=not kept or fastest < min(kept)[0],
        one_dimension=len(reduced) == 1 or not kept,
        output_row=min(kept)[1] if kept else 1,
        hardware=hardware,
        width_of_sum=width_of_sum,
    )


# --------------------------------------------------------------------------------------------------------- attention


def _efficient_backward(args: Sequence[Any], _: Sequence[Any], hardware: Hardware) -> Sequence[int]:
    """Gradients of the queries are summed in fp32 (…/transformers/cuda/attention_backward.cu): a row's share of the
    output for each query, and blocks of 64 queries with their counters."""
    gradient, query = args[0], args[1]
    batch, heads, length, width = query.shape
    delta = [4 * batch * heads * length]
    if query.element_size() == 4:  # the product that is summed to shares is another tensor
        delta = [query.numel() * 4, *delta, *delta]
    nbytes = gradient.numel() * gradient.element_size()
    copy = [] if gradient.transpose(1, 2).is_contiguous() or gradient.is_contiguous() else [nbytes]
    blocks = -(-length // 64)
    workspace = batch * heads * (64 * blocks * (-(-width // 32) * 32) * 4 + 16 * blocks)
    if query.element_size() == 4:  # the product is freed before the workspace is allocated
        return (*copy, *delta) if sum(delta) > workspace + delta[-1] else (*copy, delta[-1], workspace)
    return (*copy, *delta, workspace)


def _flash_backward(args: Sequence[Any], _: Sequence[Any], hardware: Hardware) -> Sequence[int]:
    """Row sums and the queries' gradient in fp32, both padded; keys and values again if heads share them
    (…/transformers/cuda/flash_attn/flash_api.cpp)."""
    query, key = args[1], args[2]
    batch, heads, length, width = query.shape
    rows = batch * heads * (-(-length // 128) * 128)
    shared = [] if key.shape[1] == heads else [batch * heads * key.shape[2] * width * key.element_size()] * 2
    return (4 * rows, 4 * rows * (-(-width // 32) * 32), *shared)


# ------------------------------------------------------------------------------------------------------ other kernels


def _embedding_backward(args: Sequence[Any], _: Sequence[Any], hardware: Hardware) -> Sequence[int]:
    """Above 3,072 indices: sorted indices and partial sums of rows (aten/src/ATen/native/cuda/Embedding.cu and
    EmbeddingBackwardKernel.cu)."""
    gradient, indices, rows = args[:3]
    count, width = indices.numel(), gradient.shape[-1]
    copy = [] if gradient.is_contiguous() else [gradient.numel() * gradient.element_size()]
    if count <= 3072:
        return copy
    segments = min(count, rows)
    parts = count // 10 + segments
    each = indices.element_size()
    return (*copy, *[each * count] * 3, 8, each * segments, each * segments, 8, each * parts, 4 * parts * width)


def _convolution_backward(args: Sequence[Any], _: Sequence[Any], hardware: Hardware) -> Sequence[int]:
    """The gradient as cuDNN needs it; after it is freed, the bias's gradient as a sum over batch and positions."""
    gradient, bias = args[0], args[3]
    copy = () if gradient.is_contiguous() else (gradient.numel() * gradient.element_size(),)
    if bias is None or not args[-1][2]:
        return copy
    partial = _over(gradient, [dim for dim in range(gradient.dim()) if dim != 1], hardware)
    return max(copy, partial, key=sum)


def _contiguous_gradient(args: Sequence[Any], _: Sequence[Any], hardware: Hardware) -> Sequence[int]:
    return () if args[0].is_contiguous() else (args[0].numel() * args[0].element_size(),)


# -------------------------------------------------------------------------------------------------------------- losses


def _elementwise_loss(args: Sequence[Any]) -> int:
    """Bytes of the losses of every element; 0 if they are the output."""
    reduced = len(args) < 3 or args[-1] != 0
    return args[0].numel() * args[0].element_size() if reduced else 0


def kept(name: str, args: Sequence[Any]) -> int | None:
    """Bytes of the output's storage, if larger than the output: the mean of such a loss stays in the storage of all
    elements' losses (aten/src/ATen/native/BinaryOps.cpp, mse_loss_out)."""
    return _elementwise_loss(args) or None if name in _LOSSES_IN_PLACE else None


_LOSSES_IN_PLACE = {f"aten.{name}.default" for name in ("mse_loss", "smooth_l1_loss", "binary_cross_entropy")}


def _losses(copies: int) -> Rule:
    return lambda args, _, __: [_elementwise_loss(args)] * copies


_RULES: dict[str, Rule] = {
    f"aten.{name}": rule
    for names, rule in (
        ("addmm.default", _addmm),
        ("mm.default bmm.default", _products),
        ("sum.dim_IntList sum.default mean.dim mean.default linalg_vector_norm.default amax.default", _sum),
        ("var.correction std.correction var_mean.correction", _variance),
        ("_scaled_dot_product_efficient_attention_backward.default", _efficient_backward),
        ("_scaled_dot_product_flash_attention_backward.default", _flash_backward),
        ("embedding_dense_backward.default", _embedding_backward),
        ("convolution_backward.default", _convolution_backward),
        ("mse_loss.default smooth_l1_loss.default huber_loss.default logsumexp.default", _losses(1)),
        ("binary_cross_entropy_with_logits.default", _losses(2)),
        (
            "native_layer_norm_backward.default _softmax_backward_data.default _log_softmax_backward_data.default"
            " native_group_norm_backward.default max_pool2d_with_indices_backward.default"
            " upsample_bilinear2d_backward.default upsample_nearest2d_backward.default",
            _contiguous_gradient,
        ),
    )
    for name in names.split()
}
