"""Evoformer: every module equals its AlphaFold2 algorithm, written out by index."""

from __future__ import annotations

from math import sqrt

import pytest
import torch
from torch import Tensor, nn

import superscaler_core as ss
from superscaler_core.models import build, config_of, example_inputs
from superscaler_core.models.recycling import last_pass
from superscaler_core.published.alphafold2 import evoformer
from superscaler_core.published.alphafold2.evoformer import (
    RECYCLED,
    EvoformerConfig,
    GatedAttention,
)

CONFIG = EvoformerConfig.presets()["tiny"]
S, R = CONFIG.sequences, CONFIG.residues


def filled(module: nn.Module) -> nn.Module:
    """The module with random parameters, so that its norms have a scale and a shift."""
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module.double()


def alignment() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, S, R, CONFIG.msa_width, generator=generator, dtype=torch.float64)


def pairs() -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(2, R, R, CONFIG.pair_width, generator=generator, dtype=torch.float64)


def attended(attn: GatedAttention, row: Tensor, bias: Tensor | None = None) -> Tensor:
    """Algorithms 7, 8, 13 and 14 for one row ``[n, c]``; ``bias[q, k, head]``."""
    width = CONFIG.head_width
    gate = torch.sigmoid(attn.gate(row))
    heads = []
    for head in range(row.shape[1] // width):
        at = slice(head * width, (head + 1) * width)
        q, k, v = (line(row)[:, at] for line in (attn.q, attn.k, attn.v))
        rows = []
        for i in range(len(row)):
            scores = torch.stack([q[i] @ k[j] / sqrt(width) for j in range(len(row))])
            if bias is not None:
                scores = scores + bias[i, :, head]
            shares = scores.exp() / scores.exp().sum()
            rows.append(gate[i, at] * sum(shares[j] * v[j] for j in range(len(row))))
        heads.append(torch.stack(rows))
    return attn.out(torch.cat(heads, 1))


def check(found: Tensor, before: Tensor, update: Tensor) -> None:
    torch.testing.assert_close(found[0], before[0] + update, rtol=1e-12, atol=1e-12)


def test_msa_row_attention_with_pair_bias_equals_its_definition() -> None:
    module = filled(evoformer.MSARow(CONFIG))
    msa, pair = alignment(), pairs()
    m, bias = module.norm(msa[0]), module.bias(module.pair_norm(pair[0]))
    update = torch.stack([attended(module.attn, m[s], bias) for s in range(S)])
    check(module(msa, pair), msa, update)


def test_msa_column_attention_equals_its_definition() -> None:
    module = filled(evoformer.MSAColumn(CONFIG))
    msa = alignment()
    m = module.norm(msa[0])
    check(module(msa), msa, torch.stack([attended(module.attn, m[:, i]) for i in range(R)], 1))


def test_outer_product_mean_equals_its_definition() -> None:
    module = filled(evoformer.OuterProductMean(CONFIG))
    msa, pair = alignment(), pairs()
    m = module.norm(msa[0])
    a, b = module.left(m), module.right(m)
    means = [
        [torch.stack([torch.outer(a[s, i], b[s, j]) for s in range(S)]).mean(0) for j in range(R)]
        for i in range(R)
    ]
    update = torch.stack([torch.stack([module.out(x.flatten()) for x in row]) for row in means])
    check(module(msa, pair), pair, update)


@pytest.mark.parametrize("outgoing", [True, False])
def test_triangle_products_equal_their_definition(outgoing: bool) -> None:
    module = filled(evoformer.TriangleProduct(CONFIG, outgoing=outgoing))
    pair = pairs()
    z = module.norm(pair[0])
    a = torch.sigmoid(module.left_gate(z)) * module.left(z)
    b = torch.sigmoid(module.right_gate(z)) * module.right(z)
    rows = [
        [sum(a[i, k] * b[j, k] if outgoing else a[k, i] * b[k, j] for k in range(R))
         for j in range(R)]
        for i in range(R)
    ]  # fmt: skip
    mixed = torch.stack([torch.stack(row) for row in rows])
    update = torch.sigmoid(module.gate(z)) * module.out(module.inner_norm(mixed))
    check(module(pair), pair, update)


def test_triangle_attention_around_the_starting_node_equals_its_definition() -> None:
    module = filled(evoformer.TriangleAttention(CONFIG, starting=True))
    pair = pairs()
    z = module.norm(pair[0])
    bias = module.bias(z)  # of edge j k
    check(module(pair), pair, torch.stack([attended(module.attn, z[i], bias) for i in range(R)]))


def test_triangle_attention_around_the_ending_node_equals_its_definition() -> None:
    module = filled(evoformer.TriangleAttention(CONFIG, starting=False))
    pair = pairs()
    z = module.norm(pair[0])
    bias = module.bias(z).transpose(0, 1)  # of edge k i
    update = torch.stack([attended(module.attn, z[:, j], bias) for j in range(R)], 1)
    check(module(pair), pair, update)


def test_recycling_starts_from_zeros_and_trains_the_last_turn() -> None:
    model = filled(build("evoformer"))
    msa, pair, target, *before = [
        x.double() if x.is_floating_point() else x for x in example_inputs("evoformer", 2)
    ]
    assert not any(x.any() for x in before)
    for _ in range(2):
        _, *before = (x.detach() for x in model(msa, pair, target, *before))
    loss = model(msa, pair, target, *before)[0]
    zeros = [torch.zeros_like(x) for x in (msa, pair)]
    found = last_pass(model, [msa, pair, target, *zeros], RECYCLED, 2)
    assert found == loss != last_pass(model, [msa, pair, target, *zeros], RECYCLED, 1)
    parameters = list(model.parameters())
    torch.testing.assert_close(
        torch.autograd.grad(found, parameters), torch.autograd.grad(loss, parameters)
    )


@pytest.mark.parametrize(
    ("preset", "mebibytes"), [("128x256", 32), ("512x256", 80), ("512x384", 132)]
)
def test_recycled_tensors_have_the_sizes_of_the_study(preset: str, mebibytes: int) -> None:
    """Sizes of SuperScaler's benchmark in half precision. Half of the first are pairs."""
    sizes = {"layers": 1}
    assert config_of("evoformer", preset).layers == 48
    with torch.device("meta"):
        model = build("evoformer", preset, **sizes).half()
        inputs = [
            x.half() if x.is_floating_point() else x
            for x in meta_inputs(config_of("evoformer", preset, **sizes))
        ]
    graph = ss.capture(model, inputs, recycled=RECYCLED)
    assert sum(tensor.num_bytes for tensor in graph.recycled.values()) == mebibytes << 20


def meta_inputs(config: EvoformerConfig) -> list[Tensor]:
    """Shapes of one sample."""
    msa = torch.empty(1, config.sequences, config.residues, config.msa_width)
    pair = torch.empty(1, config.residues, config.residues, config.pair_width)
    return [msa, pair, torch.zeros(pair.shape[:3], dtype=torch.int64), msa, pair]


def test_block_has_the_parameter_counts_of_its_algorithms() -> None:
    """Counts by hand per module. 48 blocks of AlphaFold2's widths have 88 million parameters."""
    config = EvoformerConfig(layers=1)
    m, z, c = config.msa_width, config.pair_width, config.outer_width
    norm_m, norm_z = 2 * m, 2 * z
    expected = {
        "msa_row": norm_m + norm_z + z * (m // 32) + 5 * m * m + 2 * m,
        "msa_col": norm_m + 5 * m * m + 2 * m,
        "msa_transition": norm_m + 8 * m * m + 5 * m,
        "outer": norm_m + 2 * (m * c + c) + c * c * z + z,
        "tri_out": 2 * norm_z + 6 * (z * z + z),
        "tri_in": 2 * norm_z + 6 * (z * z + z),
        "tri_start": norm_z + z * (z // 32) + 5 * z * z + 2 * z,
        "tri_end": norm_z + z * (z // 32) + 5 * z * z + 2 * z,
        "pair_transition": norm_z + 8 * z * z + 5 * z,
    }
    with torch.device("meta"):
        block = evoformer.Block(config)
    found = {n: sum(p.numel() for p in m.parameters()) for n, m in block.named_children()}
    assert found == expected
    assert round(48 * sum(found.values()) / 1e6) == 88
