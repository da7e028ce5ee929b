"""Convolutions and pools of a piece of an image, which is padded only where the image ends."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody writes it
from torch import Tensor

Overhang = Sequence[tuple[int, int]]
"""Rows that windows reach beyond the piece, before and after it, for every spatial dim."""

_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_MAX_POOL = {1: F.max_pool1d, 2: F.max_pool2d}
_AVG_POOL = {1: F.avg_pool1d, 2: F.avg_pool2d}


def conv(
    x: Tensor,
    weight: Tensor,
    overhang: Overhang,
    *,
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int = 1,
    bias: Tensor | None = None,
) -> Tensor:
    """Convolution of a piece of an image; beyond the piece, windows see zeros.

    Args:
        x: ``[n, channels, *piece]``.
        weight: ``[out, channels / groups, *kernel]``.
        overhang: see ``Overhang``.
        stride, dilation, groups, bias: as in ``torch.nn.functional.conv2d``.

    Returns:
        ``[n, out, *windows]``.
    """
    kernel = [d * (k - 1) + 1 for k, d in zip(weight.shape[2:], dilation, strict=True)]
    padding, left = _split(x, overhang, kernel, stride)
    call = _CONV[len(overhang)]
    return call(
        _padded(x, left, 0.0), weight, bias, tuple(stride), padding, tuple(dilation), groups
    )


def max_pool(
    x: Tensor, kernel: Sequence[int], overhang: Overhang, *,
    stride: Sequence[int], dilation: Sequence[int],
) -> Tensor:  # fmt: skip
    """Maximum over windows; beyond the piece, windows see minus infinity.

    Args:
        x: ``[..., *piece]``, with one or two dims before the piece.
        kernel, stride, dilation: as in ``torch.nn.functional.max_pool2d``.
        overhang: see ``Overhang``.
    """
    reach = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    padding, left = _split(x, overhang, reach, stride)
    call = _MAX_POOL[len(overhang)]
    x = _padded(x, left, float("-inf"))
    made: Tensor = call(x, tuple(kernel), tuple(stride), padding, tuple(dilation))
    return made


def avg_pool(
    x: Tensor, kernel: Sequence[int], overhang: Overhang, *,
    stride: Sequence[int], counts_padding: bool = True, divisor: int | None = None,
) -> Tensor:  # fmt: skip
    """Mean over windows; beyond the piece, windows see zeros.

    Args:
        x: ``[..., *piece]``, with one or two dims before the piece.
        kernel, stride: as in ``torch.nn.functional.avg_pool2d``.
        overhang: see ``Overhang``.
        counts_padding: whether those zeros count in a mean.
        divisor: divisor of the sum over a window; if None, the number of elements that count.
    """
    padding, left = _split(x, overhang, kernel, stride)
    how = {} if divisor is None else {"divisor_override": divisor}

    def pool(image: Tensor, counts: bool) -> Tensor:
        call = _AVG_POOL[len(overhang)]
        image = _padded(image, left, 0.0)
        made: Tensor = call(image, tuple(kernel), tuple(stride), padding, False, counts, **how)
        return made

    if counts_padding or divisor is not None or not any(map(any, left)):
        return pool(x, counts_padding)
    return pool(x, True) / pool(torch.ones_like(x), True)


def _split(
    x: Tensor, overhang: Overhang, reach: Sequence[int], stride: Sequence[int]
) -> tuple[tuple[int, ...], Overhang]:
    """The padding that an op can do itself, equal at both ends, and the rest, done before it."""
    padding, left = [], []
    sizes = x.shape[x.dim() - len(overhang) :]
    for size, (before, after), rows, step in zip(sizes, overhang, reach, stride, strict=True):
        # Rows after the last window do no harm if they are fewer than a stride. Half a window is
        # the most that torch's pools pad.
        over = (size + before + after - rows) % step
        is_even = before <= rows // 2 and 0 <= before - after < step - over
        padding.append(before if is_even else 0)
        left.append((0, 0) if is_even else (before, after))
    return tuple(padding), left


def _padded(x: Tensor, overhang: Overhang, value: float) -> Tensor:
    """An image with rows of a value around it."""
    if not any(map(any, overhang)):
        return x
    # torch names the last dim first.
    return F.pad(x, [n for ends in reversed(overhang) for n in ends], value=value)
