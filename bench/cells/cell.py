"""Cells: a model on a number of GPUs, and the plan that a planner finds for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bench.cells.cluster import PAPER, Cluster
from bench.cells.hurried import hurried
from bench.cells.processes import CLOCK
from bench.cells.workload import Workload
from superscaler_core import Found, Precision
from superscaler_core.cost import comm_costs_on
from superscaler_core.errors import PlanError
from superscaler_core.evaluation import Request, SearchPlanner, with_overlap
from superscaler_core.planners import PLANNERS, search_request
from superscaler_core.simulator import simulate

PULLS = {"intra": ("p2p", "rvd"), "inter": ("rvd", "p2p"), "both": ("p2p", "p2p")}
"""Communication (inside stages, between stages), by the place where it is point-to-point."""


@dataclass(frozen=True)
class Cell:
    """A model on a number of GPUs.

    Attributes:
        name: name of the model, its sizes and the number of GPUs.
        workload: the model, its batch and its optimizer.
        num_gpus: number of GPUs.
        systems: planners of this cell that are not in the table of planners, by name.
        first: names in the table of planners that run before all others.
        communication: how tensors move, as in ``simulate``.
        cluster: the hosts and links.
        has_check: whether a search checks its plan on a captured graph, within its budget. If not,
            the graph is one that ``Resizing`` made.
        pulled: planners whose rows have the times of point-to-point communication (``PULLS``).
        overlaps: whether planners of the table get each candidate with overlap too.
        clusters: the hosts and links of planners that have others, by name.
    """

    name: str
    workload: Workload
    num_gpus: int
    systems: Mapping[str, SearchPlanner]
    first: tuple[str, ...] = ("auto",)
    communication: str = "rvd"
    cluster: Cluster = PAPER
    has_check: bool = True
    pulled: tuple[str, ...] = ()
    overlaps: bool = True
    clusters: Mapping[str, Cluster] = field(default_factory=dict)

    def planner(self, name: str, budget_secs: float) -> SearchPlanner:
        """A planner by its name.

        If the cell ``overlaps``, planners of the table also get each candidate with overlap;
        ``auto`` decides overlap itself.

        Args:
            name: name of a system of this cell, or in the table of planners.
            budget_secs: time limit of the search; it also limits the planner's own computation.
        """
        if name in self.systems:
            return self.systems[name]
        if name == "auto":
            return PLANNERS[name]
        planner = PLANNERS[name]
        offered = with_overlap(planner) if self.overlaps else planner
        return hurried(offered, budget_secs, CLOCK)

    def request(self, planner: str = "") -> Request:
        """The request of a planner; all get the same, but for ``clusters``."""
        workload, cluster = self.workload, self.clusters.get(planner, self.cluster)
        graphs = workload.graphs
        return Request(
            graphs,
            workload.samples,
            workload.batch,
            tuple(range(self.num_gpus)),
            cluster.topology(self.num_gpus),
            cluster.profile,
            cluster.limit_bytes,
            optimizer=workload.optimizer,
            precision=Precision(workload.master_dtype),
            recycle=workload.recycle,
            communication=self.communication,
            captured=graphs.as_captured if self.has_check else None,
            clock=CLOCK,
        )

    def row(self, planner: str, budget_secs: float, max_tried: int = 0) -> dict[str, Any]:
        """A planner's result as a row; ``problem`` says why there is none.

        The model is captured before the search begins, because capturing is equal for all planners.

        Args:
            planner: name of the planner.
            budget_secs: time limit of the search.
            max_tried: limit of its evaluations; 0 for none. With one, the same code finds the same
                plan again.
        """
        head = {"cell": self.name, "gpus": self.num_gpus, "planner": planner}
        self.workload.capture()
        request = self.request(planner)
        try:
            found = search_request(
                request,
                self.planner(planner, budget_secs),
                budget_secs=budget_secs,
                max_tried=max_tried,
            )
        except PlanError as error:
            return {**head, "problem": str(error)}
        pulled = {"pulled_secs": _pulled_secs(found)} if planner in self.pulled else {}
        return {**head, **_figures(found), **pulled}


def _pulled_secs(found: Found) -> dict[str, float]:
    """Seconds of a step of the plan with point-to-point communication."""
    request, comm_costs = (
        found.request,
        comm_costs_on(found.request.topology, found.request.profile.measured),
    )
    return {
        where: simulate(
            found.compiled, request.profile, intra=intra, inter=inter, comm_costs=comm_costs
        ).secs
        for where, (intra, inter) in PULLS.items()
    }


def _figures(found: Found) -> dict[str, Any]:
    """Figures of one step of the plan: time and its shares, memory, and communication."""
    request, best = found.request, found.best
    samples, parts = best.candidate.samples, best.breakdown
    assert parts is not None, "the best trial was simulated in full"
    return {
        "plan": found.name,
        "samples": samples,
        "microbatches": request.microbatches(samples),
        "secs": found.secs,
        "bound_secs": found.bound.secs,
        "samples_per_sec": found.samples_per_sec,
        "peak_bytes": found.peak_bytes,
        "memory": parts.memory,
        "shares": parts.shares,
        "levels": parts.levels,
        "tried": len(found.tried),
        "full": found.num_full,
        "skipped": found.num_skipped,
        "left": found.num_left,
        "search_secs": found.search_secs,
    }
