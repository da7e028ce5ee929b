"""Reductions: parts of sums and means add up; all other reductions keep the reduced dims whole."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from superscaler_core.front_end.call import Call, dim_of, dims_of, fixed, names, share, text
from superscaler_core.front_end.rules.table import rule
from superscaler_core.graph.tensor import PTensor


@rule("aten.sum", "aten.mean")
def sums(call: Call) -> PTensor:
    """Each part of a mean is its own mean times its share of the elements, so that parts add up."""
    x: PTensor = call["self"]
    rank = len(x.shape)
    over = dims_of(call.get("dim"), rank)
    dims = names(rank)
    keep = call.get("keepdim", False)
    source = [f"{d}+" if i in over else d for i, d in enumerate(dims)]
    out = [("1" if i in over else d) for i, d in enumerate(dims) if keep or i not in over]
    words = [] if len(over) == rank and not keep else [str(tuple(over))]
    words += ["keepdim=True"] if keep else []
    dtype = call.node.outputs[0].dtype
    words += [f"dtype=torch.{dtype}"] if dtype != x.dtype else []
    count = prod(x.shape[d] for d in over)
    factor = f" * {share([dims[d] for d in over], count)}" if call.kind == "mean" else ""
    return call.op(
        call.kind, f"{text(source)} -> {text(out)}", (x,),
        f"{{x0}}.{call.kind}({', '.join(words)}){factor}", saves=(),
    )  # fmt: skip


@rule("aten.amax", "aten.amin", "aten.var", "aten.std", "aten.logsumexp", "aten.prod", "aten.all",
      "aten.any", "aten.argmax", "aten.argmin", "aten.linalg_vector_norm", "aten.norm",
      "aten.max.default", "aten.min.default", "aten.count_nonzero")  # fmt: skip
def whole(call: Call) -> PTensor:
    x: PTensor = call["self"]
    dims = names(len(x.shape))
    over = dims_of(call.get("dim"), len(dims))
    keep = call.get("keepdim", False)
    out = [("1" if i in over else d) for i, d in enumerate(dims) if keep or i not in over]
    return call.op(
        call.kind, f"{text(fixed(dims, over))} -> {text(out)}", (x,), call.fallback((x,))
    )


@rule("aten.softmax", "aten.log_softmax", "aten._softmax", "aten._log_softmax")
def softmax(call: Call) -> PTensor:
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
def scan(call: Call) -> PTensor:
    return along(call, [call["dim"]])


@rule(*(f"aten.fft_{name}" for name in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")))
def transform(call: Call) -> PTensor:
    """A Fourier transform along one dim."""
    return along(call, [call["dim"]])


@rule(*(f"aten.fft_{name}" for kind in ("fft", "ifft", "rfft", "irfft")
        for name in (f"{kind}2", f"{kind}n")))  # fmt: skip
def transforms(call: Call) -> PTensor:
    """Fourier transforms along several dims; along the last dims if only sizes are given."""
    rank, sizes = len(call["self"].shape), call["s"]
    return along(call, call["dim"] or range(rank - len(sizes) if sizes else 0, rank))


def along(call: Call, whole: Iterable[int]) -> PTensor:
    """An op that computes each line, or plane, of these dims by itself, and may change its size."""
    x: PTensor = call["self"]
    dims = names(len(x.shape))
    source = fixed(dims, (dim_of(d, len(dims)) for d in whole))
    pairs = zip(source, x.shape, call.shape, strict=True)
    out = [d if size == made else f"o{i}^" for i, (d, size, made) in enumerate(pairs)]
    return call.op(call.kind, f"{text(source)} -> {text(out)}", (x,), call.fallback((x,)), saves=())


@rule("aten.sort", "aten.topk", "aten.max.dim", "aten.min.dim")
def ordered(call: Call) -> tuple[PTensor, ...]:
    """Values along one dim, and their positions."""
    x: PTensor = call["self"]
    dims = names(len(x.shape))
    dim = dim_of(call["dim"], len(dims))
    out = [*dims[:dim], "o^", *dims[dim + 1 :]]
    if len(call.shape) < len(dims):
        del out[dim]
    annotation = f"{text(fixed(dims, [dim]))} -> {text(out)}, {text(out)}"
    outputs = [(value.shape, value.dtype) for value in call.node.outputs]
    # Autograd keeps only the positions.
    return call.op_of_many(call.kind, annotation, (x,), call.fallback((x,)), outputs, saves=(2,))
