"""Overlap: which communication of a step runs while devices compute."""

from __future__ import annotations

import re
from dataclasses import dataclass

from superscaler_core.errors import PlanError

BUCKET_BYTES = 16 << 20
"""Size of a bucket. It is large enough that bandwidth, not latency, limits a message; and small
enough that the first message leaves early, and that arriving results need little extra memory."""

_TEXT = re.compile(
    r"prefetch ([0-9]{1,9}) reductions (on|off) moves (on|off) duplex (on|off) "
    r"(?:pairs (on) )?bucket ([0-9]{1,18})"
)


@dataclass(frozen=True, slots=True)
class Overlap:
    """The rewrites that overlap communication with computing; by default there are none.

    Law (tests/superscaler_core/plan/test_overlap.py): ``Overlap.parse(str(o)) == o``.

    Attributes:
        prefetch: weights are gathered this many gathers before the ops that read them; 0 gathers
            each when it is read. Each device needs memory for that many more windows (ZeRO-3) or
            buckets. Swapped values are copied back that many segments ahead, or one ahead for 0.
        reductions: whether gradients are reduced during the rest of the stage's backward instead of
            after it. Each device needs memory for at most two more reduced buckets.
        moves: whether tensor-parallel communication inside a stage overlaps with independent
            computing, mainly gradients of inputs with gradients of weights. Backwards of segments
            are split into halves for this, which costs time in a small model.
        duplex: whether each microbatch of the schedule runs as two halves, of which one computes
            while the other communicates inside the stage (``program.duplex``). A step then takes
            twice as many microbatches, so the model is captured with half of the batch.
        pairs: whether the two actions of a schedule's pair (``0F3&1B2``) are interleaved: one
            computes while the other communicates inside its stage (``program.pairs``).
        bucket_bytes: the most bytes that one call reduces, or fetches for the whole step; a single
            larger weight is a bucket of its own.

    Raises:
        PlanError: ``prefetch`` is negative, ``bucket_bytes`` is below 1, or both ``duplex`` and
            ``pairs`` are on.
    """

    prefetch: int = 0
    reductions: bool = False
    moves: bool = False
    duplex: bool = False
    pairs: bool = False
    bucket_bytes: int = BUCKET_BYTES

    def __post_init__(self) -> None:
        if self.prefetch < 0 or self.bucket_bytes < 1:
            raise PlanError(
                f"overlap: prefetch={self.prefetch} is at least 0, and "
                f"bucket_bytes={self.bucket_bytes} at least 1."
            )
        if self.duplex and self.pairs:
            raise PlanError("overlap: a pair has no halves; choose duplex or pairs.")

    def __bool__(self) -> bool:
        return self.is_of_weights or self.moves or self.duplex or self.pairs

    @property
    def num_halves(self) -> int:
        """The number of captured batches in a microbatch of the schedule: 2 with duplex, or 1."""
        return 2 if self.duplex else 1

    @property
    def is_of_weights(self) -> bool:
        """Whether fetching weights or reducing their gradients overlaps with computing."""
        return self.prefetch > 0 or self.reductions

    def __str__(self) -> str:
        switches = {"reductions": self.reductions, "moves": self.moves, "duplex": self.duplex}
        words = [f"{name} {'on' if on else 'off'}" for name, on in switches.items()]
        words += ["pairs on"] if self.pairs else []
        return f"prefetch {self.prefetch} {' '.join(words)} bucket {self.bucket_bytes}"

    @classmethod
    def parse(cls, text: str) -> Overlap:
        """Read the text that ``str`` writes.

        Raises:
            PlanError: the text has another form.
        """
        found = _TEXT.fullmatch(text.strip())
        if found is None:
            raise PlanError(
                f"cannot read the overlap {text.strip()[:80]!r}: it is 'prefetch NUMBER reductions "
                "on|off moves on|off duplex on|off [pairs on] bucket BYTES'."
            )
        reductions, moves, duplex = (word == "on" for word in found.group(2, 3, 4))
        return cls(int(found[1]), reductions, moves, duplex, found[5] == "on", int(found[6]))


NO_OVERLAP = Overlap()
"""No overlap: devices wait for all communication."""
