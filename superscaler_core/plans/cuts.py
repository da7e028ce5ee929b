"""Cuts: which dims of a model plans mean by batch, sequence and inner features, and the cutting."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from math import gcd

from superscaler_core.errors import PlanError
from superscaler_core.graph.dims import DimClass
from superscaler_core.graph.graph import Op
from superscaler_core.plan import Axis, Device, Plan

INNER = (
    (
        ("*.attn.q.weight", 0),
        ("*.cross.q.weight", 0),
        ("*.mlp.up.weight", 0),
        ("*.experts.up", 2),
    ),
    (("*.conv2.weight", 0),),
    (("layers.*[02468].weight", 0),),
)
"""Dims that lie between two linear maps, by kind of model: transformer, bottleneck, MLP.

A parameter's name with wildcards, and a dim; the first row that fits a model is meant.
"""

VOCABULARY = (("embed.weight", 0), ("head.weight", 0))
"""Dims of the words in the embedding and in the head."""


def spread_all(
    plan: Plan, axes: Sequence[Axis], ops: Iterable[Op], devices: Sequence[Device]
) -> None:
    """Cut or replicate ops along every axis of a grid of devices.

    Raises:
        PlanError: a dim is too small, or cannot be cut alike in all ops; the message says into
            how many pieces it can.
    """
    chosen = tuple(ops)
    # By dim and number of pieces: the sizes of its loops, each with one op that has it.
    loops: dict[tuple[DimClass, int], dict[int, Op]] = {}
    for op in chosen:
        for dim, num in _pieces_of(plan, axes, op).items():
            size = op.sizes[plan.dims.ids(op, dim)[0]]
            loops.setdefault((dim, num), {}).setdefault(size, op)
    for (dim, num), sizes in loops.items():
        check_cut(plan.graph.name, dim, num, sizes)
    for op in chosen:
        plan.spread(op, devices, axes)


def _pieces_of(plan: Plan, axes: Sequence[Axis], op: Op) -> dict[DimClass, int]:
    """Into how many pieces all axes together cut the dims of an op."""
    found: dict[DimClass, int] = {}
    for axis in axes:
        dim = next((dim for dim in axis.dims if plan.dims.ids(op, dim)), None)
        if dim is not None and axis.num > 1:
            found[dim] = found.get(dim, 1) * axis.num
    return found


def check_cut(model: str, dim: DimClass, num: int, sizes: Mapping[int, Op]) -> None:
    """All loops of a dim can be cut at the same places.

    Args:
        model: name, for messages.
        dim: what is cut.
        num: pieces.
        sizes: of its loops, each with one op that has it.

    Raises:
        PlanError: they cannot; the message says into how many pieces they can.
    """
    # Loops of one size are cut alike wherever; of several, at multiples of the coarsest grain.
    grain = gcd(*sizes)
    if num <= grain and (len(sizes) == 1 or grain % num == 0):
        return
    counts = " and ".join(f"{size} in {op.name}" for size, op in sorted(sizes.items()))
    right = f"at most {grain}" if len(sizes) == 1 else f"a divisor of {grain}"
    raise PlanError(
        f"{model} cut along {dim} into {num}: it has {counts}; cut it into {right}, or make it "
        "larger."
    )


def sequences(plan: Plan) -> tuple[DimClass, ...]:
    """The dims of tokens: dim 1 of the inputs, such as of a source and of a target.

    Raises:
        PlanError: few ops have one of them, so they are no sequences.
    """
    dims = dict.fromkeys(plan.dims.of(t.name, 1) for t in plan.graph.inputs if len(t.shape) > 1)
    num_ops = len(plan.graph.ops)
    having = {dim: sum(bool(plan.dims.ids(op, dim)) for op in plan.graph.ops) for dim in dims}
    # Features of an input end at its first linear map; tokens are there all along.
    found = tuple(dim for dim, num in having.items() if 4 * num > num_ops)
    if 2 * sum(having[dim] for dim in found) > num_ops:
        return found
    raise PlanError(
        f"{plan.graph.name} has no sequence: an input such as {plan.graph.inputs[0]} should be "
        "[batch, sequence, ...] with a dim 1 that most ops keep; cut the batch instead "
        "(data_parallel)."
    )


def inner(plan: Plan, given: str = "") -> tuple[DimClass, ...]:
    """The inner features of all blocks: heads, features of MLPs.

    Args:
        plan: for its graph.
        given: parameters and dims to use, such as ``"blocks.*.fc1.weight:0,blocks.*.q.weight:0"``;
            those of ``INNER`` if empty.

    Raises:
        PlanError: a pattern fits no parameter.
    """
    return tuple(sorted(plan.dims.of_params(*_inner_params(plan, given))))


def width(plan: Plan, given: str = "") -> tuple[DimClass, ...]:
    """The features of the hidden state: the other dims of the matrices that have inner features.

    Args:
        plan, given: as of ``inner``.

    Raises:
        PlanError: as of ``inner``.
    """
    shapes = {name: tensor.shape for name, tensor in plan.graph.parameters.items()}
    params = [
        (name, 1 - dim)
        for pattern, dim in _inner_params(plan, given)
        for name, shape in shapes.items()
        if fnmatchcase(name, pattern) and len(shape) == 2
    ]
    return tuple(sorted(plan.dims.of_params(*params)))


def _inner_params(plan: Plan, given: str) -> list[tuple[str, int]]:
    """The parameters, with wildcards, and their dims that are inner features."""
    names = plan.graph.parameters
    rows = [[p for p in row if any(fnmatchcase(n, p[0]) for n in names)] for row in INNER]
    row = next((row for row in rows if row), [])
    if given:
        row = [_pattern(word) for word in given.split(",")]
    if not row:
        raise PlanError(
            f"{plan.graph.name} has no parameters named as its inner features usually are; say "
            "features='NAME:DIM,...', where NAME is a parameter, with wildcards, whose dim DIM is "
            f"cut. It has {', '.join(list(names)[:8])}, ..."
        )
    return row


def vocabulary(plan: Plan) -> tuple[DimClass, ...]:
    """The words, in the embedding and, where there is one, in the head.

    Raises:
        PlanError: the model has no such parameters.
    """
    known = {*plan.graph.parameters, *plan.graph.aliases}
    embedding, *heads = VOCABULARY
    rows = (embedding, *(row for row in heads if row[0] in known))
    return tuple(dict.fromkeys(plan.dims.of(name, dim) for name, dim in rows))


def last_scores(plan: Plan, words: Iterable[DimClass]) -> int:
    """The last op that gives each word a score; the number of ops if none does."""
    found = [
        op.index
        for op in plan.graph.ops
        for dim in words
        if {*plan.dims.ids(op, dim)} - {*op.annotation.reductions}
    ]
    return max(found, default=len(plan.graph.ops))


def _pattern(word: str) -> tuple[str, int]:
    name, _, dim = word.strip().rpartition(":")
    if not name or not dim.isdecimal():
        raise PlanError(f"features: {word.strip()!r} should be NAME:DIM, such as 'up.weight:0'.")
    return name, int(dim)
