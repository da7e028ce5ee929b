"""Host: host memory, and the copies between it and the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Arrival = Callable[[], Tensor]
"""A started copy: each call waits for it and returns it."""


class Host:
    """Host memory as a place for tensors that take no memory on the device.

    For a CPU device this is other memory of the same kind, so that programs behave alike
    everywhere, and every copy is complete when its call returns. For CUDA it is pinned memory, and
    copies run one after another on a stream of their own, in parallel with computing.

    Args:
        device: the device of tensors that are not on the host.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._stream: torch.cuda.Stream | None = None
        if self.device.type == "cuda":
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate zeros on the host."""
        return torch.zeros(tuple(shape), dtype=dtype, pin_memory=self._stream is not None)

    def to_host(self, x: Tensor) -> Tensor:
        """Start a copy to the host.

        ``to_device`` may take the copy at once; its values may be read only after ``wait``.
        """
        if self._stream is None:
            return x.detach().clone()
        copy = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            copy.copy_(x.detach(), non_blocking=True)
        # The caller may drop x now: its memory is not reused before the copy has read it.
        x.record_stream(self._stream)
        return copy

    def to_device(self, x: Tensor) -> Arrival:
        """Start a copy of a tensor on the host to the device."""
        if self._stream is None:
            copy = x.detach().clone()
            return lambda: copy
        with torch.cuda.stream(self._stream):
            copy = x.detach().pin_memory().to(self.device, non_blocking=True)
            is_there = self._stream.record_event()

        def arrived() -> Tensor:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(is_there)
            copy.record_stream(stream)
            return copy

        return arrived

    def mark(self) -> Callable[[], None]:
        """A function that makes the device wait for all copies that were started so far."""
        if self._stream is None:
            return lambda: None
        is_done = self._stream.record_event()
        return lambda: torch.cuda.current_stream(self.device).wait_event(is_done)

    def wait(self) -> None:
        """Wait for all copies; after this, tensors on the host can be read and changed."""
        if self._stream is not None:
            self._stream.synchronize()
