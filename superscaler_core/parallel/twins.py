"""Twins: which op of a microbatch's graph is which op of the graph of more samples.

Both have the same names in the same order. With one sample alone some ops do nothing, such as
``cls.expand(len(x), -1, -1)``: the larger graph alone has them, and later names have other numbers.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from math import prod

from superscaler_core.graph.graph import Graph, Op

_COUNT = re.compile(r"_\d+$")


def twins_of(narrow: Graph, wide: Graph, num: int) -> Mapping[Op, Op | None]:
    """The op of ``narrow`` for every op of ``wide`` that has one; None if it does nothing there.

    The graphs are those of a microbatch and of two; ``num`` is the number of samples of the latter.
    """
    named = {op.name: op for op in narrow.ops}
    if num != 2 or all(op.name in named for op in wide.ops):
        return {op: named[op.name] for op in wide.ops if op.name in named}
    found: dict[Op, Op | None] = {}
    rest = deque(narrow.ops)
    for op in wide.ops:
        if rest and _base(rest[0]) == _base(op):
            found[op] = rest.popleft()
        elif _does_nothing_for_one(op, num):
            found[op] = None
        elif op.name in named:
            found[op] = named[op.name]
            while rest and rest.popleft() is not found[op]:
                pass
    return found


def _base(op: Op) -> str:
    """The name of an op without the number that makes it unique."""
    return _COUNT.sub("", op.name)


def _does_nothing_for_one(op: Op, num: int) -> bool:
    """Whether an op of ``num`` samples only moves or repeats elements, and does nothing for one."""
    if op.flops or op.hint or len(op.inputs) != 1 or len(op.outputs) != 1:
        return False
    before, after = prod(op.inputs[0].shape), prod(op.outputs[0].shape)
    return after in (before, num * before)
