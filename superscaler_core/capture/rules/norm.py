"""Normalizations: over dims that stay whole, or as sums over what is cut."""

from __future__ import annotations

from math import prod

from superscaler_core.capture.call import Call, fixed, names, text
from superscaler_core.capture.rules.table import rule
from superscaler_core.tensor import PTensor


@rule("aten.layer_norm", "aten.rms_norm")
def layer_norm(call: Call) -> PTensor:
    x: PTensor = call["input"]
    width = call["normalized_shape"]
    rank = len(x.shape)
    dims = fixed(names(rank), range(rank - len(width), rank))
    inner = text(dims[rank - len(width) :])
    weights = [(n, call[n]) for n in ("weight", "bias") if call.get(n) is not None]
    annotation = ", ".join([text(dims), *[inner] * len(weights)]) + f" -> {text(dims)}"
    words = [f"{name}={{x{i}}}" for i, (name, _) in enumerate(weights, 1)]
    words += [f"eps={call['eps']}"] if call["eps"] is not None else []
    code = f"F.{call.kind}({', '.join(['{x0}', str(tuple(width)), *words])})"
    return call.op(call.kind, annotation, [x, *(w for _, w in weights)], code, saves=(0,))


@rule("aten.group_norm")
def group_norm(call: Call) -> PTensor:
    x: PTensor = call["input"]
    rest = [f"{d}^" for d in names(len(x.shape))[2:]]
    weights = [(n, call[n]) for n in ("weight", "bias") if call[n] is not None]
    dims = text(["n", "(g c^)", *rest])
    words = ["{x0}", "{size[g]}", *(f"{n}={{x{i}}}" for i, (n, _) in enumerate(weights, 1))]
    words.append(f"eps={call['eps']}")
    code = f"F.group_norm({', '.join(words)})"
    return call.op(
        "group_norm", ", ".join([dims, *["(g c^)"] * len(weights)]) + f" -> {dims}",
        [x, *(w for _, w in weights)], code, saves=(0,), sizes={"g": call["num_groups"]},
    )  # fmt: skip


@rule("aten.batch_norm", "aten._batch_norm_impl_index")
def batch_norm(call: Call) -> PTensor:
    """Mean and variance as sums over batch and image: exact however the batch is cut."""
    x: PTensor = call["input"]
    if not call["training"]:
        return _normalized(call, x, call["running_mean"], call["running_var"])
    if call["running_mean"] is not None:
        raise call.error(
            "running statistics change in the forward pass, which parts of a split batch would do "
            "differently; make the module with track_running_stats=False."
        )
    dims = ["n", "c", *names(len(x.shape))[2:]]
    over = [f"{d}+" if d != "c" else d for d in dims]
    count = prod(x.shape) // x.shape[1]
    axes = tuple(i for i in range(len(dims)) if i != 1)
    shape = (x.shape[1],)
    mean = call.op(
        "mean", f"{text(over)} -> c", (x,), f"{{x0}}.sum({axes}) / {count}", shape=shape, saves=()
    )
    variance = call.op(
        "variance", f"{text(over)}, c -> c", (x, mean),
        f"(({{x0}} - {{x1}}{_stretched(x)}) ** 2).sum({axes}) / {count}", shape=shape, flops=3.0,
    )  # fmt: skip
    return _normalized(call, x, mean, variance)


def _normalized(call: Call, x: PTensor, mean: PTensor, variance: PTensor) -> PTensor:
    weights = [(n, call[n]) for n in ("weight", "bias") if call[n] is not None]
    dims = text(["n", "c", *names(len(x.shape))[2:]])
    at = _stretched(x)
    code = f"({{x0}} - {{x1}}{at}) * torch.rsqrt({{x2}} + {call['eps']}){at}"
    signs = {"weight": "*", "bias": "+"}
    code += "".join(f" {signs[n]} {{x{i}}}{at}" for i, (n, _) in enumerate(weights, 3))
    inputs = [x, mean, variance, *(w for _, w in weights)]
    return call.op(
        "batch_norm", f"{dims}{', c' * (len(inputs) - 1)} -> {dims}", inputs, code,
        saves=(0, 1, 2), flops=4.0,
    )  # fmt: skip


def _stretched(x: PTensor) -> str:
    """The index that lines a vector up with dim 1."""
    return "[:" + ", None" * (len(x.shape) - 2) + "]"
