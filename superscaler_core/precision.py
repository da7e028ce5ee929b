"""Precision: the dtypes in which a training keeps what it computes with."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

from superscaler_core.checks import one_of
from superscaler_core.errors import PlanError
from superscaler_core.graph.tensor import ITEM_BYTES

if TYPE_CHECKING:
    import torch

_UPDATED = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtypes of a training. Ops compute in the dtypes of the captured model.

    >>> mixed = Precision(master="float32")  # or torch.float32
    >>> mixed.stored("bfloat16"), Precision().stored("bfloat16")
    ('float32', 'bfloat16')

    Attributes:
        master: dtype of stored parameters, in which gradients are accumulated and reduced, and
            optimizers update: torch's or its name; that of the model if None.

    Raises:
        PlanError: optimizers do not update the dtype.
    """

    master: torch.dtype | str | None = None

    def __post_init__(self) -> None:
        if self.master is not None:
            name = str(self.master).removeprefix("torch.")
            one_of("dtype of stored parameters", name, _UPDATED)
            object.__setattr__(self, "master", name)

    @classmethod
    def of(cls, given: object) -> Precision:
        """What a caller gave.

        Raises:
            PlanError: it is no ``Precision``.
        """
        if not isinstance(given, cls):
            raise PlanError(
                f"precision={given!r}: it is an ss.Precision, such as Precision(master='float32')."
            )
        return given

    def stored(self, dtype: str) -> str:
        """The dtype in which a parameter of the model's ``dtype`` is stored."""
        return dtype if self.master is None else str(self.master)

    def item_bytes(self, dtype: str) -> int:
        """Bytes of an element of a parameter where it is stored, and of its gradient."""
        return ITEM_BYTES[self.stored(dtype)]


def former_precision(master_dtype: torch.dtype | str | None) -> Precision:
    """The precision that ``master_dtype`` meant, as a keyword of the version before."""
    warnings.warn(
        "master_dtype=... is precision=ss.Precision(master=...) now.", FutureWarning, stacklevel=4
    )
    return Precision(master_dtype)
