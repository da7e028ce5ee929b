"""Trace: what the calls of a segment do to memory, recorded once on tensors without data.

Only autograd knows what it keeps for a backward, so a segment runs once, on torch's meta device. It
runs on autograd leaves of its own. So what it allocates and drops, and when, depends only on its
function and on the layouts of the tensors that it is given. Segments of equal structure share their
traces.

The calls of one segment for one microbatch number its pieces of memory: those given to its first
call, those that this call makes and leaves, those given to its second call, and so on.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import _disable_current_modes

from rvdcomm.collector import paused_collector
from superscaler_core.known import Known
from superscaler_core.memory.meta import FusedAttention, Layouts, Lying, MetaMeter, Strided
from superscaler_core.program.verb import Verb
from superscaler_core.run.host import Arrival, Host
from superscaler_core.run.tape import SegmentFunction, Tape

MAX_TRACES = 1 << 12
"""Bound on cached traces, some kilobytes each. A plan of equal layers has some ten forwards and
backwards; a plan that splits one op differently adds a few more."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive operators that free nothing but what they have made.

    Attributes:
        peak_bytes: the most memory that they add; None if no operator has run.
        left_bytes: the memory that they have added at their end, without ``made``.
        made: bytes of each piece that outlives the call.
    """

    peak_bytes: int | None
    left_bytes: int
    made: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Drop:
    """The segment drops a piece; it is freed if nobody else holds it."""

    number: int


@dataclass(frozen=True, slots=True)
class WeightGrad:
    """Autograd has computed the gradient of the weight at a position among the given tensors."""

    position: int


Happening = Stretch | Drop | WeightGrad


@dataclass(frozen=True, slots=True)
class Trace:
    """What one call does to memory.

    Attributes:
        happenings: in order.
        results: how the tensors that it returns lie.
        kept: numbers of the pieces that the segment holds for its next call.
    """

    happenings: tuple[Happening, ...]
    results: tuple[Lying, ...]
    kept: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TracedFunction:
    """A function whose calls are traced.

    Attributes:
        key: equal for functions that do the same.
        make: makes the function; only called if a trace is not known.
        num_inputs: how many of the tensors given to a forward need gradients; they come first.
        recompute, swap: as in ``Segment``.
    """

    key: Hashable
    make: Callable[[], SegmentFunction]
    num_inputs: int = 0
    recompute: bool = False
    swap: bool = False


Call = tuple[Verb, Layouts]
"""What is called, and how the tensors lie that are given to it."""

_TRACES: Known[Hashable, Trace] = Known(MAX_TRACES)


class TracedCalls:
    """The calls of a segment for one microbatch, with the traces of them.

    Args:
        source: the segment.
    """

    def __init__(self, source: TracedFunction) -> None:
        self._source = source
        self._before: tuple[Call, ...] = ()
        self._recording: _Recording | None = None

    def trace(self, verb: Verb, given: Layouts) -> Trace:
        """The trace of the next call."""
        source, calls = self._source, (*self._before, (verb, given))
        key = source.key, source.num_inputs, source.recompute, source.swap, calls
        found = _TRACES.get(key)
        if found is not None:
            self._recording = None
        else:
            if self._recording is None:
                self._recording = _Recording(source)
                for call in self._before:
                    self._recording.trace(*call)
            found = _TRACES[key] = self._recording.trace(verb, given)
        self._before = calls
        return found


class _Recording:
    """Makes the calls of a segment on new tensors, one after another, and traces them."""

    def __init__(self, source: TracedFunction) -> None:
        # Otherwise torch imports this inside the first operator whose shapes it computes in Python,
        # and the frames of the import keep that operator's callers and their tensors alive.
        importlib.import_module("torch._dynamo")
        self._function, self._num_inputs = source.make(), source.num_inputs
        name = self._function.__name__
        marks = (name,) if source.recompute else (), (name,) if source.swap else ()
        self._tape = Tape(*marks, _UnseenHost())
        self._recorder = _Recorder()
        self._numbers: dict[int, int] = {}
        """The trace's numbers of pieces, by the recorder's numbers."""

    def trace(self, verb: Verb, given: Layouts) -> Trace:
        """The trace of the next call."""
        recorder, numbers = self._recorder, self._numbers
        with ExitStack() as stack:
            # A collection would free what cycles of objects hold, at a moment that is not ours.
            for context in (paused_collector(), _disable_current_modes(), torch.enable_grad()):
                stack.enter_context(context)
            tensors = given.made()
            self._watch_grads(given, tensors)
            self._number(recorder.new(x for x in tensors if x is not None))
            with FusedAttention(), recorder:
                results = self._call(verb, tensors)
            new = self._number(number for number in recorder.living if number not in numbers)
            happenings = tuple(recorder.happenings(numbers, new))
            lying = tuple(Lying(numbers[recorder.number_of(x)], Strided.of(x)) for x in results)
            del tensors, results
            return Trace(happenings, lying, tuple(numbers[n] for n in recorder.living))

    def _number(self, new: Iterable[int]) -> frozenset[int]:
        """Number pieces that the recorder has seen since the last call."""
        found = list(new)
        for number in found:
            self._numbers[number] = len(self._numbers)
        return frozenset(found)

    def _call(self, verb: Verb, tensors: Sequence[Any]) -> tuple[Tensor, ...]:
        tape, function, num = self._tape, self._function, self._num_inputs
        match verb:
            case Verb.COMPUTE:
                return tape.compute(function, 0, (), tuple(tensors))
            case Verb.FORWARD:
                return tape.forward(function, 0, 0, tuple(tensors[:num]), tuple(tensors[num:]))
            case Verb.HOLD:
                tape.hold(function, 0, tuple(tensors[:num]), tuple(tensors[num:]))
            case Verb.RECOMPUTE:
                tape.recompute(function, 0, 0)
            case Verb.BACKWARD:
                return tape.backward(function, 0, 0, tuple(tensors))
            case Verb.BACKWARD_INPUTS:
                return tape.backward_inputs(function, 0, 0, tuple(tensors))
            case Verb.BACKWARD_WEIGHTS:
                tape.backward_weights(function, 0)
            case Verb.OFFLOAD:
                tape.offloaded(function, 0).send()
                tape.offloaded(function, 0).leave()
            case Verb.RELOAD:
                tape.offloaded(function, 0).fetch()
                tape.offloaded(function, 0).arrive()
        return ()

    def _watch_grads(self, given: Layouts, tensors: Sequence[Tensor | None]) -> None:
        """Note when autograd has computed the gradients of weights."""
        for position, (lying, x) in enumerate(zip(given.tensors, tensors, strict=True)):
            if x is not None and lying is not None and lying.form.is_trained:
                hook = self._recorder.grad_hook(position)
                x.requires_grad_().register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


class _UnseenHost(Host):
    """A host whose memory is not counted."""

    def __init__(self) -> None:
        super().__init__("meta")

    def to_host(self, x: Tensor) -> Tensor:
        with _disable_current_modes():
            return torch.empty_like(x)

    def to_device(self, x: Tensor) -> Arrival:
        # An operator that is given the copy on the host would make it seen.
        copy = torch.empty(x.shape, dtype=x.dtype, device="meta")
        return lambda: copy


# --- recording ----------------------------------------------------------------------------------


class _Event(Enum):
    """A kind of event that the recorder notes."""

    MADE = auto()
    GONE = auto()
    MEASURED = auto()
    GRAD = auto()


class _Recorder(MetaMeter):  # type: ignore[no-untyped-call]
    """Records events; pieces of memory are numbered in the order of their first use."""

    def __init__(self) -> None:
        super().__init__()
        self._events: list[tuple[_Event, int]] = []
        self._bytes: list[int] = []
        self._numbers: dict[int, int] = {}

    @property
    def living(self) -> list[int]:
        """The numbers of the pieces that are alive, ascending."""
        return sorted(self._numbers.values())

    def number_of(self, x: Tensor) -> int:
        """The number of the piece that holds a tensor."""
        return self._numbers[id(x.untyped_storage())]

    def new(self, tensors: Iterable[Tensor]) -> list[int]:
        """Forget the events so far, and number the pieces of new tensors."""
        first = len(self._bytes)
        self.count(tensors)
        self._events.clear()
        return list(range(first, len(self._bytes)))

    def happenings(self, known: Mapping[int, int], new: frozenset[int]) -> Iterable[Happening]:
        """The recorded events, with temporary memory added up.

        Args:
            known: the trace's numbers of pieces that exist before or after the call.
            new: those of them that the call has made.
        """
        made: list[int] = []
        now, most = 0, None
        for event, number in self._events:
            is_drop = event is _Event.GONE and number in known
            if is_drop or event is _Event.GRAD:
                if now or most is not None:
                    yield Stretch(most, now - sum(made), tuple(made))
                now, most, made = 0, None, []
                yield Drop(known[number]) if is_drop else WeightGrad(number)
            elif event is _Event.MEASURED:
                most = now if most is None else max(most, now)
            else:
                now += self._bytes[number] if event is _Event.MADE else -self._bytes[number]
                made += [self._bytes[number]] if number in new and event is _Event.MADE else []
        if now or most is not None:
            yield Stretch(most, now - sum(made), tuple(made))

    def grad_hook(self, position: int) -> Callable[[Tensor], None]:
        """The hook that a weight calls when it has a gradient."""

        def hook(weight: Tensor) -> None:
            self._events.append((_Event.GRAD, position))
            weight.grad = None

        return hook

    def measure(self) -> None:
        self._events.append((_Event.MEASURED, -1))

    def _watch(self, storage: UntypedStorage, num_bytes: int) -> None:
        self._numbers[id(storage)] = len(self._bytes)
        self._events.append((_Event.MADE, len(self._bytes)))
        self._bytes.append(num_bytes)
        super()._watch(storage, num_bytes)

    def _ending(self, key: int) -> Callable[[Any], None]:
        end, number = super()._ending(key), self._numbers[key]

        def ended(reference: Any) -> None:
            del self._numbers[key]
            self._events.append((_Event.GONE, number))
            end(reference)

        return ended
