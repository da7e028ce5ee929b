"""Random numbers: each depends on its place in the whole tensor, so every part draws its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from superscaler_core.graph.tensor import PTensor
from superscaler_core.rules.call import RuleCall, broadcast_to, literal, names, text
from superscaler_core.rules.table import rule

_SAMPLES = {
    "rand": "{u}", "rand_like": "{u}", "uniform": "{low} + ({high} - {low}) * {u}",
    "randn": "{n}", "randn_like": "{n}", "normal_functional": "{mean} + {std} * {n}",
    "normal": "({mean} + {std} * {n}).detach()", "log_normal": "torch.exp({mean} + {std} * {n})",
    "cauchy": "{median} + {sigma} * torch.tan(torch.pi * ({u} - 0.5))",
    "bernoulli": "({u} < {p}).to(torch.{dtype})",
    "geometric": "(torch.log({u}) / {log_of_rest}).ceil().to(torch.{dtype})",
    "exponential": "(-torch.log({u}) / {lambd}).to(torch.{dtype})",
    "randint": "{i}", "randint_like": "{i}", "random": "{i}",
    "poisson": "ops.poisson({self}, {of})", "binomial": "ops.binomial({count}, {prob}, {of})",
    "standard_gamma": "ops.standard_gamma({self}, {of})",
}  # fmt: skip
"""Code of samples, from uniform numbers in (0, 1), from normal ones, or from integers."""

_FROM_FLOAT32 = {"bernoulli", "exponential", "geometric", "cauchy"}
"""Samples from uniform numbers of float32 at least: a dtype of fewer digits has too few numbers."""

_READ = ("p", "mean", "std", "count", "prob")
"""The arguments that may be tensors of parameters; others are numbers."""


@rule(*(f"aten.{name}" for name in _SAMPLES if name != "standard_gamma"), "aten._standard_gamma")
def samples(call: RuleCall) -> PTensor:
    """The same numbers on every part and in every recompute, but not the numbers of torch."""
    out = call.node.outputs[0]
    if out.dtype.startswith("complex"):
        raise call.error("complex numbers are not supported.")
    read = _read(call)
    inputs = list(dict.fromkeys(read.values())) or [_origin(call)]
    dims = [d if size != 1 else "1" for d, size in zip(names(len(out.shape)), out.shape,
                                                      strict=True)]  # fmt: skip
    operands = ", ".join(broadcast_to(x.shape, dims, out.shape) for x in inputs)
    fields = _numbers(call, out.dtype)
    fields |= {name: literal(x, inputs) for name, x in read.items()}
    return call.op(
        call.kind, f"{operands} -> {text(dims)}", inputs, _SAMPLES[call.kind].format(**fields),
        saves=(0, 1) if call.kind == "standard_gamma" else (),
        flops=20 * prod(out.shape), differentiable=call.kind == "standard_gamma",
    )  # fmt: skip


def _read(call: RuleCall) -> dict[str, PTensor]:
    """The tensors whose values parametrize the distribution, by name."""
    read = {name: call.get(name) for name in _READ}
    is_self = call.kind in ("poisson", "standard_gamma")
    if is_self or (call.kind == "bernoulli" and "p" not in call.args):
        read["self" if is_self else "p"] = call["self"]
    return {name: x for name, x in read.items() if isinstance(x, PTensor)}


def _origin(call: RuleCall) -> PTensor:
    """The tensor from which an op takes its device: one of the same shape, or a scalar."""
    given = call.get("self")
    if isinstance(given, PTensor) and given.kind != "constant":
        return given
    return call.builder.constant("origin", torch.zeros(()), (), "float32")


def _numbers(call: RuleCall, dtype: str) -> dict[str, Any]:
    """The fields of the templates in ``_SAMPLES`` except tensors."""
    where = "lo={out0.lo}, extent={out0.shape}"
    is_wide = dtype == "float64" or call.kind not in _FROM_FLOAT32
    drawn = dtype if is_wide else "float32"
    more = f"shape={call.shape}, dtype=torch.{drawn}, device={{x0}}.device"
    made = {
        "u": f"ops.uniform({{seed}}, {where}, {more})",
        "n": f"ops.normal({{seed}}, {where}, {more})",
        "of": f"{{seed}}, lo={{out0.lo}}, shape={call.shape}",
        "low": call.get("from"), "high": call.get("to"), "dtype": dtype,
    }  # fmt: skip
    made |= {n: call.get(n) for n in ("mean", "std", "median", "sigma", "lambd", "p")}
    if call.kind == "geometric":
        made["log_of_rest"] = literal(math.log1p(-call["p"]) if call["p"] < 1 else -math.inf, ())
    if "rand" in call.kind:
        low, high = _range(call, dtype)
        made["i"] = f"ops.integers({{seed}}, {low}, {high}, {where}, {more})"
    return made


def _range(call: RuleCall, dtype: str) -> Sequence[int]:
    """The least integer to be drawn, and the first that is not drawn any more."""
    high = call.get("high", call.get("to"))
    if isinstance(high, PTensor):
        raise call.error("a bound that is a tensor is not supported.")
    if high is None:
        made: torch.dtype = getattr(torch, dtype)
        if made == torch.bool:
            high = 2
        elif made.is_floating_point:
            high = round(2 / torch.finfo(made).eps)
        else:
            high = torch.iinfo(made).max
    return call.get("low", call.get("from")) or 0, high


@rule("aten.randperm")
def randperm(call: RuleCall) -> PTensor:
    (size,), dtype = call.shape, call.node.outputs[0].dtype
    return call.op(
        "randperm", "() -> n^", (_origin(call),),
        f"ops.permutation({{seed}}, {size}, dtype=torch.{dtype}, device={{x0}}.device)", saves=(),
        flops=20 * size, differentiable=False,
    )  # fmt: skip


@rule("aten.multinomial")
def multinomial(call: RuleCall) -> PTensor:
    """Every row can be drawn alone; its probabilities stay whole."""
    x: PTensor = call["self"]
    rows, num = text(names(len(x.shape) - 1)).replace("()", ""), call["num_samples"]
    row, num_rows = ("{in0.lo}[0]", x.shape[0]) if rows else (0, 1)
    return call.op(
        "multinomial", f"{rows} v^ -> {rows} n^", (x,),
        f"ops.multinomial({{x0}}, {num}, {call['replacement']}, {{seed}}, row={row}, "
        f"num_rows={num_rows})", saves=(), differentiable=False,
    )  # fmt: skip


@rule("aten.rrelu")
def rrelu(call: RuleCall) -> PTensor:
    """A leaky ReLU, whose slope is drawn for every element in training."""
    x, low, high = call["self"], call["lower"], call["upper"]
    slope = str((low + high) / 2)
    if call["training"]:
        slope = f"({low} + {high - low} * {_numbers(call, x.dtype)['u']})"
    code = f"torch.where({{x0}} >= 0, {{x0}}, {{x0}} * {slope})"
    return call.each("rrelu", x, code, saves=(0, 1))


@rule("aten.feature_dropout")
def feature_dropout(call: RuleCall) -> PTensor:
    """Dropout of whole channels."""
    x: PTensor = call["input"]
    if not call["train"] or call["p"] == 0:
        return x
    after = ", None" * (len(x.shape) - 2)
    ones = "torch.ones({in0.shape}[:2], dtype={x0}.dtype, device={x0}.device)"
    mask = f"ops.dropout({ones}, {call['p']}, {{seed}}, lo={{in0.lo}}[:2], shape={x.shape[:2]})"
    return call.each("dropout", x, f"{{x0}} * {mask}[...{after}]")
