"""Normalizations: statistics are over dims that stay whole, or are sums over dims that are cut."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from superscaler_core.graph.tensor import PTensor
from superscaler_core.rules.call import RuleCall, by_name, fields, fixed, names, share, text
from superscaler_core.rules.table import rule


@rule("aten.layer_norm", "aten.rms_norm")
def layer_norm(call: RuleCall) -> PTensor:
    x: PTensor = call["input"]
    width, rank = call["normalized_shape"], len(x.shape)
    dims = fixed(names(rank), range(rank - len(width), rank))
    inner = text(dims[rank - len(width) :])
    return _normalized(call, f"F.{call.kind}", text(dims), inner, str(tuple(width)))


def _normalized(
    call: RuleCall, function: str, dims: str, of_weights: str, *words: str, **more: Any
) -> PTensor:
    """A call of a function that normalizes over dims that stay whole.

    ``dims`` and ``of_weights`` are the operands of its input and of its weights, if there are any;
    ``words`` are the arguments after the input.
    """
    weights = call.given("weight", "bias")
    operands = ", ".join([dims, *[of_weights] * len(weights)])
    args = ["{x0}", *words, *by_name(weights)]
    args += [f"eps={call['eps']}"] if call["eps"] is not None else []
    code, inputs = f"{function}({', '.join(args)})", (call["input"], *weights.values())
    return call.op(call.kind, f"{operands} -> {dims}", inputs, code, saves=(0,), **more)


@rule("aten.group_norm")
def group_norm(call: RuleCall) -> PTensor:
    dims = text(["n", "(g c^)", *(f"{d}^" for d in names(len(call.shape))[2:])])
    sizes = {"g": call["num_groups"]}
    return _normalized(call, "F.group_norm", dims, "(g c^)", "{size[g]}", sizes=sizes)


@rule("aten.batch_norm")
def batch_norm(call: RuleCall) -> PTensor | Sequence[PTensor]:
    """Normalize by running statistics, or by those of the batch, which are found in two ways.

    ``SyncBatchNorm``, and modules without running statistics, compute mean and variance as sums
    over batch and image, which are exact for every cut of the batch. Other modules normalize each
    part of a cut batch by itself, as ranks of torch's ``DistributedDataParallel`` do.
    """
    x: PTensor = call["input"]
    if not call["training"]:
        return _scaled(call, _centered(call, x, call["running_mean"]), call["running_var"])
    if call["running_mean"] is not None and not call.node.module_type.startswith("SyncBatchNorm"):
        return _by_parts(call)
    dims = ["n", "c", *names(len(x.shape))[2:]]
    summed = f"{text(f'{d}+' if d != 'c' else d for d in dims)} -> c"
    axes = tuple(i for i in range(len(dims)) if i != 1)
    count = prod(x.shape) // x.shape[1]
    average = f".mean({axes}) * {share([d for d in dims if d != 'c'], count)}"
    mean = call.op("mean", summed, (x,), f"{{x0}}{average}", shape=x.shape[1:2], saves=())
    centered = _centered(call, x, mean)
    variance = call.op(
        "variance", summed, (centered,), f"({{x0}} ** 2){average}", shape=x.shape[1:2],
        flops=2 * prod(x.shape),
    )  # fmt: skip
    made = _scaled(call, centered, variance)
    if call["running_mean"] is None:
        return made
    return [made, *_kept(call, (mean, variance), count / max(count - 1, 1))]


def _kept(call: RuleCall, found: Sequence[PTensor], correction: float = 1.0) -> list[PTensor]:
    """The running statistics after a batch with this mean and variance, which is corrected.

    The running statistics have no gradient.
    """
    factors = call["momentum"], call["momentum"] * correction
    running = [call["running_mean"], call["running_var"]]
    return [
        call.op(
            "running", "c, c -> c", (old, new),
            f"{1 - call['momentum']} * {{x0}} + {factor} * {{x1}}.detach()",
            shape=old.shape, dtype=old.dtype, differentiable=False,
        )
        for old, new, factor in zip(running, found, factors, strict=True)
    ]  # fmt: skip


def _by_parts(call: RuleCall) -> Sequence[PTensor]:
    """Normalize each part by its own statistics; the first part's statistics are kept."""
    call.builder.note(
        "batch norms normalize each part of a cut batch by itself, and the running statistics are "
        "those of the first part, as in DistributedDataParallel; over the whole batch, as on one "
        "device, if torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) is captured."
    )
    x = call["input"]
    inputs = [x, *call.given("running_mean", "running_var", "weight", "bias").values()]
    dims = ["n", "c", *(f"{d}^" for d in names(len(x.shape))[2:])]
    words = [f"momentum={call['momentum']}", f"eps={call['eps']}", "is_first={start[n]} == 0"]
    return call.op_of_many(
        "batch_norm", f"{text(['n+', *dims[1:]])}{', c' * (len(inputs) - 1)} -> {text(dims)}, c, c",
        inputs, f"ops.batch_norm({fields(len(inputs))}, {', '.join(words)})", call.outputs,
        saves=(0,), flops=4 * prod(x.shape), num_grads=1,
    )  # fmt: skip


