"""Staging: the memory in which a worker gets its share of a checkpoint, in checkpoint form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from rvdcomm import Box
from rvdcomm.interop.vllm.record import TensorMeta
from rvdcomm.interop.vllm.recorded import CheckpointTensor, NotRecordedError


class Staging:
    """The boxes that a worker needs of every tensor of a checkpoint, in memory of their own.

    ``tensors`` gives them to a loader as the tensors of the checkpoint. A tensor of which the whole
    is held is an ordinary one; of all others, the loader may copy the views that were recorded.

    Args:
        metas: the tensors, as the checkpoint has them and loaders see them.
        boxes: those that are held, by tensor.
        dtypes: in which they are held; narrower ones where all loaders convert to them.
        device: where the memory is.
    """

    def __init__(
        self,
        metas: Mapping[str, TensorMeta],
        boxes: Mapping[str, Sequence[Box]],
        dtypes: Mapping[str, torch.dtype],
        device: torch.device,
    ) -> None:
        self.metas, self.boxes, self.device = metas, boxes, device
        self.held: dict[str, list[Tensor]] = {
            name: [torch.empty(box.shape, dtype=dtypes[name], device=device) for box in of_tensor]
            for name, of_tensor in boxes.items()
        }

    @property
    def num_bytes(self) -> int:
        """Bytes of all boxes."""
        return sum(t.nbytes for held in self.held.values() for t in held)

    def view(self, name: str, box: Box) -> Tensor:
        """The memory of a box that lies in one of those that are held."""
        for outer, held in zip(self.boxes[name], self.held[name], strict=True):
            if outer.contains(box):
                return held[box.slices_within(outer)]
        raise AssertionError(f"{name}: {box} is in none of {self.boxes[name]}")

    def tensors(self, whole: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
        """All tensors of the checkpoint for a loader; those named in ``whole`` as ordinary ones."""
        for name in self.metas:
            yield name, self.held[name][0] if name in whole else self.tensor(name)

    def tensor(self, name: str) -> Tensor:
        """A tensor of the checkpoint, of which a loader may copy what was recorded."""
        shape, dtype = self.metas[name]
        return CheckpointTensor.whole(name, shape, dtype, self.device, self)

    def refuse(self, error: NotRecordedError) -> None:
        """Nothing: the loader did what it did when it was recorded, or the error ends it."""

    def copy(self, dst: Tensor, src: CheckpointTensor) -> None:
        """Fill ``dst`` with the values of a view; a ``dst`` without data gets none."""
        window = src.window
        if dst.device.type == "meta" or not window.num_elements:
            return
        boxes, of_tensor = self.boxes.get(src.entry, ()), self.held.get(src.entry, ())
        for outer, held in zip(boxes, of_tensor, strict=True):
            if outer.contains(window.box):
                values = window.read(held, outer)
                for dtype in src.dtypes[1:]:
                    values = values.to(dtype)
                dst.copy_(values)
                return
        raise NotRecordedError(
            src.entry,
            f"its loader reads {window.box} now, which it did not when it was recorded; this "
            f"worker holds {', '.join(map(str, boxes)) or 'nothing'}",
        )
