"""Indexing: the dim that indices point into stays whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch

from superscaler_core.front_end.call import Call, broadcast_to, dim_of, fixed, names, text
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


@rule("aten.index_select", "aten.index.Tensor")
def index(call: Call) -> PTensor:
    """``x[..., numbers, ...]``, with any number of index tensors that broadcast to one shape.

    An index tensor of all numbers of its dim in order, such as ``arange(batch)[:, None]``, changes
    no element along it: the dim remains a loop, which is cut like any other. If all index tensors
    are of this kind, the result is a view.
    """
    x: PTensor = call["self"]
    given = {call["dim"]: call["index"]} if "dim" in call.args else dict(enumerate(call["indices"]))
    at = {dim_of(dim, len(x.shape)): t for dim, t in given.items() if t is not None}
    rank = max(len(t.shape) for t in at.values())
    place = _place(at)
    chosen = [f"n{i}" for i in range(rank)]
    wanted = call.shape[place : place + rank]
    same = _unchanged(call, x, at, wanted)
    dims = [
        chosen[same[d]] if d in same else f"{name}^" if d in at else name
        for d, name in enumerate(names(len(x.shape)))
    ]
    kept = [name for d, name in enumerate(dims) if d not in at]
    out = [*kept[:place], *chosen, *kept[place:]]
    if len(same) == len(at):
        order = [*sorted(same, key=lambda d: same[d])]
        before = [d for d in range(len(dims)) if d not in at]
        order = [*before[:place], *order, *before[place:]]
        unit = {f"n{i}" for i in range(rank)} - set(dims)
        return call.op(
            "index", f"{text(dims)} -> {text('1' if d in unit else d for d in out)}", (x,),
            f"{{x0}}.permute({order}).reshape({{out0.shape}})", saves=(), flops=0.0,
        )  # fmt: skip
    inputs = [x, *dict.fromkeys(t for d, t in at.items() if d not in same)]
    operands = [text(dims), *(broadcast_to(t.shape, chosen, wanted) for t in inputs[1:])]
    words = [":"] * (max(at) + 1)
    for d, tensor in at.items():
        words[d] = f"{{x{inputs.index(tensor)}}}" if d not in same else _arange(same[d], rank)
    return call.op(
        "index", f"{', '.join(operands)} -> {text(out)}", inputs,
        f"{{x0}}[{', '.join(words)}]", saves=range(1, len(inputs)),
    )  # fmt: skip


def _arange(along: int, rank: int) -> str:
    """Code of the numbers of a loop's local iterations, along one dim of the index tensors."""
    form = ", ".join(":" if i == along else "None" for i in range(rank))
    return f"torch.arange({{size[n{along}]}}, device={{x0}}.device)[{form}]"


def _unchanged(
    call: Call, x: PTensor, at: Mapping[int, PTensor], sizes: Sequence[int]
) -> dict[int, int]:
    """The dims of which every number is read once, in order: by which dim of the index tensors."""
    found: dict[int, int] = {}
    for dim, tensor in at.items():
        value, size = call.builder.value_of(tensor), x.shape[dim]
        lined_up = (1,) * (len(sizes) - len(tensor.shape)) + tensor.shape
        along = next((i for i, n in enumerate(lined_up) if n == size == sizes[i]), None)
        if value is None or along is None or along in found.values() or value.numel() != size:
            continue
        if torch.equal(value.flatten(), torch.arange(size)):
            found[dim] = along
    return found


@rule("aten.index_put", "aten._unsafe_index_put")
def index_put(call: Call) -> PTensor:
    """``x[:, numbers] = values``: what is written has to be whole, as places may be the same."""
    x, values = call["self"], call["values"]
    at = {d: t for d, t in enumerate(call["indices"]) if t is not None}
    if any(t.dtype in ("bool", "uint8") for t in at.values()):
        return _masked_put(call, x, call["indices"], values)
    sizes = torch.broadcast_shapes(*(t.shape for t in at.values()))  # type: ignore[no-untyped-call]
    chosen = [f"n{i}^" for i in range(len(sizes))]
    dims, place = names(len(x.shape)), _place(at)
    source = text(fixed(dims, at))

    def put_together(rest: Sequence[Any], new: Sequence[Any]) -> list[Any]:
        return [*rest[:place], *new, *rest[place:]]

    kept = [d for d in range(len(dims)) if d not in at]
    out = put_together([dims[d] for d in kept], chosen)
    shape = put_together([x.shape[d] for d in kept], sizes)
    operands = [source, *(broadcast_to(t.shape, chosen, sizes) for t in at.values()),
                broadcast_to(values.shape, out, shape)]  # fmt: skip
    inputs = [x, *at.values(), values]
    return call.op(
        "index_put", f"{', '.join(operands)} -> {source}", inputs, call.fallback(inputs),
        saves=range(1, len(inputs) - 1),
    )  # fmt: skip


def _place(at: Mapping[int, PTensor]) -> int:
    """Where the dims of index tensors are in the result: first if those indexed lie apart."""
    first, last = min(at), max(at)
    return first if last - first + 1 == len(at) else 0


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