@rule("aten.instance_norm")
def instance_norm(call: RuleCall) -> PTensor | Sequence[PTensor]:
    """Normalize each channel of each image by its own mean and variance, or by running statistics.

    The running statistics are means, over the batch, of the statistics of its images; they are
    summed over parts of the batch.
    """
    x = call["input"]
    if not call["use_input_stats"]:
        return _scaled(call, _centered(call, x, call["running_mean"]), call["running_var"])
    dims = ["n", "c", *(f"{d}^" for d in names(len(x.shape))[2:])]
    made = _normalized(call, "F.instance_norm", text(dims), "c", flops=4 * prod(x.shape))
    if call["running_mean"] is None:
        return made
    found = [
        call.op(
            kind, f"{text(['n+', *dims[1:]])} -> c", (x,),
            f"{{x0}}.{kind}({tuple(range(2, len(dims)))}).mean(0) * {share(['n'], x.shape[0])}",
            shape=x.shape[1:2], differentiable=False,
        )
        for kind in ("mean", "var")
    ]  # fmt: skip
    return [made, *_kept(call, found)]


@rule("aten._weight_norm")
def weight_norm(call: RuleCall) -> PTensor:
    """A weight whose slices along one dim have given norms; only this dim can be cut (-1: none)."""
    v, g, dim = call["v"], call["g"], call["dim"]
    dims = names(len(v.shape))
    whole = text(fixed(dims, (i for i in range(len(dims)) if i != dim)))
    lengths = text("1" if i != dim else d for i, d in enumerate(dims)) if g.shape else "()"
    return call.op(
        "weight_norm", f"{whole}, {lengths} -> {whole}", (v, g),
        f"torch._weight_norm({{x0}}, {{x1}}, {dim})", saves=(0, 1), flops=4 * prod(v.shape),
    )  # fmt: skip


def _centered(call: RuleCall, x: PTensor, mean: PTensor) -> PTensor:
    dims = text(["n", "c", *names(len(x.shape))[2:]])
    code = f"{{x0}} - {{x1}}{_stretched(x)}"
    return call.op("center", f"{dims}, c -> {dims}", (x, mean), code, saves=())


def _scaled(call: RuleCall, x: PTensor, variance: PTensor) -> PTensor:
    """Multiply by weight over deviation as one vector, so that autograd keeps only x; add bias."""
    weight, bias = call["weight"], call["bias"]
    dims = text(["n", "c", *names(len(x.shape))[2:]])
    scale = f"torch.rsqrt({{x1}} + {call['eps']})"
    scale = scale if weight is None else f"({scale} * {{x2}})"
    inputs = [x, variance, *call.given("weight", "bias").values()]
    code = f"{{x0}} * {scale}{_stretched(x)}"
    if bias is not None:
        code += f" + {{x{len(inputs) - 1}}}{_stretched(x)}"
    annotation = f"{dims}{', c' * (len(inputs) - 1)} -> {dims}"
    flops = 3 * prod(x.shape)
    return call.op("batch_norm", annotation, inputs, code, saves=(0, 1), flops=flops)


def _stretched(x: PTensor) -> str:
    """The index that lines a vector up with dim 1."""
    after = ", None" * (len(x.shape) - 2)
    return f"[:{after}]" if after else ""
