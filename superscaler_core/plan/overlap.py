"""Overlap: which communication of a step runs while devices compute."""

from __future__ import annotations

import re
from dataclasses import dataclass

from superscaler_core.checks import at_least
from superscaler_core.errors import PlanError

BUCKET_BYTES = 16 << 20
"""Size of a bucket. It is large enough that bandwidth, not latency, limits a message; and small
enough that the first message leaves early, and that arriving results need little extra memory."""

_SWITCHES = "reductions", "moves", "duplex", "pairs"
_TEXT = re.compile(
    "none |(?:prefetch (?P<prefetch>[0-9]{1,9}) )?"
    + "".join(rf"(?P<{name}>{name} (?:on |off )?)?" for name in _SWITCHES)
    + "(?:bucket (?P<bucket_bytes>[0-9]{1,18}) )?(?:memory (?P<memory_bytes>[0-9]{1,18}) )?"
)
"""Older texts name all switches, each with "on" or "off"."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """Which communication of a step program overlaps with computing; by default there is none.

    The rewrite ``program.overlap`` starts a communication as early as the values that it reads
    allow, and waits for it as late as the readers of its result allow. These values bound how far.

    Law (tests/superscaler_core/plan/test_overlap.py): ``Overlap.parse(str(o)) == o``.

    Attributes:
        prefetch: weights are gathered this many gathers before the ops that read them; 0 gathers
            each when it is read. Each device needs memory for that many more FSDP units (ZeRO-3) or
            buckets. Swapped values are copied back that many segments ahead, or one ahead for 0.
        reductions: whether gradients are reduced during the rest of the stage's backward instead of
            after it. Each device needs memory for one more reduced bucket.
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
        memory_bytes: the most bytes of weights that are gathered ahead of their ops at one time;
            None for as many as ``prefetch`` asks for.

    Raises:
        PlanError: ``prefetch`` or ``memory_bytes`` is negative, ``bucket_bytes`` is below 1, or
            both ``duplex`` and ``pairs`` are on.
    """

    prefetch: int = 0
    reductions: bool = False
    moves: bool = False
    duplex: bool = False
    pairs: bool = False
    bucket_bytes: int = BUCKET_BYTES
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        at_least(0, prefetch=self.prefetch)
        at_least(1, bucket_bytes=self.bucket_bytes)
        if self.memory_bytes is not None:
            at_least(0, memory_bytes=self.memory_bytes)
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

    @property
    def copied_ahead(self) -> int:
        """How many offloaded values are copied back ahead of the segments that need them."""
        # To wait for a copy at once is never useful.
        return max(1, self.prefetch)

    @property
    def most_reductions(self) -> int:
        """How many reductions are under way at one time."""
        # While one of two runs, the next is queued behind it without a gap.
        return 2 if self.reductions else 1

    def __str__(self) -> str:
        words = [f"prefetch {self.prefetch}"] if self.prefetch else []
        words += [name for name in _SWITCHES if getattr(self, name)]
        words += [f"bucket {self.bucket_bytes}"] if self.bucket_bytes != BUCKET_BYTES else []
        words += [] if self.memory_bytes is None else [f"memory {self.memory_bytes}"]
        return " ".join(words) or "none"

    @classmethod
    def parse(cls, text: str) -> Overlap:
        """Read the text that ``str`` writes, or an older one with all switches.

        Raises:
            PlanError: the text has another form.
        """
        found = _TEXT.fullmatch(f"{text.strip()} ")
        if found is None:
            raise PlanError(
                f"cannot read the overlap {text.strip()[:80]!r}: it is 'none', or some of "
                f"'prefetch NUMBER {' '.join(_SWITCHES)} bucket BYTES memory BYTES'."
            )
        switches = {name: "off" not in (found[name] or "off") for name in _SWITCHES}
        return cls(
            **switches,
            prefetch=int(found["prefetch"] or 0),
            bucket_bytes=int(found["bucket_bytes"] or BUCKET_BYTES),
            memory_bytes=None if found["memory_bytes"] is None else int(found["memory_bytes"]),
        )


NO_OVERLAP = Overlap()
"""No overlap: devices wait for all communication."""
