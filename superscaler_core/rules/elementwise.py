"""Elementwise ops: an output element depends on input elements at its position; all loops are free.

The traced program tells which they are; the tables make code readable, and say what is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from string import Formatter

from superscaler_core.graph.tensor import PTensor
from superscaler_core.rules.call import RuleCall, broadcast_to, names, text
from superscaler_core.rules.table import rule

_SIGNS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
          "__and__": "&", "__or__": "|", "__xor__": "^"}  # fmt: skip

# The first template with a field for every given argument is used.
_TEMPLATES: dict[str, tuple[str, ...]] = {
    "aten.add.Tensor": ("{self} + {other}", "{self} + {alpha} * {other}"),
    "aten.sub.Tensor": ("{self} - {other}", "{self} - {alpha} * {other}"),
    "aten.rsub.Scalar": ("{other} - {self}",),
    "aten.mul.Tensor": ("{self} * {other}",),
    "aten.div.Tensor": ("{self} / {other}",),
    "aten.pow.Tensor_Scalar": ("{self} ** {exponent}",),
    "aten.neg.default": ("-{self}",),
    "aten.gelu.default": ("F.gelu({self})", "F.gelu({self}, approximate={approximate})"),
    "aten.silu.default": ("F.silu({self})",),
    "aten.abs.default": ("{self}.abs()",),
    "aten.masked_fill.Scalar": ("{self}.masked_fill({mask}, {value})",),
    "aten.maximum.default": ("torch.maximum({self}, {other})",),
    "aten.minimum.default": ("torch.minimum({self}, {other})",),
    "aten.log_sigmoid.default": ("F.logsigmoid({self})",),
    # A lazy conjugate would lose its mark when it is sent to another rank.
    "aten._conj.default": ("torch.conj_physical({self})",),
    "aten.hardswish.default": ("F.hardswish({self})",),
    **{
        f"aten.{name}.default": (f"torch.{name}({{self}})",)
        for name in ("relu", "sigmoid", "tanh", "exp", "log", "sqrt", "rsqrt", "sin", "cos")
    },
    **{
        f"aten.where.{overload}": ("torch.where({condition}, {self}, {other})",)
        for overload in ("self", "ScalarOther", "ScalarSelf")
    },
    **{
        f"aten.{name}.{overload}": (f"{{self}} {sign} {{other}}",)
        for name, sign in _SIGNS.items()
        for overload in ("Tensor", "Scalar")
    },
}

_SAVES_NOTHING = {"add", "sub", "rsub", "neg", "floor", "ceil", "round", "sign", "alias"}
_SAVES_RESULT = {"relu", "sigmoid", "tanh", "exp", "sqrt", "rsqrt", "reciprocal"}
_SAVES_MASK = {"where", "masked_fill"}

# Pointwise ops that torch does not tag as such.
_UNTAGGED = ("aten.where.ScalarOther", "aten.where.ScalarSelf", "aten.where.Scalar",
             "aten.log_sigmoid.default", "aten.hardswish.default", "aten.selu.default",
             "aten.celu.default", "aten.clamp.Tensor", "aten.square.default",
             "aten.__and__", "aten.__or__", "aten.__xor__", "aten._conj", "aten.polar")  # fmt: skip


@rule("pointwise", *_UNTAGGED)
def pointwise(call: RuleCall) -> PTensor:
    if len(call.node.outputs) != 1:
        raise call.error("an elementwise op of several results needs a rule of its own.")
    inputs = list(dict.fromkeys(call.tensors))
    return call.op(
        call.kind, broadcast(inputs, call.shape), inputs, _code(call, inputs),
        saves=_saves(call, inputs),
    )  # fmt: skip


def broadcast(inputs: Sequence[PTensor], out: tuple[int, ...]) -> str:
    """The annotation of an op whose inputs broadcast to the output."""
    dims = names(len(out))
    operands = ", ".join(broadcast_to(t.shape, dims, out) for t in inputs)
    return f"{operands} -> {text(dims)}"


def _code(call: RuleCall, inputs: Sequence[PTensor]) -> str:
    given = {name for name, _ in call.node.given}
    for template in _TEMPLATES.get(call.node.target, ()):
        if given <= {field for _, field, _, _ in Formatter().parse(template)}:
            return call.written(template, inputs)
    return call.fallback(inputs)


def _saves(call: RuleCall, inputs: Sequence[PTensor]) -> Sequence[int]:
    if call.kind in _SAVES_NOTHING:
        return ()
    if call.kind in _SAVES_RESULT:
        return (len(inputs),)
    if call.kind in _SAVES_MASK:
        return (inputs.index(call.get("condition") or call.get("mask")),)
    if call.kind in ("mul", "div") and len(inputs) <= 2:
        if len(inputs) == 1:
            return (0,) if len(call.tensors) == 2 else ()
        # The gradient of each operand reads the other operand; that of a divisor reads both.
        first, second = map(call.builder.has_grad, inputs)
        is_kept = second, first or (second and call.kind == "div")
        return [i for i in (0, 1) if is_kept[i]]
    return range(len(inputs))


@rule("aten.to", "aten._to_copy", "aten.type_as")
def to(call: RuleCall) -> PTensor:
    """A type conversion. A move to another device does nothing, because plans choose devices."""
    x: PTensor = call["self"]
    dtype = call.node.outputs[0].dtype
    return x if dtype == x.dtype else call.each("to", x, f"{{x0}}.to(torch.{dtype})")


@rule("aten.contiguous", "aten.clone", "aten.alias", "aten.positive")
def identity(call: RuleCall) -> PTensor:
    """An op that changes the memory of a tensor, but no value, does nothing in a graph."""
    x: PTensor = call["self"]
    return x


@rule("aten.detach")
def detach(call: RuleCall) -> PTensor:
    x: PTensor = call["self"]
    return call.without_grad(x)


@rule("aten.dropout")
def dropout(call: RuleCall) -> PTensor:
    """Random by the element's position in the whole tensor: equal on all parts and recomputes."""
    (x,) = call.tensors
    if not call["train"] or call["p"] == 0:
        return x
    code = f"ops.dropout({{x0}}, {call['p']}, {{seed}}, lo={{in0.lo}}, shape={x.shape})"
    # The saved mask has the size of the result, with one byte per element.
    return call.each("dropout", x, code, saves=(1,))
