"""Forms: objects that ops of equal layers share."""

from __future__ import annotations

import pickle

import pytest

import superscaler_core as ss
from tests.superscaler_core.simulated_chains import chain
from tests.superscaler_core.small import two_linears


def test_equal_layers_share_one_form() -> None:
    _, first, second, *_ = chain(3).ops
    assert first.form is second.form


def test_ops_of_different_shapes_have_different_forms() -> None:
    up, _, down, _ = two_linears().ops
    assert up.form != down.form


@pytest.mark.parametrize("op", two_linears().ops, ids=lambda op: op.name)
def test_unpickled_form_is_the_same_object(op: ss.Op) -> None:
    assert pickle.loads(pickle.dumps(op.form)) is op.form


def test_parts_with_equal_pieces_of_equal_layers_share_one_form() -> None:
    _, first, second, *_ = chain(3).ops
    pieces = (("b", 0, 2),)
    assert ss.Part(first, pieces).form is ss.Part(second, pieces).form


def test_a_part_has_the_extents_and_the_volume_of_its_pieces() -> None:
    (op, *_) = two_linears(batch=4, width=6, hidden=8).ops
    form = ss.Part(op, (("k", 0, 2), ("n", 3, 8))).form
    assert dict(zip(op.sizes, form.extents, strict=True)) == {"b": 4, "k": 2, "n": 5}
    assert form.volume == 4 * 2 * 5
