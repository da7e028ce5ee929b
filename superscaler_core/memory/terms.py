"""Terms: the values of a stage on one device by their numbers, and sums of them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence

import rvdcomm as rv
from superscaler_core.memory.effects import (
    LOSS_GRAD,
    NOTHING,
    Combination,
    Effect,
    Index,
    Numbers,
)
from superscaler_core.memory.fold import Fold
from superscaler_core.memory.piece import Strided
from superscaler_core.program.flow import Held
from superscaler_core.program.value import IN_BLOCK, Role, Value
from superscaler_core.program.weights import Use

WEIGHTS = frozenset({Role.COPY, Role.WEIGHT})
"""Roles of copies of weights."""

Statement = list[Effect]
"""Effects after which values are freed together."""

Term = tuple[int, Index]
"""A box of a value."""


class Terms:
    """Numbers values in the order of their first use, and adds up terms as they come.

    The lines of a block do the same (``run.calls``): the first term of a sum is the sum, the first
    addition makes a new value, and all others add to it in place.

    Args:
        uses: the uses of weights, by name.
        loss_dtype: the dtype of the loss.

    Attributes:
        outside: the values whose memory is counted elsewhere: weights and the batch.
    """

    def __init__(self, uses: Mapping[str, Use], loss_dtype: str) -> None:
        self._uses = uses
        self.outside = {LOSS_GRAD: Strided.new((), loss_dtype)}
        self._numbers: dict[Hashable, int] = {"gradient of the loss": LOSS_GRAD}
        self._sums: dict[Hashable, Term] = {}
        self._own: set[int] = set()

    def number(self, value: Hashable) -> int:
        """The number of a value."""
        return self._numbers.setdefault(value, len(self._numbers))

    def of(self, held: Held, half: int | None) -> int:
        """The number of what a device holds of a tensor, in a half of the microbatch."""
        value = held.value
        if value.role in IN_BLOCK:
            return self.number((value.key, half))
        number = self.number(value.key)
        if number not in self.outside:
            is_trained = value.role in WEIGHTS and self._uses[value.name].is_trained
            shape, dtype = held.box.shape, held.tensor.dtype
            self.outside[number] = Strided.new(shape, dtype, is_trained=is_trained)
        return number

    def all(self, held: Iterable[Held], half: int | None) -> Numbers:
        """The numbers of several values."""
        return tuple(self.of(each, half) for each in held)

    def new(self) -> int:
        """The number of a value without a name."""
        return self.number(len(self._numbers))

    def taken(self, term: Term | None) -> tuple[Statement, int]:
        """The effects that make a value of a term, and its number."""
        if term is None:
            return [], NOTHING
        number, box = term
        return ([], number) if box is None else self.combined((number,), Combination((box,)))

    def combined(self, reads: Numbers, how: Combination) -> tuple[Statement, int]:
        """The effects that combine values, and the number of the result."""
        made = self.new()
        return [combine(reads, made, how)], made

    # --- sums -----------------------------------------------------------------------------------

    def forget(self, keys: Iterable[Hashable] | None = None) -> None:
        """Forget the sums so far: all of them, or those of some keys."""
        for key in list(self._sums) if keys is None else keys:
            self._sums.pop(key, None)

    def grad(self, value: Value, half: int | None) -> Term | None:
        """The gradient of a value so far."""
        return self.sum(("grad", value.key, half))

    def add_grad(self, value: Value, half: int | None, term: Term) -> Iterator[Statement]:
        """The effects of adding to the gradient of a value."""
        yield from self.add(("grad", value.key, half), term)

    def sum(self, key: Hashable) -> Term | None:
        """The sum so far; None if nothing was added."""
        return self._sums.get(key)

    def add(self, key: Hashable, term: Term) -> Iterator[Statement]:
        """The effects of adding a term to a sum."""
        now = self._sums.get(key)
        if now is None:
            self._sums[key] = term
            return
        reads, boxes = (now[0], term[0]), (now[1], term[1])
        if now[0] in self._own:
            yield [combine(reads, now[0], Combination(boxes, in_place=True))]
            return
        total = self.number(("sum", key))
        self._own.add(total)
        self._sums[key] = total, None
        yield [combine(reads, total, Combination(boxes))]


def begin(place: int) -> Effect:
    """A step of the stage begins."""
    return Effect(Fold.begin, (place,))


def combine(reads: Numbers, made: int, how: Combination) -> Effect:
    """A value is computed from others."""
    return Effect(Fold.combine, (reads, made, how), (*reads, made))


def within(box: rv.Box, outer: rv.Box) -> Index:
    """The index of a box in a tensor that holds ``outer``."""
    if box == outer:
        return None
    return tuple((lo - low, hi - low) for lo, hi, low in zip(box.lo, box.hi, outer.lo, strict=True))


def freed(statements: Sequence[Statement], staying: Iterable[int]) -> Iterator[Effect]:
    """The effects of statements; each statement is followed by what nothing uses after it.

    Args:
        statements: in order.
        staying: numbers of values that are never freed.
    """
    last: dict[int, int] = {}
    for place, statement in enumerate(statements):
        for effect in statement:
            last.update(dict.fromkeys(effect.uses, place))
    dead: dict[int, list[int]] = {}
    for number in last.keys() - {NOTHING, *staying}:
        dead.setdefault(last[number], []).append(number)
    for place, statement in enumerate(statements):
        yield from statement
        if place in dead:
            yield Effect(Fold.free, (tuple(sorted(dead[place])),))
