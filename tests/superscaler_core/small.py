"""Small graphs built by hand, so that tests of plans need no torch model."""

from __future__ import annotations

import superscaler_core as ss


def two_linears(batch: int = 4, width: int = 6, hidden: int = 8, out: int = 5) -> ss.Graph:
    """``sum(tanh(x up^T) down^T)``: two products, each with three loops that can be split."""
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
    """Assign all ops of a plan to one device."""
    for op in plan.graph.ops:
        plan.op_assign(op, device)
    return plan


def branched() -> ss.Graph:
    """A graph with many features of models.

    It has a weight that is used twice, a skip connection, a mask without gradient, and an op with
    two outputs.
    """
    builder = ss.GraphBuilder("branched")
    up = builder.parameter("up.weight", (8, 6), "float64")
    down = builder.parameter("down.weight", (6, 8), "float64")
    x = builder.input("x", (4, 6), "float64")

    def op(kind: str, annotation: str, reads: list[ss.PTensor], *shapes: tuple[int, ...],
           code: str, dtype: str = "float64") -> list[ss.PTensor]:  # fmt: skip
        outputs = [(shape, dtype) for shape in shapes]
        return [*builder.op(kind, annotation, reads, outputs, code, module=kind)]

    linear, hidden, inner = "b k+, n k+ -> b n", (4, 8), (4, 6)
    (h,) = op("up", linear, [x, up], hidden, code="F.linear({x0}, {x1})")
    (mask,) = op("mask", "b n -> b n", [h], hidden, code="({x0} > 0)", dtype="bool")
    (a,) = op("select", "b n, b n -> b n", [mask, h], hidden, code="torch.where({x0}, {x1}, 0)")
    (y,) = op("down", linear, [a, down], inner, code="F.linear({x0}, {x1})")
    s, c = op("waves", "b n -> b n, b n", [y], inner, inner, code="({x0}.sin(), {x0}.cos())")
    (z,) = op("add", "b n, b n -> b n", [s, c], inner, code="{x0} + {x1} * {x1}")
    (again,) = op("up_again", linear, [z, up], hidden, code="F.linear({x0}, {x1})")
    (p,) = op("times", "b n, b n -> b n", [again, a], hidden, code="{x0} * {x1}")
    (loss,) = op("loss", "b+ n+ -> ()", [p], (), code="{x0}.sum()")
    return builder.build(loss)
