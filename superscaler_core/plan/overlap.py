"""Overlap: which communication of a step runs while devices compute."""

from __future__ import annotations

import re
from dataclasses import dataclass

from superscaler_core.errors import PlanError

BUCKET_BYTES = 16 << 20
"""Large enough that a message is limited by bandwidth, small enough that the first leaves early,
and that little memory is taken by what arrives before what it replaces is dropped."""

_TEXT = re.compile(r"prefetch ([0-9]{1,9}) reductions (on|off) moves (on|off) bucket ([0-9]{1,18})")


@dataclass(frozen=True, slots=True)
class Overlap:
    """Which rewrites the step program gets; without any, devices wait for all communication.

    Law (tests/superscaler_core/plan/test_overlap.py): ``Overlap.parse(str(o)) == o``.

    Attributes:
        prefetch: by how many gathers weights are fetched before the ops that read them; 0 fetches
            each when it is read. Memory a device: that many windows (ZeRO-3) or buckets more. What
            is swapped comes back as many segments ahead, and one ahead if this is 0.
        reductions: whether gradients are reduced while the backward of the stage goes on, and not
            after it. Memory a device: as many reduced buckets as are under way, at most two.
        moves: whether tensor parallelism's communication inside a stage runs beside computing that
            does not need it, above all gradients of inputs beside those of weights. Backwards of
            segments are divided into halves for that, which takes time on a small model.
        bucket_bytes: the most that one call reduces, or fetches for the whole step, unless a single
            weight is larger.

    Raises:
        PlanError: ``prefetch`` is negative, or ``bucket_bytes`` is below 1.
    """

    prefetch: int = 0
    reductions: bool = False
    moves: bool = False
    bucket_bytes: int = BUCKET_BYTES

    def __post_init__(self) -> None:
        if self.prefetch < 0 or self.bucket_bytes < 1:
            raise PlanError(
                f"overlap: prefetch={self.prefetch} is at least 0, and "
                f"bucket_bytes={self.bucket_bytes} at least 1."
            )

    def __bool__(self) -> bool:
        return self.is_of_weights or self.moves

    @property
    def is_of_weights(self) -> bool:
        """Whether weights come, or gradients of weights go, while devices compute."""
        return self.prefetch > 0 or self.reductions

    def __str__(self) -> str:
        reductions, moves = ("on" if on else "off" for on in (self.reductions, self.moves))
        return (
            f"prefetch {self.prefetch} reductions {reductions} moves {moves} "
            f"bucket {self.bucket_bytes}"
        )

    @classmethod
    def parse(cls, text: str) -> Overlap:
        """Read the text that ``str`` writes.

        Raises:
            PlanError: it has another form.
        """
        found = _TEXT.fullmatch(text.strip())
        if found is None:
            raise PlanError(
                f"cannot read the overlap {text.strip()[:80]!r}: it is 'prefetch NUMBER reductions "
                "on|off moves on|off bucket BYTES'."
            )
        return cls(int(found[1]), found[2] == "on", found[3] == "on", int(found[4]))


NO_OVERLAP = Overlap()
"""Devices wait for all communication."""
