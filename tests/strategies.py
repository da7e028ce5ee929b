"""Hypothesis strategies for boxes, layouts and transitions."""

from __future__ import annotations

import random

from hypothesis import strategies as st

import rvdcomm as rv
from rvdcomm.layout import Box
from tests.oracle import random_layout, random_pair, random_topology

seeds = st.integers(0, 2**32 - 1)


@st.composite
def ranges(draw: st.DrawFn, size: int = 9) -> tuple[int, int]:
    """A half-open range, which may be empty."""
    low = draw(st.integers(0, size))
    return low, draw(st.integers(low, size))


@st.composite
def boxes(draw: st.DrawFn, num_dims: int | None = None) -> Box:
    """A box of 0 to 4 dims, which may be empty."""
    count = draw(st.integers(0, 4)) if num_dims is None else num_dims
    bounds = [draw(ranges()) for _ in range(count)]
    return Box(tuple(a for a, _ in bounds), tuple(b for _, b in bounds))


@st.composite
def box_pairs(draw: st.DrawFn) -> tuple[Box, Box]:
    """Two boxes of one tensor."""
    first = draw(boxes())
    return first, draw(boxes(num_dims=len(first.lo)))


@st.composite
def layouts(draw: st.DrawFn) -> rv.Layout:
    """A layout of 0 to 6 dims with random cuts, over up to 12 ranks in a random order."""
    shape = draw(st.lists(st.integers(0, 9), max_size=6))
    num_ranks = draw(st.integers(1, 12))
    rng = random.Random(draw(seeds))
    return random_layout(rng, shape, rng.sample(range(40), num_ranks))


@st.composite
def transitions(draw: st.DrawFn) -> tuple[rv.Layout, rv.Layout, rv.Topology]:
    """A random pair of layouts with a random topology."""
    rng = random.Random(draw(seeds))
    return *random_pair(rng), random_topology(rng)
