"""Model FLOPs: the floating-point operations that a model itself needs, whatever the plan does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from superscaler_core.cost.op_time import backward_products
from superscaler_core.graph.graph import Graph, Op


class ModelFlops(NamedTuple):
    """The operations of one microbatch of a model.

    Attributes:
        forward, backward: floating-point operations.
        dtype: the dtype of the results with most of them.
    """

    forward: float
    backward: float
    dtype: str


def model_flops(graph: Graph) -> ModelFlops:
    """Count the operations of a model's ops, as the cost model does, each once.

    Recomputation, copies of ops on several devices and communication are left out: it is what the
    model asks for, not what a plan computes. A product of matrices counts a multiplication and an
    addition for each of its terms, as papers do (Chowdhery et al. 2022, appendix B); other ops
    count one operation per iteration of their loops.

    >>> import superscaler_core as ss
    >>> builder = ss.GraphBuilder("product")
    >>> x = builder.input("x", (8, 3), "float32")
    >>> w = builder.parameter("w", (5, 3), "float32")
    >>> (y,) = builder.op("linear", "b k+, n k+ -> b n", [x, w], [((8, 5), "float32")],
    ...     "F.linear({x0}, {x1})", flops=2.0)
    >>> (loss,) = builder.op("sum", "b+ n+ -> ()", [y], [((), "float32")], "{x0}.sum()")
    >>> model_flops(builder.build(loss))
    ModelFlops(forward=280.0, backward=280.0, dtype='float32')
    """
    by_dtype = Counter[str]()
    forward = backward = 0.0
    for op, flops in _each(graph):
        forward += flops
        backward += flops * backward_products(op.form)
        by_dtype[op.outputs[0].dtype] += flops  # type: ignore[assignment]
    ((dtype, _),) = by_dtype.most_common(1) or [("float32", 0)]
    return ModelFlops(forward, backward, dtype)


def _each(graph: Graph) -> Iterator[tuple[Op, float]]:
    return ((op, op.flops * prod(op.sizes.values())) for op in graph.ops)
