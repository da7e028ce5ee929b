"""Record: where a loader puts the tensors of a checkpoint, found by loading tensors without data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from rvdcomm import Box, LayoutError
from rvdcomm.interop.vllm.recorded import CheckpointTensor, NotRecordedError
from rvdcomm.interop.vllm.window import Window

Load = Callable[[Iterable[tuple[str, Tensor]]], object]
"""``load_weights`` of a model: it takes the names and tensors of a checkpoint."""


class TensorMeta(NamedTuple):
    """A tensor of a checkpoint: its whole shape, in elements, and its dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class RecordedCopy(NamedTuple):
    """One copy of a loader: ``window`` of a checkpoint tensor is converted and fills ``dst``.

    ``dtypes`` are the dtypes on the way: that of the checkpoint first, that of ``dst`` last.
    """

    window: Window
    dtypes: tuple[torch.dtype, ...]
    dst: Tensor


@dataclass
class Record:
    """What a loader does with a checkpoint: its copies by name, and why others are not recorded.

    ``whole`` has the tensors whose loader needs data, each with the reason. A name in neither is
    not used by the loader, as an expert of another worker.
    """

    copies: dict[str, list[RecordedCopy]] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)

    def copy(self, dst: Tensor, src: CheckpointTensor) -> None:
        """Note a copy."""
        dtypes = src.dtypes if src.dtype == dst.dtype else (*src.dtypes, dst.dtype)
        self.copies.setdefault(src.entry, []).append(RecordedCopy(src.window, dtypes, dst))

    def boxes(self, name: str) -> list[Box]:
        """The boxes of a checkpoint tensor that its copies read."""
        return [copy.window.box for copy in self.copies.get(name, ()) if copy.window.num_elements]

    def wanted(self, name: str) -> torch.dtype | None:
        """The dtype to which all copies of a tensor convert it at once; None if they differ."""
        chains = {copy.dtypes for copy in self.copies.get(name, ())}
        chain = next(iter(chains)) if len(chains) == 1 else ()
        return chain[-1] if 1 <= len(chain) <= 2 else None


def recorded(load: Load, metas: Mapping[str, TensorMeta], device: torch.device) -> Record:
    """Record a loader, whose parameters are without data too (on the device ``meta``).

    A tensor whose loader needs data is left out, and the loader called again for those that it has
    not taken. Such a tensor is loaded once more with zeros in its place, so that a loader which
    cannot take it at all is found now and not in an update.

    Raises:
        LayoutError: the loader fails for another reason; no tensor can be loaded then.
    """
    record = Record()
    left = dict(metas)
    while left:
        given: list[str] = []
        try:
            load(_without_data(left, device, record, given))
            break
        except NotRecordedError as error:
            record.copies.pop(error.name, None)
            record.whole[error.name] = error.reason
            # Those that were taken and copied nothing may have been held back by the loader.
            left = {
                name: meta
                for name, meta in left.items()
                if name != error.name and not (name in given and name in record.copies)
            }
    for name in record.whole:
        shape, dtype = metas[name]
        zeros = torch.zeros((), dtype=dtype, device=device).expand(shape)
        _check_loads(load, name, zeros)
    return record


def _without_data(
    metas: Mapping[str, TensorMeta], device: torch.device, record: Record, given: list[str]
) -> Iterator[tuple[str, Tensor]]:
    for name, (shape, dtype) in metas.items():
        given.append(name)
        # A loader that was called again begins anew.
        record.copies.pop(name, None)
        yield name, CheckpointTensor.whole(name, shape, dtype, device, record)


def _check_loads(load: Load, name: str, zeros: Tensor) -> None:
    try:
        load([(name, zeros)])
    except Exception as error:
        raise LayoutError(
            f"the loader of {name!r} fails for a tensor of shape {tuple(zeros.shape)} and "
            f"{zeros.dtype}: {error}"
        ) from error
