"""Trained: which parameters are trained, as their ``requires_grad`` says on all ranks together.

A user freezes a parameter, or trains it again, on this rank's boxes (``parameters()``, a group of
an optimizer) or on the model that was captured. Both places are read, and both show the set that
all ranks agreed on.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from superscaler_core.errors import PlanError
from superscaler_core.training.same_call import SameCall

_SAYS_NOTHING = 2


class Trained:
    """The set of trained parameters.

    Laws (tests/superscaler_core/training/test_trained.py): after ``agree``, ``names`` is the same
    on all ranks, and so are the flags of every tensor of a name.

    Attributes:
        names: the names of trained parameters.

    Args:
        first: whether each parameter of the model is trained at first, by name, in an order that is
            the same on all ranks.
        stored: the boxes of parameters that this rank stores, by name.
        originals: the parameters of the captured model, by name; those that are to be read too.
    """

    def __init__(
        self,
        first: Mapping[str, bool],
        stored: Mapping[str, Tensor],
        originals: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        self._all, self._stored, self._originals = [*first], stored, originals
        self._pairs = [*stored.items(), *originals.items()]
        self._tensors = [tensor for _, tensor in self._pairs]
        self.names = frozenset(name for name, is_trained in first.items() if is_trained)
        self._show()

    @property
    def is_changed(self) -> bool:
        """Whether a flag on this rank is not as all ranks agreed."""
        return [tensor.requires_grad for tensor in self._tensors] != self._flags

    def agree(self, calls: SameCall) -> None:
        """Take over what was changed on any rank; collective.

        Raises:
            PlanError: ranks disagree about a parameter; on all ranks.
        """
        votes = self._votes()
        rows = calls.rows(torch.tensor([votes[name] for name in self._all], dtype=torch.uint8))
        found = set()
        for number, name in enumerate(self._all):
            column = dict(zip(calls.ranks, rows[:, number].tolist(), strict=True))
            said = {rank: vote for rank, vote in column.items() if vote != _SAYS_NOTHING}
            if len({*said.values()}) > 1:
                by = {vote: [r for r, v in said.items() if v == vote] for vote in (1, 0)}
                raise PlanError(
                    f"requires_grad of {name!r} is True on ranks {by[1]} and False on ranks "
                    f"{by[0]}: freeze it, or train it, on all ranks that store it."
                )
            if 1 in said.values() or (not said and name in self.names):
                found.add(name)
        self.names = frozenset(found)
        self._show()

    def _votes(self) -> dict[str, int]:
        """What this rank says of each parameter; nothing of those that it knows no better."""
        votes = dict.fromkeys(self._all, _SAYS_NOTHING)
        votes |= {name: int(tensor.requires_grad) for name, tensor in self._stored.items()}
        # A flag of the captured model counts where it changed: it is changed after the other.
        for name, tensor in self._originals.items():
            if tensor.requires_grad != (name in self.names):
                votes[name] = int(tensor.requires_grad)
        return votes

    def _show(self) -> None:
        for name, tensor in self._pairs:
            if tensor.requires_grad != (name in self.names):
                tensor.requires_grad_(name in self.names)
        self._flags = [tensor.requires_grad for tensor in self._tensors]
