"""Together: sums, rows and texts over all ranks of a program."""

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
    """The sum of every rank's scalar on the CPU, on every rank; collective."""
    return rows_of_all(value[None], tables, transport).sum()


def rows_of_all(row: Tensor, tables: Tables, transport: Transport) -> Tensor:
    """Every rank's row, ``[elements]``, as rows in the order of ``ranks_of``; collective."""
    return rows_of(row, ranks_of(tables), transport)


def rows_of(row: Tensor, ranks: tuple[int, ...], transport: Transport) -> Tensor:
    """The row of each of these ranks, ``[ranks, elements]``; collective over them."""
    return row[None] if len(ranks) == 1 else transport.rows(row, ranks)


def texts_of_all(text: str, tables: Tables, transport: Transport) -> list[str]:
    """Every rank's text, on every rank, in the order of ``ranks_of``; collective."""
    return texts_of(text, ranks_of(tables), transport)


def texts_of(text: str, ranks: tuple[int, ...], transport: Transport) -> list[str]:
    """The text of each of these ranks, on each of them; collective over them."""
    if len(ranks) == 1:
        return [text]
    data = text.encode()
    lengths = transport.rows(torch.tensor([len(data)]), ranks)[:, 0].tolist()
    # Widths are powers of two, so that few transitions are planned.
    row = torch.zeros(1 << max(lengths).bit_length(), dtype=torch.uint8)
    row[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)
    rows = transport.rows(row, ranks)
    return [
        row[:length].numpy().tobytes().decode() for row, length in zip(rows, lengths, strict=True)
    ]


def norm_of_grads(
    grads: dict[str, Tensor], norm_type: float, tables: Tables, transport: Transport
) -> Tensor:
    """The p-norm of all gradients of the model, every element counted once; collective.

    Args:
        grads: gradients of the parameters that this rank stores, by name.
        norm_type: p, above zero; may be infinite.
        tables: tell which rank counts a box that several ranks store.
        transport: brings all ranks' parts together.
    """
    pieces = [
        _piece(name, grad, leg, tables).double()
        for name, grad in grads.items()
        for leg in tables.parameters[name].whole
        if tables.rank in leg.layouts[0] and leg.layouts[0].cell(tables.rank).replica == 0
    ]
    norms = [_norm(piece, norm_type).cpu() for piece in pieces if piece.numel()]
    here = _norm(torch.stack([torch.zeros((), dtype=torch.float64), *norms]), norm_type)
    return _norm(rows_of_all(here[None], tables, transport), norm_type)


def _norm(values: Tensor, norm_type: float) -> Tensor:
    found: Tensor = torch.linalg.vector_norm(values, norm_type)
    return found


def _piece(name: str, grad: Tensor, leg: Leg, tables: Tables) -> Tensor:
    """The part of a stored gradient that a leg counts."""
    entry, box = tables.parameters[name], leg.src_box(tables.rank)
    assert entry.box is not None
    assert box is not None
    return entry.boxed(grad)[box.slices_within(rv.Box.parse(entry.box))]
