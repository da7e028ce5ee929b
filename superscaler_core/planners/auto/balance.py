"""Balance: numbers of blocks per pipeline stage such that all stages take nearly equal time.

The blocks of a model differ: a decoder's block attends twice, the first of Swin have most tokens.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, combinations, pairwise

from superscaler_core.cost import DeviceProfile
from superscaler_core.cost.op_time import OpTimes
from superscaler_core.graph.blocks import Blocks, find_blocks
from superscaler_core.graph.graph import Graph, Op
from superscaler_core.graph.once import once_per_graph
from superscaler_core.graph.part import Part


def balanced_sizes(
    graph: Graph, num_stages: int, profile: DeviceProfile, blocks: Blocks | None = None
) -> tuple[int, ...]:
    """Blocks of every stage, as ``hybrid`` takes them; empty if there are fewer than stages.

    The cost of a block is the time of its forward and backward, with ops that are not cut. Tensor
    parallelism cuts all blocks alike, so the ratios of these costs hold for every degree.
    """
    known = _known(graph)
    costs = next((costs for other, costs in known if other is profile), None)
    if costs is None:
        costs = _block_secs(blocks or find_blocks(graph), profile)
        known.append((profile, costs))
    return tuple(partition(costs, num_stages)) if num_stages <= len(costs) else ()


@once_per_graph
def _known(graph: Graph) -> list[tuple[DeviceProfile, list[float]]]:
    """Seconds of every block of a graph, for the profiles that were asked for so far."""
    return []


def partition(costs: Sequence[float], num: int) -> list[int]:
    """Cut a sequence into ``num`` runs so that the largest cost of a run is minimal; their lengths.

    The last runs are filled first, because under 1F1B the first stages hold most microbatches.
    There are at least as many costs as runs, all above 0.
    """
    ends = [0.0, *accumulate(costs[::-1])]
    # The optimum is a sum of consecutive costs. If a limit is possible, so is every higher limit.
    limits = sorted({b - a for a, b in combinations(ends, 2)})
    place = bisect_left(limits, True, key=lambda limit: _fits(ends, num, limit))
    starts = _starts(ends, num, limits[place])
    return [b - a for a, b in pairwise([*starts, len(costs)])][::-1]


def _fits(ends: Sequence[float], num: int, limit: float) -> bool:
    """Whether the greedy runs all cost at most ``limit``."""
    starts = _starts(ends, num, limit)
    return all(ends[b] - ends[a] <= limit for a, b in pairwise([*starts, len(ends) - 1]))


def _starts(ends: Sequence[float], num: int, limit: float) -> list[int]:
    """Starts of runs, filled greedily: every run except the last takes as many items as fit."""
    starts = [0]
    for left in range(num - 1, 0, -1):
        most = bisect_right(ends, limit, key=lambda end: end - ends[starts[-1]]) - 1
        # A run takes at least one item, and leaves one for each later run.
        starts.append(min(max(most, starts[-1] + 1), len(ends) - 1 - left))
    return starts


def _block_secs(parts: Blocks, profile: DeviceProfile) -> list[float]:
    """Seconds of every block; the ops before and behind the blocks join the first and the last."""
    times = OpTimes(profile)

    def secs(ops: tuple[Op, ...]) -> float:
        return sum(times.forward_secs(p) + times.backward_secs(p) for p in map(Part, ops))

    layers = parts.layers
    found = [secs(ops) for ops in layers]
    for group in parts.groups:
        if group[-1].index < layers[0][0].index:
            found[0] += secs(group)
        elif group[0].index > layers[-1][-1].index:
            found[-1] += secs(group)
    return found
