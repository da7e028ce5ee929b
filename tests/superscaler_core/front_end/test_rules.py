"""Rules: the graph computes the same values as the model, and so do split ops."""

import random
from math import prod

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import superscaler_core as ss
from superscaler_core.cost import forward_flops
from superscaler_core.rules import RULES, rows, view_annotation
from superscaler_core.run.evaluate import evaluate
from tests.superscaler_core.parts import check_splits, loops_of, pieces_of, values_of


class Apply(nn.Module):
    """A function of parameters ``p0``, ... and integer inputs; every element affects its loss."""

    def __init__(self, function, tensors):
        super().__init__()
        self.function = function
        self.order = [(f"p{i}" if t.is_floating_point() else None) for i, t in enumerate(tensors)]
        for name, tensor in zip(self.order, tensors, strict=True):
            if name:
                self.register_parameter(name, nn.Parameter(tensor))

    def forward(self, *integers):
        left = iter(integers)
        args = [getattr(self, name) if name else next(left) for name in self.order]
        made = self.function(*args)
        results = made if isinstance(made, tuple | list) else (made,)
        results = [torch.view_as_real(r) if r.is_complex() else r for r in results]
        return sum((r.to(torch.float64) ** 2).sum() for r in results)


def floats(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=GENERATOR)


def positive(*shape):
    return floats(*shape).abs() + 0.1


def ints(top, *shape):
    return torch.randint(top, shape, generator=GENERATOR)


GENERATOR = torch.Generator().manual_seed(0)
X, Y, ROW = floats(2, 3, 4), floats(2, 3, 4), floats(4)
IMAGE = floats(2, 4, 6, 5)
IGNORED = torch.tensor([4, -100, 0, -100])
Q, K, V = floats(2, 4, 5, 6), floats(2, 4, 7, 6), floats(2, 4, 7, 3)

