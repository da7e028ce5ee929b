"""Laws of bindings: they have the placements of their layouts, and each part tiles the tensor."""

from __future__ import annotations

from itertools import accumulate, combinations, pairwise, permutations, product
from operator import attrgetter, mul

import numpy as np
import pytest

import rvdcomm as rv
from rvdcomm.layout import Box, Holdings
from rvdcomm.planning.binding import Binding, BoundAxis, Digit, Grid, R, V, refine
from rvdcomm.planning.factors import Numbering, factors_of, level_blocks
from tests.covering import each_value
from tests.oracle import all_layouts, all_pairs, sliced
from tests.planning.placements import placement_of

LINK = rv.Link(0, 1.0)


def hosts_of(num_ranks: int, num_hosts: int) -> rv.Topology:
    size = num_ranks // num_hosts
    return rv.Topology.hosts(
        [range(h * size, (h + 1) * size) for h in range(num_hosts)], LINK, LINK
    )


def held(placement: Holdings) -> set[tuple[tuple[Box, ...], tuple[int, ...]]]:
    """Boxes and holders; parts are not numbered, since they are interchangeable."""
    return {
        (tuple(box for box in holding.boxes if not box.is_empty), holding.ranks)
        for holding in placement.holdings
        if holding.num_elements
    }


def untiled_parts(placement: Holdings) -> list[int]:
    """Parts whose holdings miss an element or hold one twice."""
    found = []
    for part in range(placement.num_parts):
        count = np.zeros(placement.shape, dtype=int)
        for holding in placement.holdings:
            for box in holding.boxes if holding.part == part else ():
                sliced(count, box)[...] += 1
        if (count != 1).any():
            found.append(part)
    return found


# --- refinement ---------------------------------------------------------------------------------

WORLDS = [
    pytest.param(shape, num_ranks, num_hosts, id=f"{num_ranks}in{num_hosts}-{shape}")
    for num_ranks, num_hosts, shape in [
        (8, 1, (16, 24)),
        (8, 2, (16, 24)),
        (8, 4, (6, 10)),
        (12, 1, (24, 36)),
        (12, 3, (24, 36)),
        (12, 2, (6, 10)),
    ]
]


@pytest.mark.parametrize("shape, num_ranks, num_hosts", WORLDS)
def test_refined_bindings_have_the_placements_of_their_layouts(
    shape: tuple[int, ...], num_ranks: int, num_hosts: int
) -> None:
    topology = hosts_of(num_ranks, num_hosts)
    wrong, num_regular = [], 0
    for src, dst in all_pairs(shape, num_ranks):
        bindings = refine(src, dst, topology)
        if bindings is None:
            continue
        num_regular += 1
        for layout, binding in zip((src, dst), bindings, strict=True):
            if held(placement_of(binding)) != held(layout.placement):
                wrong.append(f"{src.rvd} -> {dst.rvd}: {binding} is not {layout.rvd}")
    assert wrong == []
    assert num_regular > 0


def prime_orders(number: int) -> set[tuple[int, ...]]:
    """All orders of the prime factors of ``number``."""
    primes = [p for p in (2, 2, 2, 2, 3) if number % p == 0]
    found = {p for n in range(1, 6) for p in permutations(primes, n)}
    return {order for order in found if np.prod(order) == number}


def digits_of(counts: tuple[int, ...], primes: tuple[int, ...]) -> list[list[int]] | None:
    """The prime factors of every count, taken in order; None if they do not fit."""
    left, out = list(primes), []
    for count in counts:
        taken: list[int] = []
        while np.prod(taken, dtype=int) < count:
            taken.append(left.pop(0))
        if np.prod(taken, dtype=int) != count:
            return None
        out.append(taken)
    return out


def has_common_refinement(src: rv.RVD, dst: rv.RVD, num_hosts: int) -> bool:
    """Whether some order of prime axes fits both layouts, the hosts and the digits of every dim."""
    for primes in prime_orders(src.num_ranks):
        sides = [digits_of(rvd.counts, primes) for rvd in (src, dst)]
        if None in sides or num_hosts not in accumulate(primes, mul, initial=1):
            continue
        places = [
            sorted({*accumulate(a, mul, initial=1), *accumulate(b, mul, initial=1)})
            for a, b in zip(sides[0][2:], sides[1][2:], strict=True)
        ]
        if all(fine % coarse == 0 for dim in places for coarse, fine in pairwise(dim)):
            return True
    return False


