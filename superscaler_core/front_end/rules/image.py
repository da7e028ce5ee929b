"""Images: convolutions, pools and interpolation; height and width stay whole."""

from __future__ import annotations

from math import prod

from superscaler_core.front_end.call import Call, literal, names, text
from superscaler_core.front_end.rules.linear import add_bias
from superscaler_core.front_end.rules.table import rule
from superscaler_core.tensor import PTensor


@rule("aten.conv1d", "aten.conv2d", "aten.conv3d")
def convolution(call: Call) -> PTensor:
    """Input channels are a sum, by groups if there are some; the bias is an op of its own."""
    x, weight = call["input"], call["weight"]
    rank = len(x.shape) - 2
    if len(weight.shape) != len(x.shape):
        raise call.error("an input without a batch dim is not supported.")
    image, kernel, out = ([f"{c}{i}^" for i in range(rank)] for c in "xky")
    words = ["{x0}", "{x1}"]
    words += [
        f"{name}={literal(call[name], ())}" for name, _ in call.node.given
        if name in ("stride", "padding", "dilation")
    ]  # fmt: skip
    if call["groups"] == 1:
        dims = ["n", "c+", *image], ["o", "c+", *kernel], ["n", "o", *out]
    else:
        dims = ["n", "(g c+)", *image], ["(g o)", "c+", *kernel], ["n", "(g o)", *out]
        words.append("groups={size[g]}")
    made = call.op(
        call.kind, f"{text(dims[0])}, {text(dims[1])} -> {text(dims[2])}", (x, weight),
        f"F.{call.kind}({', '.join(words)})",
        # Input pixels are loops too, but a kernel meets each output pixel once.
        flops=2.0 / prod(x.shape[2:]),
    )  # fmt: skip
    return made if call["bias"] is None else add_bias(call, made, call["bias"], dim=1)


@rule("aten.max_pool1d", "aten.max_pool2d", "aten.avg_pool1d", "aten.avg_pool2d",
      "aten.adaptive_avg_pool1d", "aten.adaptive_avg_pool2d", "aten.upsample_nearest2d",
      "aten.upsample_bilinear2d")  # fmt: skip
def resampled(call: Call) -> PTensor:
    x = next(iter(call.tensors))
    spatial = 1 if call.kind.endswith("1d") else 2
    lead = names(len(x.shape) - spatial)
    image, out = ([f"{c}{i}^" for i in range(spatial)] for c in "xy")
    # A mean over the whole image needs no more than its count.
    is_linear = call.kind.startswith("upsample") or prod(call.shape[-spatial:]) == 1
    keeps_places = call.kind.startswith("max")
    return call.op(
        call.kind, f"{text([*lead, *image])} -> {text([*lead, *out])}", (x,), call.fallback((x,)),
        saves=(0, 1) if keeps_places else () if is_linear else (0,),
    )  # fmt: skip