# Name, function, its tensors, annotation of the first op, a part of the code of some op.
CASES = [
    # elementwise
    ("add alpha", lambda x, y: torch.add(x, y, alpha=3), (X, Y), "b s h, b s h -> b s h",
     "{x0} + 3 * {x1}"),
    ("mul itself", lambda x: x * x, (X,), "b s h -> b s h", "{x0} * {x0}"),
    ("scalar to the power", lambda x: (-2.0) ** x.detach().round() * x, (X,),
     "b s h -> b s h", "torch.ops.aten.pow.Scalar(-2.0, {x0})"),
    ("masked_fill", lambda x: x.masked_fill(x > 0, float("-inf")).exp(), (X,), "b s h -> b s h",
     '{x0}.masked_fill({x1}, float("-inf"))'),
    ("relu in place", lambda x: (x + 1).relu_() * 2, (X,), "b s h -> b s h", "torch.relu({x0})"),
    ("pow in place", lambda x: (x + 1).pow_(3), (X,), "b s h -> b s h", "{x0} ** 3"),
    # products
    ("linear", F.linear, (X, floats(5, 4), floats(5)), "b s k+, n k+ -> b s n",
     "F.linear({x0}, {x1})"),
    ("matmul by a transposed weight", lambda x, w: x @ w.T, (X, floats(5, 4)),
     "b s k+, n k+ -> b s n", "F.linear({x0}, {x1})"),
    ("matmul batches", torch.matmul, (floats(3, 1, 2, 4), floats(5, 4, 6)),
     "b 1 m k+, s k+ n -> b s m n", "{x0} @ {x1}"),
    ("addmm scaled", lambda b, x, y: torch.addmm(b, x, y, beta=3, alpha=0.5),
     (floats(5), floats(3, 4), floats(4, 5)), "b -> b", "0.5 * ({x0} @ {x1})"),
    ("baddbmm of no bias",
     lambda x, y: torch.baddbmm(x.new_full((2, 3, 5), torch.nan), x, y, beta=0, alpha=0.5),
     (X, floats(2, 4, 5)), "b m k+, b k+ n -> b m n", "0.5 * ({x0} @ {x1})"),
    ("einsum trace", lambda x: torch.einsum("bsh->sb", x), (X,), "b s h+ -> s b", "torch.einsum"),
    ("embedding padding", lambda i, w: F.embedding(i, w, padding_idx=1),
     (ints(7, 9), floats(7, 4)), "b, v+ w -> b w", "padding_idx=1"),
    ("embedding_bag with padding", lambda i, w: F.embedding_bag(i, w, padding_idx=-5),
     (ints(7, 9, 3), floats(7, 5)), "b s^, v+ w -> b w", "is_mean=True, padding_idx=2)"),
    ("embedding_bag of weighted rows",
     lambda i, w, p: F.embedding_bag(i, w, mode="sum", per_sample_weights=p, padding_idx=1),
     (ints(7, 3, 4), floats(7, 5), floats(3, 4)), "b s^, b s^, v+ w -> b w",
     "ops.embedding_bag({x0}, {x2}, {x1}, first={start[v]}, padding_idx=1)"),
    # shapes
    ("permute", lambda x: x.permute(2, 0, -2), (X,), "b s h -> h b s", "{x0}.permute([2, 0, 1])"),
    ("t", lambda x: x.t(), (floats(3, 4),), "b s -> s b", "{x0}.transpose(0, 1)"),
    ("movedim", lambda x: x.movedim(0, 2), (X,), "b s h -> s h b", "permute"),
    ("repeat", lambda x: x.repeat(3, 2, 1), (floats(3, 4),), "b s -> r0 (r1 b) (r2 s)",
     "{x0}.repeat({size[r0]}, {size[r1]}, {size[r2]})"),
    ("slice step", lambda x: x[..., ::2], (X,), "b s h^ -> b s o^", "{x0}[:, :, 0:4:2]"),
    ("narrow", lambda x: x.narrow(2, 1, 2), (X,), "b s h^ -> b s o^", "narrow(2, 1, 2)"),
    ("unbind", lambda x: x.unbind(1)[2], (X,), "b s^ h -> b h", "{x0}.select(1, 2)"),
    ("chunk", lambda x: x.chunk(2, -1)[1], (X,), "b s h^ -> b s o^", "{x0}.narrow(2, 2, 2)"),
    ("cat", lambda x, y: torch.cat([x, y], 1), (X, floats(2, 5, 4)), "b c0^ h, b c1^ h -> b o^ h",
     "torch.cat([{x0}, {x1}], 1)"),
    ("stack", lambda x, y: torch.stack([x, y], -1), (X, Y), "b s h, b s h -> b s h o^",
     "torch.stack([{x0}, {x1}], 3)"),
    ("pad reflect", lambda x: F.pad(x, (1, 1), "reflect"), (X,), "b s h^ -> b s o2^", '"reflect"'),
    ("roll", lambda x: x.roll((1, -1), (1, 2)), (X,), "b s^ h^ -> b s^ h^",
     "torch.roll({x0}, [1, -1], [1, 2])"),
    ("tril", lambda x: x.tril(), (floats(2, 5, 7),), "b s h -> b s h", "torch.tril"),
    # reductions
    ("sum keepdim", lambda x: x.sum(1, keepdim=True), (X,), "b s+ h -> b 1 h", "keepdim=True"),
    ("sum in the own dtype of integers",
     lambda x, i: x * i.to(torch.uint8).sum(1, True, dtype=torch.uint8), (X, ints(200, 2, 9, 4)),
     "b s h -> b s h", "{x0}.sum((1,), keepdim=True, dtype=torch.uint8)"),
    ("sum of truth values", lambda x, i: x * i.bool().sum(1, True, dtype=torch.bool),
     (X, ints(2, 2, 2, 4)), "b s h -> b s h", "dtype=torch.bool"),
    ("cumsum", lambda x: x.cumsum(1), (X,), "b s^ h -> b s^ h", "cumsum"),
    ("max", lambda x: x.max(1), (X,), "b s^ h -> b h, b h", "max"),
    ("rfft", lambda x: torch.view_as_real(torch.fft.rfft(x, dim=1)), (X,),
     "b s^ h -> b o1^ h", "torch.ops.aten.fft_rfft.default({x0}, None, 1)"),
    ("fft of sizes", lambda x: torch.fft.fftn(x, (2, 2)).imag, (X,), "b s^ h^ -> b o1^ o2^",
     "fft_fftn"),
    # look-ups
    ("one_hot", lambda i: F.one_hot(i, 5), (ints(5, 2, 3),), "b s -> b s v^", "F.one_hot({x0}, 5)"),
    ("gather shorter", lambda x, i: x.gather(1, i), (X, ints(3, 1, 5, 4)),
     "b^ v^ h, o0^ o h -> o0^ o h", "gather"),
    ("scatter_add", lambda x, i, y: x.scatter_add(1, i, y), (X, ints(3, 2, 5, 4), floats(2, 5, 4)),
     "b s^ h, b s1^ h, b s2^ h -> b s^ h", "scatter_add"),
    ("index_put of each row",
     lambda x, i, y: torch.ops.aten.index_put(x, [torch.arange(2), i], y, True),
     (X, ints(3, 2), floats(2, 1)), "n0 s^ h, n0, n0 1 -> n0 s^ h", "[torch.arange({size[n0]}"),
    ("index_put mask", lambda x, y: x.index_put((x[..., 0] > 0,), y), (X, floats(1)),
     "b s h^ -> b s", "torch.where({x1}[..., None], {x2}, {x0})"),
    ("index_fill", lambda x, i, y: x.index_fill(2, i, y), (X, ints(4, 2), floats()),
     "b s h^, n^, () -> b s h^", "index_fill"),
    ("slice_scatter", lambda x, y: x.slice_scatter(y, 1, 0, 3, 2), (X, floats(2, 2, 4)),
     "b s^ h, b o^ h -> b s^ h", "torch.ops.aten.slice_scatter.default({x0}, {x1}, 1, 0, 3, 2)"),
    ("select_scatter", lambda x, y: x.select_scatter(y, -1, 2), (X, floats(2, 3)),
     "b s h^, b s -> b s h^", "select_scatter"),
    ("copy", lambda x, i: torch.zeros(3, 4).double().copy_(i) * x, (X, ints(5, 4)), "b -> b",
     "{x0}.to(torch.float64)"),
    ("index by several", lambda x, i, j: x[i, :, j], (X, ints(2, 5, 1), ints(4, 3)),
     "b^ s h^, n0 1, n1 -> n0 n1 s", "{x0}[{x1}, :, {x2}]"),
    ("index by arange", lambda x: x[torch.arange(2)[:, None, None], torch.arange(3)], (X,),
     "n0 n2 h -> n0 1 n2 h", "{x0}.permute([0, 1, 2]).reshape({out0.shape})"),
    ("index by a part of arange", lambda x: x[:, torch.arange(2)], (X,), "b s^ h, n0 -> b n0 h",
     "{x0}[:, {x1}]"),
    ("index of a diagonal", lambda x: x[torch.arange(3), torch.arange(3)], (floats(3, 3),),
     "n0 s^, n0 -> n0", "{x1}]"),
    # norms
    ("layer_norm of two dims", lambda x: F.layer_norm(x, (3, 4)), (X,), "b s^ h^ -> b s^ h^",
     "F.layer_norm({x0}, (3, 4), eps=1e-05)"),
    ("weight norm of the last dim", lambda v, g: torch._weight_norm(v, g, 1),
     (floats(3, 4), floats(1, 4)), "b^ s, 1 s -> b^ s", "torch._weight_norm({x0}, {x1}, 1)"),
    ("weight norm of all", lambda v, g: torch._weight_norm(v, g, -1), (floats(3, 4), floats()),
     "b^ s^, () -> b^ s^", "torch._weight_norm({x0}, {x1}, -1)"),
    ("group_norm", lambda x, w, b: F.group_norm(x, 2, w, b), (IMAGE, ROW, floats(4)),
     "n (g c^) h^ d^, (g c^), (g c^) -> n (g c^) h^ d^", "F.group_norm({x0}, {size[g]}"),
    ("batch_norm", lambda x, w, b: F.batch_norm(x, None, None, w, b, True), (IMAGE, ROW, floats(4)),
     "n+ c h+ d+ -> c", "{x0}.mean((0, 2, 3)) * ({size[n]} * {size[h]} * {size[d]} / 60)"),
    ("batch_norm eval", lambda x, m, v: F.batch_norm(x, m.detach(), v.detach()),
     (floats(3, 4), ROW, positive(4)), "b -> b", "torch.rsqrt({x1} + 1e-05)"),
    ("transpose of a view with a dim of one", lambda x: x.view(2, 3, 4, 1).transpose(1, 2), (X,),
     "b s h -> b s h 1", "{x0}.transpose(1, 2)"),
    # losses
    ("cross_entropy of ignored labels", F.cross_entropy, (floats(4, 5), IGNORED), "b v^, b -> b",
     "ops.count_labels({x0}, ignore_index=-100, dtype=torch.float64)"),
    ("cross_entropy of images",
     lambda x, y, w: F.cross_entropy(x, y, w.detach(), label_smoothing=0.1),
     (floats(3, 5, 2, 4), ints(5, 3, 2, 4), positive(5)), "b -> b", "label_smoothing=0.1"),
    ("cross_entropy none", lambda x, y: F.cross_entropy(x, y, reduction="none"),
     (floats(4, 5), IGNORED), "b v^, b -> b", "ops.cross_entropy({x0}, {x1})"),
    ("cross_entropy of one label", F.cross_entropy, (floats(5), ints(5)), "v^, () -> ()",
     "ops.cross_entropy"),
    ("cross_entropy of probabilities",
     lambda x, y, w: F.cross_entropy(x, y.softmax(1), w.detach()),
     (floats(3, 5), floats(3, 5), positive(5)), "b s^ -> b s^", "({size[b]} / 3)"),
    ("nll_loss of images", lambda x, y: F.nll_loss(x.log_softmax(1), y, reduction="sum"),
     (floats(3, 5, 2, 4), ints(5, 3, 2, 4)), "b s^ h d -> b s^ h d", "{x0}.sum()"),
    ("mse_loss", F.mse_loss, (X, Y), "b+ s+ h+, b+ s+ h+ -> ()",
     "F.mse_loss({x0}, {x1}) * ({size[b]} * {size[s]} * {size[h]} / 24)"),
    ("bce of weighted elements",
     lambda x, y, w: F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), w.detach()),
     (X, Y, positive(4)), "b s h -> b s h", "F.binary_cross_entropy({x0}, {x1}, weight={x2}) * ("),
    ("bce with logits of weighted elements and classes",
     lambda x, y, w, p: F.binary_cross_entropy_with_logits(
         x, y.sigmoid(), w.detach(), pos_weight=p.detach(), reduction="sum"),
     (X, Y, positive(3, 1), positive(4)), "b s h -> b s h",
     'reduction="sum", weight={x2}, pos_weight={x3})'),
    ("gaussian_nll_loss of few variances",
     lambda x, y, v: F.gaussian_nll_loss(x, y, v, full=True, eps=0.5, reduction="sum"),
     (X, Y, positive(2, 3)), "b s -> b s 1", "torch.log({x0})"),
    ("ctc_loss of a list of texts",
     lambda x, y: F.ctc_loss(x.log_softmax(-1), y, (6, 6), (2, 1), 4, "sum", True),
     (floats(6, 2, 5), ints(4, 3)), "b s h^ -> b s h^", "ctc_losses_of_one_list"),
    ("ctc_loss of one text",
     lambda x, y: F.ctc_loss(x.log_softmax(-1), y + 1, torch.tensor(6), torch.tensor(2)),
     (floats(6, 5), ints(4, 2)), "b s^ -> b s^", "ctc_losses({x0}"),
    # functions that torch composes of other ops
    ("cosine_similarity", lambda x, y: F.cosine_similarity(x, y, dim=1), (X, floats(1, 3, 4)),
     "1 s h -> b s h", "linalg_vector_norm"),
    # images
    ("conv2d", lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=1),
     (IMAGE, floats(3, 4, 3, 3), floats(3)), "n c+ y0*2-1+1 y1*2-1+1, o c+ k0^ k1^ -> n o y0 y1",
     "ops.conv({x0}, {x1}, [{pad0[2]}, {pad0[3]}], stride=[2, 2], dilation=[1, 1])"),
    ("conv2d groups", lambda x, w: F.conv2d(x, w, groups=2, padding="same"),
     (IMAGE, floats(6, 2, 3, 1)), "n (g c+) y0-1+1 y1, (g o) c+ k0^ k1^ -> n (g o) y0 y1",
     "groups={size[g]}"),
    ("conv2d with rows left over", lambda x, w: F.conv2d(x, w, stride=4, padding=1),
     (floats(1, 2, 9, 12), floats(3, 2, 3, 3)), "n c+ y0*4-1+1 y1*4-1+1, o c+ k0^ k1^ -> n o y0 y1",
     "stride=[4, 4]"),
    ("conv2d padded too much", lambda x, w: F.conv2d(x, w, padding=3), (IMAGE, floats(3, 4, 3, 3)),
     "n c+ x0^ x1^, o c+ k0^ k1^ -> n o y0^ y1^", "padding=[3, 3])"),
    ("max_pool2d that overlaps", lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True), (IMAGE,),
     "b s y0*2-1+1 y1*2-1+1 -> b s y0 y1", "ops.max_pool"),
    ("avg_pool2d of pixels alone",
     lambda x: F.avg_pool2d(x, 3, 1, padding=1, count_include_pad=False), (IMAGE,),
     "b s y0-1+1 y1-1+1 -> b s y0 y1", "counts_padding=False"),
    ("avg_pool2d over a number", lambda x: F.avg_pool2d(x, (2, 3), 1, divisor_override=7),
     (IMAGE,), "b s y0-0+1 y1-0+2 -> b s y0 y1", "divisor=7"),
    ("avg_pool2d over less", lambda x: F.avg_pool2d(x, 2, ceil_mode=True), (IMAGE,),
     "b s x0^ x1^ -> b s y0^ y1^", "aten.avg_pool2d"),
    ("adaptive_avg_pool2d", lambda x: F.adaptive_avg_pool2d(x, (2, 1)), (IMAGE,),
     "b s x0^ x1^ -> b s y0^ y1^", "adaptive_avg_pool2d"),
    ("adaptive_avg_pool2d to one", lambda x: F.adaptive_avg_pool2d(x, 1), (IMAGE,),
     "b s h+ d+ -> b s 1 1", "{x0}.mean((2, 3), keepdim=True) * ({size[h]} * {size[d]} / 30)"),
    ("interpolate", lambda x: F.interpolate(x, scale_factor=2.0), (IMAGE,),
     "n c y x -> n c (y f0^) (x f1^)", "F.interpolate({x0}, scale_factor=[2, 2])"),
    ("interpolate by three", lambda x: F.interpolate(x, scale_factor=3.0), (IMAGE,),
     "b s x0^ x1^ -> b s y0^ y1^", "upsample_nearest2d"),
    ("interpolate bilinear", lambda x: F.interpolate(x, (12, 10), mode="bilinear"), (IMAGE,),
     "b s x0^ x1^ -> b s y0^ y1^", "upsample_bilinear2d"),
    # attention
    ("attention causal", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
     (Q, K, V), "b h l e^, b h t^ e^, b h t^ d -> b h l d", "first={start[l]}, is_causal=True"),
    ("attention causal with more queries",
     lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.5),
     (K, Q, floats(2, 4, 5, 3)), "b h l e^, b h t^ e^, b h t^ d -> b h l d", "scale=0.5"),
    ("attention bool mask", lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m > -9),
     (Q, K, V, floats(2, 1, 1, 7)), "b s h d -> b s h d", "{x3}"),
    ("attention of groups",
     lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
     (Q, K[:, :2].clone(), V[:, :2].clone()),
     "b (g r) l e^, b g t^ e^, b g t^ d -> b (g r) l d", "enable_gqa=True"),
]  # fmt: skip


