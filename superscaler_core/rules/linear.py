"""Matrix products: every loop can be cut; a bias is an op of its own.

If the bias were part of the product, every part of the reduction loop would add it.
"""

from __future__ import annotations

from math import prod

from superscaler_core.graph.graph import Op
from superscaler_core.graph.invocation import Invocation
from superscaler_core.graph.tensor import PARAMETER, PTensor
from superscaler_core.quoted import quoted
from superscaler_core.rules.call import RuleCall, broadcast_to, fields, largest, names, text
from superscaler_core.rules.opaque import flops_of_products
from superscaler_core.rules.shape import packed, reshaped, rows_apart
from superscaler_core.rules.table import rule


@rule("aten.linear.default")
def linear(call: RuleCall) -> PTensor:
    bias: PTensor | None = call["bias"]
    made = _mapped(call, rows_apart(call, call["input"]), call["weight"])
    return reshaped(call, made if bias is None else add_bias(call, made, bias), call.shape)


def _mapped(call: RuleCall, x: PTensor, weight: PTensor) -> PTensor:
    """``x`` times the transposed weight."""
    lead = text(names(len(x.shape) - 1)) if len(x.shape) > 1 else ""
    function, out, shape = "F.linear", "n" if len(weight.shape) == 2 else "", weight.shape[:-1]
    src = packed(call, weight, 0)
    if src is not None and src.kind == PARAMETER:
        function, out, weight = "ops.linear_of_pieces", "p n", src
    made = call.op(
        "linear", f"{lead} k+, {out} k+ -> {f'{lead} {out}'.strip() or '()'}", (x, weight),
        Invocation(function, ("{x0}", "{x1}")), flops=2 * prod(x.shape) * prod(shape),
        shape=(*x.shape[:-1], *weight.shape[:-1]),
    )  # fmt: skip
    return reshaped(call, made, (*x.shape[:-1], *shape))


def add_bias(call: RuleCall, x: PTensor, bias: PTensor, dim: int = -1) -> PTensor:
    """Add a vector along one dim of ``x``; a matrix or scalar is broadcast."""
    rank = len(x.shape)
    of_bias, of_x = packed(call, bias, 0), packed(call, x, rank - 1)
    if dim == -1 and of_bias is not None and of_x is not None and len(of_bias.shape) == 2:
        return reshaped(call, add_bias(call, of_x, of_bias), x.shape)
    of_x = packed(call, x, 0) if rank == len(bias.shape) == 3 else None
    if of_x is not None and bias.shape[0] == x.shape[0]:
        of_bias = reshaped(call, bias, (*of_x.shape[:2], *bias.shape[1:]))
        return reshaped(call, add_bias(call, of_x, of_bias), x.shape)
    dims = names(rank)
    if len(bias.shape) != 1 or dim == -1:
        added = broadcast_to(bias.shape, dims, x.shape)
        return call.op("add_bias", f"{text(dims)}, {added} -> {text(dims)}", (x, bias),
                       "{x0} + {x1}", shape=x.shape, saves=())  # fmt: skip
    after = ", None" * (rank - 1 - dim % rank)
    return call.op(
        "add_bias", f"{text(dims)}, {dims[dim]} -> {text(dims)}", (x, bias),
        f"{{x0}} + {{x1}}[:{after}]", shape=x.shape, saves=(),
    )  # fmt: skip


@rule("aten.matmul.default", "aten.mm.default", "aten.bmm.default", "aten.mv.default",
      "aten.dot.default")  # fmt: skip
def matmul(call: RuleCall) -> PTensor:
    x, y = (t for t in call.args.values() if isinstance(t, PTensor))
    return product(call, x, y)


def product(call: RuleCall, x: PTensor, y: PTensor, scale: float = 1.0) -> PTensor:
    """``x @ y`` times a number, with broadcast batch dims."""
    maker = call.builder.maker_of(y)
    if scale == 1 and maker is not None and _transposes_weight(call, maker):
        return _mapped(call, x, maker.inputs[0])
    if (apart := _batch_apart(call, x, y)) is not None:
        return reshaped(call, product(call, *apart, scale), call.shape)
    rows = ["m"] if len(x.shape) > 1 else []
    columns = ["n"] if len(y.shape) > 1 else []
    batch = names(max(len(x.shape), len(y.shape), 2) - 2)
    x_batch = _batch(batch, x.shape[:-2], y.shape[:-2])
    y_batch = _batch(batch, y.shape[:-2], x.shape[:-2])
    code = "{x0} @ {x1}" if scale == 1 else f"{scale} * ({{x0}} @ {{x1}})"
    is_plain = bool(columns) and y.shape[:-2] in ((), x.shape[:-2])
    shape = out = (*x.shape[:-1], y.shape[-1]) if is_plain else call.shape
    src = packed(call, y, len(y.shape) - 1) if columns and scale == 1 else None
    if src is not None and src.kind == PARAMETER:
        y, columns, out = src, ["p", "n"], (*shape[:-1], *src.shape[-2:])
        code = "ops.matmul_of_pieces({x0}, {x1})"
    made = call.op(
        "matmul",
        f"{text([*x_batch, *rows, 'k+'])}, {text([*y_batch, 'k+', *columns])} -> "
        f"{text([*batch, *rows, *columns])}",
        (x, y), code, flops=2 * prod(shape) * x.shape[-1], shape=out,
    )  # fmt: skip
    return reshaped(call, made, shape)


