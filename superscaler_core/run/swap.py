"""Swap: what segments keep from their forward to their backward waits on the host."""

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
    """A tensor as a look at a piece of memory, of which a parcel knows the number."""

    piece: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int | torch.SymInt


class Swap:
    """Takes parcels to a host; memory that several of them keep goes there once."""

    def __init__(self, host: Host) -> None:
        self.host = host
        # torch keeps the Python object of a storage as long as the storage, so it is an identity.
        self._sent: WeakKeyDictionary[UntypedStorage, Tensor] = WeakKeyDictionary()

    def parcel(self, staying: Iterable[Tensor]) -> Parcel:
        """What a segment will keep, but for tensors that stay where they are."""
        return Parcel(self, frozenset(x.untyped_storage() for x in staying))

    def sent(self, storage: UntypedStorage) -> Tensor:
        """The bytes of a storage, on the host."""
        if storage not in self._sent:
            whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            self._sent[storage] = self.host.to_host(whole)
        return self._sent[storage]


class Parcel:
    """What one segment keeps of one microbatch.

    By ``send`` all that was packed goes to the host, each piece of memory once, however many
    tensors look at it; ``leave`` waits for that and gives the device's memory back. ``fetch``
    starts the way back, and ``arrive`` waits for it.
    """

    def __init__(self, swap: Swap, staying: frozenset[UntypedStorage]) -> None:
        self._swap, self._staying = swap, staying
        self._packed: dict[UntypedStorage, int] = {}
        self._pieces: list[Tensor] = []
        self._has_left: Callable[[], None] = _at_once
        self._arrivals: list[Arrival] = []

    @property
    def num_bytes(self) -> int:
        """What waits on the host."""
        return sum(piece.nbytes for piece in self._pieces)

    def packing(self) -> saved_tensors_hooks:
        """Within which autograd packs what it saves."""
        return saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, x: Tensor) -> Tensor | Look:
        """What stands for a tensor until it is needed again."""
        storage = x.untyped_storage()
        if storage in self._staying:
            return x
        piece = self._packed.setdefault(storage, len(self._packed))
        return Look(piece, x.dtype, tuple(x.shape), x.stride(), x.storage_offset())

    def send(self) -> None:
        """Let what was packed begin to go to the host."""
        self._pieces = [self._swap.sent(storage) for storage in self._packed]
        self._has_left = self._swap.host.mark()

    def leave(self) -> None:
        """Wait until it is there, and forget the device's memory of it."""
        self._has_left()
        self._packed.clear()
        self._staying = frozenset()

    def fetch(self) -> None:
        """Start the way back."""
        self._arrivals = [self._swap.host.to_device(piece) for piece in self._pieces]

    def arrive(self) -> None:
        """Wait until all of it is back."""
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
    """Take the memory from a leaf; it stays where its gradient arrives, in its shape."""
    leaf.data = leaf.data.new_zeros(()).expand_as(leaf)
    return leaf


def _at_once() -> None:
    """Nothing is under way."""
