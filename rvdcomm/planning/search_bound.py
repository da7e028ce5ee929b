"""Search bound: a lower bound on every path from one binding to another, by formula.

Derived in docs/bound.md, "In the search". Bytes are in the units of ``RebindPricer``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from rvdcomm.planning.factors import R, V
from rvdcomm.planning.primitives import RebindPricer, Targets, axes_by_digit


def least_of_any(pricer: RebindPricer, src: Targets, dst: Targets) -> int:
    """A lower bound on the ticks of any plan; 0 only if nothing must move."""
    axis_of, port_bytes = axes_by_digit(dst), []
    for outer in pricer.grid.outer_axes:
        src_r, src_v, _ = _counts(pricer, outer, src)
        dst_r, dst_v, need = _counts(pricer, outer, dst)
        if src_v == dst_v == 1:
            missing = pricer.missing(outer, src, dst, axis_of)
            units = _entering(pricer.square, need, missing)
        else:
            messages = messages_an_element(src_r, src_v, dst_r, dst_v)
            units = pricer.square // (dst_r * dst_v * need) * messages
        port_bytes.append(pricer.num_bytes * units)
    return pricer.ports.least(port_bytes, latency=0)


def least_of_kept(
    pricer: RebindPricer, state: Targets, dst: Targets, is_masked: Sequence[bool]
) -> tuple[int, int]:
    """A lower bound on the ticks and rounds of paths of ``LeanGraph``.

    On such a path the V axes of ``dst`` are V from the start, or become V by a mask at the end
    (``is_masked``). Before the mask, groups that differ in masked axes alone may share what they
    need. They count as one group, whose bytes are spread over the ports of all of them.
    """
    axis_of, port_bytes = axes_by_digit(dst), []
    for outer in pricer.grid.outer_axes:
        axes = [a for a in outer if not is_masked[a]]
        dst_r, kept, need = _counts(pricer, axes, dst)
        summed = _counts(pricer, axes, state)[1] // kept
        if summed == 1:
            missing = pricer.missing(axes, state, dst, axis_of)
            units = _entering(pricer.square, need, missing)
        else:
            # No group has all parts, so each group also receives everything that it wants.
            messages = kept * messages_an_element(1, summed, dst_r, 1)
            groups = dst_r * kept * need
            units = max(pricer.square // need, pricer.square // groups * messages)
        sharing = prod([pricer.sizes[a] for a in outer if is_masked[a]])
        port_bytes.append(pricer.num_bytes * (units // sharing))
    ticks, rounds = _least_rounds(pricer, state, axis_of, dst, is_masked)
    return pricer.ports.least(port_bytes, latency=ticks), max(rounds, int(any(port_bytes)))


def messages_an_element(src_r: int, src_v: int, dst_r: int, dst_v: int) -> int:
    """The fewest messages that one element needs, between two bindings of the same ranks.

    Source: docs/bound.md, "Messages in all". For ``dst_v > 1``: merging ``src_v`` values into
    ``dst_v`` takes one message per value that disappears, and the value of some part must reach
    ``dst_r`` ranks, of which at most ``src_r`` have it.
    """
    if dst_v == 1:
        return src_v + dst_r - 2
    return max(src_v - dst_v, dst_r - src_r if src_v == 1 else 0, 0)


def _counts(pricer: RebindPricer, axes: Sequence[int], targets: Targets) -> tuple[int, int, int]:
    """The replicas, parts and pieces of the tensor that these axes count."""
    r = v = pieces = 1
    for a in axes:
        if targets[a] >= 0:
            pieces *= pricer.sizes[a]
        elif targets[a] == R:
            r *= pricer.sizes[a]
        else:
            v *= pricer.sizes[a]
    return r, v, pieces


def _entering(square: int, need: int, missing: int) -> int:
    """Units that enter the group that has least of its piece; the tensor has ``need`` pieces."""
    return square // need - (square // (need * missing) if missing else 0)


def _least_rounds(
    pricer: RebindPricer,
    state: Targets,
    axis_of: Mapping[int, int],
    dst: Targets,
    is_masked: Sequence[bool],
) -> tuple[int, int]:
    """A lower bound on the ticks of all rounds, and on their number, for any number of bytes.

    An axis that leaves V, or whose digit no axis of ``dst`` is bound to, needs a round per partner.
    A step for several such axes has at least as many rounds as one step per axis.
    """
    a_round = pricer.ports.a_round
    ticks = rounds = in_place = lost = farthest = 0
    for a, (s, t) in enumerate(zip(state, dst, strict=True)):
        if is_masked[a] or s == t:
            continue
        partners, once = pricer.sizes[a] - 1, a_round[pricer.levels[a]]
        if s == V:
            ticks += partners * once
            rounds += partners
        elif s >= 0 and s not in axis_of:
            in_place += partners * once
            lost += partners
            farthest = max(farthest, once)
    # Digits are gathered where they are, or first brought to the nearest level in one round.
    return ticks + min(in_place, lost * a_round[0] + farthest), rounds + lost
