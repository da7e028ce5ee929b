"""Same batch: all ranks find out together whether they pass the same batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NoReturn

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from superscaler_core.front_end.model_call import ModelCall
from superscaler_core.parallel.batch import Inputs
from superscaler_core.training.checksum import checksum
from superscaler_core.training.same_call import SameCall, digest_of

Ranks = tuple[int, ...]

_WHOLE = (
    "Every rank passes the same whole batch, and uses its part of it. If every rank is to pass "
    'samples of its own, say batch=ss.Batch(kind="local").'
)


def check_same(call: ModelCall, inputs: Inputs, calls: SameCall, *, values: bool = True) -> None:
    """Compare shapes and values of a batch on all ranks; collective.

    Args:
        call, inputs: the call of the model, and its tensors.
        calls: brings the hashes of all ranks together.
        values: whether to compare the values of tensors too.

    Raises:
        ValueError: on all ranks, if a rank passes other shapes or other values.
    """
    if len(calls.ranks) == 1:
        return
    form = form_of(call, inputs)
    digests = [checksum(tensor) for tensor in inputs.tensors] if values else []
    row = torch.tensor([digest_of(form), digest_of(str(digests))])
    forms, batches = zip(*calls.rows(row).tolist(), strict=True)
    if first_odd(forms):
        refuse_shapes(form, calls)
    if first_odd(batches):
        refuse_values(inputs.names, digests, calls)


def refuse_shapes(form: str, calls: SameCall, hint: str = _WHOLE, among: Ranks = ()) -> NoReturn:
    """Raise the error of ranks whose calls have other forms; collective.

    Args:
        form: of this rank's call.
        calls: brings the forms of all ranks together.
        hint: what would be right.
        among: ranks whose forms have to be equal; all ranks if empty.
    """
    forms = calls.texts(form)
    first, *others = among or calls.ranks
    odd = next(rank for rank in others if forms[rank] != forms[first])
    raise ValueError(
        f"ranks pass other shapes: rank {first} passes {forms[first]}, and rank {odd} passes "
        f"{forms[odd]}. {hint}"
    )


def refuse_values(
    names: Sequence[str],
    digests: Sequence[int],
    calls: SameCall,
    among: Sequence[Ranks] = (),
    hint: str = _WHOLE,
) -> NoReturn:
    """Raise the error of ranks whose batches have other values; collective.

    Args:
        names, digests: of this rank's tensors.
        calls, hint: as in ``refuse_shapes``.
        among: the groups of ranks whose batches have to be equal; all ranks if empty.
    """
    rows = calls.rows(torch.tensor(digests))
    for group in among or (calls.ranks,):
        for name, column in zip(names, rows[list(group)].T.tolist(), strict=True):
            if odd := first_odd(column):
                raise ValueError(
                    f"input {name!r} has other values on rank {group[odd]} than on rank "
                    f"{group[0]}. {hint}"
                )
    raise AssertionError("a rank's hash differs")


def form_of(call: ModelCall, inputs: Inputs, *, counts_samples: bool = True) -> str:
    """The arguments of a call without the values of its tensors, as a text that ranks compare.

    The number of samples is in the text if ``counts_samples``.
    """
    leaves = pytree.tree_leaves((call.args, call.kwargs))
    plain = [
        repr(leaf) if isinstance(leaf, bool | int | float | complex | str | None)
        else type(leaf).__name__
        for leaf in leaves if not isinstance(leaf, Tensor)
    ]  # fmt: skip
    dtypes = ", ".join(dict.fromkeys(str(x.dtype).removeprefix("torch.") for x in inputs.tensors))
    more = f" with {', '.join(plain)}" if plain else ""
    return f"{inputs if counts_samples else inputs.without_sizes} ({dtypes}){more}"


def first_odd(values: Iterable[object]) -> int:
    """The place of the first value that is not the first one; 0 if all are equal."""
    first, *rest = values
    return next((i for i, value in enumerate(rest, 1) if value != first), 0)