def check_flops(graph, model, integers):
    """Compare the flops of all ops with torch's count of products plus a few per element.

    A causal attention computes half of the products; interpolations take 8 operations per element,
    short Fourier transforms and pools up to 15.
    """
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(*integers)
    products = counter.get_total_flops()
    elements = sum(max(prod(t.shape) for t in (*op.inputs, *op.outputs)) for op in graph.ops)
    flops = sum(forward_flops(ss.Part(op).form) for op in graph.ops)
    assert products / 2 <= flops <= products + 15 * elements


@pytest.mark.many(40)
@pytest.mark.parametrize(
    "name, function, tensors, annotation, code", CASES, ids=[c[0] for c in CASES]
)
def test_rule_is_exact_for_whole_and_split_ops(name, function, tensors, annotation, code):
    graph = exact_graph(function, tensors)
    assert str(graph.ops[0].annotation) == str(ss.Annotation.parse(annotation))
    assert any(code in op.code for op in graph.ops), [op.code for op in graph.ops]


def exact_graph(function, tensors):
    """The graph of a function, whose values and gradients, whole and split, are those of torch."""
    model = Apply(function, [t.clone() for t in tensors])
    integers = [t for t in tensors if not t.is_floating_point()]
    graph = ss.capture(model, integers)
    parameters = dict(model.named_parameters())
    expected, found = model(*integers), evaluate(graph, integers, parameters)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    check_flops(graph, model, integers)
    if expected.requires_grad:
        wanted = list(parameters.values())
        grads = [torch.autograd.grad(y, wanted, allow_unused=True) for y in (found, expected)]
        torch.testing.assert_close(*grads, rtol=1e-11, atol=1e-13)
    values = values_of(graph, integers, parameters)
    for op in graph.ops:
        check_splits(op, [values[t] for t in op.inputs])
    return graph


