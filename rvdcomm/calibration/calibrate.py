"""Calibration: the links of this cluster, measured by transfers and fitted to the cost model.

    topology, fit = rvdcomm.calibration.calibrate()     # collective over the group
    topology.save("topology.json", notes=fit.notes())   # what Topology.load reads

``probes`` says which transfers, ``measure`` times them on a process group, ``fit`` finds the links
that explain the times, ``report`` prints how well. See docs/calibration.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rvdcomm.calibration.fit import Fit, LevelFit, Sample, fit_links

if TYPE_CHECKING:
    from rvdcomm.calibration.measure import Effort
    from rvdcomm.layout import Topology

__all__ = ["Fit", "LevelFit", "Sample", "calibrate", "fit_links"]


def calibrate(
    group: Any = None,
    *,
    executor: str | None = None,
    like: Topology | None = None,
    effort: Effort | None = None,
) -> tuple[Topology, Fit]:
    """Measure the links between the ranks of ``group``; collective over all of them.

    Args:
        group: process group; the default group if None.
        executor: whose transfers are measured, as of ``redistribute``.
        like: a topology whose groups are measured, for example with racks; if None, the hosts that
            ranks find themselves on.
        effort: how long and how large; the default if None.

    Returns:
        The topology, equal on all ranks, and what it was fitted to.

    Raises:
        LayoutError: ranks were asked for different things, or there is nothing to measure.
        CommError: a rank failed or did not join within the group's timeout.
    """
    from rvdcomm.calibration.measure import measured  # It needs torch.

    return measured(group, executor, like, effort)
