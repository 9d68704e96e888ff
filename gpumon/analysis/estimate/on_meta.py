"""Makes PyTorch run on the meta device as on CUDA, and reports its allocations. Long: one mode for each difference.

CUDA is not needed, nor a torch built for it. Tensors have shapes and no bytes; autograd, optimizers and modules are the
real ones. Behaviour specific to CUDA is emulated: autocast's rules, dropout with a mask of one byte per element, the
choice of attention kernel.

Source. ATen's autocast lists (aten/src/ATen/autocast_mode.h), aten/src/ATen/native/Dropout.cpp and
aten/src/ATen/native/transformers/cuda/sdp_utils.cpp.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from importlib import import_module
from math import prod
from typing import Any

import torch
import torch._meta_registrations  # older versions import it late; attention has no meta kernels before
from torch import overrides
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from gpumon.analysis.estimate.replacing import replaced

META = torch.device("meta")
aten = torch.ops.aten
VERSION = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
_EFFICIENT = "aten._scaled_dot_product_efficient_attention.default"
_FUSED_RMS_NORM = (2, 15)
_GROUPED_EFFICIENT = VERSION >= (2, 15)  # supports fewer key heads than query heads since then


class Shapes:
    """Caches operators' results by input shapes: layers are alike, and so are iterations.

    PyTorch computes most results in Python, ten times slower than a lookup. Cached are operators that return new
    tensors or change their first argument. Views and all others are run each time.
    """

    def __init__(self) -> None:
        self._kinds: dict[Any, str] = {}
        self._known: dict[Any, Any] = {}

    def run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        kind = self._kinds.get(func) or self._kinds.setdefault(func, _kind(func))
        if kind == _RUN:
            return func(*args, **kwargs)
        try:
            key = (func, *map(_alike, args), *((name, _alike(value)) for name, value in kwargs.items()))
            if key in self._known:
                return _made(self._known[key]) if kind == _NEW else args[0] if func._schema.returns else None
        except (_Unlike, TypeError):  # TypeError: an unhashable argument
            return func(*args, **kwargs)
        out = func(*args, **kwargs)
        if kind == _NEW and _shares(out, args):  # such as _unsafe_view, a view by another name
            self._kinds[func] = _RUN
        else:
            self._known[key] = _layouts(out) if kind == _NEW else None
        return out


class _Unlike(Exception):
    """A tensor that is not described by shape, strides and dtype alone."""


_NEW, _CHANGES, _RUN = "returns new tensors", "changes its first argument", "is run"
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _kind(func: Any) -> str:
    name, schema = func._schema.name, func._schema
    aliases = [argument.alias_info for argument in schema.arguments]
    tensors = all(str(value.type) in ("Tensor", "List[Tensor]") for value in schema.returns)
    if not name.startswith("aten::") or not tensors:
        return _RUN
    if not any(aliases) and not any(value.alias_info for value in schema.returns):
        return _NEW
    first, *others = aliases
    elementwise = name in _ELEMENTWISE or name.startswith("aten::_foreach_")
    return _CHANGES if first is not None and first.is_write and not any(others) and elementwise else _RUN


_ELEMENTWISE = {
    f"aten::{name}_"
    for name in [
        "add",
        "sub",
        "mul",
        "div",
        "addcmul",
        "addcdiv",
        "lerp",
        "copy",
        "zero",
        "fill",
        "sqrt",
        "neg",
        "clamp",
        "masked_fill",
        "pow",
        "sign",
    ]
}


def _alike(value: Any) -> Any:
    """What a result's layout depends on in an argument."""
    if isinstance(value, torch.Tensor):
        if not value.is_meta or value.layout is not torch.strided or type(value) not in _PLAIN:
            raise _Unlike
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(map(_alike, value))
    return type(value), value


def _shares(out: Any, args: Any) -> bool:
    """Whether a result shares an argument's storage, or is not an ordinary tensor on the device."""
    made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
    if not all(each.is_meta and each.layout is torch.strided and type(each) in _PLAIN for each in made):
        return True
    given = {leaf.untyped_storage()._cdata for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)}
    return any(each.untyped_storage()._cdata in given for each in made)


def _layouts(out: Any) -> Any:
    if isinstance(out, torch.Tensor):
        return out.shape, out.stride(), out.dtype
    return None if out is None else [_layouts(each) for each in out]


def _made(layout: Any) -> Any:
    if isinstance(layout, list):
        return tuple(map(_made, layout))
    return None if layout is None else torch.empty_strided(*layout[:2], dtype=layout[2], device=META)


