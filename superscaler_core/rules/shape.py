"""Ops that only move elements: views, permutations, slices, joins."""

from __future__ import annotations

from math import prod
from typing import Any

from superscaler_core.graph.builder import GraphBuilder
from superscaler_core.graph.tensor import PARAMETER, PTensor
from superscaler_core.rules.call import (
    RuleCall,
    broadcast_to,
    dim_of,
    dims_of,
    fields,
    fixed,
    literal,
    names,
    text,
)  # fmt: skip
from superscaler_core.rules.table import rule
from superscaler_core.rules.views import view_annotation


def move(call: RuleCall, annotation: str, inputs: Any, code: str, **more: Any) -> PTensor:
    """An op that computes nothing and keeps nothing for the backward."""
    return call.op(call.kind, annotation, inputs, code, saves=(), flops=0.0, **more)


_VIEW = "{x0}.reshape({out0.shape})"


@rule("aten.view.default", "aten.reshape", "aten._unsafe_view", "aten.flatten", "aten.unflatten",
      "aten.unsqueeze", "aten.squeeze", "aten.view_as", "aten.reshape_as")  # fmt: skip
def view(call: RuleCall) -> PTensor:
    return reshaped(call, call["self"], call.shape, call.kind)


def reshaped(call: RuleCall, x: PTensor, shape: tuple[int, ...], kind: str = "view") -> PTensor:
    """A tensor in another shape; if it is a view of a tensor of that shape, that tensor itself.

    So a dim can be cut even if an intermediate shape merges it with others.
    """
    if x.shape == shape:
        return x
    src = viewed(call, x)
    if src.shape == shape:
        return src
    annotation, sizes = view_annotation(x.shape, shape)
    if src is not x and "^" not in (direct := view_annotation(src.shape, shape))[0]:
        x, (annotation, sizes) = src, direct
    apart = tuple(sizes.values())
    if "^" not in annotation and len(apart) > max(_rank(x.shape), _rank(shape)):
        # Dims are split first and merged then: the tensor between can be cut along every dim.
        x = _view_op(call, kind, view_annotation(x.shape, apart), x, apart)
        annotation, sizes = view_annotation(apart, shape)
    return _view_op(call, kind, (annotation, sizes), x, shape)


def _view_op(
    call: RuleCall, kind: str, how: tuple[str, dict[str, int]], x: PTensor, shape: tuple[int, ...]
) -> PTensor:
    return call.op(
        kind, how[0], (x,), _VIEW, shape=shape, dtype=x.dtype, sizes=how[1], saves=(), flops=0.0
    )


def _rank(shape: tuple[int, ...]) -> int:
    return sum(size > 1 for size in shape)


def view_of(builder: GraphBuilder, x: PTensor, shape: tuple[int, ...]) -> PTensor:
    """A tensor in another shape, by an op that is no call of the model."""
    annotation, sizes = view_annotation(x.shape, shape)
    (made,) = builder.op(
        "unpacked", annotation, (x,), [(shape, x.dtype)], _VIEW, sizes=sizes, saves=(), flops=0.0
    )
    return made


def viewed(call: RuleCall, x: PTensor) -> PTensor:
    """The tensor that ``x`` is a view of; ``x`` itself if it is no view."""
    maker = call.builder.maker_of(x)
    # Where no gradients are recorded, the result of a view has to be a new tensor.
    is_view = call.node.with_grad and maker is not None and maker.code == _VIEW
    return maker.inputs[0] if is_view and maker is not None else x


def packed(call: RuleCall, x: PTensor, dim: int) -> PTensor | None:
    """The tensor that ``x`` is a view of, if ``dim`` is ``[pieces, features]`` there; else None."""
    kept = call.builder.uncast(x)
    maker = call.builder.maker_of(kept)
    if maker is None or maker.code != _VIEW:
        return None
    src = maker.inputs[0]
    merged = (*src.shape[:dim], prod(src.shape[dim : dim + 2]), *src.shape[dim + 2 :])
    is_split = len(src.shape) == len(x.shape) + 1 and 1 not in src.shape[dim : dim + 2]
    if merged != x.shape or not is_split:
        return None
    return src if kept == x else call.builder.cast(src, x.dtype)


