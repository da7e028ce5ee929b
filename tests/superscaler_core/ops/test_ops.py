"""Functions that generated code calls: exact on parts, with correct random distributions."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from superscaler_core import ops
from tests.covering import covering

SHAPE = (6, 50, 40)
SEEDS = [0, -7, 2**62]


def bits(seed, lo=(0, 0, 0), extent=SHAPE):
    return ops.uniform_bits(seed, lo, extent, SHAPE)


@pytest.mark.parametrize("lo, extent", [((0, 0, 0), (2, 50, 40)), ((3, 7, 11), (2, 5, 29))])
def test_random_bits_of_a_box_equal_the_slice_of_the_whole(lo, extent):
    at = tuple(slice(a, a + n) for a, n in zip(lo, extent, strict=True))
    assert torch.equal(bits(3, lo, extent), bits(3)[at])


@pytest.mark.parametrize("seed", SEEDS)
def test_random_bits_are_uniform(seed):
    """Mean, variance and all 64 cells of the unit interval, within 5 standard deviations."""
    u = bits(seed).double() / 2**53
    assert u.min() >= 0
    assert u.max() < 1
    n = u.numel()
    assert abs(u.mean() - 0.5) < 5 * (1 / 12 / n) ** 0.5
    assert abs(u.var() - 1 / 12) < 5 * (1 / 180 / n) ** 0.5
    cells = torch.histc(u, 64, 0, 1)
    chi2 = ((cells - n / 64) ** 2 / (n / 64)).sum()
    assert abs(chi2 - 63) < 5 * (2 * 63) ** 0.5


def correlation(x, y):
    x, y = (t.double().flatten() - t.double().mean() for t in (x, y))
    return (x * y).mean() / (x.std() * y.std())


@pytest.mark.parametrize("other", [1, -1])
def test_bits_of_other_seeds_and_of_adjacent_elements_are_uncorrelated(other):
    n = torch.Size(SHAPE).numel()
    assert abs(correlation(bits(0), bits(other))) < 5 / n**0.5
    assert abs(correlation(bits(other)[:, :, 1:], bits(other)[:, :, :-1])) < 5 / n**0.5
    assert abs(correlation(bits(other)[:, 1:], bits(other)[:, :-1])) < 5 / n**0.5


def test_every_bit_is_one_with_probability_one_half():
    values = bits(5).flatten()
    n = len(values)
    ones = torch.stack([((values >> i) & 1).sum() for i in range(53)])
    assert (abs(ones - n / 2) < 5 * n**0.5 / 2).all()


@pytest.mark.parametrize("p", [0.1, 0.9])
def test_dropout_keeps_a_share_of_one_minus_p_and_rescales(p):
    x = torch.ones(SHAPE, dtype=torch.float64, requires_grad=True)
    y = ops.dropout(x, p, 7, lo=(0, 0, 0), shape=SHAPE)
    kept = (y != 0).double().mean()
    assert abs(kept - (1 - p)) < 5 * (p * (1 - p) / x.numel()) ** 0.5
    assert torch.equal(y[y != 0], torch.full_like(y[y != 0], 1 / (1 - p)))
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad, y.detach())


@pytest.mark.parametrize("p, expected", [(0.0, 1.0), (1.0, 0.0)])
def test_dropout_keeps_all_at_p_zero_and_nothing_at_p_one(p, expected):
    y = ops.dropout(torch.ones(3), p, 7, lo=(0,), shape=(3,))
    assert y.tolist() == [expected] * 3


def test_mix_depends_on_every_number_and_their_order():
    made = [ops.mix(*numbers) for numbers in [(0,), (1,), (0, 0), (0, 1), (1, 0), (-1,), (2**63,)]]
    assert len(set(made)) == len(made)
    assert all(0 <= m < 2**64 for m in made)


def test_embeddings_of_table_parts_sum_to_the_whole():
    ids, rows = torch.tensor([[0, 6, 3], [2, 2, 5]]), torch.randn(7, 4, dtype=torch.float64)
    whole = ops.embedding(ids, rows, first=0, num_rows=7)
    pieces = [ops.embedding(ids, rows[a:b], first=a, num_rows=7) for a, b in [(0, 3), (3, 7)]]
    assert torch.equal(whole, F.embedding(ids, rows))
    assert torch.equal(sum(pieces), whole)


def test_embedding_index_outside_of_the_table_raises_index_error():
    with pytest.raises(IndexError):
        ops.embedding(torch.tensor([7]), torch.randn(7, 4), first=0, num_rows=7)


@covering(
    name=["cross_entropy", "nll_loss"],
    weight=[None, torch.tensor([1.0, 0.5, 0.0, 2.0, 3.0])],
    dtype=[torch.float64, torch.float32, torch.bfloat16],
)
def test_split_losses_sum_to_the_mean_over_counted_labels(name, weight, dtype):
    scores, labels = torch.randn(6, 5).to(dtype), torch.tensor([1, -100, 2, -100, -100, 0])
    weight = None if weight is None else weight.to(dtype)
    count = ops.count_labels(labels, weight, ignore_index=-100, dtype=torch.float32)
    pieces = [
        ops.mean_of_labels(getattr(ops, name)(scores[a:b], labels[a:b], weight), count)
        for a, b in [(0, 3), (3, 5), (5, 6)]
    ]
    expected = getattr(F, name)(
        scores.double(), labels, None if weight is None else weight.double()
    )
    tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-6
    torch.testing.assert_close(sum(pieces).double(), expected, rtol=tolerance, atol=tolerance)


def test_mean_loss_is_correct_if_the_sum_exceeds_float16():
    scores, labels = torch.zeros(4, 5, dtype=torch.float16), torch.tensor([0, 1, 2, 3])
    scores[:, 4] = 30000.0
    count = ops.count_labels(labels, ignore_index=-100, dtype=torch.float32)
    losses = ops.cross_entropy(scores, labels)
    assert ops.mean_of_labels(losses, count) == F.cross_entropy(scores.float(), labels)


@pytest.mark.parametrize("first, last", [(0, 4), (4, 9)])
def test_causal_attention_of_a_query_range_equals_the_slice_of_the_whole(first, last):
    q, k, v = (torch.randn(2, 3, 9, 4, dtype=torch.float64) for _ in range(3))
    whole = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    part = ops.attention(q[:, :, first:last], k, v, first=first, is_causal=True)
    torch.testing.assert_close(part, whole[:, :, first:last])


@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_with_dropout_on_a_part_equals_the_slice_of_the_whole(heads, is_causal):
    shape = (2, 4, 9, 9)
    q = torch.randn(2, 4, 9, 6, dtype=torch.float64)
    k, v = (torch.randn(2, heads, 9, 6, dtype=torch.float64) for _ in range(2))
    more = {"is_causal": is_causal, "p": 0.3, "seed": 5, "shape": shape, "enable_gqa": heads < 4}
    whole = ops.attention(q, k, v, lo=(0, 0, 0, 0), **more)
    part = ops.attention(q[1:, :, 3:7], k[1:], v[1:], first=3, lo=(1, 0, 3, 0), **more)
    torch.testing.assert_close(part, whole[1:, :, 3:7])
    more["p"] = 1e-300
    plain = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=heads < 4)
    torch.testing.assert_close(ops.attention(q, k, v, lo=(0, 0, 0, 0), **more), plain)


def test_attention_with_dropout_applies_additive_and_boolean_masks():
    q, k, v = (torch.randn(2, 3, 9, 4, dtype=torch.float64) for _ in range(3))
    more = {"p": 1e-300, "seed": 5, "shape": (2, 3, 9, 9), "lo": (0, 0, 0, 0)}
    for mask in (torch.randn(9, 9, dtype=torch.float64), torch.ones(9, 9).tril().bool()):
        expected = F.scaled_dot_product_attention(q, k, v, mask)
        torch.testing.assert_close(ops.attention(q, k, v, mask, **more), expected)


@pytest.mark.parametrize("is_boolean", [True, False])
def test_masked_rows_of_attention_with_dropout_are_zero_with_gradients(is_boolean):
    q, k, v = (torch.randn(2, 3, 9, 4, requires_grad=True) for _ in range(3))
    mask = torch.arange(9)[:, None] != 5
    mask = mask if is_boolean else torch.zeros(9, 9).masked_fill(~mask, float("-inf"))
    how = {"p": 1e-300, "seed": 5, "shape": (2, 3, 9, 9), "lo": (0, 0, 0, 0)}
    found = ops.attention(q, k, v, mask, **how)
    expected = F.scaled_dot_product_attention(q, k, v, mask)
    assert not found[:, :, 5].any()
    grads = [torch.autograd.grad(y.square().sum(), (q, k, v)) for y in (found, expected)]
    torch.testing.assert_close([found, *grads[0]], [expected, *grads[1]])


def test_join_adds_pieces_at_their_offsets():
    x = torch.arange(12.0).view(3, 4).requires_grad_()
    pieces = [(x[:2], "[0:2,0:4]"), (x[1:], "[1:3,0:4]")]
    found = ops.join("[1:3,1:4]", pieces)
    expected = x[1:, 1:] + torch.cat([x[1:2, 1:], torch.zeros(1, 3)])
    assert torch.equal(found, expected)
    (grad,) = torch.autograd.grad(found.sum(), x)
    assert grad.tolist() == [[0, 0, 0, 0], [0, 2, 2, 2], [0, 1, 1, 1]]


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str
)
def test_uniform_numbers_are_never_zero_or_one(dtype, monkeypatch):
    ends = torch.tensor([0, 2**53 - 1])
    monkeypatch.setattr("superscaler_core.ops.random.uniform_bits", lambda *_: ends)
    low, high = ops.uniform(0, lo=(), extent=(), shape=(), dtype=dtype, device="cpu")
    assert 0 < low < high < 1
    assert low == 1 - high


def test_uniform_and_normal_samples_have_the_expected_moments():
    how = {"lo": (0,), "extent": (40_000,), "shape": (40_000,), "dtype": torch.float64}
    even, bell = (draw(3, **how, device="cpu") for draw in (ops.uniform, ops.normal))
    assert 0 < even.min() < even.max() < 1
    # Six standard deviations of a mean of 40,000 samples.
    assert even.mean().item() == pytest.approx(0.5, abs=6 * 0.29 / 200)
    assert bell.mean().item() == pytest.approx(0.0, abs=6 / 200)
    assert bell.std().item() == pytest.approx(1.0, abs=6 * 0.71 / 200)
