"""Explain an edge: its writers and readers, and the plans of its communication, step by step."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from textwrap import fill

import rvdcomm as rv
from superscaler_core.errors import PlanError
from superscaler_core.graph.graph import Op
from superscaler_core.materialize.edges import Edge
from superscaler_core.materialize.materialized import Materialized
from superscaler_core.materialize.sharding import Sharding
from superscaler_core.materialize.transfer import Transfer
from superscaler_core.materialize.weights import Use

MAX_SHARDS = 4
"""Number of shards of an end that are printed."""


MOST_NAMES = 8
"""Most names of edges in a message."""


def explain_edge(made: Materialized, name: str, topology: rv.Topology | None = None) -> str:
    """An edge (``e3``) or a use of a weight (by its name): its ends, and the plans both ways.

    Raises:
        PlanError: there is no edge or use of that name.
    """
    found = _named(made, name)
    ends = _edge_ends(made, found) if isinstance(found, Edge) else _use_ends(found)
    lines = [f"{name}: {found.tensor} {found.tensor.dtype}"]
    for end, text in ends.items():
        lines.append(fill(text, 100, initial_indent=f"  {end:<8}", subsequent_indent=" " * 10))
    names = ("forward", "backward") if isinstance(found, Edge) else ("fetch", "reduce")
    for way in names:
        lines += _way(way, getattr(found, way), topology)
    return "\n".join(lines)


def _named(made: Materialized, name: str) -> Edge | Use:
    known: dict[str, Edge | Use] = {edge.name: edge for edge in made.edges.all}
    known |= {use.name: use for use in made.weights.uses}
    if name in known:
        return known[name]
    first = ", ".join(edge.name for edge in made.edges.all[:MOST_NAMES])
    more = ", ..." if len(made.edges.all) > MOST_NAMES else ""
    edges = f"edges of activations are {first}{more}; " if first else ""
    raise PlanError(
        f"there is no edge {name!r}; {edges}uses of weights have the names of parameters; near "
        f"are {', '.join(get_close_matches(name, known, 3, 0.0))}."
    )


def _edge_ends(made: Materialized, edge: Edge) -> dict[str, str]:
    writer = made.plan.graph.producer[edge.tensor].name
    source = writer if edge.parent is None else f"{writer} by edge {edge.parent.name}"
    return {
        "from": f"{source} in stage {edge.src_stage}: {_sharding_text(edge.src)}",
        "to": f"{_names(edge.readers)} in stage {edge.dst_stage}: {_sharding_text(edge.dst.whole)}",
    }


def _use_ends(use: Use) -> dict[str, str]:
    return {
        "stored": _sharding_text(use.storage),
        "read by": f"{_names(use.readers)}: {_sharding_text(use.sharding.whole)}",
    }


def _names(readers: Iterable[tuple[Op, int]]) -> str:
    return ", ".join(dict.fromkeys(op.name for op, _ in readers)) or "other edges"


def _sharding_text(sharding: Sharding) -> str:
    """The shards of an end, such as ``[0:4,0:8] on 0, [4:8,0:8] on 1``."""
    shards = [f"{shard.box} on {device}" for device, shard in sorted(sharding.shards.items())]
    more = len(shards) - MAX_SHARDS
    summands = f", in {sharding.num_summands} summands" if sharding.num_summands > 1 else ""
    return ", ".join(shards[:MAX_SHARDS]) + (f", {more} more" if more > 0 else "") + summands


def _way(name: str, transfers: tuple[Transfer, ...], topology: rv.Topology | None) -> list[str]:
    texts = []
    for each in transfers:
        if not each.is_idle:
            where = f" of region {each.box}" if len(transfers) > 1 else ""
            texts += ["", f"{name}{where}:", str(each.plan(topology))]
    return texts or ["", f"{name}: nothing moves"]