def _batch_apart(call: RuleCall, x: PTensor, y: PTensor) -> tuple[PTensor, PTensor] | None:
    """Both factors with two batch dims, such as batch and heads; None if no view merged these."""
    if len(x.shape) != 3 or len(y.shape) != 3:
        return None
    of_x, of_y = packed(call, x, 0), packed(call, y, 0)
    if of_x is None or of_y is None or of_x.shape[:2] != of_y.shape[:2]:
        return None
    return of_x, of_y


def _transposes_weight(call: RuleCall, op: Op) -> bool:
    """Whether an op makes ``weight.T``, so that a product with its result is a linear map."""
    (dims,), (out,) = op.annotation.inputs[:1], op.annotation.outputs[:1]
    weight = packed(call, op.inputs[0], 0) or op.inputs[0]
    return weight.kind == PARAMETER and len(dims) == 2 and out == dims[::-1] and not op.flops


def _batch(batch: list[str], mine: tuple[int, ...], other: tuple[int, ...]) -> list[str]:
    """The batch dims of one operand; those that broadcast are ``1``."""
    padded = (1,) * (len(mine) - len(other)) + other
    against = padded[len(padded) - len(mine) :] if mine else ()
    dims = batch[len(batch) - len(mine) :]
    sizes = zip(dims, mine, against, strict=True)
    return ["1" if size == 1 and wanted != 1 else dim for dim, size, wanted in sizes]


@rule("aten.addmm.default", "aten.baddbmm.default", "aten.addmv.default")
def added_matmul(call: RuleCall) -> PTensor:
    bias, x, y = (t for t in call.args.values() if isinstance(t, PTensor))
    # Times 0 it is not read, as in torch: it may be memory that nothing has written.
    is_read = call["beta"] != 0
    if is_read and call["beta"] != 1:
        bias = call.each("mul", bias, f"{{x0}} * {call['beta']}")
    is_map = len(x.shape) == 2 and len(bias.shape) == 1
    made = product(call, rows_apart(call, x) if is_map else x, y, call["alpha"])
    return reshaped(call, add_bias(call, made, bias) if is_read else made, call.shape)


@rule("aten.einsum.default")
def einsum(call: RuleCall) -> PTensor:
    equation, operands = call["equation"].replace(" ", ""), call["tensors"]
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    if not arrow or "." in equation or any(len(set(t)) < len(t) for t in [*terms, right]):
        raise call.error(
            f"equation {equation!r} is not supported: write '->' and every dim, each once."
        )
    marked = [text(i if i in right else f"{i}+" for i in term) for term in terms]
    return call.op(
        "einsum", f"{', '.join(marked)} -> {text(right)}", operands,
        f"torch.einsum({quoted(equation)}, {fields(len(operands))})",
        flops=max(flops_of_products(call), largest([t.shape for t in operands], [call.shape])),
    )  # fmt: skip


@rule("aten.embedding")
def embedding(call: RuleCall) -> PTensor:
    """Look up rows; a part with some of the rows gives zeros for the others; parts are summed."""
    rows, ids = call["weight"], call["indices"]
    _check_gradient(call, rows)
    if call["scale_grad_by_freq"]:
        raise call.error("scale_grad_by_freq is not supported.")
    dims = text(names(len(ids.shape)))
    padding = f", padding_idx={call['padding_idx']}" if call["padding_idx"] >= 0 else ""
    where = "" if dims == "()" else f"{dims} "
    return call.op(
        "embedding", f"{dims}, v+ w -> {where}w", (ids, rows),
        f"ops.embedding({{x0}}, {{x1}}, first={{start[v]}}, num_rows={rows.shape[0]}{padding})",
        # Rows that are not looked up cost nothing.
        flops=prod(ids.shape) * rows.shape[1],
    )  # fmt: skip


def _check_gradient(call: RuleCall, rows: PTensor) -> None:
    """Refuse rows whose gradient would be sparse."""
    if call["sparse"] and rows.requires_grad and call.node.with_grad:
        raise call.refusal(
            f"the gradient of {call.builder.uncast(rows).name!r} would be sparse, and plans cut "
            "and move dense tensors; make the embedding with sparse=False."
        )


@rule("aten.embedding_bag")
def embedding_bag(call: RuleCall) -> tuple[PTensor, ...]:
    """Sums or means of rows over bags of one size; other bags and maxima are opaque ops."""
    rows, ids, weights = call["weight"], call["indices"], call["per_sample_weights"]
    num_bags = call.shape[0]
    size = ids.shape[0] // max(num_bags, 1)
    _check_gradient(call, rows)
    if call["scale_grad_by_freq"] or call["include_last_offset"]:
        raise call.error("options of gradients and offsets are not supported.")
    starts = [*range(0, num_bags * size, size or 1)]
    is_even = num_bags * size == ids.shape[0] and call["mode"] in (0, 1)
    if not (is_even and call.is_known(call["offsets"], lambda value: value.tolist() == starts)):
        raise call.error("bags have to be rows of a matrix, and their mode 'sum' or 'mean'.")
    bags = [reshaped(call, t, (num_bags, size)) for t in (ids, weights) if t is not None]
    more = ", is_mean=True" if call["mode"] == 1 else ""
    padding = call.get("padding_idx")
    more += "" if padding is None else f", padding_idx={padding % rows.shape[0]}"
    made = call.op(
        "embedding_bag", f"{', '.join(['b s^'] * len(bags))}, v+ w -> b w", (*bags, rows),
        f"ops.embedding_bag({{x0}}, {{x{len(bags)}}}, {'{x1}' if weights else 'None'}, "
        f"first={{start[v]}}{more})",
        flops=prod(ids.shape) * rows.shape[1],
    )  # fmt: skip
    return (made,)
