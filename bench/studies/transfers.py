"""RVD on and off: the studies' communication by rvdcomm's plans and by point-to-point messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import rvdcomm as rv
from bench.cells.cell import PULLS
from bench.cells.cluster import PAPER
from bench.rvd.cases import make_cases
from bench.tables import Lines
from superscaler_core.cost import TICKS_PER_SEC, CommCosts
from superscaler_core.materialize import Transfer

SIZES = ("64 KiB", "4 MiB", "64 MiB")

GROUPS = {"n->n": (4, 4), "n->2n": (4, 8), "2n->n": (8, 4)}
"""Sizes of the src and the dst group; the two groups are on different hosts."""


# --- the 18 cases -------------------------------------------------------------------------------


def cases() -> Iterator[dict[str, Any]]:
    """The cases between two hosts, and those in one group over both hosts, by both methods."""
    comm_costs = CommCosts(PAPER.topology(16))
    hosts = range(8), range(8, 16)
    groups: dict[str, tuple[Sequence[int], Sequence[int]]] = {
        name: (hosts[0][:a], hosts[1][:b]) for name, (a, b) in GROUPS.items()
    }
    groups["in group"] = (range(16), range(16))
    for case in make_cases(groups, SIZES):
        sub_transfer = Transfer(rv.Box.of_shape(case.layouts[0].shape), *case.layouts, "float32")
        if sub_transfer.is_idle:
            continue
        secs = {m: comm_costs.of([sub_transfer], m).ticks / TICKS_PER_SEC for m in ("rvd", "p2p")}
        if not secs["p2p"]:
            continue  # Every rank already holds its dst shard.
        yield {**case.to_json(), "secs": secs}


def case_lines(found: list[dict[str, Any]]) -> Lines:
    """Time of point-to-point over that of RVD, by case and size."""
    head = ["case", "groups", *SIZES]
    lines = [head]
    by_name = {(c["category"], c["relation"], c["size"]): c["secs"] for c in found}
    for category, relation in dict.fromkeys((c["category"], c["relation"]) for c in found):
        ratios = [by_name[category, relation, size] for size in SIZES]
        lines.append([category, relation, *(f"{s['p2p'] / s['rvd']:.2f}" for s in ratios)])
    return lines


def worst_text(found: list[dict[str, Any]]) -> str:
    """The largest ratio between two groups, and that of the paper."""
    worst = max(c["secs"]["p2p"] / c["secs"]["rvd"] for c in found if c["relation"] != "in group")
    return f"between groups up to {worst:.1f} x; the paper: up to 57 x"


# --- the studies --------------------------------------------------------------------------------


def pulled_lines(rows: Sequence[Mapping[str, Any]]) -> Lines:
    """Seconds of a step with RVD, and the ratios of steps with point-to-point moves to it.

    Rows in which no ratio differs from 1 by 1 % or more are left out.
    """
    lines = [["cell", "system", "RVD", *(f"{where} p2p" for where in PULLS)]]
    for row in rows:
        pulled_secs = row.get("pulled_secs", {})
        ratios = [pulled_secs[where] / row["secs"] for where in PULLS if where in pulled_secs]
        if any(abs(ratio - 1) >= 0.01 for ratio in ratios):
            texts = (f"{ratio:.2f} x" for ratio in ratios)
            lines.append([row["cell"], row["planner"], f"{row['secs']:.4g}", *texts])
    return lines
