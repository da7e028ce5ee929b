"""Opaque ops in words: which ops are opaque, their share of the time, and how to split them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from math import prod
from operator import itemgetter

from superscaler_core.graph.graph import Graph, Op
from superscaler_core.graph.tensor import PARAMETER, PTensor
from superscaler_core.grouped import grouped

FLOPS_PER_BYTE = 96
"""Floating-point operations that take as long as one byte of memory traffic, for an estimate. On an
A100 in bfloat16, at half of its peak and 0.8 of its bandwidth: 312e12 * 0.5 / (2039e9 * 0.8)."""


def opaque_notes(graph: Graph) -> list[str]:
    """One line for every kind of opaque op, the largest share of the time first."""
    total = sum(map(_work, graph.ops))
    notes = []
    for (kind, pattern, hint), ops in grouped((_key(op), op) for op in graph.opaque).items():
        place, share = pattern or "the model itself", sum(map(_work, ops)) / max(total, 1)
        times = f", {len(ops)} times" if len(ops) > 1 else ""
        note = f"{kind} in {place}{times}: {share:.0%} of the forward (estimated). {hint}"
        notes.append((-share, note))
    return [note for _, note in sorted(notes, key=itemgetter(0))]


def _key(op: Op) -> tuple[str, str, str]:
    return op.kind, re.sub(r"(?<![^.])\d+(?![^.])", "*", op.module), op.hint


def rows_annotation(inputs: Sequence[PTensor], outputs: Sequence[Sequence[int]]) -> str:
    """The annotation of an op whose rows are independent: only the first dim can be cut.

    Parameters have no rows. The annotation is empty if no input has rows.

    >>> x = PTensor("x", (4, 6), "float32", "input", False)
    >>> w = PTensor("w", (4, 6), "float32", PARAMETER, True)
    >>> rows_annotation([x, w], [(4, 3)])
    'b d1_6^, d0_4^ d1_6^ -> b d1_3^'
    """
    rows = next((shape[0] for shape in outputs if shape), None)

    def dims(shape: Sequence[int], may_have_rows: bool) -> str:
        has_rows = may_have_rows and shape and shape[0] == rows
        return whole_dims(shape, 0 if has_rows else None)

    left = [dims(t.shape, t.kind != PARAMETER) for t in inputs]
    right = [dims(shape, True) for shape in outputs]
    is_cut = any(text.startswith("b") for text in left)
    return f"{', '.join(left)} -> {', '.join(right)}" if is_cut else ""


def whole_annotation(inputs: Iterable[Sequence[int]], outputs: Iterable[Sequence[int]]) -> str:
    """The annotation of an op that is never cut.

    >>> whole_annotation([(4, 6), ()], [(4, 3)])
    'd0_4^ d1_6^, () -> d0_4^ d1_3^'
    """
    return f"{', '.join(map(whole_dims, inputs))} -> {', '.join(map(whole_dims, outputs))}"


def whole_dims(shape: Sequence[int], batch: int | None = None) -> str:
    """An operand of fixed dims, but for the batch; equal dims at one position share a loop."""
    words = ("b" if i == batch else f"d{i}_{size}^" for i, size in enumerate(shape))
    return " ".join(words) or "()"


def _work(op: Op) -> float:
    """Estimated time of an op's forward, in bytes of memory traffic; views take none."""
    if not op.flops and not op.hint:
        return 0.0
    num_bytes = sum(t.num_bytes for t in (*op.inputs, *op.outputs))
    return max(num_bytes, op.flops * prod(op.sizes.values()) / FLOPS_PER_BYTE)
