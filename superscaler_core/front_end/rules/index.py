"""Indexing: the dim that indices point into stays whole."""

from __future__ import annotations

from superscaler_core.front_end.call import Call, dim_of, fixed, names, text
from superscaler_core.front_end.rules.table import rule
from superscaler_core.graph.tensor import PTensor


@rule("aten.one_hot")
def one_hot(call: Call) -> PTensor:
    dims = names(len(call.shape) - 1)
    return call.op(
        "one_hot", f"{text(dims)} -> {text([*dims, 'v^'])}", (call["self"],),
        f"F.one_hot({{x0}}, {call.shape[-1]})",
    )  # fmt: skip


@rule("aten.gather")
def gather(call: Call) -> PTensor:
    """Dims in which both tensors have equal sizes can be cut; other dims stay whole."""
    x, index = call["self"], call["index"]
    dims = names(len(x.shape))
    dim = dim_of(call["dim"], len(dims))
    source, out = list(dims), list(dims)
    for i, (size, wanted) in enumerate(zip(x.shape, index.shape, strict=True)):
        if i == dim:
            source[i], out[i] = "v^", "o"
        elif size != wanted:
            source[i], out[i] = f"{dims[i]}^", f"o{i}^"
    return call.op(
        "gather", f"{text(source)}, {text(out)} -> {text(out)}", (x, index),
        f"{{x0}}.gather({dim}, {{x1}})", saves=(1,),
    )  # fmt: skip


@rule("aten.scatter.src", "aten.scatter.value", "aten.scatter_add")
def scatter(call: Call) -> PTensor:
    x, index, src = call["self"], call["index"], call.get("src")
    dims = names(len(x.shape))
    dim = dim_of(call["dim"], len(dims))
    shapes = [t.shape for t in (x, index, src) if t is not None]
    # Where sizes differ, the position decides which elements are touched.
    whole = {i for i in range(len(dims)) if i == dim or len({s[i] for s in shapes}) > 1}
    inputs = [t for t in (x, index, src) if t is not None]
    operands = [
        text(f"{d}{n}^" if i in whole and n else f"{d}^" if i in whole else d
             for i, d in enumerate(dims))
        for n in range(len(inputs))
    ]  # fmt: skip
    return call.op(
        call.kind, f"{', '.join(operands)} -> {operands[0]}", inputs, call.fallback(inputs),
        saves=(1,),
    )  # fmt: skip


@rule("aten.index_select", "aten.index.Tensor")
def index_select(call: Call) -> PTensor:
    """``x[:, numbers]``; indexing with several tensors has no rule."""
    x = call["self"]
    if "dim" in call.args:
        dim, numbers = dim_of(call["dim"], len(x.shape)), call["index"]
    else:
        found = [(i, t) for i, t in enumerate(call["indices"]) if t is not None]
        if len(found) != 1 or found[0][1].dtype == "bool":
            raise call.error(
                "only one tensor of numbers is supported as an index; use gather or where."
            )
        dim, numbers = found[0]
    dims = names(len(x.shape))
    chosen = [f"n{i}" for i in range(len(numbers.shape))]
    out = [*dims[:dim], *chosen, *dims[dim + 1 :]]
    return call.op(
        "index", f"{text(fixed(dims, [dim]))}, {text(chosen)} -> {text(out)}", (x, numbers),
        f"{{x0}}[{':, ' * dim}{{x1}}]", saves=(1,),
    )  # fmt: skip
