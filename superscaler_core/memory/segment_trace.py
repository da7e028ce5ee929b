"""Segment trace: what a segment does to memory, recorded once and played wherever it runs again.

A segment runs on leaves of its own. So what it makes and lets go, and when, follows from its form
and from how the tensors lie that it is given. It is recorded while the segment runs alone. A piece
of memory that others hold too is gone when the last of them lets it go, so a trace says when the
segment *drops* it.
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
    """How a tensor lies in a piece of memory.

    Attributes:
        piece: number of the piece.
        shape, stride, offset, dtype: of the tensor.
        is_trained: whether gradients are added to it.
    """

    piece: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    is_trained: bool

    @classmethod
    def of(cls, x: Tensor, piece: int) -> Lying:
        """How a tensor lies in the piece of that number."""
        offset = int(x.storage_offset())
        return cls(piece, tuple(x.shape), x.stride(), offset, x.dtype, x.requires_grad)

    def on(self, storage: UntypedStorage) -> Tensor:
        """A tensor that lies so."""
        empty = torch.empty(0, dtype=self.dtype, device="meta")
        return empty.set_(storage, self.offset, self.shape, self.stride)


class Layouts(NamedTuple):
    """How tensors lie that a segment is given, and which of them share memory.

    Attributes:
        tensors: how each lies; None where there is none.
        sizes: bytes of the pieces.
    """

    tensors: tuple[Lying | None, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, tensors: Sequence[Tensor | None]) -> Layouts:
        """Of these tensors."""
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
        """Other tensors that lie alike."""
        storages = list(map(storage_of, self.sizes))
        return [
            None if lying is None else lying.on(storages[lying.piece]) for lying in self.tensors
        ]


def pieces_of(tensors: Iterable[Tensor | None]) -> list[UntypedStorage]:
    """The pieces in which tensors lie, in the order in which they come up."""
    # torch keeps the Python object of a storage as long as the storage, so it is an identity.
    storages = (x.untyped_storage() for x in tensors if x is not None)
    return list({id(storage): storage for storage in storages}.values())


def storage_of(num_bytes: int) -> UntypedStorage:
    """A piece of memory without data."""
    return torch.empty(num_bytes, dtype=torch.uint8, device="meta").untyped_storage()


# --- traces -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ForwardTrace:
    """What a forward does; pieces are numbered: those that it was given, then those that it leaves.

    Attributes:
        peak_bytes: the most that is there beside what was there before.
        made: bytes of the pieces that it leaves.
        outputs: how its results lie.
        kept: the pieces that its backward needs.
    """

    peak_bytes: int
    made: tuple[int, ...]
    outputs: tuple[Lying, ...]
    kept: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Moments:
    """Operators run whose results are gone soon.

    Attributes:
        peak_bytes: the most beside what was there before; None if none has run.
        left_bytes: what is left of it.
    """

    peak_bytes: int | None
    left_bytes: int


@dataclass(frozen=True, slots=True)
class Drop:
    """The segment lets a piece go that its forward has kept."""

    piece: int


@dataclass(frozen=True, slots=True)
class Result:
    """A piece comes to be in which results lie."""

    piece: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class WeightGrad:
    """Autograd has made the gradient of what was given at a position among ``others``."""

    position: int


Happening = Moments | Drop | Result | WeightGrad


@dataclass(frozen=True, slots=True)
class BackwardTrace:
    """What a backward does; pieces are numbered: of its forward, of given gradients, its own.

    Attributes:
        happenings: in order.
        results: how the gradients lie that it returns.
    """

    happenings: tuple[Happening, ...]
    results: tuple[Lying, ...]


# --- recording ----------------------------------------------------------------------------------


class Recording:
    """A segment that runs alone, on tensors that lie as those that it is given.

    Args:
        segment: the function.
        num_inputs: how many of what it is given are inputs of which a gradient is wanted.
        given: how they lie.
        call: runs an operator.
        tape: that remembers nothing but this.
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
        """Run it forward."""
        with _disable_current_modes():
            ran = self._forward(with_grad=with_grad)
        self._ran = ran if with_grad else None
        return ran[0]

    def backward(self, grads: Layouts) -> BackwardTrace:
        """Run it back from gradients that lie so; forward before, unless that was just done."""
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
        """What the forward does, and its pieces by their numbers at the recorder."""
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
        """Tensors to run on."""
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
    """What happens to memory."""

    MADE = auto()
    GONE = auto()
    LOOKED = auto()
    GRAD = auto()


class _Recorder(StorageMeter):  # type: ignore[no-untyped-call]
    """Writes down what happens; pieces are numbered in the order in which they come to be."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self._call = call
        self.events: list[tuple[_Event, int]] = []
        self.sizes: list[int] = []
        self._numbers: dict[int, int] = {}

    @property
    def living(self) -> list[int]:
        """The pieces that are there, ascending."""
        return sorted(self._numbers.values())

    def number_of(self, x: Tensor) -> int:
        """Of the piece in which a tensor lies."""
        return self._numbers[id(x.untyped_storage())]

    def happenings(self, before: Mapping[int, int], results: Mapping[int, int]) -> list[Happening]:
        """The events, with what is gone soon added up.

        Args:
            before: numbers of pieces that were there before, by those that they have here.
            results: of those that stay.
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
        """What a weight calls when it has a gradient."""

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
