"""PipeDream (Narayanan et al., 2019) and PipeDream-2BW (Narayanan et al., 2021)."""

from __future__ import annotations

from superscaler_core.schedules.asynchronous import without_flush
from superscaler_core.schedules.errors import ScheduleError
from superscaler_core.schedules.schedule import Schedule
from superscaler_core.schedules.versions import WeightRule


def pipedream(
    num_stages: int, num_microbatches: int, *, every: int = 1, vertical: bool = False
) -> Schedule:
    """1F1B without a flush: stages update at once, and stash the versions that are still read.

    With an update per microbatch (a *minibatch* of the paper), stage s of D keeps ``D - s``
    versions of its weights; the gradient of an update is computed with weights that are
    ``D - 1 - s`` updates old. With vertical sync every stage keeps D versions, and all gradients
    are ``D - 1`` updates old. Between fill and drain no worker is idle if stages are equal.

    >>> print(pipedream(2, 3))
    pipedream stages=2 microbatches=3 weights=stash
    worker 0: 0F0 0F1 0B0 0U0 0F2 0B1 0U1 0B2 0U2
    worker 1: 1F0 1B0 1U0 1F1 1B1 1U1 1F2 1B2 1U2

    Args:
        num_stages, num_microbatches: at least 1.
        every: number of microbatches per update.
        vertical: whether all stages read the version that stage 0 read (vertical sync).

    Raises:
        ScheduleError: a count is below 1, or ``every`` does not divide the microbatches.

    Source: Narayanan et al., PipeDream, SOSP 2019: sections 3.2 and 3.3.
    """
    rule = WeightRule.VERTICAL if vertical else WeightRule.STASH
    return without_flush("pipedream", num_stages, num_microbatches, every, rule)


def pipedream_2bw(num_stages: int, num_microbatches: int, *, every: int = 0) -> Schedule:
    """PipeDream with two versions of weights: updates have enough microbatches for two to suffice.

    All stages compute update t from version ``t - 1`` of the weights, and the first update from
    version 0: ``w(t+1) = w(t) - lr * grad(w(t-1))``. This is vertical sync with at least D
    microbatches in an update. A pipeline of one stage has no delay, and keeps one version.

    >>> print(pipedream_2bw(2, 4))
    pipedream-2bw stages=2 microbatches=4 weights=vertical
    worker 0: 0F0 0F1 0B0 0F2 0B1 0U1 0F3 0B2 0B3 0U3
    worker 1: 1F0 1B0 1F1 1B1 1U1 1F2 1B2 1F3 1B3 1U3

    Args:
        num_stages, num_microbatches: at least 1.
        every: number of microbatches per update, at least ``num_stages``; 0 means ``num_stages``.

    Raises:
        ScheduleError: a count is below 1, or ``every`` is below ``num_stages`` or does not divide
            the microbatches.

    Source: Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training, ICML 2021. The
    formula is from memory of the paper, and unchecked.
    """
    size = every or num_stages
    if size < num_stages:
        raise ScheduleError(
            f"pipedream-2bw of {num_stages} stages: an update of {size} microbatches needs more "
            f"than two versions of weights; let it have {num_stages} or more."
        )
    name = "pipedream-2bw"
    return without_flush(name, num_stages, num_microbatches, size, WeightRule.VERTICAL)
