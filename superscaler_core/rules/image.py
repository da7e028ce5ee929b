"""Images: convolutions, pools and interpolation; windows slide along height and width.

If the padding is wider than a window, or a size does not match the windows, dims stay whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from superscaler_core.graph.invocation import Invocation
from superscaler_core.graph.sliding import SlidingWindow
from superscaler_core.graph.tensor import PTensor
from superscaler_core.rules.call import RuleCall, literal, names, share, text
from superscaler_core.rules.linear import add_bias
from superscaler_core.rules.table import rule


@dataclass(frozen=True)
class _Windows:
    """The windows in the spatial dims of an image; each field has one number per dim.

    Attributes:
        sizes, counts: sizes of the image, and numbers of windows.
        reach: indices that a window spans.
        stride: distance between two windows.
        before: indices of padding before the image.
    """

    sizes: Sequence[int]
    counts: Sequence[int]
    reach: Sequence[int]
    stride: Sequence[int]
    before: Sequence[int]

    @property
    def rows(self) -> list[tuple[int, ...]]:
        """For every dim its fields, in their order."""
        sides = self.sizes, self.counts, self.reach, self.stride, self.before
        return list(zip(*sides, strict=True))

    def dims(self) -> list[str] | None:
        """The image's dims as windows along ``y0``, ...; None if one does not match its size."""
        made = []
        for i, (size, count, reach, stride, before) in enumerate(self.rows):
            if before >= reach:
                return None
            window = SlidingWindow(f"y{i}", stride, -before, reach - 1 - before)
            if not window.fits(count, size):
                return None
            made.append(f"y{i}" if reach == stride == 1 else str(window))
        return made

    def overhang(self, lead: int) -> str:
        """Code of the lengths by which windows reach over the ends, after ``lead`` other dims."""
        return f"[{', '.join(f'{{pad0[{lead + i}]}}' for i in range(len(self.sizes)))}]"


@rule("aten.conv1d", "aten.conv2d", "aten.conv3d")
def convolution(call: RuleCall) -> PTensor:
    """The op sums over input channels, within groups if there are any; the bias is another op."""
    x, weight = call["input"], call["weight"]
    rank = len(x.shape) - 2
    if len(weight.shape) != len(x.shape):
        raise call.error("an input without a batch dim is not supported.")
    windows, dilation = _convolved(call, rank)
    kernel = [f"k{i}^" for i in range(rank)]
    out = [f"y{i}" for i in range(rank)]
    image = windows.dims()
    if image is None:
        image, out = ([f"{c}{i}^" for i in range(rank)] for c in "xy")
    groups = call["groups"]
    if groups == 1:
        dims = ["n", "c+", *image], ["o", "c+", *kernel], ["n", "o", *out]
    else:
        dims = ["n", "(g c+)", *image], ["(g o)", "c+", *kernel], ["n", "(g o)", *out]
    if image[0][-1] == "^" or image == out:
        function, more, steps = f"F.{call.kind}", [], ["stride", "padding", "dilation"]
        words = [(n, literal(call[n], ())) for n, _ in call.node.given if n in steps]
    else:
        function, more = "ops.conv", [windows.overhang(2)]
        words = [("stride", str(windows.stride)), ("dilation", str(dilation))]
    words += [("groups", "{size[g]}")] if groups != 1 else []
    made = call.op(
        call.kind, f"{text(dims[0])}, {text(dims[1])} -> {text(dims[2])}", (x, weight),
        Invocation(function, ("{x0}", "{x1}", *more), tuple(words)),
        flops=2 * prod(call.shape) * prod(weight.shape[1:]),
    )  # fmt: skip
    return made if call["bias"] is None else add_bias(call, made, call["bias"], dim=1)


