"""Losses: each part of a mean divides by the number of all elements, so that parts add up."""

from __future__ import annotations

from math import prod

from superscaler_core.graph.tensor import PTensor
from superscaler_core.rules.call import (
    RuleCall,
    broadcast_to,
    fields,
    literal,
    names,
    share,
    text,
)
from superscaler_core.rules.table import rule

_REDUCTIONS = ("none", "mean", "sum")


@rule("aten.cross_entropy_loss")
def cross_entropy(call: RuleCall) -> PTensor:
    """Cross entropy of scores by class; the classes stay whole."""
    scores, labels, smoothing = call["self"], call["target"], call["label_smoothing"]
    more = f", label_smoothing={smoothing}" if smoothing else ""
    if labels.shape == scores.shape and labels.dtype.startswith(("float", "bfloat")):
        return _of_probabilities(call, more)
    return _of_labels(call, "cross_entropy", more)


@rule("aten.nll_loss_nd", "aten.nll_loss", "aten.nll_loss2d")
def nll(call: RuleCall) -> PTensor:
    return _of_labels(call, "nll_loss", "")


def _of_labels(call: RuleCall, kind: str, more: str) -> PTensor:
    """A loss of class numbers, some of which may be ignored; classes may have weights.

    A mean is over the labels that are not ignored. Their number depends on the labels' values, and
    is summed over parts. An op of its own computes the losses of single labels first. So only these
    losses, and not the scores, wait for the number from other devices.
    """
    scores, labels, weight = call["self"], call["target"], call["weight"]
    classes, dims = _dims(scores)
    reduction, index = _REDUCTIONS[call["reduction"]], call["ignore_index"]
    weights = [] if weight is None else [weight]
    ignoring = f", ignore_index={index}" if index != -100 else ""
    losses = call.op(
        kind, f"{', '.join([text(classes), text(dims), *['v^'] * len(weights)])} -> {text(dims)}",
        (scores, labels, *weights),
        f"ops.{kind}({fields(2 + len(weights))}{ignoring}{more})",
        shape=labels.shape, saves=range(2 + len(weights)),
    )  # fmt: skip
    if reduction == "none":
        return losses
    summed = _text(dims, True)
    if reduction == "sum":
        return call.op("sum", f"{summed} -> ()", (losses,), "{x0}.sum()", saves=())
    # Half precision cannot represent every count.
    dtype = "float64" if losses.dtype == "float64" else "float32"
    count = call.op(
        "count_labels", f"{', '.join([summed, *['v^'] * len(weights)])} -> ()",
        (labels, *weights),
        f"ops.count_labels({fields(1 + len(weights))}, ignore_index={index}, dtype=torch.{dtype})",
        dtype=dtype, differentiable=False,
    )  # fmt: skip
    return call.op(
        "mean_of_labels", f"{summed}, () -> ()", (losses, count), "ops.mean_of_labels({x0}, {x1})",
        saves=(1,),
    )  # fmt: skip


def _of_probabilities(call: RuleCall, more: str) -> PTensor:
    """Cross entropy of labels that are a probability of every class; no label is ignored."""
    scores, labels, weight = call["self"], call["target"], call["weight"]
    classes, dims = _dims(scores)
    reduction = _REDUCTIONS[call["reduction"]]
    weights = [] if weight is None else [weight]
    operands = [*[_text(classes, reduction != "none")] * 2, *["v^"] * len(weights)]
    code = f'F.cross_entropy({fields(2 + len(weights))}, reduction="{reduction}"{more})'
    if reduction == "mean":
        code += f" * {share(dims, prod(scores.shape) // scores.shape[1 if dims else 0])}"
    out = text(dims) if reduction == "none" else "()"
    annotation = f"{', '.join(operands)} -> {out}"
    return call.op("cross_entropy", annotation, (scores, labels, *weights), code)


def _dims(scores: PTensor) -> tuple[list[str], list[str]]:
    """The dims of scores, and the dims of labels."""
    dims = names(len(scores.shape) - 1)
    return ["v^"] if not dims else [dims[0], "v^", *dims[1:]], dims


def _text(dims: list[str], is_summed: bool) -> str:
    return text(f"{d}+" if is_summed and not d.endswith("^") else d for d in dims)


_PAIRED = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
           "binary_cross_entropy_with_logits")  # fmt: skip


@rule(*(f"aten.{name}" for name in _PAIRED))
def paired(call: RuleCall) -> PTensor:
    """A loss of each element and the target at its position; weights are broadcast."""
    x, target = call["self"], call["target"]
    if x.shape != target.shape:
        raise call.error("the target has to have the shape of the input.")
    weights = call.given("weight", "pos_weight")
    inputs = (x, target, *weights.values())
    more = "".join(f", {n}={{x{i}}}" for i, n in enumerate(weights, 2))
    more += "".join(f", {n}={literal(call[n], ())}" for n in ("beta", "delta") if n in call.args)
    reduction = _REDUCTIONS[call["reduction"]]
    dims = names(len(x.shape))
    marked = dims if reduction == "none" else [f"{d}+" for d in dims]
    operands = ", ".join(broadcast_to(t.shape, marked, x.shape) for t in inputs)
    how = "" if reduction == "mean" else f', reduction="{reduction}"'
    code = f"F.{call.kind}({{x0}}, {{x1}}{how}{more})"
    code += f" * {share(dims, prod(x.shape))}" if reduction == "mean" else ""
    out = text(dims) if reduction == "none" else "()"
    return call.op(call.kind, f"{operands} -> {out}", inputs, code)
