"""Groups and choices: the ops that share one decision, and the ways to cut them."""

from __future__ import annotations

import pytest

import superscaler_core as ss
from superscaler_core.space import Choice
from superscaler_core.space.choices import choices_of
from superscaler_core.space.groups import OpGroup, decides, groups_of
from tests.superscaler_core.small import branched, two_linears
from tests.superscaler_core.space.models import captured


def kinds(groups: tuple[OpGroup, ...]) -> list[str]:
    return [" ".join(op.kind for op in group) for group in groups]


def group_of(graph: ss.Graph, name: str) -> OpGroup:
    runs = ss.find_blocks(graph).groups
    groups = [group for run in runs for group in groups_of(graph, run)]
    return next(group for group in groups if any(op.name == name for op in group))


def choices(graph: ss.Graph, name: str, mesh: tuple[int, ...]) -> list[Choice]:
    devices = range(1)
    for side in mesh:
        devices = range(len(devices) * side)
    return list(choices_of(ss.Dims(graph), group_of(graph, name), devices, mesh))


@pytest.mark.parametrize("model", ["mlp", "gpt", "moe", "evoformer", "wide_resnet", "swin"])
def test_groups_contain_every_op_of_a_model_once(model: str) -> None:
    graph = captured(model)
    groups = [group for run in ss.find_blocks(graph).groups for group in groups_of(graph, run)]
    assert sorted((op for ops in groups for op in ops), key=lambda op: op.index) == [*graph.ops]


@pytest.mark.parametrize("model", ["gpt", "moe", "evoformer", "wide_resnet"])
def test_group_has_only_deciding_ops_or_only_following_ops(model: str) -> None:
    graph = captured(model)
    for run in ss.find_blocks(graph).groups:
        for group in groups_of(graph, run):
            assert len({decides(op) for op in group}) == 1


def test_query_key_and_value_products_form_one_group_before_attention() -> None:
    graph = captured("gpt")
    block = ss.find_blocks(graph).all[0]
    assert kinds(groups_of(graph, block)) == [
        "layer_norm",
        "linear linear linear",
        "add_bias view transpose add_bias view transpose add_bias view transpose attention "
        "transpose flatten",
        "linear",
        "add_bias add layer_norm",
        "linear",
        "add_bias gelu",
        "linear",
        "add_bias add",
    ]


def test_position_table_and_label_count_join_the_group_of_their_reader() -> None:
    graph = captured("gpt")
    before, *_, behind = ss.find_blocks(graph).groups
    assert kinds(groups_of(graph, before)) == ["embedding", "embedding add"]
    assert kinds(groups_of(graph, behind))[-1].split()[-3:] == [
        "cross_entropy", "count_labels", "mean_of_labels"
    ]  # fmt: skip


def test_op_that_follows_two_groups_joins_the_later_one() -> None:
    graph = branched()
    assert kinds(groups_of(graph, graph.ops)) == [
        "up", "mask select", "down", "waves add", "up_again", "times loss"
    ]  # fmt: skip


def test_a_product_is_cut_along_all_its_loops_on_each_axis() -> None:
    names = [choice.name for choice in choices(two_linears(8, 8, 8), "up:linear", (2, 2))]
    loops = "bkn-"
    assert sorted(names) == sorted(f"{a}/2 {b}/2" for a in loops for b in loops)


def test_loop_cut_on_two_axes_has_the_product_of_their_parts() -> None:
    (twice,) = (x for x in choices(two_linears(8), "up:linear", (2, 4)) if x.name == "b/2 b/4")
    assert [p.pieces for p in twice.splits[0].parts] == [(("b", i, i + 1),) for i in range(8)]


def test_nothing_is_cut_along_an_axis_of_one_device() -> None:
    names = {choice.name for choice in choices(two_linears(8, 8, 8), "up:linear", (1, 2))}
    assert names == {"-/1 b/2", "-/1 k/2", "-/1 n/2", "-/1 -/2"}


def test_loops_not_divisible_by_the_axis_are_not_cut() -> None:
    names = {choice.name for choice in choices(two_linears(4, 6, 8), "up:linear", (4,))}
    assert names == {"b/4", "n/4", "-/4"}


def test_all_loops_of_a_class_must_be_divisible() -> None:
    # There are four heads of four features. Features could be cut into eight, but heads cannot.
    names = {choice.name for choice in choices(captured("gpt"), "layers.0.attn:attention", (8,))}
    assert names == {"s/8", "-/8"}


def test_loop_that_is_whole_at_the_ends_of_a_group_is_not_cut_inside() -> None:
    (group,) = {group_of(captured("gpt"), "layers.0.attn:attention")}
    inner = {loop for op in group if op.kind == "attention" for loop in op.sizes}
    assert "d" in inner
    names = {choice.name for choice in choices(captured("gpt"), "layers.0.attn:attention", (2,))}
    assert names == {"b/2", "s/2", "h/2", "-/2"}


def test_all_ops_of_a_group_are_cut_into_the_same_number_of_parts() -> None:
    graph = captured("gpt")
    group = group_of(graph, "layers.0.attn:attention")
    (by_heads,) = (x for x in choices(graph, "layers.0.attn:attention", (4,)) if x.name == "h/4")
    for op, split in by_heads.split_of(group).items():
        assert len({part.pieces for part in split.parts}) == 4, op
