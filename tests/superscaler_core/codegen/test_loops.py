"""Repeats: equal blocks, one behind the other."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from superscaler_core.codegen.loops import LEAST_LENGTH, repeats_of


@given(st.lists(st.integers(0, 3), max_size=40))
def test_blocks_are_equal_and_adjoin(keys: list[int]) -> None:
    found = repeats_of(keys)
    assert len(found) != 1
    for block, after in pairwise(found):
        assert block.stop == after.start
        assert [keys[i] for i in block] == [keys[i] for i in after]
        assert len(block) >= LEAST_LENGTH


@given(st.integers(2, 9), st.integers(LEAST_LENGTH, 9), st.integers(0, 5), st.integers(0, 5))
def test_all_blocks_of_a_model_are_found(count: int, length: int, before: int, after: int) -> None:
    keys = [*(f"a{i}" for i in range(before)), *map(str, [*range(length)] * count)]
    keys += [f"b{i}" for i in range(after)]
    found = repeats_of(keys)
    assert [(block.start, block.stop) for block in found] == [
        (before + i * length, before + (i + 1) * length) for i in range(count)
    ]


def test_a_sequence_without_repeats_has_no_blocks() -> None:
    assert repeats_of(range(20)) == []
    assert repeats_of([]) == []