def resized(mode, size, antialias=False):
    return lambda x: F.interpolate(x, size, mode=mode, antialias=antialias)


CELL = (floats(3, 4), floats(3, 2), floats(2, 4), floats(2, 2), floats(2), floats(2))
GATES = (floats(3, 4), floats(3, 2), floats(6, 4), floats(6, 2), floats(6), floats(6))
CUBE = floats(2, 3, 4, 5, 6)
OF_ROWS = {
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2), (IMAGE,)),
    "channel_shuffle": (lambda x: F.channel_shuffle(x, 2), (IMAGE,)),
    "im2col": (lambda x: F.unfold(x, (2, 3), padding=1), (IMAGE,)),
    "col2im": (lambda x: F.fold(x, (3, 4), 2), (floats(2, 12, 6),)),
    "prelu": (F.prelu, (IMAGE, floats(4))),
    "adaptive_max_pool2d": (lambda x: F.adaptive_max_pool2d(x, (3, 2)), (IMAGE,)),
    "adaptive_avg_pool3d": (lambda x: F.adaptive_avg_pool3d(x, (3, 2, 1)), (CUBE,)),
    "max_pool2d_with_indices": (lambda x: F.max_pool2d(x, 2, return_indices=True), (IMAGE,)),
    "replication_pad2d": (lambda x: torch.ops.aten.replication_pad2d(x, [1, 2, 0, 1]), (IMAGE,)),
    "upsample_linear1d": (resized("linear", 8), (floats(2, 3, 5),)),
    "_upsample_nearest_exact2d": (resized("nearest-exact", (8, 7)), (IMAGE,)),
    "_upsample_bicubic2d_aa": (resized("bicubic", (4, 3), True), (IMAGE,)),
    "grid_sampler": (
        lambda x, at: F.grid_sample(x, at.tanh(), align_corners=False), (IMAGE, floats(2, 3, 5, 2)),
    ),
    "lstm_cell": (lambda x, h, c, *weights: torch.lstm_cell(x, (h, c), *weights),
     (floats(3, 4), floats(3, 2), floats(3, 2), floats(8, 4), floats(8, 2))),
    "gru_cell": (torch.gru_cell, GATES),
    "rnn_tanh_cell": (torch.rnn_tanh_cell, CELL),
    "bilinear": (F.bilinear, (floats(3, 4), floats(3, 2), floats(5, 4, 2), floats(5))),
    "conv_transpose1d": (F.conv_transpose1d, (floats(2, 3, 4), floats(3, 5, 2))),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_ROWS)
