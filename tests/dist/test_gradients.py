"""Gradients flow back by the adjoint transition, on every rank, in every category and relation."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import rvdcomm as rv
from rvdcomm.layout import Box
from rvdcomm.run.world import World
from tests.dist.on_ranks import on_ranks
from tests.dist.shards import error_of, shard_of
from tests.dist.world import Worlds
from tests.oracle import random_layout

pytestmark = pytest.mark.dist

SHAPE = (2, 3)
"""Ragged over 2 ranks and over 4, of which some have nothing."""

CATEGORIES = {
    "R->R": ("R({n})V(1)D(1,1)", "R({m})V(1)D(1,1)"),
    "R->D": ("R({n})V(1)D(1,1)", "R(1)V(1)D({m},1)"),
    "V->R": ("R(1)V({n})D(1,1)", "R({m})V(1)D(1,1)"),
    "V->D": ("R(1)V({n})D(1,1)", "R(1)V(1)D({m},1)"),
    "D->R": ("R(1)V(1)D({n},1)", "R({m})V(1)D(1,1)"),
    "D->D'": ("R(1)V(1)D({n},1)", "R(1)V(1)D(1,{m})"),
}
RELATIONS = {
    "in group": (range(4), range(4)),
    "n->n": (range(2), range(2, 4)),
    "n->2n": (range(2), range(2, 6)),
    "2n->n": (range(4), range(4, 6)),
}


def pair_of(category: str, relation: str) -> tuple[rv.Layout, rv.Layout]:
    """The layouts of a category between the groups of a relation."""
    texts, ranks = CATEGORIES[category], RELATIONS[relation]
    src, dst = (text.format(n=len(ranks[0]), m=len(ranks[1])) for text in texts)
    return rv.Layout(SHAPE, src, ranks[0]), rv.Layout(SHAPE, dst, ranks[1])


def world_size(*layouts: rv.Layout) -> int:
    return 1 + max(rank for layout in layouts for rank in layout.ranks)


def slices_of(layout: rv.Layout, rank: int) -> tuple[slice, ...]:
    """Where a rank's box is in the whole tensor."""
    return layout.cell(rank).box.slices_within(Box.of_shape(layout.shape))


# --- gradcheck ----------------------------------------------------------------------------------


class Transition(torch.autograd.Function):
    """From all parts of src to all shards of dst, as one function that all ranks call alike.

    ``gradcheck`` runs in every process on equal tensors, so that all ranks make equal calls: each
    takes its shard out of the parts, and the results and the gradients of all ranks are summed up.
    """

    @staticmethod
    def forward(ctx: Any, parts: Tensor, rank: int, src: Any, dst: Any, options: Any) -> Tensor:
        ctx.rank, ctx.dst = rank, dst
        ctx.leaf = parts.detach().requires_grad_()
        with torch.enable_grad():
            shard = None
            if rank in src:
                shard = ctx.leaf[(src.cell(rank).part, *slices_of(src, rank))]
            ctx.result = rv.redistribute(shard, src, dst, requires_grad=True, **options)
        rows = parts.new_zeros(len(dst.ranks), *dst.shape)
        if rank in dst:
            rows[(dst.ranks.index(rank), *slices_of(dst, rank))] = ctx.result.detach()
        dist.all_reduce(rows)
        return rows

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad, rank, dst = None, ctx.rank, ctx.dst
        if rank in dst:
            grad = grads[0][(dst.ranks.index(rank), *slices_of(dst, rank))]
        ctx.leaf.grad = None
        ctx.result.backward(grad, retain_graph=True)
        total = torch.zeros_like(ctx.leaf) if ctx.leaf.grad is None else ctx.leaf.grad
        dist.all_reduce(total)
        return total, None, None, None, None


FAST = {"dist": False, "peer": True}
"""Whether gradcheck uses random projections, which take fewer calls, by executor."""


def parts_of(layout: rv.Layout) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    shape = (layout.rvd.v, *layout.shape)
    return torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True)


