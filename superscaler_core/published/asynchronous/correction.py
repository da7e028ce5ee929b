"""PipeMare: corrections of updates whose gradients are delayed (Yang et al., 2021)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PipeMare:
    """Corrections of updates for the delay of their gradients; a value of 0 turns one off.

    A stage's delay tau is the number of updates between the version that its forwards read and the
    one that the update changes, on average (``Schedule.delays``). The corrections are:

    - T1, learning rate rescheduling: update k has the learning rate divided by ``tau ** p`` with
      ``p = 1 - min(k / annealing, 1)``. Where tau is below 1, dividing would raise the learning
      rate above that of synchronous training; it is left as it is.
    - T2, discrepancy correction: a backward reads ``w - tau * delta`` instead of the newest weights
      w, an estimate of what its forward read. delta is the running mean of the weights' changes:
      ``delta = gamma * delta + (1 - gamma) * (w(t+1) - w(t))`` with ``gamma = decay ** (1 / tau)``.
    - T3, synchronous warm-up, needs no correction: train the first steps by a synchronous program,
      then ``Trainer.save`` and ``load`` the run into the asynchronous one.

    Attributes:
        annealing: number of updates after which T1 ends (K of the paper).
        decay: D of T2; the paper's default is ``exp(-2)``.
        first: number of updates that were made before, if the run is resumed.

    Source: Yang et al., PipeMare, MLSys 2021, from memory of the paper, and unchecked. What to do
    where tau is below 1 is our decision (docs/adr/0040-updates-between-microbatches.md).
    """

    annealing: int = 0
    decay: float = 0.0
    first: int = 0

    def __post_init__(self) -> None:
        if self.annealing < 0 or self.first < 0 or not 0 <= self.decay < 1:
            raise ValueError(f"annealing and first are at least 0, and 0 <= decay < 1: {self}.")

    @property
    def corrects_weights(self) -> bool:
        """Whether T2 is on."""
        return self.decay > 0

    def weights(self, delays: Mapping[str, float]) -> Discrepancy:
        """What corrects the weights that backwards read, given their delays (T2)."""
        return Discrepancy(self.decay, delays)

    def rate(self, tau: float, update: int) -> float:
        """The factor of the learning rate of a stage's update (T1).

        >>> [PipeMare(annealing=2).rate(4.0, update) for update in range(3)]
        [0.25, 0.5, 1.0]
        """
        if not self.annealing:
            return 1.0
        power = 1 - min((self.first + update) / self.annealing, 1.0)
        return math.exp(-power * math.log(max(tau, 1.0)))


class Discrepancy:
    """Corrects the copies of weights for the time of a backward (T2).

    Args:
        decay: D of ``PipeMare``.
        delays: the delay of every copy that is corrected, by name.
    """

    def __init__(self, decay: float, delays: Mapping[str, float]) -> None:
        self._delays = {name: tau for name, tau in delays.items() if tau > 0}
        self._gammas = {name: decay ** (1 / tau) for name, tau in self._delays.items()}
        self._values: dict[str, Tensor] = {}
        self._deltas: dict[str, Tensor] = {}
        self._versions: dict[str, int] = {}

    @contextmanager
    def corrected(self, copies: Iterable[tuple[str, Tensor, int]]) -> Iterator[None]:
        """Put the estimated weights into copies, and the real ones back at the end.

        Args:
            copies: names and tensors, each with the number of its version. Of copies that share
                memory, the first is corrected.
        """
        firsts: dict[int, tuple[str, Tensor]] = {}
        for name, copy in self.note(copies):
            firsts.setdefault(copy.data_ptr(), (name, copy))
        for name, copy in firsts.values():
            copy.sub_(self._deltas[name], alpha=self._delays[name])
        try:
            yield
        finally:
            for name, copy in firsts.values():
                copy.copy_(self._values[name])

    def note(self, copies: Iterable[tuple[str, Tensor, int]]) -> list[tuple[str, Tensor]]:
        """Update the running means of the weights' changes.

        Call this before a step's first update, and after every update.

        Returns:
            The copies that are corrected.
        """
        chosen = [(name, copy.data, now) for name, copy, now in copies if name in self._delays]
        for name, copy, number in chosen:
            if name not in self._values:
                self._values[name] = copy.clone()
                self._deltas.setdefault(name, torch.zeros_like(copy))
            elif self._versions[name] != number:
                gamma = self._gammas[name]
                change = copy - self._values[name]
                self._deltas[name].mul_(gamma).add_(change, alpha=1 - gamma)
                self._values[name].copy_(copy)
            self._versions[name] = number
        return [(name, copy) for name, copy, _ in chosen]

    def restart(self) -> None:
        """Begin a step, whose version 0 is the present weights."""
        self._values.clear()
