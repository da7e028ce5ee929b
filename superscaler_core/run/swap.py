"""Swap: moves the values that segments keep for their backward to the host and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, UntypedStorage
from torch.autograd.graph import saved_tensors_hooks

from superscaler_core.run.host import Arrival, Host


@dataclass(frozen=True, slots=True)
class Look:
    """A placeholder for a packed tensor: the number of a piece of memory, and a view of it."""

    piece: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int | torch.SymInt


class Swap:
    """Creates parcels; memory that several parcels keep is copied to the host only once."""

    def __init__(self, host: Host) -> None:
        self.host = host
        # torch keeps the Python object of a storage as long as the storage, so it is an identity.
        self._sent: WeakKeyDictionary[UntypedStorage, Tensor] = WeakKeyDictionary()

    def parcel(self, staying: Iterable[Tensor]) -> Parcel:
        """An empty parcel for a segment's kept values, except tensors that stay on the device."""
        return Parcel(self, frozenset(x.untyped_storage() for x in staying))

    def sent(self, storage: UntypedStorage) -> Tensor:
        """The bytes of a storage, on the host."""
        if storage not in self._sent:
            whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            self._sent[storage] = self.host.to_host(whole)
        return self._sent[storage]


class Parcel:
    """The values that one segment keeps of one microbatch.

    ``send`` starts to copy all packed values to the host, each piece of memory once, however many
    tensors view it; ``leave`` waits for this and frees the device's memory. ``fetch`` starts the
    copies back, and ``arrive`` waits for them.
    """

    def __init__(self, swap: Swap, staying: frozenset[UntypedStorage]) -> None:
        self._swap, self._staying = swap, staying
        self._packed: dict[UntypedStorage, int] = {}
        self._pieces: list[Tensor] = []
        self._has_left: Callable[[], None] = _at_once
        self._arrivals: list[Arrival] = []

    @property
    def num_bytes(self) -> int:
        """Bytes that are on the host."""
        return sum(piece.nbytes for piece in self._pieces)

    def packing(self) -> saved_tensors_hooks:
        """A context in which autograd packs the tensors that it saves."""
        return saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, x: Tensor) -> Tensor | Look:
        """A placeholder for a tensor until it is needed again."""
        storage = x.untyped_storage()
        if storage in self._staying:
            return x
        piece = self._packed.setdefault(storage, len(self._packed))
        return Look(piece, x.dtype, tuple(x.shape), x.stride(), x.storage_offset())

    def send(self) -> None:
        """Start to copy the packed values to the host."""
        self._pieces = [self._swap.sent(storage) for storage in self._packed]
        self._has_left = self._swap.host.mark()

    def leave(self) -> None:
        """Wait for ``send``, and free the memory on the device."""
        self._has_left()
        self._packed.clear()
        self._staying = frozenset()

    def fetch(self) -> None:
        """Start to copy the values back."""
        self._arrivals = [self._swap.host.to_device(piece) for piece in self._pieces]

    def arrive(self) -> None:
        """Wait for ``fetch``."""
        for arrival in self._arrivals:
            arrival()

    def unpack(self, kept: Tensor | Look) -> Tensor:
        """The tensor that was packed."""
        if isinstance(kept, Tensor):
            return kept
        whole = self._arrivals[kept.piece]()
        tensor = torch.empty(0, dtype=kept.dtype, device=whole.device)
        return tensor.set_(whole.untyped_storage(), kept.offset, kept.shape, kept.stride)


def emptied(leaf: Tensor) -> Tensor:
    """Free the memory of a leaf; the leaf itself remains, with its shape, for its gradient."""
    leaf.data = leaf.data.new_zeros(()).expand_as(leaf)
    return leaf


def _at_once() -> None:
    """Nothing to wait for."""