def check_gradient(rank: int, src: rv.Layout, dst: rv.Layout, executor: str) -> bool:
    args = (parts_of(src), rank, src, dst, {"executor": executor})
    torch.manual_seed(1)  # All ranks draw the same projections.
    return gradcheck(Transition.apply, args, fast_mode=FAST[executor])


CASES = [
    ("R->R", "n->2n", "dist"),
    ("R->D", "2n->n", "peer"),
    ("V->R", "in group", "dist"),
    ("V->D", "n->n", "dist"),
    ("D->R", "n->2n", "peer"),
    ("D->D'", "2n->n", "dist"),
]


@pytest.mark.parametrize("category, relation, executor", CASES)
def test_first_gradients_pass_gradcheck(
    worlds: Worlds, category: str, relation: str, executor: str
) -> None:
    src, dst = pair_of(category, relation)
    size = world_size(src, dst)
    assert worlds(size).run(check_gradient, src, dst, executor) == [True] * size


class Copied(torch.autograd.Function):
    """The identity of a replicated tensor; its gradient is the sum of those of all ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return Summed.apply(grads[0])


class Summed(torch.autograd.Function):
    """The sum over all ranks; every rank has its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return Copied.apply(grads[0])


def check_second_gradient(rank: int, src: rv.Layout, dst: rv.Layout) -> bool:
    def squares(parts: Tensor) -> Tensor:
        mine = Copied.apply(parts)[(src.cell(rank).part, *slices_of(src, rank))]
        result = rv.redistribute(mine, src, dst)
        whole = torch.zeros(src.shape, dtype=parts.dtype)
        whole[slices_of(dst, rank)] = result**2
        return Summed.apply(whole)

    return gradgradcheck(squares, (parts_of(src),))


@pytest.mark.parametrize("category", CATEGORIES)
def test_second_gradients_pass_gradgradcheck(worlds: Worlds, category: str) -> None:
    src, dst = pair_of(category, "in group")
    assert worlds(4).run(check_second_gradient, src, dst) == [True] * 4


# --- conventions --------------------------------------------------------------------------------


@pytest.mark.parametrize("dst", ["R(4)V(1)D(1)", "R(1)V(1)D(4)"])
@pytest.mark.parametrize("src", ["R(4)V(1)D(1)", "R(1)V(4)D(1)", "R(1)V(1)D(4)"])
@on_ranks(4)
def test_replica_grads_copies_gives_every_rank_the_gradient_of_the_tensor(
    rank: int, src: str, dst: str
) -> None:
    """All ranks compute one loss: 1·x0 + 2·x1 + 3·x2 + 4·x3."""
    whole = [1.0, 2.0, 3.0, 4.0]
    shard = torch.zeros((1,) if "D(4)" in src else (4,), requires_grad=True)
    result = rv.redistribute(shard, src, dst, replica_grads="copies")
    weights = torch.tensor(whole)
    (result * (weights[rank : rank + 1] if "D(4)" in dst else weights)).sum().backward()
    assert shard.grad.tolist() == (whole[rank : rank + 1] if "D(4)" in src else whole)


def products(rank: int, pairs: Sequence[tuple[rv.Layout, rv.Layout]]) -> list[tuple[float, float]]:
    """This rank's share of ``<g, T x>`` and of ``<T* g, x>``, exact in float64."""
    found = []
    for seed, (src, dst) in enumerate(pairs):
        shard = shard_of(rank, src, seed, "float64")
        if shard is not None:
            shard.requires_grad_()
        result = rv.redistribute(shard, src, dst, requires_grad=True)
        grad = shard_of(rank, gradient_layout(dst), seed + 1, "float64")
        result.backward(grad)
        there = 0.0 if grad is None else (grad * result.detach()).sum().item()
        back = 0.0 if shard is None else (shard.grad * shard.detach()).sum().item()
        found.append((there, back))
    return found


