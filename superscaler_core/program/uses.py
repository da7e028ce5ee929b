"""Uses: at which positions the instructions of a block read and write values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property

from superscaler_core.plan import Device
from superscaler_core.program.instruction import Block, StepInstruction
from superscaler_core.program.value import SUMMED, Value


class Uses:
    """The positions of a block at which values are read and written."""

    def __init__(self, block: Block) -> None:
        self._block = block
        self._reads: dict[str, list[int]] = defaultdict(list)
        self._writes: dict[str, list[int]] = defaultdict(list)
        for place, instruction in enumerate(block):
            for value in instruction.reads:
                self._reads[value.key].append(place)
            for value in instruction.writes:
                self._writes[value.key].append(place)

    @cached_property
    def devices(self) -> frozenset[Device]:
        """All devices with an instruction."""
        return frozenset(device for instruction in self._block for device in instruction.devices)

    def readers(self, given: StepInstruction) -> Iterator[int]:
        """Where any value that an instruction writes is read."""
        return self._of(given, given.writes, self._reads)

    def writers(self, given: StepInstruction) -> Iterator[int]:
        """Where any value that an instruction reads is written."""
        return self._of(given, given.reads, self._writes)

    def ready(self, place: int) -> int:
        """The first position at which the instruction at ``place`` could be."""
        given = self._block[place]
        others = self._of(given, given.writes, self._writes)
        before = (*self.writers(given), *self.readers(given), *others)
        return 1 + max((p for p in before if p < place), default=-1)

    def wanted(self, place: int, starts: Mapping[int, int]) -> int:
        """The first position at which something needs what the instruction at ``place`` writes.

        Args:
            place: its position.
            starts: where others start that do not start in their place.
        """
        given = self._block[place]
        # Sums are added to in any order.
        single = [value for value in given.writes if value.role not in SUMMED]
        after = (*self.readers(given), *self._of(given, single, self._writes))
        return min((starts.get(p, p) for p in after if p > place), default=len(self._block))

    def _of(
        self, given: StepInstruction, values: Iterable[Value], side: Mapping[str, Sequence[int]]
    ) -> Iterator[int]:
        """Where instructions use values of another one, on the same devices and in its half."""
        for value in values:
            devices = frozenset(value.devices or given.devices)
            for place in side.get(value.key, ()):
                other = self._block[place]
                is_of_half = None in (given.half, other.half) or given.half == other.half
                if is_of_half and not devices.isdisjoint(other.devices):
                    yield place