def rows_apart(call: RuleCall, x: PTensor) -> PTensor:
    """``x[rows, n]`` with the dims that a view has merged into its rows: ``[batch, tokens, n]``.

    An op that treats every row alike can then be cut along each of these dims. A tensor that has
    other dims too, such as windows, stays as it is: several maps may share the copy that its view
    makes.
    """
    src = viewed(call, x)
    if len(x.shape) == 2 and x.shape[0]:
        for num in range(len(src.shape), 1, -1):
            if prod(src.shape[:num]) == x.shape[0]:
                return reshaped(call, src, (*src.shape[:num], x.shape[-1]))
    return x


def permuted(call: RuleCall, order: list[int], code: str) -> PTensor:
    x: PTensor = call["self"]
    dims = names(len(x.shape))
    if order == sorted(order):
        return x
    for dim in range(len(dims)):
        src = packed(call, x, dim)
        if src is not None and src.kind != PARAMETER:
            # The view follows the permutation, so that readers of pieces find the pieces.
            apart = [d + (d > dim) + i for d in order for i in ((0, 1) if d == dim else (0,))]
            sizes = [src.shape[d] for d in apart]
            words = names(len(sizes))
            made = move(call, f"{text(words)} -> {text(words[d] for d in apart)}", (src,),
                        f"{{x0}}.permute({apart})", shape=sizes, dtype=x.dtype)  # fmt: skip
            return reshaped(call, made, call.shape, "view")
    return move(call, f"{text(dims)} -> {text(dims[d] for d in order)}", (x,), code)


@rule("aten.permute", "aten.numpy_T")
def permute(call: RuleCall) -> PTensor:
    rank = len(call.shape)
    order = [dim_of(d, rank) for d in call.get("dims", range(rank - 1, -1, -1))]
    return permuted(call, order, f"{{x0}}.permute({order})")


@rule("aten.transpose.int", "aten.swapaxes", "aten.swapdims")
def transpose(call: RuleCall) -> PTensor:
    rank = len(call.shape)
    a, b = (dim_of(d, rank) for d in list(call.args.values())[1:])
    order = list(range(rank))
    order[a], order[b] = b, a
    return permuted(call, order, f"{{x0}}.transpose({a}, {b})")


@rule("aten.t", "aten.mT")
def t(call: RuleCall) -> PTensor:
    rank = len(call.shape)
    order = [*range(rank - 2), rank - 1, rank - 2] if rank > 1 else [0]
    return permuted(call, order, f"{{x0}}.transpose({rank - 2}, {rank - 1})")


@rule("aten.movedim.int", "aten.movedim.intlist", "aten.moveaxis")
def movedim(call: RuleCall) -> PTensor:
    x, rank = call["self"], len(call.shape)
    pairs = [[v] if isinstance(v, int) else v for v in (call["source"], call["destination"])]
    src, dst = ([dim_of(d, rank) for d in dims] for dims in pairs)
    order = [d for d in range(rank) if d not in src]
    for at, d in sorted(zip(dst, src, strict=True)):
        order.insert(at, d)
    return permuted(call, order, f"{{x0}}.permute({order})") if x.shape else x


@rule("aten.expand", "aten.expand_as")
def expand(call: RuleCall) -> PTensor:
    return expanded(call, call["self"])


def expanded(call: RuleCall, x: PTensor) -> PTensor:
    """``x`` repeated along the dims that it lacks, and along its dims of size 1."""
    if x.shape == call.shape:
        return x
    dims = names(len(call.shape))
    source = broadcast_to(x.shape, dims, call.shape)
    return call.op(
        "expand", f"{source} -> {text(dims)}", (x,), "{x0}.expand({out0.shape})",
        dtype=x.dtype, saves=(), flops=0.0,
    )  # fmt: skip


@rule("aten.broadcast_tensors")
def broadcast_tensors(call: RuleCall) -> list[PTensor]:
    return [expanded(call, x) for x in call.tensors]


@rule("aten.repeat")
def repeat(call: RuleCall) -> PTensor:
    """The copies are a loop of their own, the outer loop of each dim."""
    x, repeats = call["self"], call["repeats"]
    skipped = len(repeats) - len(x.shape)
    inner = names(len(x.shape))
    dims = [f"r{i}" if i < skipped else f"(r{i} {inner[i - skipped]})" for i in range(len(repeats))]
    counts = ", ".join(f"{{size[r{i}]}}" for i in range(len(repeats)))
    return move(call, f"{text(inner)} -> {text(dims)}", (x,), f"{{x0}}.repeat({counts})")


