"""Small graphs made by hand, and random plans of them: no torch model is needed to test plans."""

from __future__ import annotations

import superscaler_core as ss
from superscaler_core.graph import Graph


def two_linears(batch: int = 4, width: int = 6, hidden: int = 8, out: int = 5) -> Graph:
    """``sum((x up^T) down^T)``: two matrices, each of which can be cut in three ways."""
    builder = ss.GraphBuilder("two_linears")
    up = builder.parameter("up.weight", (hidden, width), "float64")
    down = builder.parameter("down.weight", (out, hidden), "float64")
    x = builder.input("x", (batch, width), "float64")
    (h,) = builder.op(
        "linear", "b k+, n k+ -> b n", [x, up], [((batch, hidden), "float64")],
        "F.linear({x0}, {x1})", module="up", flops=2.0,
    )  # fmt: skip
    (a,) = builder.op(
        "tanh", "b n -> b n", [h], [((batch, hidden), "float64")], "torch.tanh({x0})",
        module="act", saves=(1,),
    )  # fmt: skip
    (y,) = builder.op(
        "linear", "b k+, n k+ -> b n", [a, down], [((batch, out), "float64")],
        "F.linear({x0}, {x1})", module="down", flops=2.0,
    )  # fmt: skip
    (loss,) = builder.op("sum", "b+ n+ -> ()", [y], [((), "float64")], "{x0}.sum()", module="loss")
    return builder.build(loss)


def on_one(plan: ss.Plan, device: int = 0) -> ss.Plan:
    """Everything on one device."""
    for op in plan.graph.ops:
        plan.op_assign(op, device)
    return plan
