"""Checksum: a number by which ranks compare whole tensors that have to be equal."""

from __future__ import annotations

from functools import cache
from hashlib import blake2b

import torch
from torch import Tensor

_CHUNK = 1 << 17
"""Words of 8 bytes that are summed at once: 1 MiB, which stays in a core's cache."""


def checksum(tensor: Tensor) -> int:
    """A number of 63 bits that differs, but for chance, if two tensors differ in a bit.

    It is computed where the tensor is, by integer sums of its words with random factors, so it is
    the same on all devices. Shapes and dtypes are no part of it, and neither are
    tensors without values.

    >>> checksum(torch.arange(3)) == checksum(torch.arange(3))
    True
    """
    if tensor.layout != torch.strided or tensor.is_meta or not tensor.numel():
        return 0
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # Strides of a tensor of one element may be anything; a view as bytes needs 1.
    flat = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
    made = blake2b(str(len(flat)).encode(), digest_size=8)
    size = len(flat) // 8 * 8
    words = flat[:size]
    # A view needs aligned memory, which a part of a larger tensor may lack.
    words = (words if words.storage_offset() % 8 == 0 else words.clone()).view(torch.int64)
    factors = _factors(tensor.device)
    sums = [(part * factors[: len(part)]).sum() for part in torch.split(words, _CHUNK)]
    for value in torch.stack(sums).tolist() if sums else ():
        made.update(value.to_bytes(8, "big", signed=True))
    made.update(bytes(flat[size:].tolist()))
    return int.from_bytes(made.digest(), "big") >> 1


@cache
def _factors(device: torch.device) -> Tensor:
    """Odd factors, so that each of a word's bits matters."""
    generator = torch.Generator().manual_seed(1)
    made = torch.randint(-(2**62), 2**62, (_CHUNK,), generator=generator)
    return (2 * made + 1).to(device)