def gradient_layout(dst: rv.Layout) -> rv.Layout:
    """Gradients that differ from replica to replica, and not from part to part."""
    ranks = np.array(dst.ranks).reshape(dst.rvd.r, dst.rvd.v, -1).swapaxes(0, 1)
    rvd = rv.RVD(dst.rvd.v, dst.rvd.r, dst.rvd.d)
    return rv.Layout(dst.shape, rvd, ranks.reshape(-1), dst.cuts)


def random_pairs(count: int, num_ranks: int) -> list[tuple[rv.Layout, rv.Layout]]:
    """Ragged layouts over all ranks, in any order."""
    rng = random.Random(11)
    shapes = [(5,), (3, 4), (2, 3, 4)]
    return [
        (random_layout(rng, shape, range(num_ranks)), random_layout(rng, shape, range(num_ranks)))
        for shape in (rng.choice(shapes) for _ in range(count))
    ]


@pytest.mark.parametrize("num_ranks", [4, 6])
def test_backward_transition_is_the_adjoint_of_the_forward_one(
    worlds: Worlds, num_ranks: int
) -> None:
    seen = worlds(num_ranks).run(products, random_pairs(40, num_ranks))
    sums = np.sum(seen, axis=0)
    assert sums[:, 0].tolist() == sums[:, 1].tolist()
    assert np.count_nonzero(sums) > 60


# --- between groups -----------------------------------------------------------------------------

