"""Shard specs: text form, equality, and errors of malformed texts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from superscaler_core.errors import AnnotationError
from superscaler_core.graph.shard_spec import ShardSpec


@st.composite
def specs(draw: st.DrawFn) -> ShardSpec:
    axes = draw(st.permutations(["x", "y", "z_1"]))
    dims = draw(st.lists(st.integers(0, 12), unique=True, max_size=4))
    ends = sorted(draw(st.lists(st.integers(0, 3), min_size=len(dims), max_size=len(dims))))
    cuts = [tuple(axes[a:b]) for a, b in zip([0, *ends], ends, strict=False)]
    return ShardSpec(tuple(zip(dims, cuts, strict=True)), draw(st.booleans()))


@given(specs())
def test_spec_round_trips_through_its_text(spec: ShardSpec) -> None:
    assert ShardSpec.parse(str(spec)) == spec


@given(specs())
def test_order_of_words_in_a_spec_does_not_matter(spec: ShardSpec) -> None:
    assert ShardSpec.parse(",".join(reversed(str(spec).split(",")))) == spec


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", {}),
        ("d0@x", {0: ("x",)}),
        ("d2@x*y", {2: ("x", "y")}),
        ("d1@-", {1: ()}),
        ("*@-", {0: (), 1: (), 2: ()}),
        (" *@- ,d1@y", {0: (), 1: ("y",), 2: ()}),
    ],
)
def test_dims_that_a_spec_does_not_mention_are_open(text: str, said: dict[int, object]) -> None:
    assert ShardSpec.parse(text).said(3) == said


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x@0", "'x@0' is no word; a spec is words such as d0@x"),
        ("d0", "'d0' is no word"),
        ("d0@x+y", "is no word"),
        ("*@x", "'\\*@x' is no word"),
        ("d0@x, d0@y", "dim 0 is there twice"),
        ("d0@x, d1@y*x", "axis x is there twice"),
    ],
)
def test_malformed_spec_raises_annotation_error(text: str, words: str) -> None:
    with pytest.raises(AnnotationError, match=words):
        ShardSpec.parse(text)


def test_spec_with_a_dim_out_of_range_is_rejected() -> None:
    with pytest.raises(AnnotationError, match="'d2@x' of a tensor with 2 dims: there is no dim 2"):
        ShardSpec.parse("d2@x").said(2)
