"""Reductions: parts of sums and means add up; all other reductions keep the reduced dims whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

from superscaler_core.graph.tensor import PTensor
from superscaler_core.rules.call import (
    RuleCall,
    dim_of,
    dims_of,
    fixed,
    largest,
    names,
    share,
    text,
)  # fmt: skip
from superscaler_core.rules.table import rule


@rule("aten.sum", "aten.mean")
def sums(call: RuleCall) -> PTensor:
    """Each part of a mean is its own mean times its share of the elements, so that parts add up."""
    x: PTensor = call["self"]
    rank = len(x.shape)
    over = dims_of(call.get("dim"), rank)
    dims = names(rank)
    keep = call.get("keepdim", False)
    dtype = call.node.outputs[0].dtype
    # Truth values do not add up.
    mark = "^" if dtype == "bool" else "+"
    source = [f"{d}{mark}" if i in over else d for i, d in enumerate(dims)]
    out = _left(dims, over, keep)
    words = [] if len(over) == rank and not keep else [str(tuple(over))]
    words += ["keepdim=True"] if keep else []
    # torch sums integers in int64 if no dtype is given.
    usual = x.dtype if x.dtype.startswith(("float", "bfloat", "complex")) else "int64"
    words += [f"dtype=torch.{dtype}"] if dtype != usual else []
    count = prod(x.shape[d] for d in over)
    factor = f" * {share([dims[d] for d in over], count)}" if call.kind == "mean" else ""
    return call.op(
        call.kind, f"{text(source)} -> {text(out)}", (x,),
        f"{{x0}}.{call.kind}({', '.join(words)}){factor}", saves=(),
    )  # fmt: skip


@rule("aten.amax", "aten.amin", "aten.var", "aten.std", "aten.logsumexp", "aten.prod", "aten.all",
      "aten.any", "aten.argmax", "aten.argmin", "aten.linalg_vector_norm", "aten.norm",
      "aten.max.default", "aten.min.default", "aten.count_nonzero")  # fmt: skip
def whole(call: RuleCall) -> PTensor:
    x: PTensor = call["self"]
    dims = names(len(x.shape))
    over = dims_of(call.get("dim"), len(dims))
    annotation = f"{text(fixed(dims, over))} -> {text(_left(dims, over, call.get('keepdim')))}"
    return call.op(call.kind, annotation, (x,), call.fallback((x,)))


def _left(dims: Sequence[str], over: Sequence[int], keep: bool | None) -> list[str]:
    """The dims of the result of a reduction."""
    return ["1" if i in over else d for i, d in enumerate(dims) if keep or i not in over]


@rule("aten.softmax", "aten.log_softmax", "aten._softmax", "aten._log_softmax")
def softmax(call: RuleCall) -> PTensor:
    x: PTensor = call["self"]
    dims = names(len(x.shape))
    dim = dim_of(call["dim"], len(dims))
    dtype = call.node.outputs[0].dtype
    more = f", dtype=torch.{dtype}" if dtype != x.dtype else ""
    return call.op(
        call.kind, f"{text(fixed(dims, [dim]))} -> {text(dims)}", (x,),
        f"torch.{call.kind}({{x0}}, dim={dim}{more})", saves=(1,),
    )  # fmt: skip


@rule("aten.cumsum", "aten.cumprod", "aten.logcumsumexp")
def scan(call: RuleCall) -> PTensor:
    # The gradient of a sum reads no values.
    return along(call, [call["dim"]], saves=() if call.kind == "cumsum" else (0, 1))


@rule("aten.fft_hfft", "aten.fft_ihfft",
      *(f"aten.fft_{kind}{dims}" for kind in ("fft", "ifft", "rfft", "irfft")
        for dims in ("", "2", "n")))  # fmt: skip
def transform(call: RuleCall) -> PTensor:
    """Fourier transforms along some dims; along the last dims if only sizes are given.

    5 n log2(n) operations for n complex points, half of them for real ones. Source: the usual count
    of Cooley and Tukey's algorithm, as in FFTW's benchmarks.
    """
    x: PTensor = call["self"]
    rank, sizes, dim = len(x.shape), call.get("s"), call["dim"]
    last = range(rank - len(sizes) if sizes else 0, rank)
    over = [dim] if isinstance(dim, int) else list(dim or last)
    points = prod(max(x.shape[d], call.shape[d]) for d in over)
    flops = 5 * largest([x.shape, call.shape]) * _log2(points)
    dtypes = (x.dtype, call.node.outputs[0].dtype)
    is_complex = all(dtype.startswith("complex") for dtype in dtypes)
    return along(call, over, flops if is_complex else flops / 2)


def _log2(count: int) -> int:
    """The logarithm of a count, rounded up; at least 1."""
    return max(1, (count - 1).bit_length())


def along(
    call: RuleCall, whole: Iterable[int], flops: float | None = None, saves: Sequence[int] = ()
) -> PTensor:
    """An op that computes each line, or plane, of these dims by itself, and may change its size."""
    x: PTensor = call["self"]
    dims = names(len(x.shape))
    source = fixed(dims, (dim_of(d, len(dims)) for d in whole))
    pairs = zip(source, x.shape, call.shape, strict=True)
    out = [d if size == made else f"o{i}^" for i, (d, size, made) in enumerate(pairs)]
    return call.op(
        call.kind, f"{text(source)} -> {text(out)}", (x,), call.fallback((x,)), saves=saves,
        flops=flops,
    )  # fmt: skip


@rule("aten.sort", "aten.topk", "aten.max.dim", "aten.min.dim")
def ordered(call: RuleCall) -> tuple[PTensor, ...]:
    """Values along one dim, and their positions."""
    x: PTensor = call["self"]
    dims = names(len(x.shape))
    dim = dim_of(call["dim"], len(dims))
    out = [*dims[:dim], "o^", *dims[dim + 1 :]]
    if len(call.shape) < len(dims):
        del out[dim]
    annotation = f"{text(fixed(dims, [dim]))} -> {text(out)}, {text(out)}"
    flops = prod(x.shape) * (_log2(x.shape[dim]) if call.kind == "sort" and x.shape else 1)
    # Autograd keeps only the positions.
    return call.op_of_many(
        call.kind, annotation, (x,), call.fallback((x,)), call.outputs, saves=(2,), flops=flops
    )
