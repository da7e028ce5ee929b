"""Graphs with sharding specs: the mixture of experts of GShard, and random graphs."""

from __future__ import annotations

import random
from collections.abc import Mapping

import torch
from torch import Tensor, nn

import superscaler_core as ss
from superscaler_core.models import top_gating
from superscaler_core.published.gspmd import Mesh, Propagated, complete


class Experts(nn.Module):
    """A layer of experts as in GShard, with GShard's sharding specs, after a linear map.

    The linear map makes the inputs of the layer activations, as in a model.
    """

    def __init__(self, width: int = 6, hidden: int = 10, experts: int = 4) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.randn(width, width))
        self.wg = nn.Parameter(torch.randn(width, experts))
        self.wi = nn.Parameter(torch.randn(experts, width, hidden))
        self.wo = nn.Parameter(torch.randn(experts, hidden, width))

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = ss.shard(inputs @ self.before, "d0@x")
        wg = ss.shard(self.wg, "*@-")
        gates = torch.einsum("gsm,me->gse", inputs, wg)
        combine, balance = top_gating(gates, top=2, capacity=4)
        mask = (combine > 0).to(inputs.dtype)
        dispatched = torch.einsum("gsec,gsm->egcm", mask, inputs)
        dispatched = ss.shard(dispatched, "d0@x")
        h = torch.einsum("egcm,emh->egch", dispatched, self.wi).relu()
        made = torch.einsum("egch,ehm->gecm", h, self.wo)
        outputs = torch.einsum("gsec,gecm->gsm", combine, made)
        return outputs.square().mean() + balance.mean()


def completed(graph: ss.Graph, mesh: str, specs: Mapping[str, str] | None = None) -> Propagated:
    """The completed sharding specs of a graph on a mesh."""
    grid = Mesh.parse(mesh)
    said = {name: ss.ShardSpec.parse(text) for name, text in (specs or {}).items()}
    return complete(graph, range(grid.num_devices), grid, said)


def random_graph(seed: int) -> tuple[ss.Graph, dict[str, str]]:
    """A random graph of products, sums, transpositions and softmaxes; and specs of 3 tensors."""
    rng = random.Random(seed)
    builder = ss.GraphBuilder("random")
    sizes = (4, 8, 12)
    made = [
        builder.input(f"x{i}", (rng.choice(sizes), rng.choice(sizes)), "float32") for i in range(3)
    ]
    made += [
        builder.parameter(f"w{i}", (rng.choice(sizes), rng.choice(sizes)), "float32")
        for i in range(3)
    ]
    for _ in range(8):
        x = rng.choice(made)
        product = [y for y in made if y.shape[1] == x.shape[1]]
        alike = [y for y in made if y.shape == x.shape]
        y, z = rng.choice(product), rng.choice(alike)
        made += rng.choice([
            lambda x=x, y=y: builder.op(
                "linear", "b k+, n k+ -> b n", [x, y],
                [((x.shape[0], y.shape[0]), "float32")], "F.linear({x0}, {x1})", flops=2.0),
            lambda x=x, z=z: builder.op(
                "add", "b n, b n -> b n", [x, z], [(x.shape, "float32")], "{x0} + {x1}"),
            lambda x=x: builder.op(
                "turn", "b n -> n b", [x], [(x.shape[::-1], "float32")], "{x0}.t()"),
            lambda x=x: builder.op(
                "softmax", "b n^ -> b n^", [x], [(x.shape, "float32")], "{x0}.softmax(-1)"),
        ])()  # fmt: skip
    losses = [
        builder.op("sum", "b+ n+ -> ()", [x], [((), "float32")], "{x0}.sum()")[0] for x in made[-4:]
    ]
    (loss,) = builder.op(
        "total", "(), (), (), () -> ()", losses, [((), "float32")], "{x0} + {x1} + {x2} + {x3}"
    )
    graph = builder.build(loss)
    tensors = sorted({t.name for op in graph.ops for t in (*op.inputs, *op.outputs) if t.shape})
    words = ["d0@x", "d1@y", "d0@y, d1@x", "d0@x*y", "d1@-", "*@-", "d1@x"]
    return graph, {name: rng.choice(words) for name in rng.sample(tensors, 3)}
