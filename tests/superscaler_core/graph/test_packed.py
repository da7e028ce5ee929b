"""Packed attention: one linear map for q, k and v is detected and split by heads."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import cycle
from pathlib import Path

import pytest
import torch

import superscaler_core as ss
from superscaler_core.graph.packing import Packing
from superscaler_core.graph.repeats import is_map
from superscaler_core.plans import PLANS
from tests.superscaler_core.as_torch import check_program, compiled
from tests.superscaler_core.packed import HEADS, inputs, models

MODELS = models()


@cache
def blocks_of(name: str, is_flat: bool = False) -> ss.Blocks:
    graph = ss.capture(MODELS[name](), inputs())
    ops = tuple(replace(op, module="") for op in graph.ops)
    return ss.find_blocks(replace(graph, ops=ops) if is_flat else graph)


@pytest.mark.parametrize("name", MODELS)
def test_each_block_has_an_attention(name: str) -> None:
    blocks = blocks_of(name)
    assert len(blocks.all) == len(blocks.attention) == 3
    for ops in blocks.attention:
        assert [op.kind for op in ops if op.kind in ("attention", "softmax")] != []
        assert {op.module.split(".")[2] for op in ops if op.module.count(".") > 1} == {"mixer"}


@pytest.mark.parametrize("name, is_flat", [*zip(MODELS, cycle([True, False]))])
def test_inner_features_are_attention_heads_and_mlp_features(name: str, is_flat: bool) -> None:
    blocks = blocks_of(name, is_flat)
    sizes = [min(blocks.dims.sizes(dim)) for dim in blocks.inner]
    assert sizes == [HEADS, 24] * 3


@pytest.mark.parametrize("name", MODELS)
def test_mlp_and_attention_groups_are_disjoint(name: str) -> None:
    blocks = blocks_of(name)
    for attention, mlp in zip(blocks.attention, blocks.mlp, strict=True):
        assert mlp
        assert not set(attention) & set(mlp)


@pytest.mark.parametrize("name", MODELS)
def test_tensor_parallel_splits_every_linear_map_of_a_block(name: str) -> None:
    plan = ss.Plan(blocks_of(name).graph, devices=range(2))
    PLANS["megatron"](plan)
    maps = [op for ops in plan.blocks.all for op in ops if is_map(op)]
    assert {len({part.pieces for part in plan.parts(op)}) for op in maps} == {2}


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_unpacked_undoes_packed_in_the_same_memory(dim: int) -> None:
    whole, packing = torch.randn(6, 12, 18), Packing(dim, 3)
    packed = packing.packed(whole)
    assert packed.shape == packing.shape(tuple(whole.shape))
    assert packing.merged(tuple(packed.shape)) == tuple(whole.shape)
    assert packed.data_ptr() == packing.unpacked(packed).data_ptr() == whole.data_ptr()
    assert torch.equal(packing.unpacked(packed), whole)


@pytest.mark.parametrize(
    "name", ["of torch", "gated", "split Conv1D", "unbind Conv1D", "heads Linear"],
)  # fmt: skip
def test_tensor_parallel_splits_packed_attention_and_trains_as_torch(
    name: str, tmp_path: Path
) -> None:
    torch.manual_seed(4)
    model = MODELS[name]().double()
    program = compiled(ss.capture(model, inputs()), "megatron")
    attends = [op for op in program.plan.graph.ops if op.kind in ("attention", "softmax")]
    assert {len({part.pieces for part in program.plan.parts(op)}) for op in attends} == {2}
    check_program(program, model, [tuple(inputs())] * 2, tmp_path)
