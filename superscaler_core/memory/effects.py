"""Effects: what the instructions of a stage do to the memory of one device.

Effects name values by numbers, in the order of their first use, and segments by their structure. So
stages that do the same have equal effects, and these are the key under which their memory is known.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from superscaler_core.memory.piece import Strided
from superscaler_core.schedules import ActionKind

LOSS_GRAD = 0
"""The number of the gradient of the loss, a scalar that always exists."""

NOTHING = -1
"""In place of the number of a value that is not there."""

Numbers = tuple[int, ...]
"""Values by their numbers."""

Index = tuple[tuple[int, int], ...] | None
"""A box of a tensor; None for all of it."""


class Effect(NamedTuple):
    """A call of a method of ``Fold``.

    Attributes:
        do: the method.
        args: its arguments.
        uses: the values that it reads and makes.
    """

    do: Callable[..., None]
    args: tuple[Any, ...] = ()
    uses: Numbers = ()


class Combination(NamedTuple):
    """How a value is computed from others: their sum, or one tensor joined from them.

    Attributes:
        boxes: the box that is read of each value.
        in_place: whether the others are added to the first one, which is the result.
        joined: if the values are joined, the box of the result and then the box of each value.
    """

    boxes: tuple[Index, ...]
    in_place: bool = False
    joined: tuple[str, ...] = ()


class TrainedWeight(NamedTuple):
    """A weight to which a backward adds a gradient.

    Attributes:
        position: its position among the tensors given to the forward.
        grad: number of its gradient.
        num_bytes: bytes of the gradient where it is accumulated.
        stays: whether it stays until the step's end; otherwise until its window closes.
        is_cast: whether it is accumulated in another dtype than it is computed in.
    """

    position: int
    grad: int
    num_bytes: int
    stays: bool
    is_cast: bool


class SegmentShape(NamedTuple):
    """The structure of a segment, without names.

    Attributes:
        form: equal for segments whose functions do the same.
        num_inputs: how many of its arguments need gradients; they come first.
        recompute, swap: as in ``Segment``.
        trained: the weights that get gradients.
    """

    form: Hashable
    num_inputs: int
    recompute: bool
    swap: bool
    trained: tuple[TrainedWeight, ...]


class StageEffects(NamedTuple):
    """What a stage does to the memory of a device: everything that its memory depends on.

    Attributes:
        num_steps: number of its steps.
        runs: for each run of the stage, the effects for one microbatch, in order.
        segments: its segments, by number.
        outside: by number, the values whose memory is counted elsewhere: weights and the batch.
    """

    num_steps: int
    runs: tuple[tuple[ActionKind, tuple[Effect, ...]], ...]
    segments: tuple[SegmentShape, ...]
    outside: tuple[tuple[int, Strided], ...]
