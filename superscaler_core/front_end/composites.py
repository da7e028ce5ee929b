"""Composites: ops without a rule that torch itself computes by other ops.

If an op computes something without gradient inside, this is not noticed. The only known case in
torch is ``cosine_similarity``, where vectors shorter than ``eps`` get another gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch._decomp import decomposition_table
from torch.fx.experimental.proxy_tensor import make_fx

_BY_OTHERS = {f"aten.{name}.default" for name in ("glu", "soft_margin_loss")}
"""Ops with a kernel and a backward of their own that torch can also compute by other ops, with the
same gradients everywhere. For most other ops with a kernel, the two gradients differ at points
without a derivative."""

_KEPT = ("nn_module_stack", "stack_trace")
"""Metadata that inner calls take over from the call that they compute."""


def composed(node: fx.Node) -> fx.GraphModule | None:
    """The calls of other ops by which torch computes a call, of ``node.all_input_nodes``.

    None if torch computes the op by a kernel of its own, or if the inner calls depend on values.
    """
    target: Any = node.target
    inputs = node.all_input_nodes
    fakes = [other.meta["val"] for other in inputs]
    known = {target: decomposition_table[target]} if str(target) in _BY_OTHERS else {}
    if not (known or target._can_decompose()) or not all(isinstance(x, Tensor) for x in fakes):
        return None

    def call(*tensors: Tensor) -> Any:
        given = dict(zip(inputs, tensors, strict=True))
        args, keywords = fx.map_arg((node.args, node.kwargs), given.__getitem__)
        return target(*args, **keywords)

    try:
        with torch.no_grad():
            made: fx.GraphModule = make_fx(call, known)(*fakes)
    except Exception:  # the op looks at values, or torch cannot run it without values
        return None
    parts = [other for other in made.graph.nodes if other.op not in ("placeholder", "output")]
    for part in parts:
        part.meta |= {key: node.meta[key] for key in _KEPT if key in node.meta}
    # A call that checks values returns nothing.
    is_whole = all(part.op == "call_function" and "val" in part.meta for part in parts)
    return made if is_whole else None
