"""Swin Transformer: windows, their shift and their biases, and training under plans."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import superscaler_core as ss
from superscaler_core.models import build, example_inputs
from superscaler_core.models.swin import Block, from_windows, offsets_of, regions_of, to_windows
from superscaler_core.plans import stages_of_blocks
from tests.superscaler_core.cases import Case, check_trains
from tests.superscaler_core.plans.test_plans_communication import (
    all_reduce_bytes,
    backward,
    forward,
    kinds,
    reductions,
    sent_bytes,
)

# --- the model ----------------------------------------------------------------------------------


def attention_by_hand(block: Block, x: Tensor) -> Tensor:
    """Attention of a block over all tokens of an image, from the definition of a shifted window.

    Two tokens see each other if they are in one window and less than a window apart. A shifted
    window wraps around the border of the image; its tokens of opposite sides are farther apart.
    """
    attn, size, window = block.attn, block.size, block.window
    rows, columns = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    places = torch.stack([rows.flatten(), columns.flatten()])
    windows = (places - block.shift) % size // window
    apart = places[:, :, None] - places[:, None, :]
    sees = (windows[:, :, None] == windows[:, None, :]).all(0) & (apart.abs() < window).all(0)
    number = (apart[0] + window - 1) * (2 * window - 1) + apart[1] + window - 1
    bias = attn.offset[:, torch.where(sees, number, 0)]
    heads = [line(x).unflatten(-1, (attn.heads, -1)).transpose(1, 2) for line in
             (attn.q, attn.k, attn.v)]  # fmt: skip
    scores = heads[0] @ heads[1].transpose(-1, -2) / heads[0].shape[-1] ** 0.5 + bias
    mixed = scores.masked_fill(~sees, float("-inf")).softmax(-1) @ heads[2]
    out: Tensor = attn.out(mixed.transpose(1, 2).flatten(2))
    return out


@pytest.mark.parametrize(("size", "window", "shift"), [(8, 4, 2), (6, 3, 1), (4, 4, 0)])
def test_window_attention_equals_masked_attention_over_the_image(
    size: int, window: int, shift: int
) -> None:
    torch.manual_seed(0)
    block = Block(6, 2, size, window, shift, merges=False).double()
    torch.nn.init.normal_(block.attn.offset)
    x = torch.randn(2, size, size, 6, dtype=torch.float64)
    device = torch.device("cpu")
    regions = regions_of(block, device) if shift else None
    found = block(x, offsets_of(window, device), regions)
    mixed = attention_by_hand(block, block.norm1(x).flatten(1, 2)).view_as(x)
    y = x + mixed
    torch.testing.assert_close(found, y + block.mlp(block.norm2(y)), rtol=1e-12, atol=1e-12)


def test_to_windows_makes_square_windows_and_is_invertible() -> None:
    x = torch.arange(2 * 6 * 6).view(2, 6, 6, 1)
    windows = to_windows(x, 3)
    assert windows.shape == (2, 4, 9, 1)
    assert windows[0, 1, :, 0].tolist() == [3, 4, 5, 9, 10, 11, 15, 16, 17]
    assert torch.equal(from_windows(windows, 6, 3), x)


@pytest.mark.parametrize("preset", ["201M", "29B"])
def test_presets_have_the_parameter_counts_in_their_names(preset: str) -> None:
    with torch.device("meta"):
        model = build("swin", preset)
    size = float(preset[:-1]) * {"M": 1e6, "B": 1e9}[preset[-1]]
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(size, rel=0.05)


def test_full_width_model_has_no_constant_as_large_as_its_attention_scores() -> None:
    sizes = {"depths": (2, 2, 2, 2)}
    with torch.device("meta"):
        model = build("swin", "201M", **sizes).half()
    images, labels = example_inputs("swin", 1, "201M", **sizes)
    graph = ss.capture(model, (images.half(), labels))
    assert len(ss.find_blocks(graph).all) == 8
    shapes = sorted(tuple(constant.shape) for constant in graph.constants.values())
    assert shapes == [(4, 2304), (16, 2304), (64, 2304), (2304, 2304)]
    scores = [t for op in graph.ops for t in op.outputs if t.shape[-2:] == (2304, 2304)]
    assert max(t.num_bytes for t in scores) == 64 * 6 * 2304**2 * 2


def test_patch_merge_belongs_to_the_following_block() -> None:
    plan = ss.Plan(Case("data_parallel", 1, model="swin").compiled().plan.graph, range(3))
    stages = stages_of_blocks(plan, 3)
    assert [stage.ops[0].module for stage in stages[1:]] == ["layers.1.norm1", "layers.2.merge"]


# --- its plans ----------------------------------------------------------------------------------

CASES = [
    Case("megatron", 4, model="swin", optimizer="adamw"),
    Case("zero3", 2, model="swin"),
    Case("hybrid", 4, {"tp": 2, "pp": 2, "zero": 1, "keep": ss.Keep.SEGMENT_INPUTS,
         "microbatches": 2},
         model="swin", batch=1),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_plan_trains_the_same_weights_as_one_device(case: Case, tmp_path: Path) -> None:
    check_trains(case, tmp_path)


def test_tensor_parallel_has_two_all_reduces_per_layer_and_direction() -> None:
    made = Case("megatron", 4, model="swin").compiled()
    assert kinds(forward(made)) == kinds(backward(made)) == {"all_reduce": 2 * 3}
    assert kinds(reductions(made)) == {}


@pytest.mark.parametrize("tp", [1, 2])
def test_gradients_of_offset_biases_are_reduced_at_the_size_of_the_weight(tp: int) -> None:
    made = Case("hybrid", 4, {"tp": tp, "microbatches": 1}, model="swin").compiled()
    backs = [edge.tensor.name for edge in made.materialized.edges.all if edge.backward]
    assert not [name for name in backs if "index" in name]
    offsets = made.plan.graph.parameter("layers.0.attn.offset")
    moved = [t for use in made.materialized.weights.uses if use.tensor == offsets
             for t in use.reduce]  # fmt: skip
    # The sum over all groups of devices that share the batch.
    assert sent_bytes(moved) == all_reduce_bytes([offsets]) // 3 * (4 // tp - 1)
