"""Losses: a local mean is scaled by its share of all elements, so that parts are summed."""

from __future__ import annotations

from math import prod

from superscaler_core.front_end.call import Call, literal, names, share, text
from superscaler_core.front_end.rules.table import rule
from superscaler_core.graph.tensor import PTensor

_REDUCTIONS = ("none", "mean", "sum")


@rule("aten.cross_entropy_loss")
def cross_entropy(call: Call) -> PTensor:
    """Cross entropy of scores by class; the classes stay whole.

    Whether a label is torch's default of -100, "ignore", is unknown at capture. The mean is over
    all labels, and a label of -100 is an error at run time. Other values of ``ignore_index`` count.
    """
    scores, labels = call["self"], call["target"]
    if call["weight"] is not None:
        raise call.error("class weights are not supported; weigh the losses of reduction='none'.")
    rank = len(scores.shape)
    dims = names(rank - 1)
    classes = ["v^"] if rank == 1 else [dims[0], "v^", *dims[1:]]
    is_class = labels.shape != scores.shape or not labels.dtype.startswith(("float", "bfloat"))
    reduction, smoothing = _REDUCTIONS[call["reduction"]], call["label_smoothing"]
    more = f", label_smoothing={smoothing}" if smoothing else ""
    if call["ignore_index"] != -100 and is_class:
        return _ignoring(call, classes, dims, more)
    if reduction == "none":
        annotation = f"{text(classes)}, {text(dims if is_class else classes)} -> {text(dims)}"
        return call.op("cross_entropy", annotation, (scores, labels),
                       f'F.cross_entropy({{x0}}, {{x1}}, reduction="none"{more})')  # fmt: skip
    code = f"ops.cross_entropy({{x0}}, {{x1}}, num_labels={_num_labels(scores)}{more})"
    if reduction == "sum":
        code = f'F.cross_entropy({{x0}}, {{x1}}, reduction="sum"{more})'
    return _summed(call, classes, dims if is_class else classes, code)


def _num_labels(scores: PTensor) -> int:
    return prod(scores.shape) // scores.shape[1 if len(scores.shape) > 1 else 0]


def _summed(call: Call, classes: list[str], labels: list[str], code: str) -> PTensor:
    marked = [text(d if d.endswith("^") else f"{d}+" for d in dims) for dims in (classes, labels)]
    return call.op(
        "cross_entropy", f"{', '.join(marked)} -> ()", (call["self"], call["target"]), code
    )


def _ignoring(call: Call, classes: list[str], dims: list[str], more: str) -> PTensor:
    """The sum over the labels that count, and their number, each a sum over parts."""
    index, reduction = call["ignore_index"], _REDUCTIONS[call["reduction"]]
    more = f", ignore_index={index}{more}"
    if reduction == "none":
        return call.op(
            "cross_entropy", f"{text(classes)}, {text(dims)} -> {text(dims)}",
            (call["self"], call["target"]),
            f'F.cross_entropy({{x0}}, {{x1}}, reduction="none"{more})',
        )  # fmt: skip
    code = f'F.cross_entropy({{x0}}, {{x1}}, reduction="sum"{more})'
    total = _summed(call, classes, dims, code)
    if reduction == "sum":
        return total
    count = call.op(
        "count_labels", f"{text(f'{d}+' for d in dims)} -> ()", (call["target"],),
        f"ops.count_labels({{x0}}, {index}, torch.{call.node.outputs[0].dtype})",
    )  # fmt: skip
    return call.op("div", "(), () -> ()", (total, count), "{x0} / {x1}", saves=(1,))


@rule("aten.nll_loss_nd", "aten.nll_loss")
def nll(call: Call) -> PTensor:
    if call["weight"] is not None or call["ignore_index"] != -100:
        raise call.error("weights and ignore_index are not supported; use cross_entropy.")
    scores, labels = call["self"], call["target"]
    dims = names(len(scores.shape) - 1)
    classes = ["v^"] if not dims else [dims[0], "v^", *dims[1:]]
    reduction = _REDUCTIONS[call["reduction"]]
    if reduction == "none":
        annotation = f"{text(classes)}, {text(dims)} -> {text(dims)}"
        code = 'F.nll_loss({x0}, {x1}, reduction="none")'
    else:
        marked = [text(d if d.endswith("^") else f"{d}+" for d in ds) for ds in (classes, dims)]
        annotation = f"{', '.join(marked)} -> ()"
        code = f"ops.nll_loss({{x0}}, {{x1}}, num_labels={_num_labels(scores)})"
        if reduction == "sum":
            code = 'F.nll_loss({x0}, {x1}, reduction="sum")'
    return call.op("nll_loss", annotation, (scores, labels), code, saves=(1,))


_PAIRED = {
    "mse_loss": "F.mse_loss", "l1_loss": "F.l1_loss", "smooth_l1_loss": "F.smooth_l1_loss",
    "huber_loss": "F.huber_loss", "binary_cross_entropy": "F.binary_cross_entropy",
    "binary_cross_entropy_with_logits": "F.binary_cross_entropy_with_logits",
}  # fmt: skip


@rule(*(f"aten.{name}" for name in _PAIRED))
def paired(call: Call) -> PTensor:
    """A loss of one element against one other."""
    x, target = call["self"], call["target"]
    if x.shape != target.shape:
        raise call.error("the target has to have the shape of the input.")
    if call.get("weight") is not None or call.get("pos_weight") is not None:
        raise call.error("weights are not supported; weigh the losses of reduction='none'.")
    more = "".join(f", {n}={literal(call[n], ())}" for n in ("beta", "delta") if n in call.args)
    reduction = _REDUCTIONS[call["reduction"]]
    dims = names(len(x.shape))
    if reduction == "none":
        annotation = f"{text(dims)}, {text(dims)} -> {text(dims)}"
        code = f'{_PAIRED[call.kind]}({{x0}}, {{x1}}, reduction="none"{more})'
    else:
        marked = text(f"{d}+" for d in dims)
        annotation = f"{marked}, {marked} -> ()"
        code = f"{_PAIRED[call.kind]}({{x0}}, {{x1}}{more}) * {share(dims, prod(x.shape))}"
        if reduction == "sum":
            code = f'{_PAIRED[call.kind]}({{x0}}, {{x1}}, reduction="sum"{more})'
    return call.op(call.kind, annotation, (x, target), code)
