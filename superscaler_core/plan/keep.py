"""Keep: how much of a forward stays in device memory until its backward."""

from __future__ import annotations

from enum import Enum


class Keep(Enum):
    """What a forward keeps for its backward, from most memory to least.

    The backward recomputes everything else. ``Plan.keep`` sets this for a plan.
    """

    EVERYTHING = "everything"
    """Keep everything that a backward reads; recompute nothing."""

    ATTENTION_ONLY = "attention_only"
    """Keep all but the values between the linear layers of an attention; recompute only those."""

    SEGMENT_INPUTS = "segment_inputs"
    """Per block, keep the inputs of each region between communications; send nothing again."""

    BLOCK_INPUTS = "block_inputs"
    """Per block, keep only its input; recompute the rest, including its communication."""

    STAGE_INPUT = "stage_input"
    """Per stage, keep only its input; its recomputation keeps all values of one microbatch."""

    def __str__(self) -> str:
        return self.value
