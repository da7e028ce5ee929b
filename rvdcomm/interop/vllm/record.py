"""Record: where a loader puts the tensors of a checkpoint, found by loading none of their data."""

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
    not used by the loader, as an expert of another worker. ``loaded`` has the parameters that the
    loader says it filled; None if it says nothing.
    """

    copies: dict[str, list[RecordedCopy]] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)
    loaded: set[str] | None = None

    def copy(self, dst: Tensor, src: CheckpointTensor) -> None:
        """Note a copy."""
        dtypes = src.dtypes if src.dtype == dst.dtype else (*src.dtypes, dst.dtype)
        self.copies.setdefault(src.entry, []).append(RecordedCopy(src.window, dtypes, dst))

    def boxes(self, name: str) -> list[Box]:
        """The boxes of a checkpoint tensor that its copies read."""
        return [copy.window.box for copy in self.copies.get(name, ()) if copy.window.num_elements]

    def fills(self, name: str, parameter: Tensor) -> bool:
        """Whether a tensor of the checkpoint is copied into a parameter."""
        memory = parameter.untyped_storage()._cdata
        return any(
            copy.dst.untyped_storage()._cdata == memory for copy in self.copies.get(name, ())
        )

    def wanted(self, name: str) -> torch.dtype | None:
        """The dtype to which all copies of a tensor convert it at once; None if they differ."""
        chains = {copy.dtypes for copy in self.copies.get(name, ())}
        chain = next(iter(chains)) if len(chains) == 1 else ()
        return chain[-1] if 1 <= len(chain) <= 2 else None


def recorded(load: Load, metas: Mapping[str, TensorMeta], device: torch.device) -> Record:
    """Record a loader, whose parameters are without data too (on the device ``meta``).

    A tensor whose loader needs data is given as zeros, so that a loader which cannot take it at all
    is found now and not in an update.

    Raises:
        LayoutError: the loader fails for another reason; nothing can be loaded then.
    """
    whole: dict[str, str] = {}
    while True:
        record, given = Record(whole=whole), list[str]()
        try:
            loaded = load(_without_data(metas, device, record, given))
        except NotRecordedError as error:
            whole[error.name] = error.reason
            # All others are found in one more pass, instead of one pass for each.
            rest = {name: meta for name, meta in metas.items() if name not in given}
            whole |= _refused(load, rest, device)
        except Exception as error:
            shape, dtype = metas[given[-1]] if given else ((), None)
            raise LayoutError(
                f"the engine's loader fails at {given[-1:]} of shape {shape} and {dtype}: {error}"
            ) from error
        else:
            record.loaded = set(loaded) if isinstance(loaded, set) else None
            return record


def _refused(load: Load, left: Mapping[str, TensorMeta], device: torch.device) -> dict[str, str]:
    """The tensors of ``left`` whose loaders need data, with the reason of each."""
    found: dict[str, str] = {}
    while left:
        given: list[str] = []
        try:
            load(_without_data(left, device, Record(), given))
            break
        except NotRecordedError as error:
            found[error.name] = error.reason
            left = {name: meta for name, meta in left.items() if name not in given}
    return found


def _without_data(
    metas: Mapping[str, TensorMeta], device: torch.device, record: Record, given: list[str]
) -> Iterator[tuple[str, Tensor]]:
    for name, (shape, dtype) in metas.items():
        given.append(name)
        if name in record.whole:
            yield name, torch.zeros((), dtype=dtype, device=device).expand(shape)
        else:
            yield name, CheckpointTensor.whole(name, shape, dtype, device, record)
