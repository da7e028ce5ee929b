"""A host that remembers what moved, and sees what of it is still alive on the device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from weakref import ref

from torch import Tensor, UntypedStorage

from superscaler_core.run.host import Arrival, Host

Weak = ref[UntypedStorage]


@dataclass(frozen=True)
class Copied:
    """A copy to the host or back, and what earlier ones had left on the device then."""

    num_bytes: int
    sent_alive_bytes: int
    fetched_alive_bytes: int


class Recorder(Host):
    """For all ranks of a program; what is alive is told of one rank only."""

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
        """To the host."""
        return sum(copied.num_bytes for copied in self.sent)

    @property
    def fetched_bytes(self) -> int:
        """From the host."""
        return sum(copied.num_bytes for copied in self.fetched)

    def has_sent(self, tensors: Iterable[Tensor]) -> bool:
        """Whether the memory of any of these was sent."""
        sources = {source() for source in self._sources}
        return any(tensor.untyped_storage() in sources for tensor in tensors)

    def _copied(self, x: Tensor) -> Copied:
        return Copied(x.nbytes, _alive_bytes(self._sources), _alive_bytes(self._copies))


def _alive_bytes(storages: Iterable[Weak]) -> int:
    return sum(s.nbytes() for s in {weak() for weak in storages} if s is not None)
