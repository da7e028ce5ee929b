"""Autotune: of the best few plans, the one that is fastest on this machine.

    tuned = rvdcomm.autotune.tune(src, dst, "float32", topology)      # collective, measures once
    call = rv.Redistributor(tuned.plan, executor=tuned.executor)

``recipes`` says which plans are tried, ``race`` times them with every executor, ``memory``
remembers the fastest, in this process and in a file. The log ``rvdcomm.autotune`` (level INFO) says
when the model's choice was not the fastest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rvdcomm.autotune.recipes import Tuned

if TYPE_CHECKING:
    from rvdcomm.layout import Layout, Topology

__all__ = ["Tuned", "tune"]


def tune(
    src: Layout,
    dst: Layout,
    dtype: Any = "float32",
    topology: Topology | None = None,
    memory_limit: int | None = None,
    *,
    group: Any = None,
    executor: str | None = None,
) -> Tuned:
    """The plan and the executor that are fastest from ``src`` to ``dst``.

    Collective over the ranks of ``src`` and ``dst``, which all get the same answer. If it is known
    for this pair, power of two of bytes, topology and world, nothing is measured; the ranks still
    ask each other, because one of them may not know.

    Args:
        src, dst, dtype, topology, memory_limit: as of ``plan``.
        group: process group; the default group if None.
        executor: as of ``redistribute``; "auto" also tries "dist".

    Raises:
        LayoutError: the request is illegal, or ranks disagree about it.
        MemoryLimitError: no plan fits.
        CommError: a rank failed, or did not join within the group's timeout.
    """
    from rvdcomm.autotune.race import tuned  # It needs torch.

    return tuned(src, dst, dtype, topology, memory_limit, group, executor)
