"""Laws of trees as programs: right data by the verifier and by running, and the trees' messages."""

from __future__ import annotations

import random
from collections import Counter
from fractions import Fraction
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rvdcomm as rv
from rvdcomm.layout import Box
from rvdcomm.program.domains import SharedDomains
from rvdcomm.program.trees import program_of_trees, split
from rvdcomm.program.verify import verify
from rvdcomm.synthesis import Forest, forest_of, forests
from tests.network.oracle import random_network, random_pair_on
from tests.oracle import all_pairs, drawn, local_faults, program_faults
from tests.strategies import boxes

RING = rv.Network.preset("ring", 4, link=rv.Link(1e-6, 1e9))


def faults(program: rv.Program) -> list[str]:
    verify(program)
    return program_faults(program)


@pytest.mark.parametrize("num_slices", [1, 3])
@pytest.mark.parametrize("shape", [(12, 8), (5, 7)], ids=["even", "ragged"])
def test_programs_are_right_for_pairs_of_four_ranks(shape, num_slices: int) -> None:
    found = []
    for src, dst in drawn(all_pairs(shape, 4), 0.3, f"{shape} {num_slices}"):
        if dst.rvd.v == 1:
            forest = forest_of(src, dst, RING)
            found += faults(program_of_trees(src, dst, "int64", forest, num_slices))
    assert found == []


@pytest.mark.parametrize("seed", range(40))
def test_programs_are_right_on_random_networks(seed: int) -> None:
    rng = random.Random(seed)
    network = random_network(rng, range(rng.randint(2, 8)))
    src, dst = random_pair_on(rng, network)
    forest = forest_of(src, dst, network)
    assert faults(program_of_trees(src, dst, "int64", forest, rng.choice([1, 2, 5]))) == []


def random_case(rng: random.Random) -> tuple[rv.Layout, rv.Layout, Forest, SharedDomains]:
    """Layouts on a random network, trees, and shared-memory domains of some ranks."""
    network = random_network(rng, range(rng.randint(2, 8)))
    src, dst = random_pair_on(rng, network)
    found = rng.choice(list(forests(src, dst, network)))
    members = sorted({*src.ranks, *dst.ranks})
    cut = rng.randint(0, len(members))
    domains = tuple(group for group in (tuple(members[:cut]), tuple(members[cut:])) if group)
    return src, dst, found, domains


@pytest.mark.parametrize("seed", range(60))
def test_ranks_of_a_domain_read_memory_instead_of_messages(seed: int) -> None:
    rng = random.Random(seed)
    src, dst, forest, domains = random_case(rng)
    num_slices = rng.choice([1, 2, 5])
    program = program_of_trees(src, dst, "int64", forest, num_slices, domains=domains)
    assert faults(program) == []
    home = {rank: i for i, domain in enumerate(domains) for rank in domain}
    for call in program.collectives:
        assert all(home[a] != home[b] for a, b in call.traffic())
    apart = program_of_trees(src, dst, "int64", forest, num_slices)
    sent = [Counter({each[:2]: 0 for each in p.traffic()}) for p in (program, apart)]
    for total, p in zip(sent, (program, apart), strict=True):
        for step, pair, num_elements in p.traffic():
            total[step, pair] += num_elements
    assert sent[0] == sent[1]


@pytest.mark.parametrize("seed", range(40))
def test_programs_of_some_ranks_are_their_part_of_the_whole(seed: int) -> None:
    rng = random.Random(seed)
    src, dst, forest, domains = random_case(rng)
    lowered = partial(program_of_trees, src, dst, "int64", forest, 2, domains=domains)
    assert local_faults(lowered(), lambda rank: lowered(ranks=[rank])) == []


@pytest.mark.parametrize("seed", range(10))
def test_each_wire_carries_what_the_trees_say(seed: int) -> None:
    rng = random.Random(seed)
    network = random_network(rng, range(rng.randint(3, 6)))
    count = len(network.ranks)
    # Every share of every box is a whole number of rows.
    shape = (count * 10080, 1)
    src = rv.Layout(shape, f"R(1)V(1)D({count},1)", network.ranks)
    dst = rv.Layout(shape, f"R({count})V(1)D(1,1)", network.ranks)
    forest = forest_of(src, dst, network)
    through: Counter[tuple[int, int]] = Counter()
    for demand, ways in zip(forest.demands, forest.ways, strict=True):
        for way, share in ways:
            for tree in way:
                for hop in (*tree.sums, *tree.copies):
                    through[hop.src, hop.dst] += share * demand.num_elements
    sent: Counter[tuple[int, int]] = Counter()
    for _, pair, num_elements in program_of_trees(src, dst, "float32", forest, 4).traffic():
        sent[pair] += num_elements
    assert sent == through


def test_replicas_of_a_sum_have_equal_bits() -> None:
    src, dst = rv.Layout((64,), "R(1)V(4)D(1)"), rv.Layout((64,), "R(4)V(1)D(1)")
    program = program_of_trees(src, dst, "float32", forest_of(src, dst, RING), 2)
    assert verify(program).rounds_apart == ()


def test_slices_follow_each_other_one_beat_apart() -> None:
    line = rv.Network.preset("line", 4, link=rv.Link(1e-6, 1e9))
    src, dst = rv.Layout((12,), "R(1)V(1)D(1)", [0]), rv.Layout((12,), "R(4)V(1)D(1)")
    program = program_of_trees(src, dst, "int64", forest_of(src, dst, line), 3)
    beats: dict[int, list[tuple[int, int]]] = {}
    for step, pair, num_elements in program.traffic():
        assert num_elements == 4
        beats.setdefault(step, []).append(pair)
    assert [sorted(beats[step]) for step in sorted(beats)] == [
        [(0, 1)],
        [(0, 1), (1, 2)],
        [(0, 1), (1, 2), (2, 3)],
        [(1, 2), (2, 3)],
        [(2, 3)],
    ]
    # A relay keeps no more than what came in two beats.
    assert program.arena(1).num_bytes <= 4 * 4 * 8 + 64 * 4


def test_scalars_and_empty_tensors_are_moved_too() -> None:
    for shape in ((), (0, 3)):
        ones = f"D({','.join('1' * len(shape))})"
        src, dst = rv.Layout(shape, f"R(1)V(4){ones}"), rv.Layout(shape, f"R(4)V(1){ones}")
        assert faults(program_of_trees(src, dst, "int64", forest_of(src, dst, RING), 4)) == []


@given(boxes(), st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_slabs_tile_the_box(box: Box, weights: list[int]) -> None:
    shares = [Fraction(weight, sum(weights)) for weight in weights]
    slabs = split(box, shares)
    assert len(slabs) == len(shares)
    found = [slab for slab in slabs if slab is not None]
    assert sum(slab.num_elements for slab in found) == box.num_elements
    assert all(box.contains(slab) for slab in found)
    assert not any(a.intersect(b) for a in found for b in found if a is not b)