def test_op_of_independent_rows_is_exact_and_is_cut_along_its_batch_alone(name):
    assert RULES[f"aten.{name}"] in (rows.rows, rows.transposed_convolution)
    graph = exact_graph(*OF_ROWS[name])
    (op,) = (op for op in graph.ops if f"torch.ops.aten.{name}." in op.code)
    assert loops_of(op) == ["b"]


def zeros(*shape):
    return torch.zeros(shape, dtype=torch.float64)


def of_gates(features):
    """The weights and biases of a recurrent network with 6 hidden features and 4 gates."""
    return floats(24, features), floats(24, 6), floats(24), floats(24)


MANY, ROWS, VOLUME = floats(64, 5), floats(20, 5), floats(2, 3, 6, 7, 8)

# Kind of an op, function, its tensors, floating-point operations of the op's forward.
FLOPS = [
    # moved and added elements, compared elements
    ("index", lambda x, i: x[i], (MANY, ints(64, 7, 9)), MANY.numel()),
    ("gather", lambda x, i: x.gather(0, i), (MANY, ints(64, 90, 5)), 90 * 5),
    ("index_add", lambda x, i, y: x.index_add(0, i, y),
     (MANY, ints(64, 90), floats(90, 5)), 90 * 5),
    ("index_put", lambda x, i, y: (x * 1).index_put((i,), y, True),
     (MANY, ints(64, 20), ROWS), MANY.numel()),
    ("scatter_add", lambda x, i, y: x.scatter_add(0, i, y), (MANY, ints(64, 20, 5), ROWS),
     MANY.numel()),
    ("sort", lambda x: x.sort(0)[0], (MANY,), MANY.numel() * 6),
    ("fft_fft", lambda x: torch.fft.fft(torch.view_as_complex(x)), (floats(3, 32, 2),),
     3 * 5 * 32 * 5),
    # windows
    ("max_pool2d", lambda x: F.max_pool2d(x, 3, 2), (IMAGE,), 2 * 4 * 2 * 2 * 9),
    ("avg_pool2d", lambda x: F.avg_pool2d(x, 2, ceil_mode=True), (IMAGE,), 2 * 4 * 3 * 3 * 4),
    ("max_pool3d", lambda x: F.max_pool3d(x, 3, 1), (VOLUME,), 2 * 3 * 4 * 5 * 6 * 27),
    ("adaptive_avg_pool2d", lambda x: F.adaptive_avg_pool2d(x, (2, 1)), (IMAGE,), IMAGE.numel()),
    ("upsample_nearest2d", lambda x: F.interpolate(x, scale_factor=3.0), (IMAGE,),
     9 * IMAGE.numel()),
    ("upsample_bilinear2d", lambda x: F.interpolate(x, (9, 8), mode="bilinear"), (IMAGE,),
     2 * 4 * 9 * 8 * 2 * 4),
    ("conv2d", lambda x, w: F.conv2d(x, w, padding=3), (IMAGE, floats(3, 4, 3, 3)),
     2 * 2 * 3 * 10 * 9 * 4 * 9),
    ("conv_transpose2d", lambda x, w: F.conv_transpose2d(x, w, groups=2),
     (IMAGE, floats(4, 5, 3, 2)), 2 * IMAGE.numel() * 5 * 6),
    # products
    ("attention", F.scaled_dot_product_attention, (Q, K, V), 2 * 2 * 4 * 5 * 7 * (6 + 3)),
    ("attention", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
     (Q, K, V), 2 * 4 * 5 * 7 * (6 + 3)),
    ("embedding", lambda i, w: F.embedding(i, w), (ints(64, 7), MANY), 7 * 5),
    ("lstm", lambda x, *w: torch.lstm(
        x, [zeros(2, 3, 6), zeros(2, 3, 6)], w, True, 2, 0.0, False, False, False)[0],
     (floats(7, 3, 5), *of_gates(5), *of_gates(6)), 2 * 7 * 3 * 24 * (5 + 6 + 6 + 6)),
    ("einsum", lambda x, y, z: torch.einsum("bi,ij,jk->bk", x, y, z),
     (floats(3, 9), floats(9, 8), floats(8, 7)), 2 * 3 * 9 * 8 + 2 * 3 * 8 * 7),
    # ops without a rule
    ("einsum", lambda x, w: torch.einsum("...k,nk->...n", x, w), (floats(3, 4, 9), floats(8, 9)),
     2 * 12 * 9 * 8),
    ("conv2d", F.conv2d, (floats(4, 6, 5), floats(3, 4, 3, 3)), 2 * 3 * 4 * 3 * 4 * 9),
    ("linalg_inv", torch.linalg.inv, (floats(9, 9),), 81),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore::superscaler_core.OpaqueWarning")
@pytest.mark.parametrize("kind, function, tensors, flops", FLOPS, ids=[c[0] for c in FLOPS])
def test_op_has_as_many_flops_as_counted_by_hand_and_so_have_its_parts(
    kind, function, tensors, flops
):
    integers = [t for t in tensors if not t.is_floating_point()]
    graph = ss.capture(Apply(function, list(tensors)), integers)
    (op,) = [op for op in graph.ops if op.kind == kind]
    assert forward_flops(ss.Part(op).form) == pytest.approx(flops)
    parts = [ss.Part(op, piece) for piece in pieces_of(op, loops_of(op))]
    assert sum(forward_flops(part.form) for part in parts) == pytest.approx(flops)


@pytest.mark.parametrize("seed", range(6))
def test_indexing_with_random_index_tensors_equals_torch(seed):
    draw = random.Random(seed)
    shape = [draw.choice((1, 2, 3, 5)) for _ in range(draw.randint(1, 4))]
    sizes = [draw.choice((1, draw.choice(shape), 4)) for _ in range(draw.randint(1, 3))]
    chosen = sorted(draw.sample(range(len(shape)), draw.randint(1, len(shape))))

    def numbers(size):
        """Indices of a dim: either all in order along a dim of the result, or random."""
        fitting = [i for i, n in enumerate(sizes) if n == size]
        if fitting and draw.random() < 0.7:
            form = [1] * len(sizes)
            form[draw.choice(fitting)] = size
            return torch.arange(size).reshape(form)
        form = [n if draw.random() < 0.6 else 1 for n in sizes][draw.randrange(len(sizes)) :]
        return torch.tensor([draw.randrange(-size, size) for _ in range(prod(form))]).reshape(form)

    tensors = {dim: numbers(shape[dim]) for dim in chosen}
    fixed = {dim: draw.random() < 0.7 for dim in chosen}
    given = [t for dim, t in tensors.items() if not fixed[dim]]

    def function(x, *inputs):
        left = iter(inputs)
        at = {dim: tensors[dim].clone() if fixed[dim] else next(left) for dim in chosen}
        return x[tuple(at.get(dim, slice(None)) for dim in range(len(shape)))]

    model = Apply(function, [floats(*shape), *given])
    graph = ss.capture(model, given)
    parameters = dict(model.named_parameters())
    expected, found = model(*given), evaluate(graph, given, parameters)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    values = values_of(graph, given, parameters)
    for op in graph.ops:
        check_splits(op, [values[t] for t in op.inputs])


@pytest.mark.parametrize(
    "function, tensors",
    [
        (lambda x: F.dropout(x, 0.3), (X,)),
        (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.3), (Q, K, V)),
        (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.3, is_causal=True,
                                                        scale=0.7), (Q, K, V)),
        (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.3, enable_gqa=True),
         (Q, K[:, :2].clone(), V[:, :2].clone())),
        (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.3),
         (Q[:1].clone(), K, V)),
        (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.3),
         (Q[:1].clone(), K[:1].clone(), V)),
    ],
)  # fmt: skip
def test_random_ops_draw_the_same_numbers_when_split(function, tensors):
    model = Apply(function, list(tensors))
    graph = ss.capture(model, ())
    parameters = dict(model.named_parameters())
    assert evaluate(graph, (), parameters, 1) != evaluate(graph, (), parameters, 2)
    values = values_of(graph, (), parameters)
    check_splits(graph.ops[0], [values[t] for t in graph.ops[0].inputs])


