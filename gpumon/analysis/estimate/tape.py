"""A forward pass written down without torch: which tensors each operation makes, and what it keeps for backward.

Model. A `Tape` has one method per PyTorch operation. A family of models (estimate.families) calls them in the order in
which its forward does; what comes out is the model's parameters, exact, and a list of `Op`s: the output's bytes, the
tensors that autograd saves, the gradients that backward will make. `estimate.replay` then plays forward, backward and
optimizer step of that list against an allocator.

What is saved follows torch's tools/autograd/derivatives.yaml: a product keeps both factors, softmax and tanh their
result, gelu and silu their input, dropout a mask of one byte an element, layer_norm its input and two numbers a row,
attention by a fused kernel q, k, v, its result and one number a row. Under autocast
(aten/src/ATen/autocast_mode.h) products run in half precision on casts of their inputs, norms, softmax, powers and
losses in fp32; the cast of a weight is made once a forward and kept.

Source. The files named above, and "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198),
whose 34·s·b·h + 5·a·s²·b bytes a layer are the sum of such a list for a layer in half precision.
Cost. O(operations): about 30 a layer.

One class of many small methods, so that a family reads like the module it mirrors: that is why this file is long.

Known limitations. A slice keeps the whole tensor, shapes do not depend on data, and memory inside kernels is left out.
torch.compile keeps less.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

from gpumon.analysis.estimate.kernels import CUBLAS_WORKSPACE, CUBLASLT_WORKSPACE
from gpumon.analysis.estimate.model import Tensor

HALF, FLOAT, LONG = 2, 4, 8


@dataclass(frozen=True, slots=True)
class Numbers:
    """How a run computes. `weights`: bytes of a weight; `autocast`: products in half precision on fp32 weights."""

    weights: int = FLOAT
    autocast: bool = False


@dataclass(eq=False, slots=True)
class Value:
    """One tensor of the pass: `rows` × `features` elements of `width` bytes."""

    rows: int
    features: int
    width: int
    needs_grad: bool = True  # backward reaches it

    @property
    def count(self) -> int:
        return self.rows * self.features

    @property
    def bytes(self) -> int:
        return self.rows * self.features * self.width


@dataclass(eq=False, slots=True)
class Op:
    """One operation of the pass."""

    inputs: tuple[Value, ...]
    output: Value
    saved: tuple[Value, ...] = ()
    extra: tuple[Value, ...] = ()  # made beside the output, and among `saved`: masks, statistics
    weights: tuple[Tensor, ...] = ()  # parameters it gives a gradient to
    low_gradients: bool = False  # their gradients are made in half precision, then cast
    temporary: int = 0  # bytes alive only while it runs forward
    backward_temporary: int = 0
    passes: bool = False  # its gradient is handed on as it is (a sum, a view)
    until: tuple[Value, ...] = ()  # alive until it has run, though it does not use them: the caller's variables
    view: bool = False  # its output is its first input's storage
    block: int | None = None  # the layer that checkpointing would recompute it with


@dataclass(slots=True)
class Tape:
    """Records one forward pass over `batch` samples of `sequence` tokens."""

    batch: int
    sequence: int
    numbers: Numbers = field(default_factory=Numbers)
    training: bool = True
    fused_attention: bool = True  # sdpa; False: eager
    workspace: int = CUBLAS_WORKSPACE
    cache: bool = False  # keys and values stay in the output (use_cache)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    inputs: list[Value] = field(default_factory=list)
    held: list[Value] = field(default_factory=list)  # what the outputs keep alive until they are dropped
    kept_keys: list[Value] = field(default_factory=list)  # keys and values among them
    has_tokens: bool = True  # the sequence is the user's to choose
    tables: list[str] = field(default_factory=list)  # parameters that are only looked up in: embeddings of their own
    _nothing: ClassVar[Value] = Value(0, 0, FLOAT, needs_grad=False)
    _casts: dict[str, Value] = field(default_factory=dict)
    _block: int | None = None
    _blocks: int = 0

    # ------------------------------------------------------------------------------------------------- what is declared

    def parameter(self, name: str, *shape: int) -> Tensor:
        return self.parameters.setdefault(name, Tensor(name, shape, self.numbers.weights))

    def tie(self, name: str, to: str) -> None:
        """`name` is another name of the parameter `to`."""
        tensor = self.parameters[to]
        self.parameters[name] = Tensor(name, tensor.shape, tensor.width, tensor.trainable, to)

    def buffer(self, name: str, *shape: int, width: int = LONG) -> None:
        self.buffers[name] = Tensor(name, shape, width, trainable=False)

    def given(self, rows: int, features: int = 1, width: int = LONG) -> Value:
        """An input of the model."""
        value = Value(rows, features, width, needs_grad=False)
        self.inputs.append(value)
        return value

    def constant(self, rows: int, features: int, width: int | None = None) -> Value:
        """Something made on the way that needs no gradient."""
        value = Value(rows, features, width or self.numbers.weights, needs_grad=False)
        self.ops.append(Op((), value, block=self._block))
        return value

    @staticmethod
    def indices(rows: int) -> Value:
        """Numbers to look up that cost nothing: they are part of a buffer, or soon gone."""
        return Value(rows, 1, LONG, needs_grad=False)

    def tokens(self) -> Value:
        return self.given(self.batch * self.sequence)

    @contextmanager
    def layer(self) -> Iterator[None]:
        """What activation checkpointing recomputes in one piece."""
        self._block, self._blocks = self._blocks, self._blocks + 1
        yield
        self._block = None

    # ------------------------------------------------------------------------------------------------- with parameters

    def embedding(self, name: str, rows: int, features: int, indices: Value) -> Value:
        """Rows of a table, looked up; the table's gradient is as large as the table."""
        weight = self.parameter(f"{name}.weight", rows, features)
        out = Value(indices.count, features, weight.width)
        sorting = _sorting(indices.count, rows, features) if weight.trainable else 0
        return self._op((), out, saved=(indices,), weights=(weight,), backward_temporary=sorting)

    def linear(
        self, x: Value, name: str, into: int, *, bias: bool = True, tied: str | None = None, transposed: bool = False
    ) -> Value:
        """x·W (+ b); keeps x for the weight's gradient and, under autocast, the weight's cast for x's."""
        if tied is not None:
            self.tie(f"{name}.weight", tied)
            weight = self.parameters[tied]
        else:
            shape = (x.features, into) if transposed else (into, x.features)
            weight = self.parameter(f"{name}.weight", *shape)
        weights = (weight, self.parameter(f"{name}.bias", into)) if bias else (weight,)
        return self.product(x, x.rows, into, weights)

    def product(self, x: Value, rows: int, features: int, weights: tuple[Tensor, ...]) -> Value:
        """`x` multiplied with a weight into `rows` × `features`: linear layers, convolutions."""
        x = self._lowered(x)
        casts = tuple(self._cast_of(weight) for weight in weights) if self.numbers.autocast else ()
        saved = (x, *casts[:1]) if weights[0].trainable else casts[:1]
        out = Value(rows, features, self._product_width(x))
        return self._op(
            (x,), out, saved=saved, weights=weights, low_gradients=self.numbers.autocast,
            temporary=CUBLASLT_WORKSPACE if len(weights) > 1 else self.workspace, backward_temporary=self.workspace,
        )  # fmt: skip

    def layer_norm(self, x: Value, name: str) -> Value:
        """Keeps its input and two fp32 numbers a row. In fp32 under autocast."""
        weights = (self.parameter(f"{name}.weight", x.features), self.parameter(f"{name}.bias", x.features))
        x = self._raised(x)
        statistics = tuple(Value(x.rows, 1, FLOAT, False) for _ in range(2))
        return self._op((x,), self._like(x), saved=(x, *statistics), extra=statistics, weights=weights)

    def rms_norm(self, x: Value, name: str, *, offset: bool = False, in_place_type: bool = False) -> Value:
        """Transformers' RMS norm, written in Python: square, mean, reciprocal root, two products.

        `offset`: 1 + weight, in fp32 throughout (Gemma). `in_place_type`: the product on the input as it is (T5).
        """
        weight = self.parameter(f"{name}.weight", x.features)
        wide = self.cast(x, FLOAT)
        squares = self.power(wide)
        mean = self._op((squares,), Value(x.rows, 1, FLOAT))
        root = self._op((mean,), Value(x.rows, 1, FLOAT), keeps_output=True)
        source = x if in_place_type else wide
        normal = Value(x.rows, x.features, FLOAT)
        normal = self._op((source, root), normal, saved=(source, root), backward_temporary=normal.bytes)
        if offset:
            shifted = Value(1, x.features, FLOAT)
            out = self._op((normal,), self._like(normal), saved=(normal, shifted), extra=(shifted,), weights=(weight,))
            return self.cast(out, x.width)
        normal = self.cast(normal, weight.width if in_place_type else x.width)
        out = Value(x.rows, x.features, max(normal.width, weight.width))
        return self._op((normal,), out, saved=(normal,), weights=(weight,), backward_temporary=out.bytes)

    # ---------------------------------------------------------------------------------------------- without parameters

    def matmul(self, a: Value, b: Value, rows: int, features: int) -> Value:
        """A product of two activations; keeps both."""
        a, b = self._lowered(a), self._lowered(b)
        out = Value(rows, features, self._product_width(a))
        return self._op((a, b), out, saved=(a, b), temporary=self.workspace, backward_temporary=self.workspace)

    def add(self, a: Value, b: Value) -> Value:
        wide = a if a.width >= b.width else b
        return self._op((a, b), Value(max(a.rows, b.rows), a.features, wide.width), passes=a.width == b.width)

    def multiply(self, a: Value, b: Value) -> Value:
        return self._op((a, b), Value(a.rows, a.features, max(a.width, b.width)), saved=(a, b))

    def scale(self, a: Value) -> Value:
        """A tensor times or plus a number: a new tensor, nothing kept."""
        return self._op((a,), self._like(a))

    def scaled_to(self, a: Value, width: int) -> Value:
        """A tensor times something small that needs no gradient, in numbers of `width` bytes."""
        return self._op((a,), Value(a.rows, a.features, width))

    def widened(self, a: Value, b: Value, features: int) -> Value:
        """`torch.cat` of `a` and a part of `b`, of equal rows, to `features` columns."""
        return self._op((a, b), Value(a.rows, features, max(a.width, b.width)))

    def joined(self, a: Value, rows: int, weights: tuple[Tensor, ...]) -> Value:
        """`torch.cat` of `a` and parameters, to `rows` rows."""
        return self._op((a,), Value(rows, a.features, a.width), weights=weights)

    def plus_parameter(self, a: Value, weight: Tensor) -> Value:
        """A parameter added, the same for every sample."""
        return self._op((a,), self._like(a), weights=(weight,), passes=True)

    def copy(self, a: Value) -> Value:
        """`contiguous`, or a reshape that cannot be a view."""
        return self._op((a,), self._like(a))

    def cat(self, a: Value) -> Value:
        """`torch.cat` of a tensor with something small or empty: a copy, whose gradient is a view."""
        return self._op((a,), self._like(a), passes=True)

    def cast(self, a: Value, width: int) -> Value:
        return a if a.width == width else self._op((a,), Value(a.rows, a.features, width))

    def power(self, a: Value) -> Value:
        """In fp32 under autocast; keeps its input."""
        a = self._raised(a)
        return self._op((a,), self._like(a), saved=(a,), backward_temporary=2 * a.bytes)

    def activation(self, a: Value, kind: str) -> Value:
        """By Hugging Face's names. Raises KeyError for one that is not known."""
        if kind in ("gelu_new", "gelu_fast"):  # written out in Python
            half = self.scale(a)
            inner = self.add(a, self.scale(self.power(a)))
            bent = self._op((self.scale(inner),), self._like(inner), keeps_output=True)
            return self.multiply(half, self.scale(bent))
        if _KEEPS_INPUT[kind]:
            return self._op((a,), self._like(a), saved=(a,))
        return self._op((a,), self._like(a), keeps_output=True)

    def dropout(self, a: Value, probability: float) -> Value:
        """A mask of one byte an element; nothing at all with probability 0 or in eval mode."""
        if not self.training or probability <= 0:
            return a
        mask = Value(a.rows, a.features, 1, needs_grad=False)
        return self._op((a,), self._like(a), saved=(mask,), extra=(mask,))

    def softmax(self, a: Value) -> Value:
        """Keeps its result. In fp32 under autocast."""
        a = self._raised(a)
        return self._op((a,), self._like(a), keeps_output=True)

    def attention(
        self, q: Value, k: Value, v: Value, *, heads: int, dropout: float, keys: int | None = None,
        bias: Value | None = None, mask: bool = False, wide_softmax: bool = False, repeats: int = 1,
        head_major: bool = False, cached: bool = False,
    ) -> Value:  # fmt: skip
        """Scaled dot products of every head. `keys`: tokens attended to (the sequence).

        `repeats`: query heads per key head. `bias`: added to the scores (T5). `mask`: a causal mask is added to eager
        scores. `wide_softmax`: the softmax is asked for in fp32 and cast back. `head_major`: queries lie head by head,
        not token by token; `cached`: keys and values do, out of the cache.
        """
        given = (q, k, v)
        if self.fused_attention:
            return self._fused(q, k, v, heads, bias, head_major)
        q, k, v = self._lowered(q), self._lowered(k), self._lowered(v)
        if repeats > 1:
            k, v = (self._op((t,), Value(t.rows, q.features, t.width)) for t in (k, v))
        elif self.batch > 1 and not cached:
            k, v = self.copy(k), self.copy(v)
        q = self.copy(q) if self.batch > 1 and not head_major else q
        scores = self.scale(self.matmul(q, k, q.rows * heads, keys or self.sequence))
        for added in (bias, self._nothing if mask else None):
            if added is not None:
                scores = self._op((scores, added), self._like(scores), passes=True)
        shares = self.softmax(self.cast(scores, FLOAT) if wide_softmax else scores)
        shares = self.dropout(self.cast(shares, q.width), dropout)
        mixed = self.matmul(shares, v, q.rows * heads, q.features // heads)
        # heads side by side again; the caller's variables hold what it gave until then
        return self._op((mixed,), Value(q.rows, q.features, mixed.width), until=given)

    def cross_entropy(self, logits: Value, targets: Value, *, upcast: bool = False) -> Value:
        """log_softmax and nll_loss: each keeps the shares, and backward makes a gradient of each.

        `upcast`: the model turns its logits into fp32 first. Under autocast nll_loss alone runs in fp32, on a cast.
        """
        logits = self.cast(logits, FLOAT) if upcast else logits
        shares = self._raised(self._op((logits,), self._like(logits), keeps_output=True))
        return self._op((shares,), Value(1, 1, FLOAT), saved=(shares, targets))

    def pick(self, a: Value, rows: int) -> Value:
        """A slice of rows: a view, whose gradient is as large as the whole."""
        return self._op((a,), Value(rows, a.features, a.width), view=True)

    def part(self, a: Value, features: int) -> Value:
        """A slice of columns: a view, whose gradient is as large as the whole."""
        return self._op((a,), Value(a.rows, features, a.width), view=True)

    def reshaped(self, a: Value, rows: int, features: int) -> Value:
        return self._op((a,), Value(rows, features, a.width), view=True, passes=True)

    # ------------------------------------------------------------------------------------------------------- helpers

    def _fused(self, q: Value, k: Value, v: Value, heads: int, bias: Value | None, head_major: bool) -> Value:
        """One kernel: flash for half precision, memory-efficient for fp32; their results lie in memory differently."""
        given = (q, k, v)
        q, k, v = self._lowered(q), self._lowered(k), self._lowered(v)
        out = Value(q.rows, q.features, q.width)
        sums = Value(q.rows * heads, 1, FLOAT, needs_grad=False)
        inputs = (q, k, v) if bias is None else (q, k, v, bias)
        out = self._op(
            inputs, out, saved=(*inputs, sums), extra=(sums,), keeps_output=True, until=given,
            backward_temporary=_attending(self.batch * heads, q.rows // self.batch, q.features // heads, q.width),
        )  # fmt: skip
        return self.copy(out) if head_major and out.width == HALF else out

    def _op(self, inputs: Sequence[Value], output: Value, *, keeps_output: bool = False, **details: Any) -> Value:
        op = Op(tuple(inputs), output, block=self._block, **details)
        if keeps_output:
            op.saved = (*op.saved, output)
        trained = any(weight.trainable for weight in op.weights)
        output.needs_grad = self.training and (trained or any(value.needs_grad for value in inputs))
        if not output.needs_grad:
            op.saved = ()
        self.ops.append(op)
        return output

    @staticmethod
    def _like(a: Value) -> Value:
        return Value(a.rows, a.features, a.width)

    def _lowered(self, a: Value) -> Value:
        return self.cast(a, HALF) if self.numbers.autocast else a

    def _raised(self, a: Value) -> Value:
        return self.cast(a, FLOAT) if self.numbers.autocast else a

    def _product_width(self, a: Value) -> int:
        return HALF if self.numbers.autocast else a.width

    def _cast_of(self, weight: Tensor) -> Value:
        """The cast of a weight, made once a forward and kept until autocast ends."""
        if weight.name not in self._casts:
            value = Value(1, weight.count, HALF, needs_grad=False)
            self._casts[weight.name] = value
            self.ops.append(Op((), value, block=self._block))
        return self._casts[weight.name]

    @property
    def casts(self) -> tuple[Value, ...]:
        return tuple(self._casts.values())


def _attending(heads: int, length: int, width: int, size: int) -> int:
    """What the backward of a fused kernel takes: gradients of queries in fp32, and row sums (aten/src/ATen/native/
    transformers/cuda: attention_backward.cu for fp32, flash_attn/flash_api.cpp for half precision)."""
    wide = -(-width // 32) * 32
    if size == HALF:
        return FLOAT * heads * (-(-length // 128) * 128) * (1 + wide)
    blocks, row = -(-length // 64), FLOAT * heads * length
    return max(row * width + 2 * row, row + heads * blocks * (64 * wide * FLOAT + 16))


def _sorting(count: int, rows: int, features: int) -> int:
    """Above 3,072 indices the gradient of a table sorts them and sums rows in parts (aten/src/ATen/native/cuda/
    EmbeddingBackwardKernel.cu)."""
    if count <= 3072:
        return 0
    segments = min(count, rows)
    return 3 * LONG * count + 2 * LONG * segments + (LONG + FLOAT * features) * (count // 10 + segments)


_KEEPS_INPUT = {
    "gelu": True,
    "gelu_pytorch_tanh": True,
    "silu": True,
    "swish": True,
    "relu": False,
    "tanh": False,
    "sigmoid": False,
}
