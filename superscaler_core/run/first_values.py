"""First values: the parameters with which a training starts, as the first rank has them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

import rvdcomm as rv
from superscaler_core.run.moves import move_many
from superscaler_core.run.tables import Leg, Tables
from superscaler_core.run.together import ranks_of, sum_of_all
from superscaler_core.run.transport import Transport


def take_first_values(
    weights: Mapping[str, Tensor],
    stored: Mapping[str, nn.Parameter],
    tables: Tables,
    transport: Transport,
) -> None:
    """Give every rank its boxes of the first rank's parameters; collective.

    Other ranks' own values do not matter, so models may be initialized without a common seed.
    If the first rank has no values, because its model is on the meta device, nothing changes.

    Args:
        weights: this rank's whole parameters, by name; empty if they have no values.
        stored: the boxes that this rank stores.
        tables: of the program.
        transport: moves the boxes.
    """
    first = ranks_of(tables)[0]
    is_first = tables.rank == first
    has_values = sum_of_all(torch.tensor(float(is_first and bool(weights))), tables, transport)
    if not has_values:
        return
    moves = {
        name: (
            [leg for leg in _from_rank(first, entry.whole) if tables.rank in leg.ranks],
            (weights[name].detach(), rv.Box.of_shape(entry.shape)) if is_first else None,
        )
        for name, entry in tables.parameters.items()
    }
    with torch.no_grad():
        for name, box, value in move_many(transport, moves):
            held = tables.parameters[name].box
            assert held is not None, "it stores what it gets"
            stored[name][box.slices_within(rv.Box.parse(held))] = value.to(stored[name].device)


def _from_rank(rank: int, legs: Iterable[Leg]) -> Iterator[Leg]:
    """From one rank to where the region of each leg is stored: all ranks of its src."""
    for leg in legs:
        storage = leg.layouts[0]
        counts = ",".join("1" for _ in storage.shape)
        src = rv.Layout(storage.shape, f"R(1)V(1)D({counts})", ranks=[rank])
        yield Leg(leg.box, str(src), leg.src, leg.dtype)
