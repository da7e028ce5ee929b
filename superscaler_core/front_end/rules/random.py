"""Random numbers: each depends on its place in the whole tensor, so every part draws its own."""

from __future__ import annotations

from math import prod

import torch

from superscaler_core.front_end.call import Call, names, text
from superscaler_core.front_end.rules.table import rule
from superscaler_core.graph.tensor import PTensor

_SAMPLES = {
    "rand": "{u}", "rand_like": "{u}", "uniform": "{low} + ({high} - {low}) * {u}",
    "randn": "{n}", "randn_like": "{n}", "normal_functional": "{mean} + {std} * {n}",
    "bernoulli": "({u} < {p}).to(torch.{dtype})",
    "exponential": "(-torch.log({u}) / {lambd}).to(torch.{dtype})",
}  # fmt: skip
"""Code of samples, from uniform numbers in (0, 1) or from normal ones."""

_FROM_FLOAT32 = {"bernoulli", "exponential"}
"""Samples from uniform numbers of float32 at least: a dtype of fewer digits has too few numbers."""


@rule(
    "aten.rand.default", "aten.rand_like.default", "aten.uniform", "aten.randn.default",
    "aten.randn_like.default", "aten.normal_functional", "aten.bernoulli", "aten.exponential",
)  # fmt: skip
def samples(call: Call) -> PTensor:
    """The same numbers on every part and in every recompute, but not the numbers of torch."""
    out = call.node.outputs[0]
    if out.dtype.startswith("complex"):
        raise call.error("complex numbers are not supported.")
    given = call.get("self")
    x = given if isinstance(given, PTensor) and given.kind != "constant" else _scalar(call)
    dims = text(d if size != 1 else "1" for d, size in zip(names(len(out.shape)), out.shape,
                                                           strict=True))  # fmt: skip
    where = "lo={out0.lo}, extent={out0.shape}"
    is_wide = out.dtype == "float64" or call.kind not in _FROM_FLOAT32
    drawn = out.dtype if is_wide else "float32"
    more = f"shape={out.shape}, dtype=torch.{drawn}, device={{x0}}.device"
    fields = {
        "u": f"ops.uniform({{seed}}, {where}, {more})",
        "n": f"ops.normal({{seed}}, {where}, {more})",
        "low": call.get("from"), "high": call.get("to"), "p": call.get("p"), "dtype": out.dtype,
        **{name: call.get(name) for name in ("mean", "std", "lambd")},
    }  # fmt: skip
    if call.kind == "bernoulli" and "p" not in call.args:
        x, fields["p"] = call["self"], "{x0}"
    source = dims if x.shape == out.shape else "()"
    return call.op(
        call.kind, f"{source} -> {dims}", (x,), _SAMPLES[call.kind].format(**fields), saves=(),
        flops=20 * prod(out.shape), differentiable=False,
    )  # fmt: skip


def _scalar(call: Call) -> PTensor:
    """A scalar constant, from which the op takes its device."""
    return call.builder.constant("origin", torch.zeros(()), (), "float32")


@rule("aten.feature_dropout")
def feature_dropout(call: Call) -> PTensor:
    """Dropout of whole channels."""
    x: PTensor = call["input"]
    if not call["train"] or call["p"] == 0:
        return x
    dims = text(names(len(x.shape)))
    after = ", None" * (len(x.shape) - 2)
    ones = "torch.ones({in0.shape}[:2], dtype={x0}.dtype, device={x0}.device)"
    mask = f"ops.dropout({ones}, {call['p']}, {{seed}}, lo={{in0.lo}}[:2], shape={x.shape[:2]})"
    return call.op(
        "dropout", f"{dims} -> {dims}", (x,), f"{{x0}} * {mask}[...{after}]", saves=(),
    )  # fmt: skip
