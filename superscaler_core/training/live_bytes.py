"""LiveBytes: measures the memory that tensors take while code runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from superscaler_core.run.own_samples import OwnSamples
from superscaler_core.training.trainer import Trainer


class StorageMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of live tensors; each storage counts once, from its first use to its end.

    It sees forward and backward of this thread (on the CPU, autograd runs in the calling thread),
    but not the memory that a kernel takes while it runs.

    Attributes:
        now_bytes: bytes of the live tensors.
        is_paused: whether new tensors are left uncounted.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now_bytes = 0
        self.is_paused = False
        self._sizes: dict[int, int] = {}
        self._watched: dict[int, weakref.ref[Any]] = {}

    def count(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors from now on; nothing changes for those already counted or ignored."""
        self.count_pieces(tensor.untyped_storage() for tensor in tensors)

    def count_pieces(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Like ``count``, for storages."""
        for storage in storages:
            # torch keeps the Python object of a storage as long as the storage.
            if id(storage) not in self._watched:
                self._watch(storage, storage.nbytes())

    def counted(self, storage: torch.UntypedStorage) -> int:
        """The counted bytes of a storage."""
        return self._sizes.get(id(storage), 0)

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Never count the memory of these tensors."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if id(storage) in self._watched:
                self.now_bytes -= self._sizes[id(storage)]
                self._sizes[id(storage)] = 0
            else:
                self._watch(storage, 0)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator."""
        return func(*args, **kwargs)

    def measure(self) -> None:
        """Called after every operator, while its inputs and results are live."""

    def _watch(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        key = id(storage)
        self._sizes[key] = num_bytes
        self._watched[key] = weakref.ref(storage, self._ending(key))
        self.now_bytes += num_bytes

    def _ending(self, key: int) -> Callable[[Any], None]:
        def end(_: Any) -> None:
            del self._watched[key]
            self.now_bytes -= self._sizes.pop(key)

        return end

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled in this mode, and dynamo's check for it is slower than most kernels.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # Otherwise access to a tensor would pass through every active mode, which is slower.
        with torch._C.DisableTorchFunction():
            result = self.call(func, args, kwargs)
            tensors = list(tensors_of((*args, *kwargs.values(), result)))
            if self.is_paused:
                self.ignore(t for t in tensors if id(t.untyped_storage()) not in self._watched)
            else:
                self.count(tensors)
                self.measure()
        return result


def tensors_of(values: Iterable[Any]) -> Iterator[Tensor]:
    """All tensors among the arguments or results of an operator."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_of(value)


class LiveBytes:
    """Measures the peak memory of a model's tensors on this rank.

    It counts weights, gradients, constants and all tensors of steps, but not the caller's batch
    and tensors on the host. Staging buffers of ``rvdcomm`` and optimizer states are seen when they
    are allocated, which is in the first step. On CUDA it reports all that torch's allocator gave
    out.

    >>> # with LiveBytes(trainer) as live:
    >>> #     trainer.step(tokens, targets)
    >>> # live.peak_bytes

    Args:
        model: a ``Parallel``, whose example's program is measured, or a ``Trainer``.

    Attributes:
        peak_bytes: the peak since the context was entered.
    """

    def __init__(self, model: Any) -> None:
        trainer: Trainer = getattr(model, "trainer", model)
        self._rank = trainer._rank
        self._meter = _Peak(self._is_outside, self._with_units_of())
        self.peak_bytes = 0

    def __enter__(self) -> LiveBytes:
        if self._rank.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._rank.device)
            return self
        self._meter.count(self._resting())
        self._meter.measure()
        host = self._rank.weights._host
        # On a CPU, tensors on the host are ordinary tensors; they are not counted.
        self._to_host, host.to_host = host.to_host, self._unseen  # type: ignore[method-assign]
        self._meter.__enter__()  # type: ignore[no-untyped-call]
        return self

    def _unseen(self, x: Tensor) -> Tensor:
        self._meter.is_paused = True
        copy = self._to_host(x)
        self._meter.is_paused = False
        return copy

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._rank.device.type == "cuda":
            self.peak_bytes = torch.cuda.max_memory_allocated(self._rank.device)
            return
        self._meter.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._rank.weights._host.to_host = self._to_host  # type: ignore[method-assign]
        self.peak_bytes = self._meter.peak_bytes

    def _resting(self) -> Iterable[Tensor]:
        """Tensors that exist between steps."""
        weights, tables = self._rank.weights, self._rank.tables
        for name, parameter in weights.stored.items():
            if not tables.parameters[name].on_host:
                yield parameter
                yield from () if parameter.grad is None else (parameter.grad,)
        yield from (c for n, c in weights._copies.items() if tables.weights[n].unit != "unshard")
        yield from self._rank._constants.values()

    def _with_units_of(self) -> list[Tensor]:
        """Weights whose memory is resized without an operator."""
        weights, tables = self._rank.weights, self._rank.tables
        return [c for n, c in weights._copies.items() if tables.weights[n].unit == "unshard"]

    def _is_outside(self, tensor: Tensor) -> bool:
        """Whether memory belongs to the caller or to the host."""
        place = tensor.untyped_storage().data_ptr()
        tables = self._rank.tables
        batch = self._rank._batch.values()
        outside = [x.tensor if isinstance(x, OwnSamples) else x for x in batch]
        outside += [p for n, p in self._rank.weights.stored.items() if tables.parameters[n].on_host]
        return any(other.untyped_storage().data_ptr() == place for other in outside)


class _Peak(StorageMeter):  # type: ignore[no-untyped-call]
    """A meter that records the peak.

    Args:
        is_outside: whether a tensor that is seen for the first time is not to be counted.
        unit: tensors whose memory is resized.
    """

    def __init__(self, is_outside: Callable[[Tensor], bool], unit: Iterable[Tensor]) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._is_outside = is_outside
        self._resized = [tensor.untyped_storage() for tensor in unit]
        self.ignore(unit)

    def count(self, tensors: Iterable[Tensor]) -> None:
        given = list(tensors)
        new = [t for t in given if id(t.untyped_storage()) not in self._watched]
        self.ignore(tensor for tensor in new if self._is_outside(tensor))
        super().count(given)

    def measure(self) -> None:
        opened = sum(storage.nbytes() for storage in self._resized)
        self.peak_bytes = max(self.peak_bytes, self.now_bytes + opened)
