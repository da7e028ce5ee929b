"""Vocabulary: the dims along which tensor-parallel devices cut embedding, head and loss."""

from __future__ import annotations

from superscaler_core.errors import PlanError
from superscaler_core.graph.dims import DimClass
from superscaler_core.graph.graph import Op
from superscaler_core.plan import Plan


def vocabulary_dims(plan: Plan, op: Op) -> tuple[DimClass, ...]:
    """The dims to cut: words up to the head, then tokens: a loss reads all words of a token.

    Raises:
        PlanError: the model has no words, or no sequence.
    """
    if not plan.blocks.vocabulary:
        raise PlanError(f"{plan.graph.name} has no words to cut: neither an embedding nor a head.")
    if op.index <= plan.blocks.scored:
        return plan.blocks.vocabulary
    return (*plan.blocks.vocabulary, *plan.blocks.tokens, plan.dims.batch)