@rule("aten.slice.Tensor")
def slice_(call: RuleCall) -> PTensor:
    x: PTensor = call["self"]
    if x.shape == call.shape:
        return x
    dim = dim_of(call["dim"], len(x.shape))
    start, stop, step = slice(call["start"], call["end"], call["step"]).indices(x.shape[dim])
    found = _piece_of_view(call, x, dim, start, stop - start) if step == 1 else None
    if found is not None:
        return found
    index = ", ".join([":"] * dim + [f"{start}:{stop}" + (f":{step}" if step != 1 else "")])
    return _along(call, x, dim, f"{{x0}}[{index}]")


@rule("aten.copy", "aten.fill.Tensor")
def copy(call: RuleCall) -> PTensor:
    """The assigned value, in the shape and dtype of the tensor to which it is assigned."""
    x: PTensor = call["src"] if "src" in call.args else call["value"]
    out = call.node.outputs[0]
    if x.dtype != out.dtype:
        x = call.each("to", x, f"{{x0}}.to(torch.{out.dtype})")
    return expanded(call, x)


@rule("aten.slice_scatter")
def slice_scatter(call: RuleCall) -> PTensor:
    """A tensor with some indices of one dim replaced by another tensor; this dim stays whole."""
    x, src = call["self"], call["src"]
    if src.shape == x.shape:
        return src  # type: ignore[no-any-return]
    return _scattered(call, "o^")


@rule("aten.select_scatter")
def select_scatter(call: RuleCall) -> PTensor:
    return _scattered(call)


def _scattered(call: RuleCall, *of_piece: str) -> PTensor:
    """``call["src"]`` put into a tensor; ``of_piece`` is what it has in place of the whole dim."""
    x, src = call["self"], call["src"]
    dims, dim = names(len(x.shape)), dim_of(call["dim"], len(x.shape))
    whole, piece = text(fixed(dims, [dim])), text([*dims[:dim], *of_piece, *dims[dim + 1 :]])
    return move(call, f"{whole}, {piece} -> {whole}", (x, src), call.fallback((x, src)))


@rule("aten.narrow.default")
def narrow(call: RuleCall) -> PTensor:
    return piece(call, call["self"], call["dim"], call["start"], call["length"])


def piece(call: RuleCall, x: PTensor, dim: int, start: int, length: int) -> PTensor:
    """A run of indices of one dim."""
    dim = dim_of(dim, len(x.shape))
    if length == x.shape[dim]:
        return x
    found = _piece_of_view(call, x, dim, start, length)
    if found is not None:
        return found
    shape = (*x.shape[:dim], length, *x.shape[dim + 1 :])
    return _along(call, x, dim, f"{{x0}}.narrow({dim}, {start}, {length})", shape=shape)