def test_random_numbers_of_few_digits_have_the_distributions_of_torch():
    """In bfloat16, one of 512 numbers below 1 is rounded to 1, whose logarithm is 0."""

    def draw(w):
        ones = torch.empty_like(w, dtype=torch.bfloat16)
        return ones.clone().bernoulli_(1.0), 1 / ones.clone().exponential_(), ones.bernoulli_(0.99)

    graph = ss.capture(Apply(lambda w: [w, *draw(w)], [floats(1 << 14)]), ())
    always, waits, often = (
        x for t, x in values_of(graph, (), {"p0": torch.zeros(1 << 14)}).items()
        if t.name.startswith(("bernoulli", "reciprocal"))
    )  # fmt: skip
    assert always.all()
    assert waits.isfinite().all()
    # Six standard deviations of a mean.
    assert often.double().mean() == pytest.approx(0.99, abs=6 * 0.1 / 128)


@pytest.mark.parametrize(
    "function, tensors, saves",
    [
        (lambda x: x.cumsum(1), (X,), ()),
        (lambda x: x.cumprod(1), (X,), (0, 1)),
        (lambda x: x.logcumsumexp(1), (X,), (0, 1)),
        (lambda x, i: x.gather(1, i), (X, ints(3, 2, 5, 4)), (0, 1)),
        (lambda x, y: F.nll_loss(x, y), (floats(4, 5), IGNORED), (0, 1)),
    ],
)
def test_op_names_the_operands_that_autograd_keeps(function, tensors, saves):
    """As torch's derivatives.yaml says; the gradient of a gather needs the shape of its input."""
    model = Apply(lambda x, *rest: function(x * 1, *rest), list(tensors))
    assert ss.capture(model, tensors[1:]).ops[1].saves == saves


