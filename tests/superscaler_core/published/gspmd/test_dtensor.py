"""Comparison with torch's DTensor: an op with cut operands has a result with the same cut.

If an operand has to be moved, DTensor minimizes the bytes of operands that move, and we minimize
the price of the whole op. On one axis, DTensor's cut is then one of those that were priced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - as everybody writes it
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import superscaler_core as ss
from superscaler_core.published.gspmd.links import Specs, links_of
from superscaler_core.published.gspmd.price import Cut
from tests.superscaler_core.published.gspmd.programs import completed

AXES = ("x", "y")


@dataclass(frozen=True)
class Case:
    """One op and the shapes of its operands."""

    name: str
    function: Callable[..., Tensor]
    shapes: Sequence[tuple[int, ...]]

    def __str__(self) -> str:
        return self.name


CASES = [
    Case("mm", torch.mm, [(8, 4), (4, 12)]),
    Case("linear", F.linear, [(4, 8, 4), (12, 4)]),
    Case("embedding", lambda x, i: F.embedding(i.long(), x), [(8, 4), (4, 8)]),
    Case("add", torch.add, [(4, 8), (4, 8)]),
    Case("add_row", torch.add, [(4, 8), (8,)]),
    Case("gelu", F.gelu, [(4, 8)]),
    Case("transpose", lambda x: x.transpose(0, 1), [(4, 8)]),
    Case("sum", lambda x: x.sum(1), [(4, 8)]),
    Case("softmax", lambda x: x.softmax(-1), [(4, 8)]),
    Case("layer_norm", lambda x: F.layer_norm(x, (8,)), [(4, 12, 8)]),
]


TWO_AXES = ("mm", "add", "gelu", "transpose", "softmax")


class Alone(nn.Module):
    """A model of one op."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: Tensor) -> Tensor:
        return self.function(*tensors).exp().sum()


@pytest.fixture(scope="module")
def world() -> Iterator[None]:
    """A fake process group of four ranks, of which this is rank 0; no data is sent."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


def of_dtensor(case: Case, mesh: DeviceMesh, given: Sequence[Sequence[Placement]]) -> list[str]:
    """DTensor's placement of the result along every axis of the mesh."""
    tensors = [
        DTensor.from_local(
            torch.zeros([
                size // prod(mesh.size(i) for i, p in enumerate(placements) if p == Shard(dim))
                for dim, size in enumerate(shape)
            ]),
            mesh, list(placements), run_check=False,
        )
        for shape, placements in zip(case.shapes, given, strict=True)
    ]  # fmt: skip
    return [_word(p) for p in case.function(*tensors).placements]


def _word(placement: Placement) -> str:
    if isinstance(placement, Shard):
        return f"d{placement.dim}"
    return "-" if isinstance(placement, Replicate) else "sum"


def spec_of(placements: Sequence[Placement], rank: int) -> str:
    """The placements as a spec that gives every dim."""
    cuts = {
        dim: [axis for axis, p in zip(AXES, placements, strict=False) if p == Shard(dim)]
        for dim in range(rank)
    }
    return ", ".join([*(f"d{dim}@{'*'.join(axes)}" for dim, axes in cuts.items() if axes), "*@-"])


def result_of(op: ss.Op, cut: Cut, num_axes: int) -> list[str]:
    """For every axis: the dim of the result that it cuts, ``sum`` for a partial sum, or ``-``."""
    result = len(op.inputs)
    dims = {link.loop: f"d{link.dim}" for link in links_of(op.form) if link.operand == result}
    found = {axis: dims.get(loop, "sum") for loop, axes in cut for axis in axes}
    return [found.get(axis, "-") for axis in AXES[:num_axes]]


def stays(op: ss.Op, cut: Cut, specs: Specs) -> bool:
    """Whether the op reads every operand, or a part of it, without moving it."""
    cuts = dict(cut)
    read = {(link.operand, link.dim): cuts.get(link.loop, ()) for link in links_of(op.form)}
    return all(
        not axes or read.get((number, dim), ()) == axes
        for number, tensor in enumerate(op.inputs)
        for dim, axes in enumerate(specs[tensor.name])
    )


@pytest.mark.parametrize(
    ("case", "num_axes"),
    # Along two axes, DTensor fails on the other ops, such as those that flatten dims for a product.
    [(case, 2 if case.name in TWO_AXES else 1) for case in CASES],
    ids=str,
)
def test_results_are_cut_as_those_of_dtensor(case: Case, num_axes: int, world: None) -> None:
    mesh = init_device_mesh("cpu", (4,) if num_axes == 1 else (2, 2))
    graph = ss.capture(Alone(case.function), [torch.zeros(s) for s in case.shapes])
    options = [
        [*product([*map(Shard, range(len(shape))), Replicate()], repeat=num_axes)]
        for shape in case.shapes
    ]
    num_same = 0
    for given in product(*options):
        sizes = {"x": 4} if num_axes == 1 else {"x": 2, "y": 2}
        said = {
            tensor.name: spec_of(placements, len(tensor.shape))
            for tensor, placements in zip(graph.inputs, given, strict=True)
        }
        found = completed(graph, ",".join(f"{a}:{n}" for a, n in sizes.items()), said)
        op = graph.ops[-3]  # exp and sum follow
        theirs = of_dtensor(case, mesh, given)
        if stays(op, found.cuts[op], found.specs):
            assert result_of(op, found.cuts[op], num_axes) == theirs, said
            num_same += 1
        for choice in found.choices if num_axes == 1 else ():
            if choice.op == op.name:
                assert theirs in [result_of(op, cut, 1) for cut, _ in choice.prices], said
    assert num_same > 1