STAGES = rv.Layout((4, 6), "R(1)V(1)D(2,1)", [0, 1]), rv.Layout((4, 6), "R(1)V(1)D(1,2)", [2, 3])


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@on_ranks(4)
def test_stages_of_different_ranks_get_the_gradients_of_one_process(
    rank: int, is_async: bool
) -> None:
    """Two stages of two ranks: a matmul of rows, and a product with columns."""
    src, dst = STAGES
    generator = torch.Generator().manual_seed(5)
    x, w, scale = (
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((4, 3), (3, 6), (4, 6))
    )
    want = torch.autograd.grad(((x @ w) * scale).sum(), (w, scale))[rank // 2]
    leaf = w if rank in src else scale
    for _ in range(2):
        leaf.grad = None
        mine = x.chunk(2)[rank] @ w if rank in src else None
        options = {"requires_grad": True, "dtype": torch.float64, "async_op": is_async}
        moved = rv.redistribute(mine, src, dst, **options)
        moved = moved.wait() if is_async else moved
        if rank in dst:
            (moved * scale.chunk(2, dim=1)[rank - 2]).sum().backward()
        else:
            assert (moved.shape, moved.item()) == ((), 0.0)
            moved.backward()
        both: list[Any] = [None] * 4
        dist.all_gather_object(both, leaf.grad)
        start = rank // 2 * 2
        torch.testing.assert_close(both[start] + both[start + 1], want)


@on_ranks(4)
def test_ranks_without_a_shard_take_part_in_the_backward_pass(rank: int) -> None:
    """From 2 ranks to 4, which include the 2; the other two pass no shard."""
    src, dst = rv.Layout((2,), "R(1)V(1)D(2)", [0, 1]), rv.Layout((2,), "R(4)V(1)D(1)")
    shard = torch.zeros(1, requires_grad=True) if rank in src else None
    rv.redistribute(shard, src, dst).sum().backward()
    assert shard is None or shard.grad.tolist() == [4.0]


@pytest.mark.filterwarnings("ignore:Using backward")
@on_ranks(4)
def test_second_gradient_between_groups_is_an_error_on_every_rank(rank: int) -> None:
    src, dst = STAGES
    shard = shard_of(rank, src)
    if shard is not None:
        shard.requires_grad_()
    moved = rv.redistribute(shard, src, dst, requires_grad=True)
    assert error_of(lambda: moved.sum().backward(create_graph=True)) == (
        f"LayoutError: redistribute {src.rvd} -> {dst.rvd}: a gradient of a gradient cannot flow "
        "between groups of different ranks, where some have no tensor to start from; call "
        "redistribute on the gradients."
    )


# --- when a gradient flows ----------------------------------------------------------------------

ROWS, COLUMNS = rv.Layout((4, 4), "R(1)V(1)D(4,1)"), rv.Layout((4, 4), "R(1)V(1)D(1,4)")


def leaf(requires_grad: bool = True) -> Tensor:
    return torch.ones(1, 4, requires_grad=requires_grad)


@pytest.mark.parametrize(
    "of_tensor, argument, is_enabled, wanted",
    [
        (True, None, True, True),
        (False, None, True, False),
        (False, True, True, True),
        (True, False, True, False),
        (True, None, False, False),
        (True, True, False, False),
    ],
)
@on_ranks(4)
def test_result_requires_grad_follows_tensor_argument_and_no_grad(
    rank: int, of_tensor: bool, argument: bool | None, is_enabled: bool, wanted: bool
) -> None:
    with torch.set_grad_enabled(is_enabled):
        moved = rv.redistribute(leaf(of_tensor), ROWS, COLUMNS, requires_grad=argument)
    assert moved.requires_grad == wanted


@on_ranks(4)
def test_rank_with_a_frozen_shard_may_take_part_in_the_backward_pass(rank: int) -> None:
    shard = leaf(requires_grad=rank != 2)
    rv.redistribute(shard, ROWS, COLUMNS, requires_grad=True).sum().backward()
    assert shard.grad is None if rank == 2 else shard.grad.tolist() == [[1.0] * 4]


@on_ranks(4)
def test_training_and_evaluation_alternate_without_new_agreements(rank: int) -> None:
    """Alternate with and without grad between two groups."""
    src, dst = STAGES
    agreements = []
    for _ in range(3):
        for is_training in (True, False):
            with torch.set_grad_enabled(is_training):
                moved = rv.redistribute(shard_of(rank, src), src, dst, requires_grad=is_training)
            assert (moved is not None and moved.requires_grad) == is_training
            if is_training:
                moved.sum().backward()
        agreements.append(sum(World.of().num_agreements.values()))
    assert agreements == agreements[:1] * 3


@pytest.mark.parametrize("size", [3, 1 << 19])
@on_ranks(4)
def test_a_result_may_be_changed_in_place(rank: int, size: int) -> None:
    """Small results and large ones come from different memory."""
    layout = rv.Layout((4 * size,), "R(1)V(1)D(4)")
    shard = torch.full((size,), 3.0, requires_grad=True)
    result = rv.redistribute(shard, layout, layout)
    result.mul_(2.0)
    result.square().mean().backward()
    # d/dx of (2x)² is 8x, and x is 3.
    assert shard.grad.sum().item() == 24.0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "complex64"])
@on_ranks(4)
def test_gradients_may_have_any_strides_and_dtype(rank: int, dtype: str) -> None:
    """Gradients that are expanded, transposed and lazily conjugated."""
    for loss_of, want in (
        (lambda y: y.sum(), 1.0),
        (lambda y: (y.t() * torch.arange(4).to(y.dtype)).sum(), float(rank)),
        (
            lambda y: y.conj().mul(1j if y.is_complex() else 1).sum(),
            1j if dtype == "complex64" else 1.0,
        ),
    ):
        shard = torch.ones(1, 4, dtype=getattr(torch, dtype), requires_grad=True)
        loss = loss_of(rv.redistribute(shard, ROWS, COLUMNS))
        (loss.real if loss.is_complex() else loss).backward()
        assert shard.grad.dtype == shard.dtype
        assert shard.grad.flatten().tolist() == [want] * 4


@on_ranks(4)
def test_gradients_flow_through_pending_calls(rank: int) -> None:
    shards = [leaf() for _ in range(5)]
    pending = [rv.redistribute(shard, ROWS, COLUMNS, async_op=True) for shard in shards]
    # Waiting in another order than the others changes nothing in the order of the graph.
    order = range(5) if rank % 2 else reversed(range(5))
    results = {i: pending[i].wait() for i in order}
    sum((i + 1) * results[i].sum() for i in range(5)).backward()
    assert [shard.grad.unique().tolist() for shard in shards] == [[i + 1.0] for i in range(5)]


