"""Same batch: all ranks find out together whether they pass the same batch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from superscaler_core.front_end.model_call import ModelCall
from superscaler_core.parallel.batch import Inputs
from superscaler_core.run.tables import Tables
from superscaler_core.run.together import ranks_of, rows_of_all, texts_of_all
from superscaler_core.run.transport import Transport

LOCAL = 'If every rank is to pass samples of its own, say batch=ss.Batch(kind="local").'


def check_same(call: ModelCall, inputs: Inputs, tables: Tables, transport: Transport) -> None:
    """Compare shapes and values of a batch on all ranks; collective.

    Raises:
        ValueError: on all ranks, if a rank passes other shapes or other values.
    """
    ranks = ranks_of(tables)
    if len(ranks) == 1:
        return
    form = form_of(call, inputs)
    values = [digest_of(tensor) for tensor in inputs.tensors]
    row = torch.tensor([number_of(form), number_of(*values)])
    found = rows_of_all(row, tables, transport)
    if odd := _odd(found[:, 0].tolist()):
        raise other_shapes(ranks, texts_of_all(form, tables, transport), odd)
    if _odd(found[:, 1].tolist()):
        rows = rows_of_all(torch.tensor([*map(number_of, values)]), tables, transport)
        raise _other_values(inputs.names, ranks, rows)


def other_shapes(ranks: Sequence[int], forms: Sequence[str], odd: int) -> ValueError:
    """The error of ranks whose calls have other forms; ``odd`` is the place of one of them."""
    return ValueError(
        f"ranks pass other shapes: rank {ranks[0]} passes {forms[0]}, and rank {ranks[odd]} passes "
        f"{forms[odd]}. All ranks take a step together, and pass the same whole batch. {LOCAL}"
    )


def _other_values(names: Sequence[str], ranks: Sequence[int], rows: Tensor) -> ValueError:
    """The error of ranks whose batches have other values; ``rows`` has a number per input."""
    columns = {name: _odd(rows[:, i].tolist()) for i, name in enumerate(names)}
    name, odd = next((name, odd) for name, odd in columns.items() if odd)
    return ValueError(
        f"input {name!r} has other values on rank {ranks[odd]} than on rank {ranks[0]}: every rank "
        f"passes the same whole batch, and uses its part of it. {LOCAL}"
    )


def form_of(call: ModelCall, inputs: Inputs) -> str:
    """The arguments of a call without the values of its tensors, as a text that ranks compare."""
    leaves = pytree.tree_leaves((call.args, call.kwargs))
    plain = [
        repr(leaf) if isinstance(leaf, bool | int | float | complex | str | None) else
        type(leaf).__name__
        for leaf in leaves if not isinstance(leaf, Tensor)
    ]  # fmt: skip
    dtypes = ", ".join(dict.fromkeys(_dtype(tensor) for tensor in inputs.tensors))
    more = f" with {', '.join(plain)}" if plain else ""
    return f"{inputs} ({dtypes}){more}"


def digest_of(tensor: Tensor) -> bytes:
    """A hash of a tensor's values; empty for a tensor that is not dense."""
    if tensor.layout != torch.strided:
        return b""
    here = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return hashlib.blake2b(here.view(torch.uint8).numpy(), digest_size=8).digest()


def number_of(*parts: str | bytes) -> int:
    """A hash as a number that int64 holds."""
    made = hashlib.blake2b(digest_size=8)
    for part in parts:
        made.update(part.encode() if isinstance(part, str) else part)
    return int.from_bytes(made.digest(), "big", signed=True)


def _odd(values: Iterable[object]) -> int:
    """The place of the first value that is not the first one; 0 if all are equal."""
    first, *rest = values
    return next((i for i, value in enumerate(rest, 1) if value != first), 0)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
