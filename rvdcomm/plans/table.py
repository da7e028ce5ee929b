"""Table: the printout of a bundle: one line per tensor, and the totals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rvdcomm.cost import port_secs
from rvdcomm.units import bytes_text, secs_text

if TYPE_CHECKING:
    from rvdcomm.plans.bundle import Bundle
    from rvdcomm.plans.member import Way


MAX_COLUMNS = 100
HEAD = ("tensor", "transition", "sent", "steps", "time", "peak")
FIGURES = "  {:>9}  {:>5}  {:>8}  {:>9}"
NUM_FIGURE_COLUMNS = len(FIGURES.format(*HEAD[2:]))
MAX_TRANSITION = 40


def rows(bundle: Bundle) -> Iterator[str]:
    """One line per tensor: bytes, steps, time and peak memory of its own plan."""
    lines: list[tuple[str, ...]] = [HEAD]
    known: dict[Way, tuple[str, ...]] = {}
    for member in bundle.members:
        if member.way not in known:
            known[member.way] = _figures(member.way)
        lines.append((member.name, *known[member.way]))
    middle = min(max(len(line[1]) for line in lines), MAX_TRANSITION)
    rest = MAX_COLUMNS - NUM_FIGURE_COLUMNS - middle - 2
    left = min(max(len(line[0]) for line in lines), rest)
    for name, text, *figures in lines:
        # The end of a name tells tensors apart, the start of a transition its two sides.
        name = name if len(name) <= left else f"..{name[2 - left :]}"
        text = text if len(text) <= middle else f"{text[: middle - 2]}.."
        yield f"{name:<{left}}  {text:<{middle}}{FIGURES.format(*figures)}"


def _figures(way: Way) -> tuple[str, ...]:
    """The columns that equal tensors share."""
    cost, transition = way.plan.cost, way.transition
    return (
        f"{transition.src.rvd} -> {transition.dst.rvd}",
        bytes_text(cost.wire_bytes),
        str(len(way.plan.path.steps)),
        secs_text(cost.secs),
        bytes_text(cost.peak_bytes),
    )


def totals(bundle: Bundle) -> Iterator[str]:
    """Bytes, collectives, time and peak memory of the call.

    The time is compared with that of the busiest port, whose bytes are the same in any order.
    """
    cost = bundle.cost
    shards = max(bundle.shard_bytes(rank) for rank in bundle.ranks)
    ways = {(m.transition.src_dtype, m.transition.dst_dtype): None for m in bundle.members}
    dtypes = ", ".join(a if a == b else f"{a} -> {b}" for a, b in ways)
    yield (
        f"total  {len(bundle.members)} tensors ({dtypes}) on {len(bundle.ranks)} ranks: "
        f"{bytes_text(cost.wire_bytes)} sent ({bytes_text(cost.host_bytes)} between hosts)"
    )
    busy_secs = port_secs(bundle.busiest_bytes, 0, bundle.topology)
    gap = f" ({cost.secs / busy_secs:.3g}x the busiest port)" if busy_secs else ""
    yield (f"       {_calls_text(bundle)}, {secs_text(cost.secs)}{gap}")
    yield (
        f"       peak {bytes_text(cost.peak_bytes)} per rank: shards {bytes_text(shards)}, "
        f"staging {'' if bundle.is_counted else 'at most '}{bytes_text(bundle.staging_bytes)}"
    )


def _calls_text(bundle: Bundle) -> str:
    """The number of collectives, or in large bundles of buckets."""
    if not bundle.is_counted:
        num_buckets = sum(len(batch.buckets) for batch in bundle.batches)
        return f"{len(bundle.batches)} programs of {num_buckets} buckets, modelled"
    num_calls = sum(len(program.collectives) for program in bundle.programs)
    alone = sum(len(member.plan.program.collectives) for member in bundle.members)
    steps = len(bundle.step_costs)
    return f"{num_calls} collectives ({alone} one by one) in {steps} step{'s' * (steps > 1)}"