@pytest.mark.parametrize("category", ["D->R", "R->D"])
@pytest.mark.parametrize("relation", ["in group", "n->n"])
@on_ranks(4)
def test_redistributor_carries_gradients(rank: int, category: str, relation: str) -> None:
    src, dst = pair_of(category, relation)
    call = rv.Redistributor(rv.plan(src, dst))
    for _ in range(2):
        shard = shard_of(rank, src)
        if shard is not None:
            shard.requires_grad_()
        call(shard, requires_grad=True).sum().backward()
        # Every element is read by all replicas; or one of its replicas gets the gradient.
        total = torch.tensor(0.0 if shard is None else shard.grad.sum().item())
        dist.all_reduce(total)
        assert total == prod(SHAPE) * dst.rvd.r


# --- errors -------------------------------------------------------------------------------------

SHORT = f"redistribute {ROWS.rvd} -> {COLUMNS.rvd}"
STAGED = f"redistribute {STAGES[0].rvd} -> {STAGES[1].rvd}"
NO_OUT = "passed out, through which no gradient flows; leave it out, or pass requires_grad=False."
ERRORS = {
    "some are under no_grad": (
        lambda rank, call: under_no_grad(rank in (2, 3), call),
        "redistribute: ranks disagree about requires_grad: rank 0 asks for True, rank 2 for False.",
    ),
    "out is given": (
        lambda rank, call: call(
            leaf(), ROWS, COLUMNS, out=torch.zeros(4, 1) if rank == 3 else None
        ),
        f"{SHORT}: rank 3 {NO_OUT}",
    ),
    "integers": (
        lambda rank, call: call(
            torch.ones(1, 4, dtype=torch.int32), ROWS, COLUMNS, requires_grad=True
        ),
        f"{SHORT}: int32 has no gradient; leave out requires_grad=True.",
    ),
    "a rank has no result": (
        lambda rank, call: call(
            torch.ones(2, 6, requires_grad=True) if rank < 2 else None, *STAGES
        ),
        f"{STAGED}: a gradient flows back, but rank 0 is outside dst and has no result to start "
        "from; pass requires_grad=True on all ranks, and call backward() on the scalar that it "
        "then gets, or requires_grad=False.",
    ),
    "an unknown convention": (
        lambda rank, call: call(leaf(), ROWS, COLUMNS, replica_grads="sum"),
        f"redistribute {ROWS} -> {COLUMNS}: replica_grads='sum' is unknown; use 'parts' or "
        "'copies'.",
    ),
}


def under_no_grad(is_mine: bool, call: Callable[..., Any]) -> Any:
    with torch.set_grad_enabled(not is_mine):
        return call(leaf(), ROWS, COLUMNS)


@pytest.mark.parametrize("what", ERRORS)
@on_ranks(4)
def test_misuse_is_an_error_on_every_rank(rank: int, what: str) -> None:
    """A bad call in a new group, where nothing is agreed yet."""
    call = partial(rv.redistribute, group=dist.new_group(list(range(4))))
    misuse, message = ERRORS[what]
    assert error_of(lambda: misuse(rank, call)) == f"LayoutError: {message}"


@on_ranks(4)
def test_out_in_a_later_call_needs_requires_grad_false(rank: int) -> None:
    rv.redistribute(leaf(), ROWS, COLUMNS)
    out = torch.zeros(4, 1)
    error = error_of(lambda: rv.redistribute(leaf(), ROWS, COLUMNS, out=out))
    assert error == f"LayoutError: {SHORT}: rank {rank} {NO_OUT}"
    result = rv.redistribute(leaf(), ROWS, COLUMNS, out=out, requires_grad=False)
    assert (out.sum().item(), result.requires_grad) == (4.0, False)
