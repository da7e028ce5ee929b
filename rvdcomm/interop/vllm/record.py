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
from rvdcomm.interop.vllm.writes import Writes, memory

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
    loader says it filled; None if it says nothing. ``refused`` has what it could not do, as
    ``whole`` will have it, and ``writes`` all that it wrote.
    """

    copies: dict[str, list[RecordedCopy]] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)
    loaded: set[str] | None = None
    refused: dict[str, str] = field(default_factory=dict)
    writes: Writes = field(default_factory=Writes)

    def copy(self, dst: Tensor, src: CheckpointTensor) -> None:
        """Note a copy into a parameter.

        Raises:
            NotRecordedError: ``dst`` is other memory, which the loader may read.
        """
        if dst.device.type != "meta":
            error = NotRecordedError(src.entry, f"its loader copies it to a tensor on {dst.device}")
            self.refuse(error)
            raise error
        dtypes = src.dtypes if src.dtype == dst.dtype else (*src.dtypes, dst.dtype)
        self.copies.setdefault(src.entry, []).append(RecordedCopy(src.window, dtypes, dst))

    def refuse(self, error: NotRecordedError) -> None:
        """Note why a tensor has to be whole."""
        self.refused.setdefault(error.name, error.reason)

    def boxes(self, name: str) -> list[Box]:
        """The boxes of a checkpoint tensor that its copies read."""
        return [copy.window.box for copy in self.copies.get(name, ()) if copy.window.num_elements]

    def fills(self, name: str, parameter: Tensor) -> bool:
        """Whether a tensor of the checkpoint is copied into a parameter."""
        return any(memory(copy.dst) == memory(parameter) for copy in self.copies.get(name, ()))

    def wanted(self, name: str) -> torch.dtype | None:
        """The dtype to which all copies of a tensor convert it at once; None if they differ."""
        chains = {copy.dtypes for copy in self.copies.get(name, ())}
        chain = next(iter(chains)) if len(chains) == 1 else ()
        return chain[-1] if 1 <= len(chain) <= 2 else None


def recorded(
    load: Load,
    metas: Mapping[str, TensorMeta],
    device: torch.device,
    whole: Mapping[str, str] | None = None,
) -> Record:
    """Record a loader, whose parameters are without data too (on the device ``meta``).

    A tensor whose loader needs data is given as zeros, so that a loader which cannot take it at all
    is found now and not in an update.

    Args:
        load: the loader.
        metas: the tensors of the checkpoint.
        device: where the loader believes that they are.
        whole: tensors of which is known that they have to be whole, with reasons.

    Raises:
        LayoutError: the loader fails for another reason; nothing can be loaded then.
    """
    whole = dict(whole or {})
    while True:
        record, given = Record(whole=whole), list[str]()
        try:
            with record.writes:
                loaded = load(_without_data(metas, device, record, given))
        except NotRecordedError as error:
            whole[error.name] = error.reason
            # All others are found in one more pass, instead of one pass for each.
            rest = {name: meta for name, meta in metas.items() if name not in given}
            whole |= _refused(load, rest, device)
        except Exception as error:
            # Maybe it only cannot take a tensor without data: the last one, or one that it kept.
            untried = [name for name in given if name not in whole]
            if untried:
                suspects = given[-1:] if given[-1] in untried else untried
                why = f"its loader fails without data: {type(error).__name__}: {error}"
                whole |= dict.fromkeys(suspects, why)
                continue
            shape, dtype = metas[given[-1]] if given else ((), None)
            raise LayoutError(
                f"the engine's loader fails at {given[-1:]} of shape {shape} and {dtype}: {error}"
            ) from error
        else:
            if record.refused.keys() - whole.keys():  # The loader caught the error.
                whole |= record.refused
                continue
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
            yield name, torch.zeros(shape, dtype=dtype, device=device)
        else:
            yield name, CheckpointTensor.whole(name, shape, dtype, device, record)
