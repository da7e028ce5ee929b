"""Ops whose rows are independent: the batch can be cut, all other dims stay whole."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from superscaler_core.graph.opaque import whole_dims
from superscaler_core.graph.tensor import PTensor
from superscaler_core.rules.call import RuleCall
from superscaler_core.rules.elementwise import dropout
from superscaler_core.rules.image import flops_of_windows
from superscaler_core.rules.opaque import opaque_op
from superscaler_core.rules.shape import cat, split
from superscaler_core.rules.table import rule

_ROWS = {
    ("self",): (
        "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "im2col", "col2im", "prelu",
        "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_avg_pool3d", "max_pool3d",
        "avg_pool3d", "max_pool2d_with_indices", "reflection_pad2d", "replication_pad2d",
    ),
    # The argument's name depends on the overload.
    ("input", "self"): (
        "upsample_nearest1d", "upsample_linear1d", "upsample_bicubic2d", "upsample_nearest3d",
        "upsample_trilinear3d", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d",
        "_upsample_nearest_exact3d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa",
    ),
    ("input", "grid"): ("grid_sampler",),
    ("input", "hx"): ("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"),
    ("input1", "input2"): ("bilinear",),
}  # fmt: skip
"""The arguments that have rows, each with the ops that take them."""

_ARGUMENTS = {f"aten.{name}": args for args, names in _ROWS.items() for name in names}


@rule(*_ARGUMENTS)
def rows(call: RuleCall) -> tuple[PTensor, ...]:
    return _by_rows(call, _ARGUMENTS[call.node.base])


@rule("aten.conv_transpose1d", "aten.conv_transpose2d", "aten.conv_transpose3d")
def transposed_convolution(call: RuleCall) -> tuple[PTensor, ...]:
    if len(call["input"].shape) != len(call["weight"].shape):
        raise call.error("an input without a batch dim is not supported.")
    return _by_rows(call, ("input",))


def _by_rows(call: RuleCall, arguments: Sequence[str]) -> tuple[PTensor, ...]:
    with_rows = [
        t for name in arguments if name in call.args
        for t in (call[name] if isinstance(call[name], list) else [call[name]])
    ]  # fmt: skip
    shapes = [value.shape for value in call.node.outputs]
    if not with_rows or any(len(shape) < 2 or shape[0] != shapes[0][0] for shape in shapes):
        raise call.error("it has no batch dim.")
    inputs = list(dict.fromkeys(call.tensors))
    return by_batch(call, inputs, [0 if t in with_rows else None for t in inputs],
                    [0] * len(shapes))  # fmt: skip


@rule("aten.lstm.input", "aten.gru.input", "aten.rnn_tanh.input", "aten.rnn_relu.input")
def recurrent(call: RuleCall) -> tuple[PTensor, ...]:
    """Layers of a recurrent network over a whole sequence; with dropout, each layer is an op."""
    num = call["num_layers"]
    if num == 1 or not (call["dropout"] and call["train"]):
        return _recurrent(call)
    hidden = call["hx"] if isinstance(call["hx"], list) else [call["hx"]]
    starts = [_chunks(call, h, num) for h in hidden]
    x, ends, num_params = call["input"], [], len(call["params"]) // num
    for layer in range(num):
        hx = [start[layer] for start in starts]
        args = {
            **call.args, "input": x, "hx": hx if isinstance(call["hx"], list) else hx[0],
            "params": call["params"][layer * num_params :][:num_params],
            "num_layers": 1, "dropout": 0.0,
        }  # fmt: skip
        x, *end = _recurrent(call.other(call.node.target, args, call.shape, *(h.shape for h in hx)))
        ends.append(end)
        if layer < num - 1:
            args = {"input": x, "p": call["dropout"], "train": True}
            x = dropout(call.other("aten.dropout.default", args, x.shape))
    joined = zip(*ends, (value.shape for value in call.node.outputs[1:]), strict=True)
    cats = (call.other("aten.cat.default", {"tensors": t}, shape) for *t, shape in joined)
    return x, *map(cat, cats)


def _chunks(call: RuleCall, x: PTensor, num: int) -> Sequence[PTensor]:
    size = x.shape[0] // num
    args = {"self": x, "split_size": size}
    pieces = split(call.other("aten.split.Tensor", args, *[(size, *x.shape[1:])] * num))
    assert not isinstance(pieces, PTensor)
    return pieces


def _recurrent(call: RuleCall) -> tuple[PTensor, ...]:
    hidden = call["hx"] if isinstance(call["hx"], list) else [call["hx"]]
    time_first = 0 if call["batch_first"] else 1
    inputs = list(dict.fromkeys(call.tensors))
    batch = [time_first if t is call["input"] else 1 if t in hidden else None for t in inputs]
    return by_batch(call, inputs, batch, [time_first, *[1] * len(hidden)])


def by_batch(
    call: RuleCall,
    inputs: Sequence[PTensor],
    batch: Sequence[int | None],
    of_results: Sequence[int],
) -> tuple[PTensor, ...]:
    """The call as it was traced, as an op that can be cut only along its batch.

    ``batch`` and ``of_results`` are the dims of inputs and results that are it; None if none is.
    """
    left = ", ".join(whole_dims(t.shape, at) for t, at in zip(inputs, batch, strict=True))
    results = zip(call.node.outputs, of_results, strict=True)
    right = ", ".join(whole_dims(value.shape, at) for value, at in results)
    weights = [t for t, at in zip(inputs, batch, strict=True) if at is None]
    return opaque_op(
        call, call.kind, inputs, call.fallback(inputs), annotation=f"{left} -> {right}",
        flops=flops_of_windows(call) or _products(call, inputs[0], weights),
    )  # fmt: skip


def _products(call: RuleCall, x: PTensor, weights: Sequence[PTensor]) -> int:
    """Operations of products of every row, or pixel, of ``x`` with all matrices of weights."""
    features = 1 if call.kind.startswith("conv") else len(x.shape) - 1
    num_rows = prod(size for dim, size in enumerate(x.shape) if dim != features)
    return 2 * num_rows * sum(prod(w.shape) for w in weights if len(w.shape) > 1)
