"""Together: sums and barriers over all ranks of a program."""

from __future__ import annotations

import torch
from torch import Tensor

import rvdcomm as rv
from superscaler_core.run.tables import Leg, Tables
from superscaler_core.run.transport import Transport


def ranks_of(tables: Tables) -> tuple[int, ...]:
    """All ranks of a program: those that receive the loss."""
    return tables.loss[0].layouts[1].ranks


def sum_of_all(value: Tensor, tables: Tables, transport: Transport) -> Tensor:
    """The sum of every rank's scalar, on every rank; collective."""
    ranks = ranks_of(tables)
    if len(ranks) == 1:
        return value
    names = ",".join(map(str, ranks))
    src = f"R(1)V({len(ranks)})D() shape() ranks({names})"
    dst = f"R({len(ranks)})V(1)D() shape() ranks({names})"
    dtype = str(value.dtype).removeprefix("torch.")
    total = transport.call(Leg("[]", src, dst, dtype)).move(value)
    assert total is not None
    return total


def wait_for_all(tables: Tables, transport: Transport) -> None:
    """Return when every rank has called this; collective."""
    sum_of_all(torch.zeros(()), tables, transport)


def texts_of_all(text: str, tables: Tables, transport: Transport) -> list[str]:
    """Every rank's text, on every rank, in the order of ``ranks_of``; collective."""
    ranks, data = ranks_of(tables), bytearray(text.encode())
    if len(ranks) == 1:
        return [text]
    names = ",".join(map(str, ranks))

    def gathered(row: Tensor) -> Tensor:
        form = f"shape({len(ranks)},{row.shape[1]}) ranks({names})"
        src, dst = f"R(1)V(1)D({len(ranks)},1) {form}", f"R({len(ranks)})V(1)D(1,1) {form}"
        leg = Leg("[]", src, dst, str(row.dtype).removeprefix("torch."))
        found = transport.call(leg).move(row)
        assert found is not None
        return found

    lengths = gathered(torch.tensor([[len(data)]]))[:, 0].tolist()
    # Widths are powers of two, so that few transitions are planned.
    row = torch.zeros(1, 1 << max(lengths).bit_length(), dtype=torch.uint8)
    row[0, : len(data)] = torch.tensor(list(data), dtype=torch.uint8)
    texts = zip(gathered(row), lengths, strict=True)
    return [row[:length].numpy().tobytes().decode() for row, length in texts]


def norm_of_grads(grads: dict[str, Tensor], tables: Tables, transport: Transport) -> Tensor:
    """The 2-norm of all gradients of the model, every element counted once; collective.

    Args:
        grads: gradients of the parameters that this rank stores, by name.
        tables: tell which rank counts a box that several ranks store.
        transport: computes the sum.
    """
    squares = torch.zeros((), dtype=torch.float64)
    for name, grad in grads.items():
        for leg in tables.parameters[name].whole:
            src = leg.layouts[0]
            if tables.rank in src and src.cell(tables.rank).replica == 0:
                squares += _piece(name, grad, leg, tables).double().square().sum().cpu()
    return sum_of_all(squares, tables, transport).sqrt()


def _piece(name: str, grad: Tensor, leg: Leg, tables: Tables) -> Tensor:
    """The part of a stored gradient that a leg counts."""
    stored, box = tables.parameters[name].box, leg.src_box(tables.rank)
    assert stored is not None
    assert box is not None
    return grad[box.slices_within(rv.Box.parse(stored))]
