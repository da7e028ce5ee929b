"""Search bound: what every path from one binding to another takes at least, by formula.

Derived in docs/bound.md, "In the search". Bytes are in the units of ``RebindPricer``.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from rvdcomm.planning.factors import R, V
from rvdcomm.planning.primitives import RebindPricer, Targets

Axes = Sequence[int]


def least_of_any(pricer: RebindPricer, src: Targets, dst: Targets) -> int:
    """Ticks that any plan takes; 0 only where nothing must move."""
    port_bytes = []
    for outer in pricer.grid.outer_axes:
        src_v, dst_v = (_count(pricer, outer, targets, V) for targets in (src, dst))
        if src_v == dst_v == 1:
            units = _entering(pricer, outer, src, dst)
        else:
            src_r, dst_r = (_count(pricer, outer, targets, R) for targets in (src, dst))
            messages = messages_an_element(src_r, src_v, dst_r, dst_v)
            units = pricer.square // _num_groups(pricer, outer) * messages
        port_bytes.append(pricer.num_bytes * units)
    return pricer.ports.least(port_bytes, latency=0)


def least_of_kept(
    pricer: RebindPricer, state: Targets, dst: Targets, is_masked: Sequence[bool]
) -> tuple[int, int]:
    """Ticks and rounds of paths that keep the V axes of ``dst`` as they are, but for a last mask.

    Axes that ``is_masked`` become V by the mask. Until then groups that only such axes tell apart
    may share what they need: they count as one group, over whose ports the bytes are spread.
    """
    port_bytes = []
    for outer in pricer.grid.outer_axes:
        axes = [a for a in outer if not is_masked[a]]
        sharing = prod(pricer.sizes[a] for a in outer if is_masked[a])
        kept = prod(pricer.sizes[a] for a in axes if state[a] == dst[a] == V)
        summed = _count(pricer, axes, state, V) // kept
        if summed == 1:
            units = _entering(pricer, axes, state, dst)
        else:
            # No group has all parts, so each needs all that it wants.
            messages = kept * messages_an_element(1, summed, _count(pricer, axes, dst, R), 1)
            units = max(
                pricer.square // _need(pricer, axes, dst),
                pricer.square // _num_groups(pricer, axes) * messages,
            )
        port_bytes.append(pricer.num_bytes * (units // sharing))
    ticks, rounds = _least_rounds(pricer, state, dst, is_masked)
    return pricer.ports.least(port_bytes, latency=ticks), max(rounds, int(any(port_bytes)))


def messages_an_element(src_r: int, src_v: int, dst_r: int, dst_v: int) -> int:
    """Fewest messages that one element needs when parts are summed or made, ranks being the same.

    Source: docs/bound.md, "Messages in all". For ``dst_v > 1``: to merge ``src_v`` values into
    ``dst_v`` takes a message for each that disappears; and the value of some part must reach
    ``dst_r`` ranks, of which at most ``src_r`` have it.
    """
    if dst_v == 1:
        return src_v + dst_r - 2
    return max(src_v - dst_v, dst_r - src_r if src_v == 1 else 0, 0)


def _count(pricer: RebindPricer, axes: Axes, targets: Targets, target: int) -> int:
    """How many values the axes have together that are bound to ``target``."""
    return prod(pricer.sizes[a] for a in axes if targets[a] == target)


def _num_groups(pricer: RebindPricer, axes: Axes) -> int:
    """How many groups these axes tell apart."""
    return prod(pricer.sizes[a] for a in axes)


def _need(pricer: RebindPricer, axes: Axes, dst: Targets) -> int:
    """Of how many equal pieces of the tensor each group wants one."""
    return prod(pricer.sizes[a] for a in axes if dst[a] >= 0)


def _entering(pricer: RebindPricer, axes: Axes, src: Targets, dst: Targets) -> int:
    """Units that must enter the group that has the least of what it wants."""
    need, missing = _need(pricer, axes, dst), pricer.missing(axes, src, dst)
    return pricer.square // need - (pricer.square // (need * missing) if missing else 0)


def _least_rounds(
    pricer: RebindPricer, state: Targets, dst: Targets, is_masked: Sequence[bool]
) -> tuple[int, int]:
    """Ticks of the rounds that are needed, whatever the bytes, and how many there are.

    Axes that leave V, and digits that nobody is to hold, have a partner a round: a step that
    takes several of them has at least as many rounds as steps that take one each.
    """
    nearest = [pricer.ports.quickest_round(level) for level in range(len(pricer.grid.blocks))]
    ticks = rounds = in_place = lost = farthest = 0
    for a, (s, t) in enumerate(zip(state, dst, strict=True)):
        if is_masked[a] or s == t:
            continue
        partners, once = pricer.sizes[a] - 1, nearest[pricer.levels[a]]
        if s == V:
            ticks += partners * once
            rounds += partners
        elif s >= 0 and s not in dst:
            in_place += partners * once
            lost += partners
            farthest = max(farthest, once)
    # Digits are gathered where they are, or brought near in one round and gathered there.
    return ticks + min(in_place, lost * nearest[0] + farthest), rounds + lost