@pytest.mark.parametrize(
    "function, shape",
    [
        (lambda x: x.clone(), (2, 3)),
        (lambda x: x.to(torch.float64), (2, 3)),
        (lambda x: x.expand(2, 3), (2, 3)),
        (lambda x: x.view(2, 3), (2, 3)),
        (lambda x: F.dropout(x, 0.5, training=False), (2, 3)),
        (lambda x: x[:, :3], (2, 3)),
        (lambda x: torch.cat([x, x[:, :0]], 1), (2, 3)),
        (lambda x: x.transpose(0, 0), (2, 3)),
    ],
)
def test_identity_operations_leave_no_op(function, shape):
    graph = ss.capture(Apply(function, [floats(*shape)]), ())
    assert [op.kind for op in graph.ops] == ["pow", "sum", "add"]


@pytest.mark.parametrize(
    "src, dst, annotation",
    [
        ((2, 3, 8), (2, 3, 8), "b s h -> b s h"),
        ((2, 3, 8), (2, 3, 2, 4), "b s (h d) -> b s h d"),
        ((2, 3, 8), (6, 8), "b s h -> (b s) h"),
        ((2, 3, 8), (48,), "b s h -> (b s h)"),
        ((48,), (2, 3, 8), "(b s h) -> b s h"),
        ((2, 3), (2, 1, 3, 1), "b s -> b 1 s 1"),
        ((1, 1), (), "1 1 -> ()"),
        ((), (1,), "() -> 1"),
        ((4, 6), (8, 3), "b (s h) -> (b s) h"),
        ((6, 4), (4, 6), "(b s^) h^ -> (b d^) e^"),
        ((3, 2), (2, 3), "b^ s^ -> h^ d^"),
        ((5, 6, 4), (5, 4, 6), "b (s h^) d^ -> b (s e^) f^"),
        ((2, 6, 35), (4, 3, 5, 7), "b (s h) (d e) -> (b s) h d e"),
    ],
)
def test_view_annotation_names_the_loops_common_to_both_shapes(src, dst, annotation):
    made, sizes = view_annotation(src, dst)
    assert made == annotation
    parsed = ss.Annotation.parse(made)
    assert parsed.sizes([src], [dst], sizes) == sizes


