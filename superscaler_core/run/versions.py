"""Versions: the versions of weights that a rank keeps while microbatches still read them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn


class Versions:
    """Older versions of the copies that segments read; the newest is the copy itself.

    Autograd's graphs hold the memory of the version that a forward read. An update that keeps older
    versions therefore writes to other memory: that of the oldest version if nobody reads it any
    more, or new memory. At the end of a step the newest version returns to the memory that the
    weights had at its start.
    """

    def __init__(self) -> None:
        self.read = 0
        """The version that segments read now."""
        self.borrowed: Mapping[str, int] = {}
        """The versions that segments read now of copies that belong to other stages, by name."""
        self._newest: Counter[str] = Counter()
        self._older: dict[str, dict[int, Tensor]] = {}
        self._homes: dict[str, Tensor] = {}

    def of(self, name: str, newest: Tensor) -> Tensor:
        """The version of a copy that is read now."""
        read = self.borrowed.get(name, self.read)
        return newest if read == self._newest[name] else self._older[name][read]

    def every(self, name: str, newest: Tensor) -> Iterable[Tensor]:
        """All versions of a copy, the oldest first."""
        return *self._older.get(name, {}).values(), newest

    def number(self, name: str) -> int:
        """The number of the newest version."""
        return self._newest[name]

    # --- updates --------------------------------------------------------------------------------

    def drop(self, name: str, most: int) -> Tensor | None:
        """Drop versions until ``most`` older ones are left; return the last one dropped."""
        older, dropped = self._older.get(name, {}), None
        while len(older) > most:
            dropped = older.pop(min(older))
        return dropped

    def move(self, name: str, parameter: nn.Parameter, spare: Tensor | None) -> None:
        """Give a stored parameter other memory with the same values."""
        self._homes.setdefault(name, parameter.data)
        memory = torch.empty_like(parameter.data) if spare is None else spare.data
        parameter.data = memory.copy_(parameter.data)

    def push(self, name: str, copy: Tensor | None) -> None:
        """Count a new version of a copy; keep the one before if it is given."""
        if copy is not None:
            self._older.setdefault(name, {})[self._newest[name]] = copy
        self._newest[name] += 1

    def end(self, stored: Callable[[str], nn.Parameter]) -> list[str]:
        """Forget all versions but the newest; return the parameters that moved back.

        Args:
            stored: a stored parameter, by name.
        """
        self.read, self.borrowed = 0, {}  # a step that failed may have left others
        self._newest.clear()
        self._older.clear()
        moved = list(self._homes)
        for name in moved:
            home, parameter = self._homes.pop(name), stored(name)
            if home.data_ptr() != parameter.data_ptr():
                home.copy_(parameter.data)
                parameter.data = home
        return moved
