"""Gradients flow back by the adjoint transition, on every rank, in every category and relation."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
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
    ("R->R", "in group", "peer"),
    ("R->D", "2n->n", "peer"),
    ("V->R", "in group", "dist"),
    ("V->R", "n->n", "peer"),
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


def gradient_of(rank: int, src: str, dst: str, options: dict[str, Any]) -> list[float]:
    """The gradient of a shard where rank k computes the loss ``(k + 1) * sum(result)``."""
    whole = torch.zeros(4) if "D(1)" in src else torch.zeros(1)
    whole.requires_grad_()
    result = rv.redistribute(whole, src, dst, **options)
    ((rank + 1) * result).sum().backward()
    return whole.grad.tolist()


def test_shard_gets_the_sum_of_the_gradients_of_its_dst_replicas(worlds: Worlds) -> None:
    # 1 + 2 + 3 + 4: all ranks read every element.
    grads = worlds(4).run(gradient_of, "R(1)V(1)D(4)", "R(4)V(1)D(1)", {})
    assert grads == [[10.0]] * 4


def test_every_src_part_gets_the_gradient_of_the_sum(worlds: Worlds) -> None:
    grads = worlds(4).run(gradient_of, "R(1)V(4)D(1)", "R(1)V(1)D(4)", {})
    assert grads == [[1.0, 2.0, 3.0, 4.0]] * 4


def test_gradients_of_src_replicas_add_up_to_the_gradient_of_the_tensor(worlds: Worlds) -> None:
    grads = worlds(4).run(gradient_of, "R(4)V(1)D(1)", "R(1)V(1)D(4)", {})
    assert np.sum(grads, axis=0).tolist() == [1.0, 2.0, 3.0, 4.0]


COPIES = {"replica_grads": "copies"}


def equal_gradient_of(rank: int, src: str, dst: str) -> list[float]:
    """The gradient of a shard if all ranks compute one loss: 1·x0 + 2·x1 + 3·x2 + 4·x3."""
    shape = (1,) if "D(4)" in src else (4,)
    shard = torch.zeros(shape, requires_grad=True)
    result = rv.redistribute(shard, src, dst, **COPIES)
    weights = torch.arange(1.0, 5.0)
    (result * (weights[rank : rank + 1] if "D(4)" in dst else weights)).sum().backward()
    return shard.grad.tolist()


@pytest.mark.parametrize("dst", ["R(4)V(1)D(1)", "R(1)V(1)D(4)"])
@pytest.mark.parametrize("src", ["R(4)V(1)D(1)", "R(1)V(4)D(1)", "R(1)V(1)D(4)"])
def test_replica_grads_copies_gives_every_rank_the_gradient_of_the_tensor(
    worlds: Worlds, src: str, dst: str
) -> None:
    whole = [1.0, 2.0, 3.0, 4.0]
    wanted = [[x] for x in whole] if "D(4)" in src else [whole] * 4
    assert worlds(4).run(equal_gradient_of, src, dst) == wanted


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


def weights() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return tuple(
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((4, 3), (3, 6), (4, 6))
    )


def train_in_two_stages(rank: int, num_steps: int, is_async: bool) -> list[Any]:
    """Two stages of two ranks: a matmul of rows, and a product with columns."""
    src, dst = STAGES
    x, w, scale = weights()
    w, scale = w.requires_grad_(), scale.requires_grad_()
    grads = []
    for _ in range(num_steps):
        w.grad = scale.grad = None
        mine = x.chunk(2)[rank] @ w if rank in src else None
        options = {"requires_grad": True, "dtype": torch.float64, "async_op": is_async}
        moved = rv.redistribute(mine, src, dst, **options)
        moved = moved.wait() if is_async else moved
        if rank in dst:
            (moved * scale.chunk(2, dim=1)[rank - 2]).sum().backward()
        else:
            assert (moved.shape, moved.item()) == ((), 0.0)
            moved.backward()
        grads.append(w.grad.tolist() if rank in src else scale.grad.tolist())
    return grads


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_stages_of_different_ranks_get_the_gradients_of_one_process(
    worlds: Worlds, is_async: bool
) -> None:
    x, w, scale = (tensor.requires_grad_() for tensor in weights())
    ((x @ w) * scale).sum().backward()
    seen = worlds(4).run(train_in_two_stages, 2, is_async)
    for ranks, wanted in ((seen[:2], w.grad), (seen[2:], scale.grad)):
        total = torch.tensor(ranks, dtype=torch.float64).sum(0)
        torch.testing.assert_close(total, torch.stack([wanted] * 2))


def grow(rank: int) -> list[float] | None:
    """From 2 ranks to 4, which include the 2; the other two pass no shard."""
    src, dst = rv.Layout((2,), "R(1)V(1)D(2)", [0, 1]), rv.Layout((2,), "R(4)V(1)D(1)")
    shard = torch.zeros(1, requires_grad=True) if rank in src else None
    rv.redistribute(shard, src, dst).sum().backward()
    return None if shard is None else shard.grad.tolist()


def test_ranks_without_a_shard_take_part_in_the_backward_pass(worlds: Worlds) -> None:
    assert worlds(4).run(grow) == [[4.0], [4.0], None, None]


def second_gradient_between_groups(rank: int) -> str:
    src, dst = STAGES
    shard = shard_of(rank, src)
    if shard is not None:
        shard.requires_grad_()
    moved = rv.redistribute(shard, src, dst, requires_grad=True)
    return error_of(lambda: moved.sum().backward(create_graph=True))


@pytest.mark.filterwarnings("ignore:Using backward")
def test_second_gradient_between_groups_is_an_error_on_every_rank(worlds: Worlds) -> None:
    what = f"redistribute {STAGES[0].rvd} -> {STAGES[1].rvd}"
    error = (
        f"LayoutError: {what}: a gradient of a gradient cannot flow between groups of different "
        "ranks, where some have no tensor to start from; call redistribute on the gradients."
    )
    assert worlds(4).run(second_gradient_between_groups) == [error] * 4


# --- when a gradient flows ----------------------------------------------------------------------

ROWS, COLUMNS = rv.Layout((4, 4), "R(1)V(1)D(4,1)"), rv.Layout((4, 4), "R(1)V(1)D(1,4)")


def leaf(requires_grad: bool = True) -> Tensor:
    return torch.ones(1, 4, requires_grad=requires_grad)


def has_graph(rank: int) -> dict[str, bool]:
    made = {
        "a tensor that requires grad": rv.redistribute(leaf(), ROWS, COLUMNS),
        "one that does not": rv.redistribute(leaf(False), ROWS, COLUMNS),
        "one that does not, True": rv.redistribute(leaf(False), ROWS, COLUMNS, requires_grad=True),
        "one that does, False": rv.redistribute(leaf(), ROWS, COLUMNS, requires_grad=False),
    }
    with torch.no_grad():
        made["no_grad"] = rv.redistribute(leaf(), ROWS, COLUMNS)
        made["no_grad, True"] = rv.redistribute(leaf(), ROWS, COLUMNS, requires_grad=True)
    return {name: tensor.requires_grad for name, tensor in made.items()}


def test_result_requires_grad_follows_tensor_argument_and_no_grad(worlds: Worlds) -> None:
    wanted = {
        "a tensor that requires grad": True,
        "one that does not": False,
        "one that does not, True": True,
        "one that does, False": False,
        "no_grad": False,
        "no_grad, True": False,
    }
    assert worlds(4).run(has_graph) == [wanted] * 4


def freeze_one_rank(rank: int) -> list[float] | None:
    shard = leaf(requires_grad=rank != 2)
    rv.redistribute(shard, ROWS, COLUMNS, requires_grad=True).sum().backward()
    return None if shard.grad is None else shard.grad.tolist()


def test_rank_with_a_frozen_shard_may_take_part_in_the_backward_pass(worlds: Worlds) -> None:
    ones = [[1.0] * 4]
    assert worlds(4).run(freeze_one_rank) == [ones, ones, None, ones]


def train_and_evaluate(rank: int, num_rounds: int) -> tuple[list[bool], int]:
    """Alternate with and without grad between two groups; agreements after the first round."""
    src, dst = STAGES
    graphs = []
    for number in range(num_rounds):
        for is_training in (True, False):
            if (number, is_training) == (1, True):
                before = sum(World.of().num_agreements.values())
            shard = shard_of(rank, src)
            with torch.set_grad_enabled(is_training):
                moved = rv.redistribute(shard, src, dst, requires_grad=is_training)
            graphs.append(moved is not None and moved.requires_grad)
            if is_training:
                moved.sum().backward()
    return graphs, sum(World.of().num_agreements.values()) - before


def test_training_and_evaluation_alternate_without_new_agreements(worlds: Worlds) -> None:
    assert worlds(4).run(train_and_evaluate, 3) == [([True, False] * 3, 0)] * 4


def change_in_place(rank: int, size: int) -> float:
    """Small results and large ones come from different memory."""
    layout = rv.Layout((4 * size,), "R(1)V(1)D(4)")
    shard = torch.full((size,), 3.0, requires_grad=True)
    result = rv.redistribute(shard, layout, layout)
    result.mul_(2.0)
    result.square().mean().backward()
    return shard.grad.sum().item()


@pytest.mark.parametrize("size", [3, 1 << 19])
def test_a_result_may_be_changed_in_place(worlds: Worlds, size: int) -> None:
    # d/dx of (2x)² is 8x, and x is 3.
    assert worlds(4).run(change_in_place, size) == [24.0] * 4


def gradients_of_any_strides(rank: int, dtype: str) -> list[Any]:
    """Gradients that are expanded, transposed and lazily conjugated."""
    grads = []
    for spoil in (
        lambda y: y.sum(),
        lambda y: (y.t() * torch.arange(4).to(y.dtype)).sum(),
        lambda y: y.conj().mul(1j if y.is_complex() else 1).sum(),
    ):
        shard = torch.ones(1, 4, dtype=getattr(torch, dtype), requires_grad=True)
        loss = spoil(rv.redistribute(shard, ROWS, COLUMNS))
        (loss.real if loss.is_complex() else loss).backward()
        assert shard.grad.dtype == shard.dtype
        grads.append(shard.grad.flatten().tolist())
    return grads


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
def test_gradients_may_have_any_strides_and_dtype(worlds: Worlds, dtype: str) -> None:
    seen = worlds(4).run(gradients_of_any_strides, dtype)
    third = [1j if dtype == "complex64" else 1.0] * 4
    assert seen == [[[1.0] * 4, [float(rank)] * 4, third] for rank in range(4)]


def gradients_of_calls_in_flight(rank: int, num_calls: int) -> list[list[float]]:
    shards = [leaf() for _ in range(num_calls)]
    pending = [rv.redistribute(shard, ROWS, COLUMNS, async_op=True) for shard in shards]
    # Waiting in another order than the others changes nothing in the order of the graph.
    order = range(num_calls) if rank % 2 else reversed(range(num_calls))
    results = {i: pending[i].wait() for i in order}
    sum((i + 1) * results[i].sum() for i in range(num_calls)).backward()
    return [shard.grad.flatten().tolist() for shard in shards]


def test_gradients_flow_through_pending_calls(worlds: Worlds) -> None:
    wanted = [[float(i + 1)] * 4 for i in range(5)]
    assert worlds(4).run(gradients_of_calls_in_flight, 5) == [wanted] * 4


# --- Redistributor ------------------------------------------------------------------------------


def call_redistributor(rank: int, plan: rv.Plan) -> list[Any]:
    call = rv.Redistributor(plan)
    found = []
    for _ in range(2):
        shard = shard_of(rank, plan.src)
        if shard is not None:
            shard.requires_grad_()
        call(shard, requires_grad=True).sum().backward()
        found.append(None if shard is None else shard.grad.unique().tolist())
    return found


@pytest.mark.parametrize("category", ["D->R", "R->D"])
@pytest.mark.parametrize("relation", ["in group", "n->n"])
def test_redistributor_carries_gradients(worlds: Worlds, category: str, relation: str) -> None:
    src, dst = pair_of(category, relation)
    seen = worlds(4).run(call_redistributor, rv.plan(src, dst))
    assert [grads is None for grads in seen[0]] == [False] * 2
    held = {value for rank in src.ranks for grads in seen[rank] for value in grads}
    # Every element is read by all replicas; or one of its replicas gets the gradient, others none.
    assert held == ({float(dst.rvd.r)} if category == "D->R" else {0.0, 1.0})


# --- errors -------------------------------------------------------------------------------------

SHORT = f"redistribute {ROWS.rvd} -> {COLUMNS.rvd}"
STAGED = f"redistribute {STAGES[0].rvd} -> {STAGES[1].rvd}"
ERRORS = {
    "some require grad": (
        lambda rank, call: call(leaf(rank != 1), ROWS, COLUMNS),
        "redistribute: ranks disagree about requires_grad: rank 0 asks for True, rank 1 for False.",
    ),
    "some are under no_grad": (
        lambda rank, call: under_no_grad(rank in (2, 3), call),
        "redistribute: ranks disagree about requires_grad: rank 0 asks for True, rank 2 for False.",
    ),
    "out is given": (
        lambda rank, call: call(
            leaf(), ROWS, COLUMNS, out=torch.zeros(4, 1) if rank == 3 else None
        ),
        f"{SHORT}: rank 3 passed out, through which no gradient flows; leave it out, or pass "
        "requires_grad=False.",
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
    "other conventions": (
        lambda rank, call: call(leaf(), ROWS, COLUMNS, replica_grads="copies" if rank else "parts"),
        "redistribute: ranks disagree about replica_grads: rank 0 asks for parts, rank 1 for "
        "copies.",
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


def misuse(rank: int, what: str) -> str:
    """Make a bad call in a new group, where nothing is agreed yet."""
    call = partial(rv.redistribute, group=dist.new_group(list(range(4))))
    return error_of(lambda: ERRORS[what][0](rank, call))


@pytest.mark.parametrize("what", ERRORS)
def test_misuse_is_an_error_on_every_rank(worlds: Worlds, what: str) -> None:
    assert worlds(4).run(misuse, what) == [f"LayoutError: {ERRORS[what][1]}"] * 4


def misuse_out_later(rank: int) -> str:
    rv.redistribute(leaf(), ROWS, COLUMNS)
    return error_of(lambda: rv.redistribute(leaf(), ROWS, COLUMNS, out=torch.zeros(4, 1)))


def test_out_in_a_later_call_with_grad_is_an_error(worlds: Worlds) -> None:
    error = (
        f"{SHORT}: rank {{}} passed out, through which no gradient flows; leave it out, or pass "
        "requires_grad=False."
    )
    wanted = [f"LayoutError: {error.format(rank)}" for rank in range(4)]
    assert worlds(4).run(misuse_out_later) == wanted


def write_out_of_a_tensor_that_requires_grad(rank: int) -> tuple[float, bool]:
    out = torch.zeros(4, 1)
    result = rv.redistribute(leaf(), ROWS, COLUMNS, out=out, requires_grad=False)
    return out.sum().item(), result.requires_grad


def test_out_is_accepted_with_requires_grad_false(worlds: Worlds) -> None:
    assert worlds(4).run(write_out_of_a_tensor_that_requires_grad) == [(4.0, False)] * 4