def test_view_with_another_number_of_elements_raises_annotation_error():
    with pytest.raises(ss.AnnotationError, match=r"shape \[2, 3\] has no view of shape \[7\]"):
        view_annotation((2, 3), (7,))


@pytest.mark.parametrize(
    "function, tensors, annotation",
    [
        (torch.linalg.inv, (floats(3, 3),), "b d1_3^ -> b d1_3^"),
        (lambda x: torch.einsum("ii->i", x), (floats(3, 3),), "b d1_3^ -> b"),
        (lambda x: x.roll(1), (floats(3, 2),), "b d1_2^ -> b d1_2^"),
        (F.conv_transpose1d, (floats(4, 5), floats(4, 4, 2)),
         "b d1_5^, b d1_4^ d2_2^ -> b d1_6^"),
        (lambda x: torch.linalg.qr(x), (floats(3, 2),), "b d1_2^ -> b d1_2^, d0_2^ d1_2^"),
    ],
)  # fmt: skip
def test_operation_without_a_rule_becomes_an_opaque_op(function, tensors, annotation):
    integers = [t for t in tensors if not t.is_floating_point()]
    model = Apply(lambda *xs: function(*(x * 1 for x in xs)), list(tensors))
    with pytest.warns(ss.OpaqueWarning, match="computes all of them") as caught:
        graph = ss.capture(model, integers)
    (op,) = graph.opaque
    assert not any(op.is_splittable(i) for i, size in op.sizes.items() if size > 1)
    where = f'@register_op("{annotation}")' if annotation else "@register_op, can"
    assert where in str(caught[0].message)
    parameters = dict(model.named_parameters())
    found, expected = evaluate(graph, integers, parameters), model(*integers)
    torch.testing.assert_close(found, expected)
    wanted = [model.p0]
    torch.testing.assert_close(
        torch.autograd.grad(found, wanted), torch.autograd.grad(expected, wanted)
    )


@pytest.mark.parametrize(
    "function, tensors, message",
    [
        (lambda x: torch.native_dropout(x, 0.5, True), (floats(3),), "draws random numbers"),
        (lambda x, m: F.batch_norm(x, m.detach(), m.detach(), training=True),
         (floats(3, 4), floats(4)), "writes parameter 'p1' in place"),
    ],
)  # fmt: skip
def test_unsupported_operation_raises_capture_error(function, tensors, message):
    integers = [t for t in tensors if not t.is_floating_point()]
    with pytest.raises(ss.CaptureError, match=message):
        ss.capture(Apply(function, list(tensors)), integers)
