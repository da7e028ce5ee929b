"""redistribute_many: a whole state dict in one call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rvdcomm.api.one import redistribute
from rvdcomm.errors import LayoutError
from rvdcomm.layout import Layout
from rvdcomm.topology import Topology


def redistribute_many(
    tensors: Mapping[str, Tensor | None],
    src: Mapping[str, Layout | str],
    dst: Mapping[str, Layout | str],
    *,
    group: Any = None,
    topology: Topology | None = None,
) -> dict[str, Any]:
    """Redistribute every tensor of a state dict, one after another in the order of names.

    Args and errors are those of ``redistribute``; all three mappings have the same names, on all
    ranks.

    Raises:
        LayoutError: the mappings differ in their names.
    """
    if not set(tensors) == set(src) == set(dst):
        odd = sorted(set(tensors) ^ set(src) | set(tensors) ^ set(dst))
        raise LayoutError(f"redistribute_many: tensors, src and dst differ in the names {odd[:5]}.")
    return {
        name: redistribute(tensors[name], src[name], dst[name], group=group, topology=topology)
        for name in sorted(tensors)
    }
