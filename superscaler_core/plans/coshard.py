"""Co-shard: heads and features are cut, and the parts stay on one device, one after another."""

from __future__ import annotations

from superscaler_core.plan import Plan
from superscaler_core.plans.blocks import BLOCK
from superscaler_core.plans.hybrid import hybrid


def coshard(
    plan: Plan,
    *,
    parts: int = 2,
    blocks: str = "",
    tp: int = 1,
    pp: int = 1,
    microbatches: int = 1,
    rerun: bool = False,
    block: str = BLOCK,
    sizes: str = "",
    features: str = "",
) -> None:
    """Cut attention and MLP into ``tp * parts``, ``parts`` of them on each of ``tp`` devices.

    A device runs its parts one after another, and again in the backward. It sends what it sends
    without co-shard: nothing but what data, tensor and pipeline parallel do. Memory a device: of
    the inner activations of these blocks, such as the matrix of attention, those of one part;
    the input of every attention and MLP.

    Args:
        plan: to fill.
        parts: of every attention and every MLP on a device.
        blocks: numbers of the blocks that are cut so, such as ``"0-3,8"``; all if empty.
        tp, pp, microbatches, rerun, block, sizes, features: as of ``hybrid``.

    Raises:
        PlanError: as of ``hybrid``; heads or features cannot be cut into ``tp * parts``.

    Source: the SuperScaler paper.
    """
    hybrid(
        plan,
        tp=tp,
        pp=pp,
        microbatches=microbatches,
        rerun=rerun,
        coshard=parts,
        coshard_blocks=blocks,
        block=block,
        sizes=sizes,
        features=features,
    )
