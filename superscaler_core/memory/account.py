"""Account: the memory of a device while a stage runs, piece by piece and step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from superscaler_core.memory.meta import Layouts, Lying, Strided

# --- pieces -------------------------------------------------------------------------------------


class MemoryPool:
    """A memory.

    Attributes:
        now_bytes: bytes of its pieces.
    """

    def __init__(self) -> None:
        self.now_bytes = 0


class MemoryPiece:
    """A piece of memory, which is freed when nobody holds it.

    Args:
        num_bytes: its size.
        pool: the memory that it is in; None if it is not counted.

    Attributes:
        copy: the copy of it in host memory, which lives at least as long.
    """

    __slots__ = ("_holders", "_pool", "copy", "num_bytes")

    def __init__(self, num_bytes: int, pool: MemoryPool | None) -> None:
        self.num_bytes, self._pool, self._holders = num_bytes, pool, 0
        self.copy: MemoryPiece | None = None
        if pool is not None:
            pool.now_bytes += num_bytes

    def hold(self) -> MemoryPiece:
        """Add a holder."""
        self._holders += 1
        return self

    def release(self) -> None:
        """Remove a holder."""
        self._holders -= 1
        if self._holders:
            return
        if self._pool is not None:
            self._pool.now_bytes -= self.num_bytes
        if self.copy is not None:
            self.copy.release()

    def copied(self, pool: MemoryPool) -> MemoryPiece:
        """Its copy in another memory, which is made once."""
        if self.copy is None:
            self.copy = MemoryPiece(self.num_bytes, pool).hold()
        return self.copy


class Located(NamedTuple):
    """A tensor: its form, and the piece of memory that it lies in."""

    piece: MemoryPiece
    form: Strided


def layouts_of(given: Sequence[Located | None]) -> Layouts:
    """The layouts of tensors; pieces are numbered in the order of their first tensors."""
    numbers: dict[MemoryPiece, int] = {}
    lying = tuple(
        None if x is None else Lying(numbers.setdefault(x.piece, len(numbers)), x.form)
        for x in given
    )
    return Layouts(lying, tuple(piece.num_bytes for piece in numbers))


# --- moments ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Moment:
    """Bytes on a device at one moment, relative to the start of the observation.

    Attributes:
        activations: kept values and results of segments, gradients of activations, and gradients
            of weights until they are accumulated.
        weights: weights of open FSDP units.
        grads: accumulated gradients of weights.
        buffers: further memory of communication.
    """

    activations: int = 0
    weights: int = 0
    grads: int = 0
    buffers: int = 0

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return self.activations + self.weights + self.grads + self.buffers

    def __add__(self, other: Moment) -> Moment:
        return Moment(
            self.activations + other.activations,
            self.weights + other.weights,
            self.grads + other.grads,
            self.buffers + other.buffers,
        )

    def __neg__(self) -> Moment:
        return Moment(-self.activations, -self.weights, -self.grads, -self.buffers)


@dataclass(frozen=True, slots=True)
class Peak:
    """One step of a stage: its peak, and the memory after it."""

    most: Moment
    after: Moment

    @classmethod
    def of_bytes(cls, most_bytes: int, after_bytes: int) -> Peak:
        """A step whose memory is not told apart by kind."""
        return cls(Moment(buffers=most_bytes), Moment(buffers=after_bytes))

    @property
    def most_bytes(self) -> int:
        """Bytes at the peak."""
        return self.most.total

    @property
    def after_bytes(self) -> int:
        """Bytes after the step."""
        return self.after.total


class StageAccount(MemoryPool):
    """Adds up the memory of a device, and finds the peaks of the steps of a run.

    Gradients of weights that stay until the step's end are counted in two ways at once: as if they
    existed before, and as if they were allocated now, as in the first backward.

    Attributes:
        opened, buffers: bytes of weights of open FSDP units, and of communication.
        staying: bytes of gradients that stay, by weight.
        peaks, first_peaks: the peaks of steps, by their places; the latter with all gradients.
    """

    def __init__(self) -> None:
        super().__init__()
        self.opened = self.buffers = 0
        self._passing: dict[int, int] = {}
        self._most_total = self._first_total = -1
        self._most = self._first_most = Moment()
        self.start()

    def start(self) -> None:
        """Start a new observation from the present memory."""
        self.staying: dict[int, int] = {}
        self._passing_bytes = sum(self._passing.values())
        self._staying_bytes = 0
        self._base = Moment()
        self._base = -self._moment()
        self.peaks: dict[int, Peak] = {}
        self.first_peaks: dict[int, Peak] = {}
        self._place: int | None = None
        self._begin()

    def step(self, place: int | None) -> None:
        """End a step and begin another; None gives it no place."""
        self.note_peak()
        if self._place is not None:
            now, first = self._moment(), Moment(grads=self._staying_bytes)
            _add(self.peaks, self._place, self._most, now)
            _add(self.first_peaks, self._place, self._first_most, now + first)
            self._begin()
        self._place = place

    def note_peak(self, more: int = 0, buffers: int = 0) -> None:
        """Update the peaks with the present memory, plus so much that is freed at once."""
        total = self.now_bytes + more + self.opened + self.buffers + buffers + self._passing_bytes
        if total > self._most_total:
            self._most_total, self._most = total, self._moment(more, buffers)
        total += self._staying_bytes
        if total > self._first_total:
            self._first_total = total
            self._first_most = self._moment(more, buffers) + Moment(grads=self._staying_bytes)

    def add_grad(self, weight: int, num_bytes: int, *, stays: bool) -> None:
        """Count the gradient of a weight: one that stays, or one of an open FSDP unit."""
        grads = self.staying if stays else self._passing
        added = num_bytes - grads.get(weight, 0)
        grads[weight] = num_bytes
        if stays:
            self._staying_bytes += added
        else:
            self._passing_bytes += added

    def pass_grad(self, weight: int) -> None:
        """Free the gradient of a weight whose FSDP unit closes."""
        self._passing_bytes -= self._passing.pop(weight, 0)

    def _begin(self) -> None:
        self._most_total = self._first_total = -1
        self._most = self._first_most = Moment()
        self.note_peak()

    def _moment(self, more: int = 0, buffers: int = 0) -> Moment:
        now = self.now_bytes + more
        return self._base + Moment(now, self.opened, self._passing_bytes, self.buffers + buffers)


def _add(peaks: dict[int, Peak], place: int, most: Moment, after: Moment) -> None:
    """Note the peak of a step; a backward with a recomputation runs the step twice."""
    before = peaks.get(place)
    if before is not None and before.most.total > most.total:
        most = before.most
    peaks[place] = Peak(most, after)