class StorageMode(TorchDispatchMode):  # type: ignore[misc]
    """Calls `born(key, bytes, gathered)` and `died(key)` for every storage on the meta device, and `during(op, inputs,
    outputs)` for what else a CUDA kernel would allocate while it runs."""

    def __init__(
        self,
        born: Callable[[int, int, bool], None],
        died: Callable[[int], None],
        during: Callable[[str, Sequence[Any], Sequence[Any]], None],
        larger: Callable[[str, Sequence[Any]], int | None] = lambda *_: None,
        shapes: Shapes | None = None,
    ) -> None:
        super().__init__()
        self.born, self.died, self.during, self.larger = born, died, during, larger
        self.shapes = Shapes() if shapes is None else shapes
        self.operator = ""  # the one that ran last
        self._alive: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):  # its operator on the shard comes here too
            return NotImplemented
        kwargs = _on_meta(kwargs or {})
        name = self.operator = str(func)
        if name == "aten.copy_.default" and args[1].is_meta and not args[0].is_meta:
            return args[0]  # a copy to the host: keep the old values
        if name in _ANSWERED and args[0].device.type == "meta":
            return _ANSWERED[name](*args, **kwargs)
        if name.startswith("aten._fused_"):  # in place, and no kernel for this device
            return None
        out = self.shapes.run(func, args, kwargs)
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor) and leaf.device.type == "meta"]
        for tensor in made[:2] if name == _EFFICIENT else made:  # its random state is on the host
            if tensor.layout is torch.strided:  # a sparse one consists of tensors already seen
                self.see(tensor, self.larger(name, args))
        if made:
            self.during(name, args, made)
        return out

    def see(self, tensor: torch.Tensor, size: int | None = None) -> int:
        """The key of the tensor's storage. A new one is reported, with `size` bytes if given."""
        storage = tensor.untyped_storage()
        key = int(storage._cdata)
        if key not in self._alive:
            self._alive[key] = weakref.ref(storage, lambda _: self._gone(key))
            self.born(key, size or storage.nbytes(), False)
        return key

    def _gone(self, key: int) -> None:
        del self._alive[key]
        self.died(key)

    def __enter__(self) -> StorageMode:
        kind = torch.UntypedStorage
        resize = kind.resize_
        self._patch = replaced(kind, "resize_", lambda storage, size: self._resized(resize, storage, size))
        self._patch.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *reason: Any) -> None:
        super().__exit__(*reason)
        self._patch.__exit__(None, None, None)

    def _resized(self, resize: Callable[..., Any], storage: torch.UntypedStorage, size: int) -> None:
        """FSDP frees and reallocates a storage this way."""
        key, before = int(storage._cdata), storage.nbytes()
        resize(storage, size)
        if key in self._alive and before != size:
            self.died(key)
            self.born(key, size, True)


class _Devices(TorchFunctionMode):  # type: ignore[misc]
    """Redirects CUDA devices to the meta device."""

    def __torch_function__(
        self, func: Any, types: object, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0].to(META)
        return func(*(_device(value) for value in args), **{k: _device(v) for k, v in (kwargs or {}).items()})


def _device(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return META
    return META if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")) else value


def _on_meta(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: _device(value) if name == "device" else value for name, value in kwargs.items()}


# Numbers read from the device are zero, shapes that depend on values are empty: as on the virtual GPU.
_ANSWERED: dict[str, Callable[..., Any]] = {
    "aten._local_scalar_dense.default": lambda tensor: torch.zeros((), dtype=tensor.dtype, device="cpu").item(),
    "aten.nonzero.default": lambda tensor: tensor.new_empty((0, tensor.dim()), dtype=torch.int64),
    "aten.masked_select.default": lambda tensor, mask: tensor.new_empty((0,)),
    "aten.is_pinned.default": lambda *_, **__: False,
    "aten.equal.default": lambda *_: False,
}


# ------------------------------------------------------------------------------------------------------------ attention


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """scaled_dot_product_attention with the kernel for compute capability 8.0."""
    given = (query, key, value)
    graph = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)
    half = query.dtype in (torch.float16, torch.bfloat16)
    four = all(tensor.dim() == 4 for tensor in given) and all(size for tensor in given for size in tensor.shape)
    alike = query.shape[-1] == key.shape[-1] == value.shape[-1]
    heads = query.shape[-3] == key.shape[-3] == value.shape[-3] if four else False
    backends = torch.backends.cuda
    flash = backends.flash_sdp_enabled() and four and alike and half and attn_mask is None and query.shape[-1] <= 256
    if flash and (heads or enable_gqa):
        width = query.shape[-1]
        scale = scale if scale is not None else width**-0.5
        padded = [torch.nn.functional.pad(t, (0, -width % 8)) if width % 8 else t for t in given]
        out = aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, scale=scale)[0]
        return out[..., :width] if width % 8 else out
    aligned = all(tensor.shape[-1] % (8 if half else 4) == 0 for tensor in given)
    grouped = enable_gqa and _GROUPED_EFFICIENT
    if (
        backends.mem_efficient_sdp_enabled()
        and four
        and (heads or grouped)
        and aligned
        and query.dtype is not torch.float64
    ):
        bias = _bias(attn_mask, query, key)
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, graph, dropout_p, is_causal, scale=scale
        )[0]
    return aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]


