"""Host: memory beside the device's, and the way there and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Arrival = Callable[[], Tensor]
"""A copy that was started; a call waits for it and returns it, as often as one likes."""


class Host:
    """Host memory as a place: what is there takes no room on the device.

    On a CPU it is other memory of the same kind, so that a program does the same everywhere, and
    all copies are done when a call returns. On CUDA it is pinned, and copies run on a stream of
    their own, one after another, beside what the device computes.

    Args:
        device: where tensors live that are not on the host.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._stream: torch.cuda.Stream | None = None
        if self.device.type == "cuda":
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory on the host."""
        return torch.zeros(tuple(shape), dtype=dtype, pin_memory=self._stream is not None)

    def to_host(self, x: Tensor) -> Tensor:
        """A copy on the host, which can go back at once, and can be read after ``wait``."""
        if self._stream is None:
            return x.detach().clone()
        copy = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            copy.copy_(x.detach(), non_blocking=True)
        # The caller may drop x now: its memory is not given to others before it is read.
        x.record_stream(self._stream)
        return copy

    def to_device(self, x: Tensor) -> Arrival:
        """Start a copy of what is on the host to the device."""
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
        """What lets the device go on only when all copies are done that were started so far."""
        if self._stream is None:
            return lambda: None
        is_done = self._stream.record_event()
        return lambda: torch.cuda.current_stream(self.device).wait_event(is_done)

    def wait(self) -> None:
        """Return when nothing is under way, so that what is on the host can be read and changed."""
        if self._stream is not None:
            self._stream.synchronize()
