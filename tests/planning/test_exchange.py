"""Laws of the exchange: exact overlaps, every part once, nearest first, few senders."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given

import rvdcomm as rv
from rvdcomm.planning.cells import Cells
from rvdcomm.planning.exchange import Exchange, Move
from rvdcomm.planning.path import State, exchange_step
from tests.oracle import random_pair, sliced
from tests.strategies import seeds, transitions

Transition = tuple[rv.Layout, rv.Layout, rv.Topology]
LINK = rv.Link(0, 1.0)
ONE_HOST = rv.Topology.single_host(16, 0, 1.0)
TWO_HOSTS = rv.Topology.hosts([range(4), range(4, 8)], LINK, LINK)


def moves_of(src: rv.Layout, dst: rv.Layout, topology: rv.Topology = ONE_HOST) -> tuple[Move, ...]:
    (moves,) = exchange_step(State(src), State(dst)).moves(topology)
    return moves


def elements(moves: list[Move] | tuple[Move, ...]) -> int:
    return sum(move.box.num_elements for move in moves)


# --- exact --------------------------------------------------------------------------------------


def taken(rank: int, moves: tuple[Move, ...], src: rv.Layout) -> np.ndarray:
    """[part, *shape]: how often ``rank`` takes each part of each element."""
    count = np.zeros((src.rvd.v, *src.shape), dtype=int)
    for move in moves:
        if move.dst_rank == rank:
            sliced(count[move.part, ...], move.box)[...] += 1
    return count


@given(transitions())
def test_every_dst_replica_takes_every_part_of_every_element_once(transition: Transition) -> None:
    src, dst, topology = transition
    moves = moves_of(src, dst, topology)
    for replica in range(dst.rvd.r):
        ranks = [rank for rank in dst.ranks if dst.cell(rank).replica == replica]
        total = sum(taken(rank, moves, src) for rank in ranks)
        assert (total == 1).all(), f"replica {replica}"


@given(transitions())
def test_moves_are_of_boxes_in_the_shards_of_sender_and_receiver(transition: Transition) -> None:
    src, dst, topology = transition
    moves = moves_of(src, dst, topology)
    assert list(moves) == sorted(moves)
    for move in moves:
        assert not move.box.is_empty
        assert move.part == src.cell(move.src_rank).part
        assert src.cell(move.src_rank).box.contains(move.box)
        assert dst.cell(move.dst_rank).box.contains(move.box)


@given(transitions())
def test_rank_receives_only_missing_elements_if_there_is_one_part(transition: Transition) -> None:
    src, dst, topology = transition
    if src.rvd.v > 1 or dst.rvd.v > 1:
        return
    received = Counter()
    for move in moves_of(src, dst, topology):
        if move.src_rank != move.dst_rank:
            received[move.dst_rank] += move.box.num_elements
    for rank in dst.ranks:
        want = dst.cell(rank).box
        own = want.intersect(src.cell(rank).box) if rank in src else None
        assert received[rank] == want.num_elements - (own.num_elements if own else 0)


# --- nearest first ------------------------------------------------------------------------------


@given(transitions())
def test_every_move_comes_from_a_nearest_holder(transition: Transition) -> None:
    src, dst, topology = transition
    for move in moves_of(src, dst, topology):
        distance = topology.distance(move.src_rank, move.dst_rank)
        nearer = [
            rank
            for rank in src.ranks
            if topology.distance(rank, move.dst_rank) < distance
            and src.cell(rank).part == move.part
            and src.cell(rank).box.intersect(move.box)
        ]
        assert nearer == [], move


@pytest.mark.parametrize(
    "src_ranks, servers",
    [([0, 1, 2, 4], {0}), ([1, 2, 4, 5], {1}), ([4, 5, 6, 7], {4})],
    ids=["own memory", "own host", "other host"],
)
def test_reader_receives_from_the_nearest_holder(src_ranks: list[int], servers: set[int]) -> None:
    src = rv.Layout((6, 10), "R(4)V(1)D(1,1)", ranks=src_ranks)
    dst = rv.Layout((6, 10), "R(1)V(1)D(1,1)", ranks=[0])
    assert {move.src_rank for move in moves_of(src, dst, TWO_HOSTS)} == servers


# --- shares -------------------------------------------------------------------------------------


def sent_by_holder(src: rv.Layout, moves: tuple[Move, ...]) -> dict[int, int]:
    sent = dict.fromkeys(src.ranks, 0)
    for move in moves:
        if move.src_rank != move.dst_rank:
            sent[move.src_rank] += move.box.num_elements
    return sent


def sent_by_replicas(num_holders: int, num_readers: int) -> list[int]:
    """What each of the holders of 60 elements sends to readers of all, sorted."""
    src = rv.Layout((6, 10), rv.RVD(num_holders, 1, (1, 1)))
    readers = range(num_holders, num_holders + num_readers)
    dst = rv.Layout((6, 10), rv.RVD(num_readers, 1, (1, 1)), ranks=readers)
    return sorted(sent_by_holder(src, moves_of(src, dst)).values())


@pytest.mark.parametrize("num_holders, num_readers", [(2, 3), (2, 2), (3, 4), (3, 7), (5, 7)])
def test_replicas_send_equal_shares_to_at_least_as_many_readers(
    num_holders: int, num_readers: int
) -> None:
    # Shares differ by at most one element.
    share, rest = divmod(60 * num_readers, num_holders)
    wanted = [share] * (num_holders - rest) + [share + 1] * rest
    assert sent_by_replicas(num_holders, num_readers) == wanted


@pytest.mark.parametrize("num_holders, num_readers", [(3, 2), (4, 1), (4, 2), (7, 5), (8, 4)])
def test_fewer_readers_than_replicas_each_receive_from_one_replica(
    num_holders: int, num_readers: int
) -> None:
    wanted = [0] * (num_holders - num_readers) + [60] * num_readers
    assert sent_by_replicas(num_holders, num_readers) == wanted


def test_replicas_on_two_hosts_each_send_half_to_one_reader() -> None:
    src = rv.Layout((6, 10), "R(8)V(1)D(1,1)")
    dst = rv.Layout((6, 10), "R(1)V(1)D(1,1)", ranks=[8])
    three_hosts = rv.Topology.hosts([range(4), range(4, 8), [8]], LINK, LINK)
    sent = sent_by_holder(src, moves_of(src, dst, three_hosts))
    assert sent == {0: 30, 4: 30, 1: 0, 2: 0, 3: 0, 5: 0, 6: 0, 7: 0}


@given(seeds)
def test_no_replica_sends_more_than_its_equal_share_or_the_need_of_one_reader(seed: int) -> None:
    src, dst = random_pair(random.Random(seed))
    moves = [move for move in moves_of(src, dst) if move.src_rank != move.dst_rank]
    sent = sent_by_holder(src, tuple(moves))
    for holding in src.placement.holdings:
        needs = Counter[int]()
        for move in moves:
            if move.src_rank in holding.ranks:
                needs[move.dst_rank] += move.box.num_elements
        share = -(-sum(needs.values()) // len(holding.ranks))
        most = max(share, *needs.values(), 0)
        assert all(sent[rank] <= most for rank in holding.ranks)


# --- one rank alone -----------------------------------------------------------------------------


@given(transitions())
def test_moves_computed_for_one_rank_equal_its_moves_of_the_whole_exchange(
    transition: Transition,
) -> None:
    src, dst, topology = transition
    moves = moves_of(src, dst, topology)
    for rank in {*src.ranks, *dst.ranks}:
        alone = Exchange(Cells(src, rank), Cells(dst, rank), topology)
        assert alone.into(rank) == [move for move in moves if move.dst_rank == rank]
        assert alone.out_of(rank) == [
            move for move in moves if move.src_rank == rank != move.dst_rank
        ]


# --- parts of dst -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "src, dst",
    [
        ("R(1)V(4)D(1)", "R(1)V(4)D(1)"),
        ("R(4)V(1)D(1)", "R(1)V(4)D(1)"),
        ("R(1)V(1)D(4)", "R(1)V(4)D(1)"),
        ("R(2)V(2)D(1)", "R(1)V(4)D(1)"),
    ],
)
def test_parts_are_added_to_dst_parts_on_the_same_ranks(src: str, dst: str) -> None:
    moves = moves_of(rv.Layout((12,), src), rv.Layout((12,), dst))
    assert all(move.src_rank == move.dst_rank for move in moves)


def test_parts_are_spread_over_the_parts_of_dst() -> None:
    src = rv.Layout((12,), "R(1)V(4)D(1)")
    dst = rv.Layout((12,), "R(1)V(2)D(1)", ranks=[4, 5])
    taken_by = Counter(move.dst_rank for move in moves_of(src, dst))
    assert taken_by == {4: 2, 5: 2}


# --- examples -----------------------------------------------------------------------------------


@given(seeds)
def test_assignment_in_turn_equals_assignment_by_fewest_elements(seed: int) -> None:
    """In turn needs no counts: src cells have equal shares, and src and dst have no common rank."""
    rng = random.Random(seed)
    src, dst = random_pair(rng)
    cells = Cells(src), Cells(dst)
    exchange = Exchange(*cells, rv.Topology.single_host(16, 0, 1.0))
    for key in cells[1].all_keys():
        for holding, taker in exchange._assigned(key).items():
            assert exchange._taker(key, holding) == taker