def _piece_of_view(call: RuleCall, x: PTensor, dim: int, start: int, length: int) -> PTensor | None:
    """A run of indices of a dim, if it is a piece of ``[pieces, features]`` before a view."""
    src = packed(call, x, dim)
    if src is None or length != src.shape[dim + 1] or start % length:
        return None
    shape = (*x.shape[:dim], length, *x.shape[dim + 1 :])
    return _selected(call, src, dim, start // length, shape)


def _along(call: RuleCall, x: PTensor, dim: int, code: str, **more: Any) -> PTensor:
    """An op that mixes the indices of one dim: the dim stays whole, and may change its size."""
    dims = names(len(x.shape))
    out = [*dims[:dim], "o^", *dims[dim + 1 :]]
    return move(call, f"{text(fixed(dims, [dim]))} -> {text(out)}", (x,), code, **more)


@rule("aten.split", "aten.split_with_sizes", "aten.chunk", "aten.tensor_split")
def split(call: RuleCall) -> list[PTensor]:
    """An op for each piece, so that a piece is computed only if it is read."""
    dim = dim_of(call["dim"], len(call.shape))
    lengths = [value.shape[dim] for value in call.node.outputs]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    pairs = zip(starts, lengths, strict=True)
    return [piece(call, call["self"], dim, start, length) for start, length in pairs]


@rule("aten.select.int")
def select(call: RuleCall) -> PTensor:
    x = call["self"]
    dim = dim_of(call["dim"], len(x.shape))
    return _selected(call, x, dim, call["index"] % x.shape[dim])


@rule("aten.unbind")
def unbind(call: RuleCall) -> list[PTensor]:
    x = call["self"]
    dim = dim_of(call["dim"], len(x.shape))
    return [_selected(call, x, dim, i) for i in range(x.shape[dim])]


def _selected(
    call: RuleCall, x: PTensor, dim: int, index: int, shape: tuple[int, ...] | None = None
) -> PTensor:
    dims = names(len(x.shape))
    rest = text(dims[:dim] + dims[dim + 1 :])
    annotation = f"{text(fixed(dims, [dim]))} -> {rest}"
    return move(call, annotation, (x,), f"{{x0}}.select({dim}, {index})", shape=shape)


@rule("aten.cat")
def cat(call: RuleCall) -> PTensor:
    given: list[PTensor] = call["tensors"]
    tensors = [x for x in given if prod(x.shape)] or given[:1]
    if len(tensors) == 1 and tensors[0].shape == call.shape:
        return tensors[0]
    dim = dim_of(call["dim"], len(call.shape))
    dims = names(len(call.shape))
    pieces = [text([*dims[:dim], f"c{i}^", *dims[dim + 1 :]]) for i in range(len(tensors))]
    out = text([*dims[:dim], "o^", *dims[dim + 1 :]])
    code = f"torch.cat([{fields(len(tensors))}], {dim})"
    return move(call, f"{', '.join(pieces)} -> {out}", tensors, code)


@rule("aten.stack")
def stack(call: RuleCall) -> PTensor:
    tensors = call["tensors"]
    dim = dim_of(call["dim"], len(call.shape))
    dims = names(len(call.shape) - 1)
    operands, out = ", ".join([text(dims)] * len(tensors)), text([*dims[:dim], "o^", *dims[dim:]])
    code = f"torch.stack([{fields(len(tensors))}], {dim})"
    return move(call, f"{operands} -> {out}", tensors, code)


@rule("aten.view_as_real", "aten.view_as_complex")
def parts_of_complex(call: RuleCall) -> PTensor:
    """Complex numbers as pairs of real ones, and back; a pair is the last dim."""
    x: PTensor = call["self"]
    dims = names(min(len(x.shape), len(call.shape)))
    source, out = (text([*dims, "o^"][: len(shape)]) for shape in (x.shape, call.shape))
    return move(call, f"{source} -> {out}", (x,), f"torch.{call.kind}({{x0}})")


@rule("aten.pad", "aten.constant_pad_nd")
def pad(call: RuleCall) -> PTensor:
    x: PTensor = call["self"]
    amounts = call["pad"]
    rank = len(x.shape)
    touched = [rank - 1 - i // 2 for i, amount in enumerate(amounts) if amount]
    dims = names(rank)
    out = [f"o{i}^" if i in touched else d for i, d in enumerate(dims)]
    more = [literal(call["mode"], ())] if call.get("mode", "constant") != "constant" else []
    more += [f"value={literal(call['value'], ())}"] if call["value"] else []
    code = f"F.pad({', '.join(['{x0}', str(amounts), *more])})"
    return move(call, f"{text(fixed(dims, touched))} -> {text(out)}", (x,), code)


@rule("aten.roll", "aten.flip")
def reordered(call: RuleCall) -> PTensor:
    x: PTensor = call["self"]
    dims = names(len(x.shape))
    if not call["dims"]:
        raise call.error("name the dims.")
    whole = fixed(dims, dims_of(call["dims"], len(dims)))
    shifts = f"{call['shifts']}, " if "shifts" in call.args else ""
    code = f"torch.{call.kind}({{x0}}, {shifts}{call['dims']})"
    return move(call, f"{text(whole)} -> {text(dims)}", (x,), code)


@rule("aten.tril", "aten.triu")
def triangle(call: RuleCall) -> PTensor:
    """All loops can be cut: a part's diagonal is that of the whole, shifted by the part's start."""
    x: PTensor = call["self"]
    *_, row, column = names(len(x.shape))
    diagonal = f"{{start[{row}]}} - {{start[{column}]}} + {call['diagonal']}"
    return call.each(call.kind, x, f"torch.{call.kind}({{x0}}, {diagonal})", flops=0.0)
