"""Host: host memory, and the values that segments keep there for their backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, UntypedStorage
from torch.autograd.graph import saved_tensors_hooks

Arrival = Callable[[], Tensor]
"""A started copy: each call waits for it and returns it."""


class Host:
    """Host memory as a place for tensors that take no memory on the device.

    For a CPU device this is other memory of the same kind, so that programs behave alike
    everywhere, and every copy is complete when its call returns. For CUDA it is pinned memory, and
    copies run one after another on a stream of their own, in parallel with computing.

    Args:
        device: the device of tensors that are not on the host.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._stream: torch.cuda.Stream | None = None
        if self.device.type == "cuda":
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate zeros on the host."""
        return torch.zeros(tuple(shape), dtype=dtype, pin_memory=self._stream is not None)

    def to_host(self, x: Tensor) -> Tensor:
        """Start a copy to the host.

        ``to_device`` may take the copy at once; its values may be read only after ``wait``.
        """
        if self._stream is None:
            return x.detach().clone()
        copy = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            copy.copy_(x.detach(), non_blocking=True)
        # The caller may drop x now: its memory is not reused before the copy has read it.
        x.record_stream(self._stream)
        return copy

    def to_device(self, x: Tensor) -> Arrival:
        """Start a copy of a tensor on the host to the device."""
        if self._stream is None:
            copy = x.detach().clone()
            return lambda: copy
        with torch.cuda.stream(self._stream):
            copy = x.detach().pin_memory().to(self.device, non_blocking=True)
            is_there = self._stream.record_event()

        def arrived() -> Tensor:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(is_there)
            copy.record_stream(stream)
            return copy

        return arrived

    def mark(self) -> Callable[[], None]:
        """A function that makes the device wait for all copies that were started so far."""
        if self._stream is None:
            return lambda: None
        is_done = self._stream.record_event()
        return lambda: torch.cuda.current_stream(self.device).wait_event(is_done)

    def wait(self) -> None:
        """Wait for all copies; after this, tensors on the host can be read and changed."""
        if self._stream is not None:
            self._stream.synchronize()


# --- kept values that move to the host and back -------------------------------------------------


@dataclass(frozen=True, slots=True)
class PieceView:
    """A placeholder for a packed tensor: the number of a piece of memory, and a view of it."""

    piece: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int | torch.SymInt


class ActivationOffload:
    """Creates parcels; memory that several parcels keep is copied to the host only once."""

    def __init__(self, host: Host) -> None:
        self.host = host
        # torch keeps the Python object of a storage as long as the storage, so it is an identity.
        self._sent: WeakKeyDictionary[UntypedStorage, Tensor] = WeakKeyDictionary()

    def offloaded(self, staying: Iterable[Tensor]) -> Offloaded:
        """An empty parcel for a segment's kept values, except tensors that stay on the device."""
        return Offloaded(self, frozenset(x.untyped_storage() for x in staying))

    def sent(self, storage: UntypedStorage) -> Tensor:
        """The bytes of a storage, on the host."""
        if storage not in self._sent:
            whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            self._sent[storage] = self.host.to_host(whole)
        return self._sent[storage]


class Offloaded:
    """The values that one segment keeps of one microbatch.

    ``send`` starts to copy all packed values to the host, each piece of memory once, however many
    tensors view it; ``leave`` waits for this and frees the device's memory. ``fetch`` starts the
    copies back, and ``arrive`` waits for them.
    """

    def __init__(self, swap: ActivationOffload, staying: frozenset[UntypedStorage]) -> None:
        self._offload, self._staying = swap, staying
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

    def pack(self, x: Tensor) -> Tensor | PieceView:
        """A placeholder for a tensor until it is needed again."""
        storage = x.untyped_storage()
        if storage in self._staying:
            return x
        piece = self._packed.setdefault(storage, len(self._packed))
        return PieceView(piece, x.dtype, tuple(x.shape), x.stride(), x.storage_offset())

    def send(self) -> None:
        """Start to copy the packed values to the host."""
        self._pieces = [self._offload.sent(storage) for storage in self._packed]
        self._has_left = self._offload.host.mark()

    def leave(self) -> None:
        """Wait for ``send``, and free the memory on the device."""
        self._has_left()
        self._packed.clear()
        self._staying = frozenset()

    def fetch(self) -> None:
        """Start to copy the values back."""
        self._arrivals = [self._offload.host.to_device(piece) for piece in self._pieces]

    def arrive(self) -> None:
        """Wait for ``fetch``."""
        for arrival in self._arrivals:
            arrival()

    def unpack(self, kept: Tensor | PieceView) -> Tensor:
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
