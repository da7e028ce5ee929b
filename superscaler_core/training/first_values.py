"""First values: parameters and buffers with which a training starts, as the first rank has them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

import rvdcomm as rv
from superscaler_core.run.moves import move_many
from superscaler_core.run.tables import Stored, SubTransfer, Tables, box_of
from superscaler_core.run.together import ranks_of, sum_of_all
from superscaler_core.run.transport import Transport
from superscaler_core.training.checkpoint import on_rank


def take_first_values(
    weights: Mapping[str, Tensor],
    stored: Mapping[str, nn.Parameter],
    tables: Tables,
    transport: Transport,
    device: torch.device,
    only: Collection[str] | None = None,
) -> None:
    """Give every rank its boxes of the first rank's parameters; collective.

    Other ranks' own values do not matter, so models may be initialized without a common seed.
    If the first rank has no values, because its model is on the meta device, nothing changes.

    Args:
        weights: this rank's whole parameters, by name; empty if they have no values.
        stored: the boxes that this rank stores.
        tables: tables of the program.
        transport: moves the boxes.
        device: the device of the tensors that are moved.
        only: the parameters that get values; all if None.
    """
    first = ranks_of(tables)[0]
    is_first = tables.rank == first
    flag = torch.tensor(float(is_first and bool(weights)), device=device)
    if not sum_of_all(flag, tables, transport):
        return
    # One parameter at a time, so that the first rank holds one whole parameter on its device.
    for name, entry in tables.parameters.items():
        if only is not None and name not in only:
            continue
        given = None
        if is_first:
            whole = entry.packed(weights[name].detach().to(device))
            given = whole, rv.Box.of_shape(entry.shape)
        sub_transfers = [
            sub_transfer
            for sub_transfer in _from_rank(first, entry.whole)
            if tables.rank in sub_transfer.ranks
        ]
        for _, box, value in move_many(transport, {name: (sub_transfers, given)}):
            with torch.no_grad():
                part = entry.boxed(stored[name])[box.slices_within(_held(entry))]
                part.copy_(value)


def share_buffers(
    buffers: Mapping[str, Tensor], num_ranks: int, transport: Transport, device: torch.device
) -> None:
    """Give the model of every rank the buffers of the first rank's model, in place; collective.

    Args:
        buffers: this rank's buffers, by name; those on the meta device are left as they are.
        num_ranks: number of all ranks, which are numbered from 0.
        transport: moves the buffers.
        device: the device of the tensors that are moved.
    """
    for name, buffer in buffers.items() if num_ranks > 1 else ():
        if buffer.is_meta or not buffer.numel():
            continue
        value = torch.view_as_real(buffer) if buffer.is_complex() else buffer
        shape, counts = tuple(value.shape), ",".join("1" for _ in value.shape)
        src = on_rank(0, shape)
        dst = rv.Layout(shape, f"R({num_ranks})V(1)D({counts})", ranks=range(num_ranks))
        box, dtype = rv.Box.of_shape(shape), str(value.dtype).removeprefix("torch.")
        given = (value.to(device), box) if transport.rank == 0 else None
        sub_transfer = SubTransfer(str(box), str(src), str(dst), dtype)
        for _, _, result in move_many(transport, {name: ([sub_transfer], given)}):
            # A buffer that ``expand`` made has its repeated elements in memory once.
            once = tuple(slice(0, None if stride else 1) for stride in value.stride())
            with torch.no_grad():
                value[once].copy_(result[once])


def _held(entry: Stored) -> rv.Box:
    assert entry.box is not None, "it stores what it gets"
    return box_of(entry.box)


def _from_rank(rank: int, sub_transfers: Iterable[SubTransfer]) -> Iterator[SubTransfer]:
    """Sub-transfers that move each sub-transfer's region from one rank to all ranks that store it
    (its src).
    """
    for sub_transfer in sub_transfers:
        storage = sub_transfer.layouts[0]
        yield SubTransfer(
            sub_transfer.box,
            str(on_rank(rank, storage.shape)),
            sub_transfer.src,
            sub_transfer.dtype,
        )
