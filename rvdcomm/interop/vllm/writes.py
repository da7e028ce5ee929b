"""Writes: which elements of parameters a loader fills, with whatever values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rvdcomm.interop.vllm.recorded import CheckpointTensor


class Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """In this mode, notes which elements of parameters are written, by whatever op."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen: dict[int, dict[tuple[Any, ...], int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func._schema.is_mutable and args and isinstance(args[0], Tensor):
            at = args[0]
            if not isinstance(at, CheckpointTensor):
                place = at.storage_offset(), tuple(at.shape), tuple(at.stride())
                self._seen.setdefault(memory(at), {})[place] = at.numel()
        return func(*args, **(kwargs or {}))

    def num_elements(self, parameter: Tensor) -> int:
        """Elements of a parameter that were written, each write counted once."""
        return sum(self._seen.get(memory(parameter), {}).values())


def memory(tensor: Tensor) -> int:
    """Tells the memory of tensors that are alive apart, also that of those without data."""
    return int(tensor.untyped_storage()._cdata)