@pytest.mark.parametrize(
    "shape, num_ranks, num_hosts",
    [
        ((16, 24), 8, 1),
        ((16, 24), 8, 2),
        ((12, 18), 6, 1),
        ((12, 18), 6, 2),
        ((12, 18), 6, 3),
        ((24, 36), 12, 1),
        ((24, 36), 12, 3),
        ((24, 36), 12, 2),
    ],
)
def test_even_pairs_are_regular_if_and_only_if_they_have_a_common_refinement(
    shape: tuple[int, ...], num_ranks: int, num_hosts: int
) -> None:
    topology = hosts_of(num_ranks, num_hosts)
    wrong = [
        f"{src.rvd} -> {dst.rvd}"
        for src, dst in all_pairs(shape, num_ranks)
        if (refine(src, dst, topology) is not None)
        != has_common_refinement(src.rvd, dst.rvd, num_hosts)
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "dst",
    [
        rv.Layout((12, 18), "R(1)V(1)D(1,4)", ranks=[0, 1, 2, 4]),
        rv.Layout((12, 18), "R(1)V(1)D(1,4)", ranks=[0, 1, 3, 2]),
        rv.Layout((12, 18), "R(1)V(1)D(1,4)", cuts=[[0, 12], [0, 5, 10, 14, 18]]),
    ],
    ids=["other ranks", "order", "cuts that do not nest"],
)
def test_pairs_with_other_ranks_rank_order_or_unnested_cuts_are_irregular(dst: rv.Layout) -> None:
    src = rv.Layout((12, 18), "R(2)V(1)D(1,2)")
    assert refine(src, dst, hosts_of(8, 1)) is None


def test_unequal_hosts_make_a_pair_irregular() -> None:
    topology = rv.Topology.hosts([[0], [1, 2, 3]], LINK, LINK)
    src, dst = rv.Layout((12,), "R(1)V(1)D(4)"), rv.Layout((12,), "R(4)V(1)D(1)")
    assert refine(src, dst, topology) is None


def test_ranks_numbered_across_hosts_are_regular() -> None:
    topology = rv.Topology.hosts([[0, 2], [1, 3]], LINK, LINK)
    src, dst = rv.Layout((12,), "R(1)V(1)D(4)"), rv.Layout((12,), "R(4)V(1)D(1)")
    assert refine(src, dst, topology) is not None


def test_grid_blocks_are_the_group_sizes_of_every_level() -> None:
    src, dst = rv.Layout((16,), "R(1)V(1)D(8)"), rv.Layout((16,), "R(8)V(1)D(1)")
    pair = refine(src, dst, hosts_of(8, 2))
    assert pair is not None
    assert pair[0].grid.blocks == (1, 4)


def test_eight_columns_against_two_by_four_have_three_axes_and_four_digits() -> None:
    # Source: DESIGN section 5: axes a, b, c of size 2 and digits 0.0, 1.0, 1.1, 1.2.
    pair = [rv.Layout((16, 24), rvd) for rvd in ("R(1)V(1)D(1,8)", "R(1)V(1)D(2,4)")]
    src, dst = refine(*pair, hosts_of(8, 1)) or (None, None)
    assert src is not None
    assert src.grid.axes == (BoundAxis(2, 4), BoundAxis(2, 2), BoundAxis(2, 1))
    assert src.grid.digits == (Digit(0, 1, 2), Digit(1, 1, 2), Digit(1, 2, 2), Digit(1, 4, 2))
    assert (src.targets, dst.targets) == ((1, 2, 3), (0, 1, 2))


@pytest.mark.parametrize("num_ranks, num_hosts", [(8, 1), (8, 2), (12, 3)])
def test_computed_factors_of_consecutive_ranks_equal_enumerated_ones(
    num_ranks: int, num_hosts: int
) -> None:
    topology, wrong = hosts_of(2 * num_ranks, 2 * num_hosts), []
    for layout in all_layouts((24, 36), num_ranks):
        layout = rv.Layout(layout.shape, layout.rvd, range(num_ranks, 2 * num_ranks))
        known, counted = Numbering(layout.ranks, layout.span), Numbering(layout.ranks)
        by_stride = attrgetter("lo")
        if sorted(factors_of(layout, known) or (), key=by_stride) != sorted(
            factors_of(layout, counted) or (), key=by_stride
        ):
            wrong.append(str(layout))
        if level_blocks(known, topology) != level_blocks(counted, topology):
            wrong.append(str(layout))
    assert wrong == []


