"""MinCut: recursive bipartitioning of the groups and of the devices together.

Devices and groups are cut in two halves. Each half of the groups goes to a half of the devices, and
so on. Each half of the groups has its devices' share of the work, within a slack, and few bytes
pass between the halves. Devices are cut where links are slow. The order and overlap of operations
and the memory are ignored, so the result may be far from fast, as in the published comparisons.

A cut is spectral: groups are sorted by the Laplacian's second eigenvector (Fiedler) and cut where
the least bytes cross within the slack. Then single groups change sides while that lessens the
bytes.

Complexity: ``O(n**3)`` for n groups, by the eigenvectors.

Difference from the published rule: Scotch's dual recursive bipartitioning cuts by a multilevel
method with Fiduccia-Mattheyses moves that may pass worse cuts, and weighs a cut by the distance of
the devices; here cuts are spectral with improving moves alone.

Source: Pellegrini, Scotch (dual recursive bipartitioning), 1994; the baselines "Scotch" (with the
processor among the devices) and "MinCut" (without it) of Mirhoseini et al., ICML 2017.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from superscaler_core.published.placement.problem import PlacementProblem
from superscaler_core.space import Array, Solution


def min_cut(
    problem: PlacementProblem, devices: Sequence[int] | None = None, slack: float = 0.1
) -> Solution:
    """Place groups by balanced cuts of few bytes.

    Args:
        problem: the placement problem.
        devices: the devices to use; all if None.
        slack: how far the work of a half may be from its share, as a part of the work of both
            halves.

    Raises:
        PlanError: the placement does not fit in memory.
    """
    used = np.array(range(problem.num_devices) if devices is None else devices)
    secs = problem.group_secs[:, used]
    work = np.where(np.isfinite(secs), secs, 0.0).mean(axis=1)
    speeds = dict(
        zip(used.tolist(), (1 / np.maximum(secs.sum(axis=0), 1e-300)).tolist(), strict=True)
    )
    nearness = 1 / np.maximum(problem.message_secs.mean(axis=0), 1e-12) if problem.results else None
    at = np.zeros(len(problem.groups), dtype=np.int64)

    def place(groups: NDArray[np.int64], devices: NDArray[np.int64]) -> None:
        at[groups] = devices[0]
        if len(devices) == 1 or not len(groups):
            return
        near = np.arange(len(devices)) < len(devices) // 2
        if nearness is not None and len(devices) > 2:
            links = nearness[np.ix_(devices, devices)]
            near = bipartition(links + links.T, np.ones(len(devices)), 0.5, slack)
        rates = np.array([speeds[device] for device in devices.tolist()])
        share = float(rates[near].sum() / rates.sum())
        first = bipartition(problem.traffic[np.ix_(groups, groups)], work[groups], share, slack)
        place(groups[first], devices[near])
        place(groups[~first], devices[~near])

    place(np.arange(len(at)), used)
    return problem.solution(at, "MinCut")


def bipartition(weights: Array, work: Array, share: float, slack: float) -> NDArray[np.bool_]:
    """Which nodes are in the first half.

    Args:
        weights: weights of the edges, symmetric, ``[node, node]``.
        work: work of the nodes.
        share: the share of all work that the first half should have.
        slack: how far the first half may be from this share; if no cut is near enough, the nearest
            one counts.
    """
    num = len(work)
    weights = weights * (1 - np.eye(num))
    # Faint edges between all nodes join parts that are not connected.
    joined = weights + 1e-9 * max(weights.max(initial=0.0), 1.0) * (1 - np.eye(num))
    vector = np.linalg.eigh(np.diag(joined.sum(axis=1)) - joined)[1][:, min(1, num - 1)]
    part = work / max(work.sum(), 1e-300)
    options = []
    # The sign of an eigenvector is arbitrary, so both directions are tried.
    for order in (np.argsort(vector, kind="stable"), np.argsort(-vector, kind="stable")):
        is_first = np.zeros(num, dtype=bool)
        for count in range(1, num):
            is_first[order[count - 1]] = True
            crossing = float(weights[np.ix_(is_first, ~is_first)].sum())
            far = max(0.0, abs(float(part[is_first].sum()) - share) - slack)
            options.append((far, crossing, is_first.copy()))
    if not options:
        return np.ones(num, dtype=bool)
    best = min(options, key=lambda option: option[:2])[2]
    return _improved(best, weights, part, share, slack)


def _improved(
    is_first: NDArray[np.bool_], weights: Array, part: Array, share: float, slack: float
) -> NDArray[np.bool_]:
    """Move single nodes, the best first, while less crosses then and the balance is kept."""
    while True:
        across = np.where(
            is_first, weights[:, ~is_first].sum(axis=1), weights[:, is_first].sum(axis=1)
        )
        gain = 2 * across - weights.sum(axis=1)
        after = part[is_first].sum() + np.where(is_first, -part, part)
        gain[np.abs(after - share) > slack] = 0.0
        best = int(gain.argmax())
        # A relative threshold: rounding must not move a node back and forth.
        if gain[best] <= 1e-9 * weights.sum():
            return is_first
        is_first[best] = not is_first[best]
