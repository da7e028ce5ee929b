"""Digests: sums over the words of a box of a tensor, which add up over boxes.

A tensor is seen as unsigned words of at most 32 bits: an element of 1, 2 or 4 bytes is one word, a
longer one is several words, lowest first, along one more dim. The digest of a box is the sum modulo
2**64, over its words w at the indices (i_0, i_1, ...) in the whole tensor, of

    (w + 1) * T_0[i_0] * T_1[i_1] * ...

where every ``T_d[i]`` is an odd pseudo-random number of 64 bits (``factor``). So the digest of a
box does not depend on strides, devices or the order of the sum, and boxes that tile a box add up to
its digest: all layouts of a tensor have one total. The 1 makes zeros differ from nothing at all.

An error is missed if the weighted sum of the differences of words is 0. One wrong word is always
detected, because weights are odd. Two wrong words are missed with probability 2**-32 at most: they
differ by at most 32 bits, so the highest 32 bits of the sum are random in any case. That is why
words are this short: the signs of two float64 would be bits 63 of words of 64 bits, and two flipped
signs would always cancel. An error that has the form of a grid along k dims, in the highest bit of
each word of 32 bits, is missed with probability ``sum(comb(32, j) for j < k) / 2**32``, which is
the largest for any error; for k = 2 it is 33 / 2**32. docs/many.md derives this.

A digest detects faults. It is no signature: whoever knows the factors can make another tensor with
the same digest.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from rvdcomm.layout import Box
from rvdcomm.native import core

MAX_BLOCK_WORDS = 1 << 22
"""Words that are in memory as 64-bit numbers at once: 32 MiB, some times over."""

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
"""Shifts and multipliers of splitmix64."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers as wide as an element."""


def digest_of(tensor: Tensor, box: Box) -> int:
    """The digest of a tensor that holds ``box`` of a whole tensor.

    Laws (tests/arrival/test_digests.py): digests of boxes that tile a box add up to its digest; the
    native core gives those of ``defined_digest``.

    Args:
        tensor: ``[*box.shape]``, maybe strided, but neither conjugated nor negated lazily.
        box: the part of the whole tensor.
    """
    if core is None or tensor.device.type != "cpu":
        return defined_digest(tensor, box)
    num_words = max(1, tensor.itemsize // 4)
    sizes, strides, lo = list(tensor.shape), list(tensor.stride()), list(box.lo)
    if num_words > 1:
        sizes, strides, lo = [*sizes, num_words], [s * num_words for s in strides] + [1], [*lo, 0]
    summed: int = core.digest(tensor.data_ptr(), tensor.itemsize // num_words, sizes, strides, lo)
    return summed


def digest_converted(tensor: Tensor, box: Box, dtype: torch.dtype) -> int:
    """The digest of the values of ``tensor`` in ``dtype``, converted block by block.

    All NaNs count as one: which of them a conversion makes depends on who converts.
    """
    total = 0
    for block in _blocks(box, MAX_BLOCK_WORDS):
        values = tensor[block.slices_within(box)].to(dtype)
        if dtype.is_floating_point and (nans := values != values).any():
            values = values.masked_fill(nans, torch.nan)
        total += digest_of(values, block)
    return total & _MASK


def defined_digest(tensor: Tensor, box: Box) -> int:
    """``digest_of`` as it is defined, by operations of torch; on any device."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for block in _blocks(box, MAX_BLOCK_WORDS * 4 // max(4, tensor.itemsize)):
        terms = _words(tensor[block.slices_within(box)]) + 1
        ranges = [*zip(block.lo, block.hi, strict=True)]
        ranges += [(0, num_words) for num_words in terms.shape[len(ranges) :]]
        # From the innermost dim on; integers wrap modulo 2**64.
        for d, (low, high) in reversed([*enumerate(ranges)]):
            terms = (terms * _factors(d, low, high, terms.device)).sum(-1)
        total += terms
    return int(total) & _MASK


def factor(d: int, i: int) -> int:
    """``T_d[i]``: splitmix64 at place i of a sequence that begins at a place of its own for each d.

    Source: G. Steele et al., Fast Splittable Pseudorandom Number Generators, 2014.
    """
    return _mixed((_start(d) + i * _GOLDEN) & _MASK) | 1


@lru_cache(maxsize=128)
def _start(d: int) -> int:
    return _mixed((d + 1) * _GOLDEN & _MASK)


def _mixed(z: int) -> int:
    for shift, multiplier in _MIX:
        z = (z ^ (z >> shift)) * multiplier & _MASK
    return z


def _factors(d: int, low: int, high: int, device: torch.device) -> Tensor:
    """The factors of indices ``low`` to ``high`` (exclusive) of dim d, as bits of int64."""
    z = torch.arange(low, high, device=device) * _signed(_GOLDEN) + _signed(_start(d))
    for shift, multiplier in _MIX:
        # Shifts of int64 copy the sign, and these may not.
        z = (z ^ ((z >> shift) & ((1 << (64 - shift)) - 1))) * _signed(multiplier)
    return z | 1


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits


def _words(tensor: Tensor) -> Tensor:
    """The words of a tensor as int64, with one more dim if an element has several."""
    if tensor.itemsize == 16:
        return _words(torch.view_as_real(tensor)).flatten(-2)
    bits = tensor.view(_WORDS[tensor.itemsize]).to(torch.int64)
    if tensor.itemsize < 8:
        return bits & ((1 << 8 * tensor.itemsize) - 1)
    mask = (1 << 32) - 1
    return torch.stack([bits & mask, (bits >> 32) & mask], -1)


def _blocks(box: Box, max_elements: int) -> Iterator[Box]:
    """Boxes of at most ``max_elements`` that tile ``box``, which is halved along its outer dims."""
    if box.is_empty:
        return
    if box.num_elements <= max_elements:
        yield box
        return
    d = next(d for d, size in enumerate(box.shape) if size > 1)
    middle = (box.lo[d] + box.hi[d]) // 2
    lo, hi = list(box.lo), list(box.hi)
    lo[d] = hi[d] = middle
    yield from _blocks(Box(box.lo, tuple(hi)), max_elements)
    yield from _blocks(Box(tuple(lo), box.hi), max_elements)
