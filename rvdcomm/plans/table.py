"""Table: the lines of a bundle's printout, one per tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rvdcomm.plans.member import Member, TensorPlan
from rvdcomm.units import bytes_text, secs_text

MAX_COLUMNS = 100
HEAD = ("tensor", "transition", "sent", "steps", "time", "peak")
FIGURES = "  {:>9}  {:>5}  {:>8}  {:>9}"
NUM_FIGURE_COLUMNS = len(FIGURES.format(*HEAD[2:]))
MAX_TRANSITION = 40


def rows(members: Sequence[Member]) -> Iterator[str]:
    """One line per tensor: bytes, steps, time and peak memory of its own plan."""
    lines: list[tuple[str, ...]] = [HEAD]
    known: dict[TensorPlan, tuple[str, ...]] = {}
    for member in members:
        if member.tensor_plan not in known:
            known[member.tensor_plan] = _figures(member.tensor_plan)
        lines.append((member.name, *known[member.tensor_plan]))
    middle = min(max(len(line[1]) for line in lines), MAX_TRANSITION)
    rest = MAX_COLUMNS - NUM_FIGURE_COLUMNS - middle - 2
    left = min(max(len(line[0]) for line in lines), rest)
    for name, text, *figures in lines:
        # Long names keep their end, which differs between tensors; transitions keep their start.
        name = name if len(name) <= left else f"..{name[2 - left :]}"
        text = text if len(text) <= middle else f"{text[: middle - 2]}.."
        yield f"{name:<{left}}  {text:<{middle}}{FIGURES.format(*figures)}"


def _figures(tensor_plan: TensorPlan) -> tuple[str, ...]:
    """The columns that are equal for all tensors of a way."""
    cost, transition = tensor_plan.plan.cost, tensor_plan.transition
    return (
        f"{transition.src.rvd} -> {transition.dst.rvd}",
        bytes_text(cost.wire_bytes),
        str(len(tensor_plan.plan.path.steps)),
        secs_text(cost.secs),
        bytes_text(cost.peak_bytes),
    )
