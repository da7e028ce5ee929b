"""Indexing: the dim that indices point into stays whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from superscaler_core.graph.tensor import PTensor
from superscaler_core.rules.call import (
    RuleCall,
    broadcast_to,
    dim_of,
    fixed,
    literal,
    names,
    text,
)
from superscaler_core.rules.table import rule


@rule("aten.one_hot")
def one_hot(call: RuleCall) -> PTensor:
    dims = names(len(call.shape) - 1)
    return call.op(
        "one_hot", f"{text(dims)} -> {text([*dims, 'v^'])}", (call["self"],),
        f"F.one_hot({{x0}}, {call.shape[-1]})",
    )  # fmt: skip


@rule("aten.gather")
def gather(call: RuleCall) -> PTensor:
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
        f"{{x0}}.gather({dim}, {{x1}})", saves=(0, 1),
    )  # fmt: skip


@rule("aten.scatter", "aten.scatter_add", "aten.scatter_reduce")
def scatter(call: RuleCall) -> PTensor:
    x, index, src = call["self"], call["index"], call.get("src")
    dims = names(len(x.shape))
    dim = dim_of(call["dim"], len(dims))
    inputs = [t for t in (x, index, src) if t is not None]
    # Where sizes differ, the position decides which elements are touched; these dims stay whole.
    whole = {i for i in range(len(dims)) if i == dim or len({t.shape[i] for t in inputs}) > 1}
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
def indexed_rows(call: RuleCall) -> PTensor:
    """Rows of one dim are written, given by their numbers; other dims can be cut."""
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


@rule("aten.index_select", "aten.index.Tensor")
def index(call: RuleCall) -> PTensor:
    """``x[..., numbers, ...]``, with any number of index tensors that broadcast to one shape.

    An index tensor that has all numbers of its dim in order, such as ``arange(batch)[:, None]``,
    moves no element along the dim: the dim remains a loop, which can be cut like any other. If all
    index tensors are of this kind, the result is a view.
    """
    x: PTensor = call["self"]
    given = {call["dim"]: call["index"]} if "dim" in call.args else dict(enumerate(call["indices"]))
    at = _Indexed.of(call, x, {dim_of(d, len(x.shape)): t for d, t in given.items() if t})
    if len(at.same) == len(at.tensors):
        order = [*sorted(at.same, key=lambda d: at.same[d])]
        before = [d for d in range(len(x.shape)) if d not in at.tensors]
        order = [*before[: at.place], *order, *before[at.place :]]
        out = text(d if d in at.dims or d not in at.chosen else "1" for d in at.out)
        return call.op(
            "index", f"{text(at.dims)} -> {out}", (x,),
            f"{{x0}}.permute({order}).reshape({{out0.shape}})", saves=(), flops=0.0,
        )  # fmt: skip
    inputs = [x, *dict.fromkeys(t for d, t in at.tensors.items() if d not in at.same)]
    operands = [text(at.dims), *(broadcast_to(t.shape, at.chosen, at.sizes) for t in inputs[1:])]
    words = [word or ":" for word in at.words(inputs)]
    return call.op(
        "index", f"{', '.join(operands)} -> {text(at.out)}", inputs,
        f"{{x0}}[{', '.join(words)}]", saves=range(1, len(inputs)),
    )  # fmt: skip


@rule("aten.index_put", "aten._unsafe_index_put")
def index_put(call: RuleCall) -> PTensor:
    """``x[..., numbers, ...] = values``: the numbers stay whole, as several may be equal."""
    x, values = call["self"], call["values"]
    given = {d: t for d, t in enumerate(call["indices"]) if t is not None}
    if any(t.dtype in ("bool", "uint8") for t in given.values()):
        return _masked_put(call, x, given, values)
    at = _Indexed.of(call, x, given)
    free = {at.chosen[i] for i in at.same.values()}
    marked = {d: d if d in free else f"{d}^" for d in at.chosen}
    chosen, out = ([marked.get(d, d) for d in dims] for dims in (at.chosen, at.out))
    of_loop = {**dict(zip(at.dims, x.shape, strict=True)),
               **dict(zip(at.chosen, at.sizes, strict=True))}  # fmt: skip
    inputs = [x, *dict.fromkeys(t for d, t in at.tensors.items() if d not in at.same), values]
    operands = [
        text(at.dims), *(broadcast_to(t.shape, chosen, at.sizes) for t in inputs[1:-1]),
        broadcast_to(values.shape, out, [of_loop[d] for d in at.out]),
    ]  # fmt: skip
    words = ", ".join(str(word or None) for word in at.words(inputs[:-1]))
    more = ", True" if call["accumulate"] else ""
    return call.op(
        "index_put", f"{', '.join(operands)} -> {operands[0]}", inputs,
        f"torch.ops.aten.index_put({{x0}}, [{words}], {{x{len(inputs) - 1}}}{more})",
        saves=range(1, len(inputs) - 1),
    )  # fmt: skip


def _masked_put(call: RuleCall, x: PTensor, at: Mapping[int, PTensor], values: PTensor) -> PTensor:
    """``x[mask] = value``, with one value for all positions."""
    mask = at.get(0)
    if len(at) != 1 or mask is None or prod(values.shape) != 1 or call["accumulate"]:
        raise call.error("a mask as an index may only be given one value; use where.")
    dims = text(names(len(x.shape)))
    of_mask = text(names(len(x.shape))[: len(mask.shape)])
    after = ", None" * (len(x.shape) - len(mask.shape))
    return call.op(
        "where", f"{dims}, {of_mask}, {text('1' for _ in values.shape)} -> {dims}",
        (x, mask, values), f"torch.where({{x1}}{f'[...{after}]' if after else ''}, {{x2}}, {{x0}})",
        saves=(1,),
    )  # fmt: skip


@dataclass(frozen=True)
class _Indexed:
    """The dims of ``x[..., numbers, ...]``.

    Attributes:
        tensors: the index tensors (tensors of numbers), by the dim of x that they index.
        same: dims of x of which every number is read once, in order, each with the dim of the index
            tensors along which the numbers ascend.
        sizes, chosen: sizes and names of the dims to which all index tensors broadcast.
        place: the position of these dims in the result.
        dims, out: names of the dims of x and of the result.
    """

    tensors: Mapping[int, PTensor]
    same: Mapping[int, int]
    sizes: Sequence[int]
    chosen: Sequence[str]
    place: int
    dims: Sequence[str]
    out: Sequence[str]

    @classmethod
    def of(cls, call: RuleCall, x: PTensor, tensors: Mapping[int, PTensor]) -> _Indexed:
        shapes = (t.shape for t in tensors.values())
        sizes = tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
        first, last = min(tensors), max(tensors)
        # If the indexed dims are not adjacent, their result comes first, as numpy defines it.
        place = first if last - first + 1 == len(tensors) else 0
        chosen = [f"n{i}" for i in range(len(sizes))]
        same = _unchanged(call, x, tensors, sizes)
        dims = [
            chosen[same[d]] if d in same else f"{name}^" if d in tensors else name
            for d, name in enumerate(names(len(x.shape)))
        ]
        kept = [name for d, name in enumerate(dims) if d not in tensors]
        out = [*kept[:place], *chosen, *kept[place:]]
        return cls(tensors, same, sizes, chosen, place, dims, out)

    def words(self, inputs: Sequence[PTensor]) -> list[str]:
        """Code of the index of each dim, up to the last indexed one; empty if a dim has none."""
        words = [""] * (max(self.tensors) + 1)
        for d, tensor in self.tensors.items():
            is_same = d in self.same
            words[d] = self._arange(self.same[d]) if is_same else literal(tensor, inputs)
        return words

    def _arange(self, along: int) -> str:
        """Code of the numbers of a loop's local iterations, along one dim of the index tensors."""
        form = ", ".join(":" if i == along else "None" for i in range(len(self.sizes)))
        return f"torch.arange({{size[n{along}]}}, device={{x0}}.device)[{form}]"


def _unchanged(
    call: RuleCall, x: PTensor, at: Mapping[int, PTensor], sizes: Sequence[int]
) -> dict[int, int]:
    """``_Indexed.same``: dims of which every number is read once, in order."""
    found: dict[int, int] = {}
    for dim, tensor in at.items():
        size = x.shape[dim]
        lined_up = (1,) * (len(sizes) - len(tensor.shape)) + tensor.shape
        along = next((i for i, n in enumerate(lined_up) if n == size == sizes[i]), None)
        if along is None or along in found.values() or prod(tensor.shape) != size:
            continue
        if call.is_known(tensor, _has_all_numbers):
            found[dim] = along
    return found


def _has_all_numbers(value: Tensor) -> bool:
    """Whether a tensor holds the numbers from 0 on, each once, in order."""
    return torch.equal(value.flatten(), torch.arange(value.numel()))