def _convolved(call: RuleCall, rank: int) -> tuple[_Windows, list[int]]:
    """The windows of a convolution, and its dilation."""
    dilation = _each(call["dilation"], rank)
    pairs = zip(call["weight"].shape[2:], dilation, strict=True)
    reach = [d * (k - 1) + 1 for k, d in pairs]
    padding = call["padding"]
    # The odd row of an even kernel is padded at the end.
    same = [(r - 1) // 2 * (padding == "same") for r in reach]
    before = same if isinstance(padding, str) else _each(padding, rank)
    sizes, counts = call["input"].shape[2:], call.shape[2:]
    return _Windows(sizes, counts, reach, _each(call["stride"], rank), before), dilation


@rule("aten.max_pool1d", "aten.max_pool2d", "aten.avg_pool1d", "aten.avg_pool2d")
def pooled(call: RuleCall) -> PTensor:
    (x,) = call.tensors
    rank = int(call.kind[-2])
    kernel = _each(call["kernel_size"], rank)
    dilation = _each(call.get("dilation", 1), rank)
    padding = _each(call["padding"], rank)
    windows = _Windows(
        x.shape[-rank:], call.shape[-rank:],
        [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)],
        _each(call["stride"] or kernel, rank), padding,
    )  # fmt: skip
    is_max = call.kind.startswith("max")
    lead = names(len(x.shape) - rank)
    image = windows.dims()
    # With ceil_mode the last window may end behind the padding, and its mean has fewer elements;
    # integers have no minus infinity.
    are_whole = all((c - 1) * s - p + r <= size + p for size, c, r, s, p in windows.rows)
    is_exact = (is_max or are_whole) and x.dtype.startswith(("float", "bfloat"))
    if image is None or not is_exact:
        return _whole(call)
    words = ["{x0}", str(kernel), windows.overhang(len(lead)), f"stride={windows.stride}"]
    words += [f"dilation={dilation}"] if is_max else []
    words += ["counts_padding=False"] if not call.get("count_include_pad", True) else []
    divisor = call.get("divisor_override")
    words += [f"divisor={divisor}"] if divisor is not None else []
    out = [*lead, *(f"y{i}" for i in range(rank))]
    return call.op(
        call.kind, f"{text([*lead, *image])} -> {text(out)}", (x,),
        f"ops.{call.kind[:-2]}({', '.join(words)})", saves=(0, 1) if is_max else (0,),
        flops=flops_of_windows(call),
    )  # fmt: skip


@rule("aten.adaptive_avg_pool1d", "aten.adaptive_avg_pool2d")
def adaptive(call: RuleCall) -> PTensor:
    """Pooling to one pixel is a mean; means of parts, times their shares, add up to it."""
    (x,) = call.tensors
    rank = int(call.kind[-2])
    if prod(call.shape[-rank:]) != 1:
        return _whole(call)
    dims = names(len(x.shape))
    source = [*dims[:-rank], *(f"{d}+" for d in dims[-rank:])]
    axes = tuple(range(len(dims) - rank, len(dims)))
    return call.op(
        "mean", f"{text(source)} -> {text([*dims[:-rank], *['1'] * rank])}", (x,),
        f"{{x0}}.mean({axes}, keepdim=True) * {share(dims[-rank:], prod(x.shape[-rank:]))}",
        saves=(),
    )  # fmt: skip


@rule("aten.upsample_nearest2d")
def repeated(call: RuleCall) -> PTensor:
    """For a power of two every pixel is repeated, so the image can be cut anywhere."""
    (x,) = call.tensors
    factors = [out // size for out, size in zip(call.shape[2:], x.shape[2:], strict=True)]
    is_whole = call.shape[2:] == tuple(f * n for f, n in zip(factors, x.shape[2:], strict=True))
    # Other factors are not exact in float32, and torch divides by them.
    is_exact = is_whole and all(f & (f - 1) == 0 for f in factors)
    if not is_exact or (call.get("scale_factors") or factors) != factors:
        return _whole(call)
    return call.op(
        call.kind, "n c y x -> n c (y f0^) (x f1^)", (x,),
        f"F.interpolate({{x0}}, scale_factor={factors})", saves=(),
        sizes={"f0": factors[0], "f1": factors[1]},
    )  # fmt: skip


def _whole(call: RuleCall) -> PTensor:
    """An op whose height and width stay whole."""
    x = next(iter(call.tensors))
    spatial = 1 if call.kind.endswith("1d") else 2
    dims = names(len(x.shape) - spatial)
    image, out = ([f"{c}{i}^" for i in range(spatial)] for c in "xy")
    keeps_places = call.kind.startswith("max")
    return call.op(
        call.kind, f"{text([*dims, *image])} -> {text([*dims, *out])}", (x,), call.fallback((x,)),
        saves=(0, 1) if keeps_places else () if call.kind.startswith("upsample") else (0,),
        flops=flops_of_windows(call),
    )  # fmt: skip


rule("aten.upsample_bilinear2d")(_whole)

_PIXELS = {"linear": 2, "bicubic": 4}
"""Pixels per dim from which an interpolation computes a pixel, by the end of its name."""


def flops_of_windows(call: RuleCall) -> int | None:
    """Operations of a pool, or of an interpolation: each result is computed from one window.

    None if the call is neither, if it only copies pixels, or if its windows cover the image once.
    """
    rank = next((int(c) for c in call.kind if c.isdigit()), len(call.shape) - 2)
    if "pool" in call.kind and "kernel_size" in call.args:
        return prod(call.shape) * prod(_each(call["kernel_size"], rank))
    side = next((n for name, n in _PIXELS.items() if f"{name}{rank}d" in call.kind), None)
    return None if side is None else 2 * prod(call.shape) * side**rank


def _each(value: Any, rank: int) -> list[int]:
    """One number for each spatial dim, from torch's form: one number for all, or a list."""
    given = [value] if isinstance(value, int) else list(value)
    return given * rank if len(given) == 1 else given
