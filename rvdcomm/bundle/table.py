"""Table: a bundle for people, a line a tensor and the totals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rvdcomm.units import bytes_text, secs_text

if TYPE_CHECKING:
    from rvdcomm.bundle import Bundle


def rows(bundle: Bundle) -> Iterator[str]:
    width = min(max(len(member.name) for member in bundle.members), 24)
    widths = (9, 5, 8, 9)

    def row(name: str, text: str, figures: Sequence[str]) -> str:
        right = "".join(f"  {figure:>{w}}" for figure, w in zip(figures, widths, strict=True))
        return f"{name:<{width}}  {text:<34}{right}"

    yield row("tensor", "transition", ("sent", "steps", "time", "peak"))
    for member in bundle.members:
        cost, transition = member.plan.cost, member.transition
        text = f"{transition.src.rvd} -> {transition.dst.rvd}"
        figures = (
            bytes_text(cost.wire_bytes),
            str(len(member.plan.path.steps)),
            secs_text(cost.secs),
            bytes_text(cost.peak_bytes),
        )
        name = member.name if len(member.name) <= width else f"..{member.name[2 - width :]}"
        yield row(name, text, figures)


def totals(bundle: Bundle) -> Iterator[str]:
    cost = bundle.cost
    staging = max(bundle.staging_bytes(rank) for rank in bundle.ranks)
    shards = max(bundle.shard_bytes(rank) for rank in bundle.ranks)
    num_calls = sum(len(batch.program.collectives) for batch in bundle.batches)
    alone = sum(len(member.plan.program.collectives) for member in bundle.members)
    ways = {(m.transition.src_dtype, m.transition.dst_dtype): None for m in bundle.members}
    dtypes = ", ".join(a if a == b else f"{a} -> {b}" for a, b in ways)
    yield (
        f"total  {len(bundle.members)} tensors ({dtypes}) on {len(bundle.ranks)} ranks: "
        f"{bytes_text(cost.wire_bytes)} sent ({bytes_text(cost.host_bytes)} between hosts)"
    )
    yield (
        f"       {num_calls} collectives ({alone} one by one) in {len(bundle.step_costs)} steps, "
        f"{secs_text(cost.secs)}"
    )
    yield (
        f"       peak {bytes_text(cost.peak_bytes)} a rank: shards {bytes_text(shards)}, "
        f"staging {bytes_text(staging)}"
    )
