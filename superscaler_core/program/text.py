"""Text: a step program as lines, and back.

An instruction is one line: its kind, its name and its devices. Its operands follow from these and
from the section ``values``, which has them once for each kind and name. Where an instruction has
others, they stand in its line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from superscaler_core.errors import PlanError
from superscaler_core.plan import Device
from superscaler_core.program.event import Event, Pair, pair_text, parse_event, weights_of
from superscaler_core.program.freed import freed_block
from superscaler_core.program.instruction import Block, StepInstruction
from superscaler_core.program.together import apart
from superscaler_core.program.value import NUMBERS, Value
from superscaler_core.program.verb import ALONE, Phase, Verb
from superscaler_core.schedules import Action, ActionKind

if TYPE_CHECKING:
    from superscaler_core.program.step_program import StepProgram

_HEAD = re.compile(
    rf"step of (.+) on ({NUMBERS})(?: of ([1-9][0-9]{{0,8}}) microbatches)?"
    r"(?: by ([1-9][0-9]{0,8}) routes)?( in halves)?"
)
_VERSIONED = re.compile(r"(.*?)(?: v([1-9][0-9]{0,8}))?((?: stage[0-9]{1,9} v[0-9]{1,9})*)")
_BORROWED = re.compile(r"stage([0-9]+) v([0-9]+)")
_RUN = rf"([0-9]{{1,9}}) ?([{''.join(ActionKind)}])"
_BLOCK = re.compile(rf"stage {_RUN}:")
_PAIR = re.compile(rf"pair {_RUN}&{_RUN}:")

T = TypeVar("T")

# --- operands -----------------------------------------------------------------------------------

Key = tuple[Verb, str, tuple[Device, ...]]
"""The kind, the name and the devices of an instruction."""


class OperandTexts:
    """The values that instructions read and write, by kind, name and devices."""

    def __init__(self) -> None:
        self._reads: dict[Key, tuple[Value, ...]] = {}
        self._writes: dict[Key, tuple[Value, ...]] = {}

    def add(self, instruction: StepInstruction) -> None:
        """Take the values of an instruction, unless another one with its key has given them."""
        for key in _keys(instruction):
            if instruction.phase is not Phase.WAIT:
                self._reads.setdefault(key, instruction.given_reads)
            if instruction.phase is not Phase.START:
                self._writes.setdefault(key, instruction.given_writes)

    def filled(self, block: Iterable[StepInstruction]) -> Block:
        """The instructions of a block with these values."""
        return freed_block([self._filled(instruction) for instruction in block])

    def _filled(self, bare: StepInstruction) -> StepInstruction:
        key = _keys(bare)[0]
        return bare.with_values(self._reads.get(key, ()), self._writes.get(key, ()))

    def lines(self) -> Iterator[str]:
        """One line for each kind, name and values."""
        devices: dict[tuple[Any, ...], list[Device]] = {}
        for given in self._reads | self._writes:
            (kind, name, mine), reads = given, self._reads.get(given, ())
            writes = self._writes.get(given, ())
            if reads or writes:
                apart = () if kind in ALONE else (mine,)
                devices.setdefault((kind, name, reads, writes, *apart), []).extend(mine)
        for (kind, name, reads, writes, *_), there in devices.items():
            yield f"  {StepInstruction(kind, name, tuple(there), reads=reads, writes=writes)}"

    def read(self, line: str) -> None:
        """Read a line that ``lines`` has written.

        Raises:
            PlanError: the line has another form, or another line is about the same instruction.
        """
        instruction = StepInstruction.parse(line)
        if not (self._reads.keys() | self._writes.keys()).isdisjoint(_keys(instruction)):
            raise PlanError(f"{instruction.short}: another line has its values.")
        self.add(instruction)


def _keys(instruction: StepInstruction) -> list[Key]:
    """The keys of an instruction: one for each device, if each does it alone."""
    kind, name, devices = instruction.kind, instruction.name, instruction.devices
    return [(kind, name, mine) for mine in (zip(devices) if kind in ALONE else [devices])]


# --- writing ------------------------------------------------------------------------------------


def text_of(program: StepProgram) -> str:
    """The text of a program."""
    operands = OperandTexts()
    for instruction in (i for block in program.all_blocks for i in block):
        operands.add(instruction)
    lines = [_head(program)]
    titled = {f"stage {stage} {run}:": block for (stage, run), block in program.blocks.items()}
    titled |= {f"{pair_text(pair)}:": block for pair, block in program.pairs.items()}
    for title, given in {"begin:": program.begin, **titled, "end:": program.end}.items():
        block = [*apart(given)]
        bare = [replace(i, reads=(), writes=(), frees=()) for i in block]
        pairs = zip(block, operands.filled(bare), strict=True)
        lines += [title, *(f"  {i.short if i == known else i}" for i, known in pairs)]
    return "\n".join([*lines, "values:", *operands.lines(), "order:", *_order(program)])


def _head(program: StepProgram) -> str:
    head = f"step of {program.name} on {','.join(map(str, program.devices))}"
    num, routes = program.num_microbatches, program.num_routes
    head += f" of {num} microbatches" if num > 1 else ""
    head += f" by {routes} routes" if routes > 1 else ""
    return head + (" in halves" if program.num_halves > 1 else "")


def _order(program: StepProgram) -> Iterator[str]:
    borrowed: dict[Event, str] = {}
    for (action, owner), version in program.borrowed.items():
        borrowed[action] = borrowed.get(action, "") + f" {weights_of(owner)} v{version}"
    for event in program.events:
        version = program.versions.get(event, 0) if isinstance(event, Action) else 0
        own = f" v{version}" if version else ""
        yield f"  {event}{own}{borrowed.get(event, '')}"


# --- reading ------------------------------------------------------------------------------------


def fields_of(text: str) -> dict[str, Any]:
    """The fields of the program that ``text_of`` has written.

    Raises:
        PlanError: a line has another form; the text names it.
    """
    head, *lines = text.strip().splitlines() or [""]
    found = _HEAD.fullmatch(head.strip())
    if found is None:
        raise _unreadable(1, head, "step of NAME on DEVICE,DEVICE,...")
    reader = _Reader()
    for number, line in enumerate(lines, 2):
        reader.read(number, line)
    return {
        "name": found[1],
        "devices": tuple(map(int, found[2].split(","))),
        "num_microbatches": int(found[3] or 1),
        "num_routes": int(found[4] or 1),
        "num_halves": 2 if found[5] else 1,
        **reader.fields(),
    }


Lines = list[tuple[int, str]]
"""Lines of a section, with their numbers."""


@dataclass
class _Reader:
    """What the lines so far say."""

    blocks: dict[tuple[int, ActionKind], Lines] = field(default_factory=dict)
    pairs: dict[Pair, Lines] = field(default_factory=dict)
    around: dict[str, Lines] = field(default_factory=lambda: {"begin:": [], "end:": []})
    values: Lines = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    versions: dict[Action, int] = field(default_factory=dict)
    borrowed: dict[tuple[Action, int], int] = field(default_factory=dict)
    section: Lines | None = None
    is_order: bool = False

    def read(self, number: int, line: str) -> None:
        """Read one line; an empty one says nothing."""
        words = line.strip()
        if not words:
            return
        if words in ("order:", "values:"):
            self.is_order, self.section = words == "order:", self.values
        elif words in self.around:
            self.section = self.around[words]
        elif (title := _BLOCK.fullmatch(words)) is not None:
            self.section = self.blocks.setdefault((int(title[1]), ActionKind(title[2])), [])
        elif (title := _PAIR.fullmatch(words)) is not None:
            ends = (int(title[1]), ActionKind(title[2])), (int(title[3]), ActionKind(title[4]))
            self.section = self.pairs.setdefault(ends, [])
        elif self.is_order:
            self._event(number, words)
        elif self.section is None:
            kinds = ", ".join(ActionKind)
            raise _unreadable(number, line, f"begin:', 'end:' or 'stage NUMBER {kinds}:")
        else:
            self.section.append((number, words))

    def _event(self, number: int, words: str) -> None:
        versioned = _VERSIONED.fullmatch(words)
        assert versioned is not None, "it matches every line"
        event = _in_line(number, parse_event, versioned[1])
        self.events.append(event)
        if not isinstance(event, Action) and words != versioned[1]:
            raise _unreadable(number, line=words, expected="an event without a version")
        if isinstance(event, Action):
            self.versions |= {event: int(versioned[2])} if versioned[2] else {}
            for owner, version in _BORROWED.findall(versioned[3]):
                self.borrowed[event, int(owner)] = int(version)

    def fields(self) -> dict[str, Any]:
        """The fields of the program that the lines say."""
        operands = OperandTexts()
        for number, line in self.values:
            _in_line(number, operands.read, line)
        found = {
            "blocks": {key: _block(lines, operands) for key, lines in self.blocks.items()},
            "pairs": {key: _block(lines, operands) for key, lines in self.pairs.items()},
            "begin": _block(self.around["begin:"], operands),
            "end": _block(self.around["end:"], operands),
            "events": tuple(self.events),
            "versions": self.versions,
            "borrowed": self.borrowed,
        }
        if not self.is_order:
            raise PlanError(
                "the text of a step program ends before its section 'order:', which has the events."
            )
        return found


def _block(lines: Lines, operands: OperandTexts) -> Block:
    """The instructions of a block; those whose lines have values of their own keep these."""
    read = [_in_line(number, StepInstruction.parse, line) for number, line in lines]
    pairs = zip(lines, read, operands.filled(read), strict=True)
    return tuple(own if ": " in line else known for (_, line), own, known in pairs)


def _in_line(number: int, parse: Callable[[str], T], text: str) -> T:
    """What a text says; an error names its line."""
    try:
        return parse(text)
    except PlanError as error:
        raise PlanError(f"line {number} of a step program: {error}") from None


def _unreadable(number: int, line: str, expected: str) -> PlanError:
    return PlanError(
        f"cannot read line {number} of a step program, {line.strip()[:80]!r}: expected "
        f"'{expected}'."
    )
