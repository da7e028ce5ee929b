"""Together: sums, rows and texts over all ranks of a program, and blocks that fail on all."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

import rvdcomm as rv
from superscaler_core.run.tables import SubTransfer, Tables
from superscaler_core.run.transport import Transport

MAX_ERROR_CHARS = 2000
"""Longer messages are cut, because every rank gets those of all ranks."""


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
        _piece(name, grad, sub_transfer, tables).double()
        for name, grad in grads.items()
        for sub_transfer in tables.parameters[name].whole
        if tables.rank in sub_transfer.layouts[0]
        and sub_transfer.layouts[0].cell(tables.rank).replica == 0
    ]
    norms = [_norm(piece, norm_type).cpu() for piece in pieces if piece.numel()]
    here = _norm(torch.stack([torch.zeros((), dtype=torch.float64), *norms]), norm_type)
    return _norm(rows_of_all(here[None], tables, transport), norm_type)


def _norm(values: Tensor, norm_type: float) -> Tensor:
    found: Tensor = torch.linalg.vector_norm(values, norm_type)
    return found


def _piece(name: str, grad: Tensor, sub_transfer: SubTransfer, tables: Tables) -> Tensor:
    """The part of a stored gradient that a sub-transfer counts."""
    entry, box = tables.parameters[name], sub_transfer.src_box(tables.rank)
    assert entry.box is not None
    assert box is not None
    return entry.boxed(grad)[box.slices_within(rv.Box.parse(entry.box))]


# --- blocks that fail on all ranks ---------------------------------------------------------------


@dataclass
class Told:
    """What ranks tell each other at the end of a block.

    Attributes:
        here: the text of this rank; set it inside the block.
        of_all: after the block, the texts of all ranks in their order.
    """

    here: str = ""
    of_all: Sequence[str] = field(default_factory=list)


@contextmanager
def agreed(
    what: str, ranks: Sequence[int], texts_of_all: Callable[[str], list[str]]
) -> Iterator[Told]:
    """A block that ends on all ranks together; collective.

    Args:
        what: the request, as it begins messages.
        ranks: the numbers of all ranks.
        texts_of_all: gives every rank's text to every rank; collective.

    Raises:
        CheckpointError: the block failed on a rank; raised on all ranks. Whatever failed, it is
            this class; on the rank itself the cause follows.
        CommError: another rank is lost, so nothing can be agreed.
    """
    told, fault = Told(), None
    try:
        yield told
    except rv.CommError:
        raise
    except Exception as error:
        fault = error
    sent = json.dumps([_message(fault), told.here])
    found = [json.loads(text) for text in texts_of_all(sent)]
    for rank, (message, _) in zip(ranks, found, strict=True):
        if message:
            raise rv.CheckpointError(f"{what}: rank {rank}: {message}") from fault
    told.of_all = [text for _, text in found]


def _message(fault: Exception | None) -> str:
    """What an error says, with its class unless it is one of ours, which say what was asked."""
    if fault is None:
        return ""
    text = str(fault)[:MAX_ERROR_CHARS]
    is_ours = type(fault).__module__.partition(".")[0] in ("rvdcomm", "superscaler_core")
    return text if is_ours and text else f"{type(fault).__name__}: {text}"
