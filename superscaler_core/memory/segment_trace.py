"""Segment trace: a segment's effects on memory, recorded once and replayed for equal segments.

A segment runs on autograd leaves of its own. So what it allocates and releases, and when, depends
only on its form and on the layouts of the tensors that it is given. It is recorded while the
segment runs alone. A piece of memory that others hold too is freed when the last holder releases
it, so a trace says when the segment itself *drops* the piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import _disable_current_modes

from superscaler_core.run.live_bytes import StorageMeter
from superscaler_core.run.tape import SegmentFunction, Tape

# --- how tensors lie ----------------------------------------------------------------------------


class Lying(NamedTuple):
    """The layout of a tensor in a piece of memory.

    Attributes:
        piece: number of the piece.
        shape, stride, offset, dtype: properties of the tensor.
        is_trained: whether the tensor requires a gradient.
    """

    piece: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    is_trained: bool

    @classmethod
    def of(cls, x: Tensor, piece: int) -> Lying:
        """The layout of a tensor in the piece of that number."""
        offset = int(x.storage_offset())
        return cls(piece, tuple(x.shape), x.stride(), offset, x.dtype, x.requires_grad)

    def on(self, storage: UntypedStorage) -> Tensor:
        """A tensor with this layout in a storage."""
        empty = torch.empty(0, dtype=self.dtype, device="meta")
        return empty.set_(storage, self.offset, self.shape, self.stride)


class Layouts(NamedTuple):
    """The layouts of the tensors that a segment is given, and which of them share memory.

    Attributes:
        tensors: the layout of each tensor; None where there is none.
        sizes: bytes of each piece of memory.
    """

    tensors: tuple[Lying | None, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, tensors: Sequence[Tensor | None]) -> Layouts:
        """The layouts of these tensors."""
        pieces = pieces_of(tensors)
        numbers = {id(piece): number for number, piece in enumerate(pieces)}
        return cls(
            tuple(
                None if x is None else Lying.of(x, numbers[id(x.untyped_storage())])
                for x in tensors
            ),
            tuple(piece.nbytes() for piece in pieces),
        )

    def made(self) -> list[Tensor | None]:
        """New tensors with these layouts."""
        storages = list(map(storage_of, self.sizes))
        return [
            None if lying is None else lying.on(storages[lying.piece]) for lying in self.tensors
        ]


def pieces_of(tensors: Iterable[Tensor | None]) -> list[UntypedStorage]:
    """The pieces of memory that hold tensors, in the order of their first tensors."""
    # torch keeps the Python object of a storage as long as the storage, so it is an identity.
    storages = (x.untyped_storage() for x in tensors if x is not None)
    return list({id(storage): storage for storage in storages}.values())


def storage_of(num_bytes: int) -> UntypedStorage:
    """A piece of memory without data."""
    return torch.empty(num_bytes, dtype=torch.uint8, device="meta").untyped_storage()


# --- traces -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ForwardTrace:
    """The effects of a forward; given pieces are numbered first, then those that it leaves.

    Attributes:
        peak_bytes: the most memory that the forward adds.
        made: bytes of each piece that it leaves.
        outputs: layouts of its results.
        kept: numbers of the pieces that its backward needs.
    """

    peak_bytes: int
    made: tuple[int, ...]
    outputs: tuple[Lying, ...]
    kept: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Moments:
    """The memory of consecutive operators whose results are freed within the segment.

    Attributes:
        peak_bytes: the most memory that they add; None if no operator has run.
        left_bytes: the memory that they have added at their end.
    """

    peak_bytes: int | None
    left_bytes: int


@dataclass(frozen=True, slots=True)
class Drop:
    """The segment releases a piece of its forward or of a given gradient."""

    piece: int


@dataclass(frozen=True, slots=True)
class Result:
    """A piece is allocated that holds results."""

    piece: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class WeightGrad:
    """Autograd has computed the gradient of the weight at a position among ``others``."""

    position: int


Happening = Moments | Drop | Result | WeightGrad


@dataclass(frozen=True, slots=True)
class BackwardTrace:
    """The effects of a backward; pieces of the forward are numbered first.

    Pieces of given gradients follow, and then those that the backward allocates for its results.

    Attributes:
        happenings: the effects, in order.
        results: layouts of the gradients that it returns.
    """

    happenings: tuple[Happening, ...]
    results: tuple[Lying, ...]


# --- recording ----------------------------------------------------------------------------------


class Recording:
    """Runs a segment alone, on new tensors with given layouts, and records its effects.

    Args:
        segment: the function.
        num_inputs: number of inputs that need gradients; they come first among the given tensors.
        given: layouts of the given tensors.
        call: runs an operator.
        tape: a tape for this recording alone.
    """

    def __init__(
        self,
        segment: SegmentFunction,
        num_inputs: int,
        given: Layouts,
        call: Callable[..., Any],
        tape: Tape,
    ) -> None:
        self._segment, self._num_inputs, self._given = segment, num_inputs, given
        self._tape, self._recorder = tape, _Recorder(call)
        self._ran: tuple[ForwardTrace, dict[int, int]] | None = None

    def forward(self, *, with_grad: bool) -> ForwardTrace:
        """Record the segment's forward."""
        with _disable_current_modes():
            ran = self._forward(with_grad=with_grad)
        self._ran = ran if with_grad else None
        return ran[0]

    def backward(self, grads: Layouts) -> BackwardTrace:
        """Record its backward from such gradients; first its forward, unless just recorded."""
        recorder = self._recorder
        with _disable_current_modes():
            trace, pieces = self._ran or self._forward(with_grad=True)
            self._ran = None
            num_pieces, num_before = len(self._given.sizes) + len(trace.made), len(recorder.sizes)
            given = tuple(grads.made())
            recorder.count(x for x in given if x is not None)
            pieces |= {num_before + i: num_pieces + i for i in range(len(grads.sizes))}
            num_before += len(grads.sizes)
            recorder.events.clear()
            with recorder:
                results = self._tape.backward(self._segment, 0, 0, given)
            numbers = [recorder.number_of(x) for x in results]
            made: dict[int, int] = {}
            for number in numbers:
                if number >= num_before:
                    made.setdefault(number, num_pieces + len(grads.sizes) + len(made))
            happenings = tuple(recorder.happenings(pieces, made))
            pieces |= made
            lying = (Lying.of(x, pieces[i]) for x, i in zip(results, numbers, strict=True))
            return BackwardTrace(happenings, tuple(lying))

    def _forward(self, *, with_grad: bool) -> tuple[ForwardTrace, dict[int, int]]:
        """The trace of the forward, and its numbers of pieces by those of the recorder."""
        recorder = self._recorder
        inputs, others = self._args()
        recorder.events.clear()
        with recorder:
            if with_grad:
                outputs = self._tape.forward(self._segment, 0, 0, inputs, others)
            else:
                outputs = self._tape.compute(self._segment, 0, inputs, others)
        moments = recorder.happenings({}, {})
        peaks = (each.peak_bytes or 0 for each in moments if isinstance(each, Moments))
        living = recorder.living
        pieces = {number: piece for piece, number in enumerate(living)}
        made = tuple(recorder.sizes[number] for number in living[len(self._given.sizes) :])
        lying = tuple(Lying.of(x, pieces[recorder.number_of(x)]) for x in outputs)
        del inputs, others, outputs
        kept = tuple(pieces[number] for number in recorder.living)
        return ForwardTrace(max(peaks, default=0), made, lying, kept), pieces

    def _args(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """New tensors as arguments of the segment."""
        given = [x for x in self._given.made() if x is not None]
        self._recorder.count(given)
        inputs, others = tuple(given[: self._num_inputs]), tuple(given[self._num_inputs :])
        layouts = self._given.tensors[self._num_inputs :]
        for position, (x, lying) in enumerate(zip(others, layouts, strict=True)):
            if lying is not None and lying.is_trained:
                hook = self._recorder.grad_hook(position)
                x.requires_grad_().register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        return inputs, others


class _Event(Enum):
    """A kind of event that the recorder notes."""

    MADE = auto()
    GONE = auto()
    LOOKED = auto()
    GRAD = auto()


class _Recorder(StorageMeter):  # type: ignore[no-untyped-call]
    """Records events; pieces of memory are numbered in the order of their first use."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self._call = call
        self.events: list[tuple[_Event, int]] = []
        self.sizes: list[int] = []
        self._numbers: dict[int, int] = {}

    @property
    def living(self) -> list[int]:
        """The numbers of the pieces that are alive, ascending."""
        return sorted(self._numbers.values())

    def number_of(self, x: Tensor) -> int:
        """The number of the piece that holds a tensor."""
        return self._numbers[id(x.untyped_storage())]

    def happenings(self, before: Mapping[int, int], results: Mapping[int, int]) -> list[Happening]:
        """The recorded events, with temporary memory added up.

        Args:
            before: the trace's numbers of pieces that existed before, by the recorder's numbers.
            results: the same for pieces that hold results.
        """
        found: list[Happening] = []
        now, most = 0, None
        for event, number in self.events:
            other: Happening | None = None
            if event is _Event.LOOKED:
                most = now if most is None else max(most, now)
            elif event is _Event.GRAD:
                other = WeightGrad(number)
            elif event is _Event.MADE and number in results:
                other = Result(results[number], self.sizes[number])
            elif event is _Event.GONE and number in before:
                other = Drop(before[number])
            else:
                now += self.sizes[number] if event is _Event.MADE else -self.sizes[number]
            if other is not None:
                found += [Moments(most, now), other] if now or most is not None else [other]
                now, most = 0, None
        return [*found, Moments(most, now)] if now or most is not None else found

    def grad_hook(self, position: int) -> Callable[[Tensor], None]:
        """The hook that a weight calls when it has a gradient."""

        def hook(weight: Tensor) -> None:
            self.events.append((_Event.GRAD, position))
            weight.grad = None

        return hook

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._call(func, args, kwargs)

    def look(self) -> None:
        self.events.append((_Event.LOOKED, -1))

    def _watch(self, storage: UntypedStorage, num_bytes: int) -> None:
        self._numbers[id(storage)] = len(self.sizes)
        self.events.append((_Event.MADE, len(self.sizes)))
        self.sizes.append(num_bytes)
        super()._watch(storage, num_bytes)

    def _ending(self, key: int) -> Callable[[Any], None]:
        end, number = super()._ending(key), self._numbers[key]

        def ended(reference: Any) -> None:
            del self._numbers[key]
            self.events.append((_Event.GONE, number))
            end(reference)

        return ended
