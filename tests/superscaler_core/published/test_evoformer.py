"""Evoformer: every module equals its AlphaFold2 algorithm, written out by index."""

from __future__ import annotations

from math import sqrt

import pytest
import torch
from torch import Tensor, nn

from superscaler_core.models import build, example_inputs, last_pass
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


@pytest.mark.parametrize("starting", [True, False])
def test_triangle_attention_equals_its_definition(starting: bool) -> None:
    """Around the ending node, rows and columns change places."""
    module = filled(evoformer.TriangleAttention(CONFIG, starting=starting))
    pair = pairs()
    z = module.norm(pair[0])
    rows, bias = (x if starting else x.transpose(0, 1) for x in (z, module.bias(z)))
    update = torch.stack([attended(module.attn, row, bias) for row in rows], int(not starting))
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
