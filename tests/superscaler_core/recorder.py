"""Recorder: a host that records all copies, and the device memory that is alive at each copy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from weakref import ref

from torch import Tensor, UntypedStorage

from superscaler_core.run import Arrival, Host

Weak = ref[UntypedStorage]


@dataclass(frozen=True)
class Copied:
    """A copy to the host or back, and the device memory of earlier copies that was still alive.

    Attributes:
        num_bytes: bytes of the copy.
        sent_alive_bytes: bytes of earlier sent tensors that were still alive on the device.
        fetched_alive_bytes: bytes of earlier fetched copies that were still alive on the device.
    """

    num_bytes: int
    sent_alive_bytes: int
    fetched_alive_bytes: int


class Recorder(Host):
    """A recording host for all ranks of a program; bytes alive are exact with one rank only."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Copied] = []
        self.fetched: list[Copied] = []
        self.on_host: list[Tensor] = []
        self._sources: list[Weak] = []
        self._copies: list[Weak] = []

    def to_host(self, x: Tensor) -> Tensor:
        self.sent.append(self._copied(x))
        self._sources.append(ref(x.untyped_storage()))
        self.on_host.append(super().to_host(x))
        return self.on_host[-1]

    def to_device(self, x: Tensor) -> Arrival:
        self.fetched.append(self._copied(x))
        arrival = super().to_device(x)
        self._copies.append(ref(arrival().untyped_storage()))
        return arrival

    @property
    def sent_bytes(self) -> int:
        """Bytes copied to the host."""
        return sum(copied.num_bytes for copied in self.sent)

    @property
    def fetched_bytes(self) -> int:
        """Bytes copied from the host."""
        return sum(copied.num_bytes for copied in self.fetched)

    def has_sent(self, tensors: Iterable[Tensor]) -> bool:
        """Whether the memory of any of these tensors was copied to the host."""
        sources = {source() for source in self._sources}
        return any(tensor.untyped_storage() in sources for tensor in tensors)

    def _copied(self, x: Tensor) -> Copied:
        return Copied(x.nbytes, _alive_bytes(self._sources), _alive_bytes(self._copies))


def _alive_bytes(storages: Iterable[Weak]) -> int:
    return sum(s.nbytes() for s in {weak() for weak in storages} if s is not None)
