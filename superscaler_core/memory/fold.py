"""Fold: the memory of a device over the effects of a stage, for one microbatch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial

from torch import Tensor

from superscaler_core import ops
from superscaler_core.memory.account import (
    Located,
    MemoryPiece,
    MemoryPool,
    StageAccount,
    layouts_of,
)
from superscaler_core.memory.effects import (
    NOTHING,
    MemoryEffect,
    Numbers,
    StageEffects,
    Term,
    TrainedWeight,
)
from superscaler_core.memory.meta import Index, Strided
from superscaler_core.memory.trace import Drop, Stretch, TracedCalls, TracedFunction
from superscaler_core.program.verb import Verb
from superscaler_core.run.tape import SegmentFunction

_LAST = frozenset({Verb.COMPUTE, Verb.BACKWARD, Verb.BACKWARD_WEIGHTS})
"""Calls after which a segment keeps nothing."""


Boxes = tuple[str, ...]
"""The box of a tensor that is joined from others, and then the box of each of them, as texts."""


class Fold:
    """The memory of a device while a stage runs one microbatch.

    A value holds a piece of memory from the effect that makes it until it is freed; a segment holds
    what its trace says that it keeps. Sums add up as the run time adds them: the first term is the
    sum, the first addition makes a new tensor, and all others add to it in place.

    Args:
        stage: what the stage does.
        function: makes the function of a segment, by its number.

    Attributes:
        account, host: the memory of the device, and of its host.
        values: the values that exist, by number.
    """

    def __init__(self, stage: StageEffects, function: Callable[[int], SegmentFunction]) -> None:
        self._stage, self._function = stage, function
        self.account, self.host = StageAccount(), MemoryPool()
        self.values = {
            number: Located(MemoryPiece(form.num_bytes, None).hold(), form)
            for number, form in stage.outside
        }
        self._sums: set[int] = set()
        self._regions: dict[int, list[Located]] = {}
        self._segments: dict[tuple[int, int], _Segment] = {}

    def run(self, effects: Sequence[MemoryEffect]) -> None:
        """Add the effects of one run of the stage."""
        self.account.start()
        for effect in effects:
            effect.do(self, *effect.args)
        self.account.step(None)

    @property
    def host_bytes(self) -> Mapping[int, int]:
        """The bytes on the host of each offloaded segment, by its number."""
        return {
            number: sum(copy.num_bytes for copy in segment.copies)
            for (number, half), segment in self._segments.items()
            if half == 0 and self._stage.segments[number].swap
        }

    # --- values ---------------------------------------------------------------------------------

    def _make(self, number: int, value: Located) -> None:
        value.piece.hold()
        if number in self.values:
            self.values[number].piece.release()
        self.values[number] = value

    def free(self, values: Numbers) -> None:
        """Values that exist are not needed any more."""
        for number in values:
            if number in self.values:
                self.values.pop(number).piece.release()
                self._sums.discard(number)

    def pack(self, made: int, terms: Sequence[Term], joined: Boxes = ()) -> None:
        """A value is a box of another one, or the sum of several, or joined from their boxes."""
        given = [self._within(*term) for term in terms]
        if len(given) > 1 or joined:
            self._combine(made, given, joined)
        else:
            self._make(made, given[0])

    def add(self, total: int, term: int, index: Index) -> None:
        """A box of a value is added to a sum."""
        given = self._within(term, index)
        if total not in self.values:
            self._make(total, given)
            return
        terms = [self.values[total], given]
        self._combine(total, terms, is_in_place=total in self._sums)
        self._sums.add(total)

    def _within(self, number: int, index: Index) -> Located:
        piece, form = self.values[number]
        return Located(piece, form.within(index))

    def _combine(
        self, made: int, given: Sequence[Located], joined: Boxes = (), *, is_in_place: bool = False
    ) -> None:
        segment = _Segment(_combining(joined, is_in_place), self.account, self.host)
        (result,) = segment.call(Verb.COMPUTE, given)
        self._make(made, result)
        segment.end()

    def bring(
        self, made: int, form: Strided | None, passing_bytes: int = 0, is_counted: bool = True
    ) -> None:
        """Communication brings a value; ``passing_bytes`` are of regions that arrive one by one."""
        if form is not None:
            pool = self.account if is_counted else None
            self._make(made, Located(MemoryPiece(form.num_bytes, pool), form))
        self.account.note_peak(passing_bytes)

    def keep_region(self, region: int, reads: Numbers) -> None:
        """The values that a region reads are kept for its recomputation."""
        self._regions[region] = [self.values[number] for number in reads]
        for value in self._regions[region]:
            value.piece.hold()

    def resume_region(self, region: int, makes: Numbers) -> None:
        """The kept values of a region are taken for its recomputation."""
        for number, value in zip(makes, self._regions.pop(region), strict=True):
            self._make(number, value)
            value.piece.release()

    # --- segments -------------------------------------------------------------------------------

    def run_segment(
        self, verb: Verb, segment: int, half: int, reads: Numbers, makes: Numbers
    ) -> None:
        """A segment runs: forward, backward, or a copy of what it keeps."""
        key = segment, half
        if key not in self._segments:
            self._segments[key] = self._segment(segment)
        mine = self._segments[key]
        given = [None if number == NOTHING else self.values[number] for number in reads]
        for number, value in zip(makes, mine.call(verb, given), strict=True):
            self._make(number, value)
        mine.settle()
        if verb in _LAST:
            mine.end()
            del self._segments[key]

    def _segment(self, number: int) -> _Segment:
        shape = self._stage.segments[number]
        marks = shape.num_inputs, shape.recompute, shape.swap
        source = TracedFunction(shape.form, partial(self._function, number), *marks)
        return _Segment(source, self.account, self.host, shape.trained)

    # --- steps and weights ----------------------------------------------------------------------

    def begin(self, place: int) -> None:
        """A step of the stage begins, the one at a place in ``StageProgram.steps``."""
        self.account.step(place)

    def touch(self) -> None:
        """Values are read and stay as they are."""
        self.account.note_peak()

    def shift(self, opened: int = 0, buffers: int = 0, passing_bytes: int = 0) -> None:
        """Weights move: open units and buffers grow, and further buffers exist for a moment."""
        self.account.opened += opened
        self.account.buffers += buffers
        self.account.note_peak(buffers=passing_bytes)

    def reduce(self, gone: Numbers, stored: Sequence[tuple[int, int]]) -> None:
        """Gradients of an FSDP unit move to where they are stored, with their bytes there."""
        for grad in gone:
            self.account.pass_grad(grad)
        for grad, num_bytes in stored:
            self.account.add_grad(grad, num_bytes, stays=True)


class _Segment:
    """What a segment holds from its forward to its backward.

    Args:
        source: its function.
        account, host: the memory of the device, and of its host.
        trained: the weights that get gradients.

    Attributes:
        copies: the pieces in host memory that it has there.
    """

    def __init__(
        self,
        source: TracedFunction,
        account: StageAccount,
        host: MemoryPool,
        trained: Sequence[TrainedWeight] = (),
    ) -> None:
        self._calls, self._num_inputs = TracedCalls(source), source.num_inputs
        self._account, self._host = account, host
        self._trained = {weight.position: weight for weight in trained}
        self._pieces: list[MemoryPiece] = []
        self._held: set[int] = set()
        self._kept: set[int] = set()
        self._staying: frozenset[MemoryPiece] = frozenset()
        self.copies: list[MemoryPiece] = []

    def call(self, verb: Verb, given: Sequence[Located | None]) -> list[Located]:
        """Add what a call does, and return its results, which it holds until ``settle``."""
        trace = self._calls.trace(verb, layouts_of(given))
        pieces = self._pieces
        if verb is Verb.FORWARD:
            staying = given[self._num_inputs :]
            self._staying = frozenset(value.piece for value in staying if value is not None)
        pieces += dict.fromkeys(value.piece for value in given if value is not None)
        for what in trace.happenings:
            if isinstance(what, Stretch):
                self._stretch(what)
            elif isinstance(what, Drop):
                self._drop(what.number, to_host=verb is Verb.OFFLOAD)
            else:
                self._add_grad(self._trained[what.position])
        self._kept = set(trace.kept)
        return [Located(pieces[lying.number], lying.form) for lying in trace.results]

    def settle(self) -> None:
        """Hold what the next call needs, and nothing else."""
        for number in self._kept - self._held:
            self._pieces[number].hold()
        for number in self._held - self._kept:
            self._pieces[number].release()
        self._held = self._kept

    def end(self) -> None:
        """Hold nothing any more."""
        self._kept = set()
        self.settle()
        for copy in self.copies:
            copy.release()

    def _stretch(self, what: Stretch) -> None:
        account = self._account
        if what.peak_bytes is not None:
            account.note_peak(what.peak_bytes)
        account.now_bytes += what.left_bytes
        for num_bytes in what.made:
            self._held.add(len(self._pieces))
            self._pieces.append(MemoryPiece(num_bytes, account).hold())

    def _drop(self, number: int, *, to_host: bool) -> None:
        piece = self._pieces[number]
        if to_host and piece not in self._staying:
            self.copies.append(piece.copied(self._host).hold())
        if number in self._held:
            self._held.remove(number)
            piece.release()

    def _add_grad(self, weight: TrainedWeight) -> None:
        self._account.add_grad(weight.grad, weight.num_bytes, stays=weight.stays)
        if weight.is_cast:
            self._account.note_peak()


@lru_cache(maxsize=1 << 10)
def _combining(joined: Boxes, is_in_place: bool) -> TracedFunction:
    """The function that combines values: joins them, or adds the others to the first one."""

    def combine(_: int, *values: Tensor) -> tuple[Tensor]:
        if joined:
            return (ops.join(joined[0], list(zip(values, joined[1:], strict=True))),)
        total, *others = values
        for other in others:
            if is_in_place:
                total += other
            else:
                total = total + other
        return (total,)

    return TracedFunction((joined, is_in_place), lambda: combine)