@pytest.mark.parametrize(
    "first, num_ranks", [(0, 8), (0, 12), (2, 4), (2, 8), (2, 6), (4, 4), (3, 6), (3, 9), (5, 2)]
)
def test_computed_blocks_of_consecutive_ranks_equal_enumerated_ones(
    first: int, num_ranks: int
) -> None:
    topology, span = hosts_of(12, 3), range(first, first + num_ranks)
    known, counted = Numbering(tuple(span), span), Numbering(tuple(span))
    assert level_blocks(known, topology) == level_blocks(counted, topology)


# --- scratch digits -----------------------------------------------------------------------------


def eight_ranks(shape: tuple[int, ...]) -> Grid:
    """Three axes of size 2; dim 1 is cut in two."""
    src, dst = rv.Layout(shape, "R(2)V(2)D(1,2)"), rv.Layout(shape, "R(4)V(1)D(1,2)")
    pair = refine(src, dst, hosts_of(8, 1))
    assert pair is not None
    return pair[0].grid


SCRATCHED = [axes for count in (1, 2, 3) for axes in combinations(range(3), count)]


@each_value(shape=[(16, 24), (6, 10), (1, 3), (0, 4)] * 3, axes=SCRATCHED, rest=[R, V])
def test_scratch_digits_tile_the_tensor_in_any_nesting(
    shape: tuple[int, ...], axes: tuple[int, ...], rest: int
) -> None:
    grid = eight_ranks(shape)
    targets = tuple(grid.scratch(a) if a in axes else rest for a in range(3))
    bindings = [Binding(grid, targets, order) for order in permutations(axes)]
    assert [untiled_parts(placement_of(binding)) for binding in bindings] == [[]] * len(bindings)


def test_gathering_a_scratch_axis_adds_the_sizes_of_its_shards() -> None:
    # Shards on the ranks of an axis together are as large as each is after a gather of the axis.
    grid = eight_ranks((6, 10))
    both = Binding(grid, (grid.scratch(0), grid.scratch(1), R), (1, 0))
    one = Binding(grid, (grid.scratch(0), R, R), (1, 0))
    coordinates = product(*(range(axis.size) for axis in grid.axes))
    rank_of = dict(zip(coordinates, grid.ranks, strict=True))
    apart = [rank_of[0, b, 0] for b in (0, 1)]
    together = sum(placement_of(both).num_elements(rank) for rank in apart)
    assert together == placement_of(one).num_elements(apart[0])


def test_scratch_digit_cuts_every_atom_flat_in_row_major_order() -> None:
    # Dim 1 has a local digit: the atoms are columns 0:2 and 2:4, and half of each is 3 elements.
    grid = eight_ranks((3, 4))
    binding = Binding(grid, (grid.scratch(0), R, R), (0,))
    assert placement_of(binding).by_rank[0].boxes == (
        Box((0, 0), (1, 4)),
        Box((1, 0), (2, 1)),
        Box((1, 2), (2, 3)),
    )


# --- text ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [0, 1])
def test_str_of_a_refined_binding_is_that_of_its_layout(index: int) -> None:
    wrong = []
    for pair in all_pairs((16, 24), 8):
        bindings = refine(*pair, hosts_of(8, 1))
        if bindings is not None and str(bindings[index]) != str(pair[index].rvd):
            wrong.append(f"{bindings[index]} is not {pair[index].rvd}")
    assert wrong == []


def test_str_marks_strided_cuts() -> None:
    pair = [rv.Layout((16, 24), rvd) for rvd in ("R(1)V(1)D(1,8)", "R(1)V(1)D(2,4)")]
    src, _ = refine(*pair, hosts_of(8, 1)) or (None, None)
    assert src is not None
    assert str(Binding(src.grid, (R, 2, 3))) == "R(2)V(1)D(1,*4)"


def test_str_counts_flat_cuts() -> None:
    grid = eight_ranks((16, 24))
    assert str(Binding(grid, (grid.scratch(0), grid.scratch(1), V), (0, 1))) == "R(1)V(2)D(1,1)F(4)"
