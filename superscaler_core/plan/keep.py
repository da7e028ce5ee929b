"""Keep: how much of a forward stays on a device until its backward."""

from __future__ import annotations

from enum import Enum


class Keep(Enum):
    """What of a forward is kept for its backward, from most memory to least.

    Everything else is computed again there. ``Plan.keep`` says it of a plan.
    """

    EVERYTHING = "everything"
    """All that a backward reads; nothing is computed again."""

    ATTENTION_ONLY = "attention_only"
    """All but what is between the linear maps of an attention: only attentions are run again."""

    SEGMENT_INPUTS = "segment_inputs"
    """Of a block the inputs of what communication separates; nothing is sent again."""

    BLOCK_INPUTS = "block_inputs"
    """Of a block its input alone; its communication is done again."""

    STAGE_INPUT = "stage_input"
    """Of a stage its input alone; its second run keeps all of one microbatch."""

    def __str__(self) -> str:
        return self.value
