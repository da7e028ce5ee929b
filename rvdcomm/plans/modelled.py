"""Modelled: the cost of a path by formula, in time that grows with the ranks, not the messages.

The bytes equal those of the program (tests/plans/test_modelled.py). The program may have more
rounds: replicas that leave R may share a need, and a rank then has more partners. Memory counts all
buffers that an exchange may have, without holes between them; the program may need fewer of them.
If shards are unequal, every shard counts with the size of the largest one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import numpy as np

from rvdcomm.cost import Cost, StepCost, farthest_level, total_cost
from rvdcomm.layout import Ints
from rvdcomm.network import Topology
from rvdcomm.planning.binding import Binding, Grid, R, V
from rvdcomm.planning.path import Path, Step
from rvdcomm.planning.primitives import (
    MOVES_NOTHING,
    RebindPricer,
    Targets,
    axes_by_digit,
    kind_of_rebind,
)
from rvdcomm.planning.transfer import transfer
from rvdcomm.program import ALIGN_BYTES

NUM_BUFFERS = 5
"""Staging buffers that are alive at once; each of them may be padded for alignment."""


@dataclass(frozen=True, slots=True)
class ModelledCost:
    """The cost of a path by formula, and the cost of each of its steps.

    Attributes:
        cost: cost of the path; its time is the latency of all rounds plus the time of the bytes.
        steps: cost of each step.
        latency_secs: seconds of latency of all rounds.
        is_exact: whether time and rounds also equal those of the program: shards are equal, and no
            replica leaves R.
    """

    cost: Cost
    steps: tuple[StepCost, ...]
    latency_secs: float
    is_exact: bool


def modelled_cost(path: Path, item_bytes: int, topology: Topology) -> ModelledCost | None:
    """The cost of ``path``; None where some step has no formula.

    The rebinds that ``RebindPricer`` prices have a formula, and so have the transfers that
    ``planning/transfer.py`` covers.
    """
    steps = [step_exchanges_of(step, item_bytes, topology) for step in path.steps]
    step_exchanges = [
        step_exchange for found in steps if found is not None for step_exchange in found
    ]
    if None in steps:
        return None
    costs = tuple(_step_cost(found) for found in steps if found is not None)
    cost = total_cost(costs, _peak_bytes(path, step_exchanges, item_bytes))
    latency_secs = sum(step_exchange.latency_secs for step_exchange in step_exchanges)
    return ModelledCost(
        cost, costs, latency_secs, all(step_exchange.is_exact for step_exchange in step_exchanges)
    )


@dataclass(frozen=True, slots=True)
class ModelledExchange:
    """The modelled cost of one exchange of a step.

    Attributes:
        secs, rounds: time and rounds under the port model.
        latency_secs: seconds of latency of the rounds.
        ranks: the ranks that receive.
        entering: for every level, bytes that each receiver gets from outside its group.
        senders: the ranks that send.
        leaving: for every level, bytes that each sender sends out of its group, on average.
        before, after: bytes of a shard before and after the exchange.
        sent: the most bytes that a rank may have to pack, its own share included.
        received: the most bytes that a rank may have to unpack.
        crosses: whether the exchange leads from the src group to another group.
        is_exact: as in ``ModelledCost``.
    """

    secs: float
    rounds: int
    latency_secs: float
    ranks: Sequence[int]
    entering: list[Ints]
    senders: Sequence[int]
    leaving: list[Ints]
    before: int
    after: int
    sent: int
    received: int
    crosses: bool = False
    is_exact: bool = False


def _step_cost(step_exchanges: Sequence[ModelledExchange]) -> StepCost:
    """The cost of a step, whose exchanges run one after another."""
    recv_bytes: dict[int, int] = {}
    for step_exchange in step_exchanges:
        for rank, num_bytes in zip(
            step_exchange.ranks, step_exchange.entering[0].tolist(), strict=True
        ):
            if num_bytes:
                recv_bytes[rank] = recv_bytes.get(rank, 0) + num_bytes
    return StepCost(
        secs=sum(step_exchange.secs for step_exchange in step_exchanges),
        wire_bytes=sum(int(step_exchange.entering[0].sum()) for step_exchange in step_exchanges),
        host_bytes=sum(
            int(step_exchange.entering[1].sum())
            for step_exchange in step_exchanges
            if len(step_exchange.entering) > 1
        ),
        rounds=sum(step_exchange.rounds for step_exchange in step_exchanges),
        recv_bytes=recv_bytes,
    )


def step_exchanges_of(
    step: Step, item_bytes: int, topology: Topology
) -> list[ModelledExchange] | None:
    """The modelled exchanges of a step; None if the step has no formula."""
    if step.direct:
        step_exchange = _transfer_leg(step, item_bytes, topology)
        return None if step_exchange is None else [step_exchange]
    sources = [state.source for state in (step.src, step.middle, step.dst) if state is not None]
    bindings = [source for source in sources if isinstance(source, Binding)]
    if len(bindings) < len(sources):
        return None
    num_bytes = bindings[0].padded_elements * item_bytes
    pricer = RebindPricer(bindings[0].grid, topology, num_bytes)
    changes = [(a.targets, b.targets) for a, b in pairwise(bindings)]
    if not all(pricer.is_priced(a, b) for a, b in changes):
        return None
    is_even = all(binding.is_even for binding in bindings)
    return [_rebind_leg(pricer, a, b, is_even) for a, b in changes]


# --- inside a group -----------------------------------------------------------------------------


def _rebind_leg(
    pricer: RebindPricer, src: Targets, dst: Targets, is_even: bool
) -> ModelledExchange:
    """The exchange of a rebind, by the formula of ``RebindPricer``, applied to every rank on its
    own.

    Every rank is assumed to send as many bytes as it receives. If replicas leave R, some ranks send
    more.
    """
    grid, sizes = pricer.grid, pricer.sizes
    ticks, rounds = pricer.ticks(src, dst)
    held = prod(k for k, t in zip(sizes, dst, strict=True) if t >= 0)
    parts = prod(k for k, s, t in zip(sizes, src, dst, strict=True) if s == V != t)
    need = pricer.num_bytes * parts // held
    is_local = kind_of_rebind(src, dst) in MOVES_NOTHING
    entering = [
        np.zeros(len(grid.ranks), np.int64) if is_local else _lacking(grid, src, dst, need, outer)
        for outer in grid.outer_axes
    ]
    before = pricer.num_bytes // prod(k for k, s in zip(sizes, src, strict=True) if s >= 0)
    leaves_r = any(s == R != t for s, t in zip(src, dst, strict=True))
    return ModelledExchange(
        pricer.secs(ticks), rounds, _latency_secs(entering, rounds, pricer.topology), grid.ranks,
        entering, grid.ranks, entering,
        before, after=pricer.num_bytes // held, sent=max(before, need), received=need,
        is_exact=is_even and (is_local or not leaves_r),
    )  # fmt: skip


def _latency_secs(entering: Sequence[Ints], rounds: int, topology: Topology) -> float:
    """Time of the rounds, by the farthest level that bytes cross."""
    far = farthest_level([int(level.max()) for level in entering])
    return 0.0 if far is None else rounds * topology.latencies[far]


def _lacking(grid: Grid, src: Targets, dst: Targets, need: int, outer_axes: Iterable[int]) -> Ints:
    """Bytes that every rank needs and that no rank of its own group has.

    The group has a fraction of the need, a product over the axes outside the group. An axis of size
    k contributes 1/k if it leaves V, or if no axis of dst is bound to its digit. If its digit goes
    to another axis, the group has all or nothing.
    """
    position = np.arange(len(grid.ranks))
    axis_of = axes_by_digit(dst)
    share, is_met = 1, np.ones(len(position), np.bool_)
    for a in outer_axes:
        if src[a] == R or src[a] == dst[a]:
            continue
        if src[a] == V or src[a] not in axis_of:
            share *= grid.axes[a].size
        else:
            b = grid.axes[axis_of[src[a]]]
            mine = position // grid.axes[a].stride % grid.axes[a].size
            is_met &= mine == position // b.stride % b.size
    return need - np.where(is_met, need // share, 0)


# --- between groups -----------------------------------------------------------------------------


def _transfer_leg(step: Step, item_bytes: int, topology: Topology) -> ModelledExchange | None:
    src, dst = step.src.source, step.dst.source
    if step.num_slices > 1 or not (src.is_even and dst.is_even):
        return None
    found = transfer(src, dst, item_bytes, topology)
    if found is None:
        return None
    received = np.broadcast_to(found.recv_bytes, len(step.dst.ranks)).astype(np.int64)
    sent = np.full(len(step.src.ranks), found.sent_bytes)
    entering, leaving = (
        [mine * (level < found.distance) for level in range(len(topology.levels))]
        for mine in (received, sent)
    )
    before, after = (source.largest_shard * item_bytes for source in (src, dst))
    return ModelledExchange(
        found.secs, found.rounds, _latency_secs(entering, found.rounds, topology),
        step.dst.ranks, entering, step.src.ranks, leaving, before, after,
        sent=max(before, found.sent_bytes), received=int(received.max()), crosses=True,
    )  # fmt: skip


# --- memory -------------------------------------------------------------------------------------


def _peak_bytes(path: Path, step_exchanges: Sequence[ModelledExchange], item_bytes: int) -> int:
    """Peak bytes of a rank: its src and dst shards and the buffers of an exchange.

    These buffers are the state before the exchange, the rest of the state before that one, the
    packed data, the received data, and the state after the exchange. The first state is src itself,
    the last is dst. If a path leads to another group of ranks, the first group has no dst, the
    second no src.
    """
    src, dst = (layout.largest_shard * item_bytes for layout in (path.src, path.dst))
    crossing = next(
        (i for i, step_exchange in enumerate(step_exchanges) if step_exchange.crosses), None
    )
    is_crossed = crossing is not None
    most = [src, dst] if is_crossed else [src + dst]
    for i, step_exchange in enumerate(step_exchanges):
        shards = src + dst if not is_crossed else src if i < (crossing or 0) else dst
        before = sum(earlier.before for earlier in step_exchanges[max(i - 1, 1) : i + 1])
        after = step_exchange.after if i < len(step_exchanges) - 1 else 0
        if i == crossing:
            most += [src + before + step_exchange.sent, dst + step_exchange.received + after]
        else:
            most.append(shards + before + step_exchange.sent + step_exchange.received + after)
    return max(most) + NUM_BUFFERS * ALIGN_BYTES