def _bias(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """A mask as the kernel needs it: floating point, rows aligned to 16, expanded over heads by a view."""
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        zero = torch.zeros((), dtype=query.dtype, device=mask.device)
        mask = torch.where(mask, zero, torch.full((), float("-inf"), dtype=query.dtype, device=mask.device))
    keys = mask.shape[-1]
    if keys % 16:
        mask = torch.nn.functional.pad(mask, (0, -keys % 16))[..., :keys]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _dropout(tensor: torch.Tensor, probability: float, train: bool) -> torch.Tensor:
    if not train or probability == 0 or not tensor.numel():
        return tensor
    return aten.native_dropout(tensor, probability, True)[0]


class _RmsNorm(torch.autograd.Function):  # type: ignore[misc]
    """CUDA's fused kernel: the result, and one fp32 number per row kept for backward with input and weight."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, rows: int, weight: torch.Tensor | None) -> torch.Tensor:
        statistics = tensor.new_empty(rows, dtype=torch.float32)
        ctx.save_for_backward(tensor, statistics, *(() if weight is None else (weight,)))
        return torch.empty_like(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tensor, _, *weight = ctx.saved_tensors
        return torch.empty_like(tensor), None, torch.empty_like(weight[0]) if weight else None


def _rms_norm(
    tensor: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    return _RmsNorm.apply(tensor, tensor.numel() // prod(shape), weight)


# ------------------------------------------------------------------------------------------------------------- autocast

_LOWER = (
    "_convolution.deprecated _convolution conv1d conv2d conv3d conv1d.padding conv2d.padding conv3d.padding conv_tbc"
    " conv_transpose1d conv_transpose2d.input conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum"
    " mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot lstm_cell gru_cell rnn_tanh_cell"
    " rnn_relu_cell scaled_dot_product_attention"
)
_WIDER = (
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor"
    " pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm"
    " nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d"
    " hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss"
    " multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss"
    " binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp"
)
_SET_TYPE = (
    "prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm"
    " linalg_matrix_norm.str_ord sum sum.dim_IntList"
)
_WIDEST = "addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put tensordot scatter_add vdot"

_AUTOCAST = torch._C.DispatchKey.AutocastCPU
_KEYS = torch._C.DispatchKeySet(_AUTOCAST)


class _Autocast:
    """CUDA's rules behind the switch of the CPU's autocast, whose state torch saves and restores for checkpointing."""

    def __init__(self) -> None:
        self.casts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def lower(self, value: Any) -> Any:
        kind = torch.get_autocast_dtype("cpu")
        if not _castable(value) or value.dtype is kind:
            return value
        keep = value.requires_grad and value.is_leaf and not value._is_view() and value.dtype is torch.float32
        if not keep or not torch.is_autocast_cache_enabled():
            return value.to(kind)
        if id(value) not in self.casts:
            self.casts[id(value)] = value, value.to(kind)
        return self.casts[id(value)][1]

    @staticmethod
    def wider(value: Any) -> Any:
        return value.to(torch.float32) if _castable(value) and value.dtype is not torch.float32 else value

    def install(self, library: Any) -> None:
        def rule(op: Any, cast: Callable[[Any], Any]) -> Callable[..., Any]:
            def kernel(*args: Any, **kwargs: Any) -> Any:
                done = [tree_map(cast, arg) for arg in reversed(args)]  # C++ compilers evaluate them in this order
                with torch._C._ExcludeDispatchKeyGuard(_KEYS):
                    return op(*reversed(done), **tree_map(cast, kwargs))

            return kernel

        def set_type(op: Any) -> Callable[..., Any]:
            def kernel(*args: Any, **kwargs: Any) -> Any:
                low = _castable(args[0]) and args[0].dtype in (torch.float16, torch.bfloat16)
                at = _dtype_position(op)
                given = kwargs.get("dtype") is not None or (at is not None and len(args) > at and args[at] is not None)
                if low and not given:
                    kwargs["dtype"] = torch.float32
                    args = args[:at] if at is not None else args
                with torch._C._ExcludeDispatchKeyGuard(_KEYS):
                    return op(*args, **kwargs)

            return kernel

        def widest(op: Any) -> Callable[..., Any]:
            def kernel(*args: Any, **kwargs: Any) -> Any:
                wide = any(_castable(leaf) and leaf.dtype is torch.float32 for leaf in tree_leaves(args))
                with torch._C._ExcludeDispatchKeyGuard(_KEYS):
                    return op(*(tree_map(self.wider, args) if wide else args), **kwargs)

            return kernel

        makers: tuple[tuple[str, Callable[[Any], Callable[..., Any]]], ...] = (
            (_LOWER, lambda op: rule(op, self.lower)),
            (_WIDER, lambda op: rule(op, self.wider)),
            (_SET_TYPE, set_type),
            (_WIDEST, widest),
        )
        listed = {f"aten::{name}" for names, _ in makers for name in names.split()}
        for name in torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU"):
            if name.startswith("aten::") and name not in listed:  # a rule for the CPU only
                library.impl(name.removeprefix("aten::"), torch.library.fallthrough_kernel, "AutocastCPU")
        for names, make in makers:
            for name in names.split():
                packet, _, overload = name.partition(".")
                op = getattr(getattr(aten, packet, None), overload or "default", None)
                if op is not None:  # otherwise not in this torch
                    library.impl(name, make(op), "AutocastCPU")


def _castable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype is not torch.float64


def _dtype_position(op: Any) -> int | None:
    """Position of an operator's positional dtype argument."""
    names = [argument.name for argument in op._schema.arguments if not argument.kwarg_only]
    return names.index("dtype") if "dtype" in names else None


# ------------------------------------------------------------------------------------------------------------ backward


def _in_a_thread_of_its_own(worker: ThreadPoolExecutor) -> Callable[..., Any]:
    """The autograd engine's run. With create_graph the new graph is built in the device's thread: autograd numbers
    nodes per thread and runs the highest first, so the order of a second backward depends on the first one's thread."""
    run = torch.autograd._engine_run_backward

    def there(outputs: Any, args: Any, named: Any, functions: Sequence[Any], dispatches: Sequence[Any]) -> Any:
        with torch._C._IncludeDispatchKeyGuard(_AUTOCAST), ExitStack() as stack:
            for mode in functions:
                overrides._push_mode(mode)
                stack.callback(overrides._pop_mode)
            for mode in dispatches:
                _python_dispatch._push_mode(mode)
                stack.callback(_python_dispatch._pop_mode)
            return run(outputs, *args, **named)

    def backward(outputs: Any, *args: Any, **named: Any) -> Any:
        create_graph = args[2]
        if not create_graph:
            return run(outputs, *args, **named)
        functions = overrides._get_current_function_mode_stack()
        dispatches = _python_dispatch._get_current_dispatch_mode_stack()
        return worker.submit(there, outputs, args, named, functions, dispatches).result()

    return backward


# -------------------------------------------------------------------------------------------------------------- context


@contextmanager
def as_cuda() -> Iterator[None]:
    """Inside, the meta device uses memory as a CUDA device would."""
    casts = _Autocast()
    begin, clear = torch.autocast.__init__, torch.clear_autocast_cache

    def autocast(self: Any, device_type: str, dtype: Any = None, **settings: Any) -> None:
        if device_type in ("cuda", "meta"):
            device_type, dtype = "cpu", dtype or torch.float16
        begin(self, device_type, dtype=dtype, **settings)

    def forget() -> None:
        casts.casts.clear()
        clear()

    with ExitStack() as stack:
        library = stack.enter_context(torch.library._scoped_library("aten", "IMPL"))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)  # of overriding kernels
        library.impl("dropout", _dropout, "AutogradMeta")
        library.impl("scaled_dot_product_attention", _attention, "AutogradMeta")
        if VERSION >= _FUSED_RMS_NORM:
            library.impl("rms_norm", _rms_norm, "AutogradMeta")
        casts.install(library)
        stack.enter_context(replaced(torch.autocast, "__init__", autocast))
        stack.enter_context(replaced(torch, "clear_autocast_cache", forget))
        optimizers = import_module(torch.optim.Optimizer.__module__)  # its name in torch.optim is deleted
        for name in ("_get_fused_kernels_supported_devices", "_get_foreach_kernels_supported_devices"):
            devices = [*getattr(optimizers, name)(), "meta"]
            stack.enter_context(replaced(optimizers, name, lambda devices=devices: list(devices)))
        worker = stack.enter_context(ThreadPoolExecutor(1))
        backward = _in_a_thread_of_its_own(worker)
        stack.enter_context(replaced(torch.autograd, "_engine_run_backward", backward))
        stack.enter_context(torch._C._IncludeDispatchKeyGuard(_AUTOCAST))
        stack.enter_context(_Devices())
        yield
