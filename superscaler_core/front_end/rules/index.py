"""Indexing: the dim that indices point into stays whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from superscaler_core.front_end.call import Call, dim_of, fixed, literal, names, text
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


@rule("aten.scatter", "aten.scatter_add", "aten.scatter_reduce")
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


@rule("aten.index_add", "aten.index_copy", "aten.index_reduce", "aten.index_fill")
def indexed_rows(call: Call) -> PTensor:
    """Rows of one dim are written, by their numbers; other dims are cut freely."""
    x, index = call["self"], call["index"]
    dims = names(len(x.shape))
    dim = dim_of(call["dim"], len(dims))
    inputs, operands = [x, index], [text(fixed(dims, [dim])), text(["n^"] * len(index.shape))]
    rows = call.get("source") if "source" in call.args else call.get("value")
    if isinstance(rows, PTensor):
        inputs.append(rows)
        operands.append(text([*dims[:dim], "n^", *dims[dim + 1 :]][: len(rows.shape)]))
    return call.op(
        call.kind, f"{', '.join(operands)} -> {operands[0]}", inputs, call.fallback(inputs),
        saves=range(1, len(inputs)),
    )  # fmt: skip


@rule("aten.index_select")
def index_select(call: Call) -> PTensor:
    x, numbers = call["self"], call["index"]
    dim = dim_of(call["dim"], len(x.shape))
    return _taken(call, x, [None] * dim + [numbers])


@rule("aten.index.Tensor")
def index(call: Call) -> PTensor:
    """``x[:, numbers]``; indexing with a mask has no rule, as the shape depends on its values."""
    if any(t is not None and t.dtype in ("bool", "uint8") for t in call["indices"]):
        raise call.error("a mask as an index is not supported; use where or masked_fill.")
    return _taken(call, call["self"], call["indices"])


def _taken(call: Call, x: PTensor, indices: Sequence[PTensor | None]) -> PTensor:
    at = _Indexed.of(x, indices)
    inputs = [x, *at.tensors]
    words = [":" if t is None else literal(t, inputs) for t in indices]
    operands = ", ".join([text(at.source), *map(text, at.numbers)])
    return call.op(
        "index", f"{operands} -> {text(at.chosen)}", inputs, f"{{x0}}[{', '.join(words)}]",
        saves=range(1, len(inputs)),
    )  # fmt: skip


@rule("aten.index_put", "aten._unsafe_index_put")
def index_put(call: Call) -> PTensor:
    """``x[:, numbers] = values``: what is written has to be whole, as places may be the same."""
    x, indices, values = call["self"], call["indices"], call["values"]
    if any(t is not None and t.dtype in ("bool", "uint8") for t in indices):
        return _masked_put(call, x, indices, values)
    at = _Indexed.of(x, indices)
    inputs = [x, *at.tensors, values]
    new = {dim for number in at.numbers for dim in number}
    whole = [[f"{d}^" if d in new else d for d in dims] for dims in (*at.numbers, at.chosen)]
    shape = at.shape(x)
    skipped = len(shape) - len(values.shape)
    pairs = zip(whole[-1][skipped:], values.shape, shape[skipped:], strict=True)
    put = ["1" if size != wanted else dim for dim, size, wanted in pairs]
    operands = ", ".join(map(text, [at.source, *whole[:-1], put]))
    return call.op(
        "index_put", f"{operands} -> {text(at.source)}", inputs, call.fallback(inputs),
        saves=range(1, len(inputs) - 1),
    )  # fmt: skip


def _masked_put(
    call: Call, x: PTensor, indices: Sequence[PTensor | None], values: PTensor
) -> PTensor:
    """``x[mask] = value``, where the value does not depend on the place."""
    mask = indices[0]
    if len(indices) != 1 or mask is None or prod(values.shape) != 1 or call["accumulate"]:
        raise call.error("a mask as an index may only be given one value; use where.")
    dims = names(len(x.shape))
    after = ", None" * (len(x.shape) - len(mask.shape))
    of_mask = text(dims[: len(mask.shape)])
    value = text("1" for _ in values.shape)
    return call.op(
        "where", f"{text(dims)}, {of_mask}, {value} -> {text(dims)}", (x, mask, values),
        f"torch.where({{x1}}{f'[...{after}]' if after else ''}, {{x2}}, {{x0}})", saves=(1,),
    )  # fmt: skip


@dataclass(frozen=True)
class _Indexed:
    """The dims of ``x[..., numbers, ...]``.

    Attributes:
        tensors: of numbers, which broadcast to one shape.
        source: dims of x, of which those with numbers stay whole.
        numbers: dims of each tensor of numbers.
        chosen: dims of the result.
    """

    tensors: Sequence[PTensor]
    source: Sequence[str]
    numbers: Sequence[Sequence[str]]
    chosen: Sequence[str]

    @classmethod
    def of(cls, x: PTensor, indices: Sequence[PTensor | None]) -> _Indexed:
        places = [i for i, t in enumerate(indices) if t is not None]
        tensors = [t for t in indices if t is not None]
        rank = max(len(t.shape) for t in tensors)
        sizes = [max(t.shape[i - rank] for t in tensors if len(t.shape) >= rank - i)
                 for i in range(rank)]  # fmt: skip
        new = [f"n{i}" for i in range(rank)]
        numbers = [
            ["1" if size != wanted else dim
             for dim, size, wanted in zip(new[rank - len(t.shape):], t.shape,
                                          sizes[rank - len(t.shape):], strict=True)]
            for t in tensors
        ]  # fmt: skip
        dims = names(len(x.shape))
        # Numbers of dims that do not lie side by side come first in the result, as in numpy.
        is_run = places == list(range(places[0], places[0] + len(places)))
        first = places[0] if is_run else 0
        rest = [d for i, d in enumerate(dims) if i not in places]
        return cls(tensors, fixed(dims, places), numbers, [*rest[:first], *new, *rest[first:]])

    def shape(self, x: PTensor) -> list[int]:
        """Shape of the result."""
        sizes = dict(zip(self.source, x.shape, strict=True))
        for tensor, dims in zip(self.tensors, self.numbers, strict=True):
            sizes |= dict(zip(dims, tensor.shape, strict=True))
        return [sizes.get(dim, 1) for dim in self.chosen]
