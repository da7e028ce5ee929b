"""Decisions: everything that a plan decides about a graph, as a frozen value with a text form."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rvdcomm.whole_file import write_whole
from superscaler_core.errors import PlanError
from superscaler_core.graph.graph import TokenSlices
from superscaler_core.graph.name_text import line_text, name_of, name_text
from superscaler_core.graph.part import Piece
from superscaler_core.plan.overlap import NO_OVERLAP, Overlap
from superscaler_core.plan.placement import Placement
from superscaler_core.schedules import Schedule, ScheduleError

_PIECE = re.compile(r"(\w+)\[([0-9]+):([0-9]+)\]")
_HEAD = re.compile(r"plan of (.+) on ([0-9]+(?:,[0-9]+)*)")
_WHOLE = "whole"

DECISIONS_SUFFIX = ".plan"
"""Suffix of files of decisions, such as ``superscaler plan --decisions`` writes."""
_PART_WORD = re.compile(rf"{_PIECE.pattern}|copy:[0-9]+|{_WHOLE}")


@dataclass(frozen=True, slots=True)
class PlacedPart:
    """One part of an op: its iterations, its replica number, and its device.

    Attributes:
        pieces: the range of each loop that is cut, as in ``Part``.
        replica: its number among parts that do the same work, as in ``Part``.
        device: None as long as the plan has not assigned one.
    """

    pieces: tuple[Piece, ...] = ()
    replica: int = 0
    device: int | None = None

    def __str__(self) -> str:
        where = "-" if self.device is None else str(self.device)
        return " ".join([where, *_part_words(self.pieces, self.replica)])


@dataclass(frozen=True, slots=True)
class Chosen:
    """The op that a decision is about: all of its parts, or one part.

    Attributes:
        op: name of the op.
        part: pieces and replica of that part; None for all parts.
    """

    op: str
    part: tuple[tuple[Piece, ...], int] | None = None

    def __str__(self) -> str:
        if self.part is None:
            return name_text(self.op)
        return " ".join([name_text(self.op), *(_part_words(*self.part) or [_WHOLE])])


ChosenGroup = tuple[Chosen, ...]

Draft = dict[str, Any]
"""The fields of a ``Decisions`` that is being read, with lists for tuples."""


@dataclass(frozen=True)
class Decisions:
    """The decisions of a plan; two plans with the same decisions compare equal here.

    Law (tests/superscaler_core/plan/test_decisions.py): ``Decisions.parse(str(d)) == d``, and a
    plan rebuilt from ``d`` compiles to the same program, file by file.

    Attributes:
        model: name of the graph.
        devices: devices of the plan, in its order.
        parts: the parts of each op in order, by the op's name; ops that stay whole and have no
            device are left out.
        stages: names of the ops at which the second and each later stage begin.
        schedule: the order in which stages run; None for one microbatch.
        placement: which devices act as which workers of the schedule; None if not given.
        orders: pairs of ops of which the first runs before the second on a device.
        recomputed, recompute_regions, offloaded: groups, as in ``Plan.recompute``,
            ``Plan.recompute_regions`` and ``Plan.offload``.
        on_host: names of parameters that are stored in host memory.
        fsdp_units: groups of ops, each with whether their weights are gathered
            (``Plan.unshard``) or only their gradients are reduced (``reduce_grads``). For
            an op in several groups the last one counts.
        overlap: which communication runs while devices compute.
        notes: differences between what the plan computes and what the model computes.
        slices: how the sequence of the captured graph is cut before anything else is decided
            (``Plan.slice_tokens``); all other decisions are about the graph of slices.
    """

    model: str
    devices: tuple[int, ...]
    parts: Mapping[str, tuple[PlacedPart, ...]] = field(default_factory=dict)
    stages: tuple[str, ...] = ()
    schedule: Schedule | None = None
    placement: Placement | None = None
    orders: tuple[tuple[Chosen, Chosen], ...] = ()
    recomputed: tuple[ChosenGroup, ...] = ()
    recompute_regions: tuple[ChosenGroup, ...] = ()
    offloaded: tuple[ChosenGroup, ...] = ()
    on_host: tuple[str, ...] = ()
    fsdp_units: tuple[tuple[ChosenGroup, bool], ...] = ()
    overlap: Overlap = NO_OVERLAP
    notes: tuple[str, ...] = ()
    slices: TokenSlices | None = None

    def __hash__(self) -> int:
        # Leaves out most fields; two equal plans may also list ``parts`` in different orders.
        return hash((self.model, self.devices, frozenset(self.parts.items()), self.stages))

    # --- text -----------------------------------------------------------------------------------

    def __str__(self) -> str:
        lines = [f"plan of {name_text(self.model)} on {','.join(map(str, self.devices))}"]
        lines += [] if self.slices is None else [f"slices {self.slices}"]
        lines += [
            f"op {name_text(op)}: {'; '.join(map(str, parts))}" for op, parts in self.parts.items()
        ]
        lines += [f"stage at {name_text(op)}" for op in self.stages]
        lines += [] if self.schedule is None else ["schedule " + str(self.schedule)]
        lines += [] if self.placement is None else [f"place {self.placement}"]
        lines += [f"order {first} -> {then}" for first, then in self.orders]
        for word, attribute in _GROUPS.items():
            lines += [f"{word} {_group_text(group)}" for group in getattr(self, attribute)]
        lines += [
            f"{'unshard' if unshards else 'reduce'} {_group_text(group)}"
            for group, unshards in self.fsdp_units
        ]
        lines += [f"host {name_text(name)}" for name in self.on_host]
        lines += [f"overlap {self.overlap}"] if self.overlap != NO_OVERLAP else []
        lines += [f"note {line_text(note)}" for note in self.notes]
        return "\n".join(lines)

    @classmethod
    def parse(cls, text: str) -> Decisions:
        """Read the text that ``str`` writes; skip empty lines and lines that begin with ``#``.

        Raises:
            PlanError: a line has another form; the message names it.
        """
        lines = [
            (number, line.strip())
            for number, line in enumerate(text.splitlines(), 1)
            if line.strip() and not line.strip().startswith("#")
        ]
        head = _HEAD.fullmatch(lines[0][1]) if lines else None
        if head is None:
            raise PlanError("a plan's text begins with 'plan of MODEL on DEVICE,DEVICE,...'.")
        found: Draft = {"model": name_of(head[1]), "devices": tuple(map(int, head[2].split(",")))}
        rows: list[str] = []
        for number, line in lines[1:]:
            word, _, rest = line.partition(" ")
            if word in _FORMER:
                said = f"line {number} of a plan: {word!r} is {_FORMER[word]!r} now; save it again."
                warnings.warn(said, FutureWarning, stacklevel=2)
                word = _FORMER[word]
            try:
                if word == "schedule" or (word == "worker" and rows):
                    rows.append(line.removeprefix("schedule "))
                elif word in _READ:
                    _READ[word](found, rest)
                else:
                    raise PlanError(f"a line begins with {', '.join([*_READ, 'schedule'])}.")
            except (PlanError, ValueError) as error:
                raise PlanError(f"line {number} of a plan, {line[:60]!r}: {error}") from None
        try:
            schedule = Schedule.parse("\n".join(rows)) if rows else None
        except ScheduleError as error:
            raise PlanError(f"the schedule of a plan: {error}") from None
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in found.items()
        }
        return cls(**values, schedule=schedule)

    def save(self, path: str | Path) -> None:
        """Write the text to a file."""
        write_whole(path, f"{self}\n")

    @classmethod
    def load(cls, path: str | Path) -> Decisions:
        """Read a file that ``save`` wrote, possibly edited by hand since.

        Raises:
            PlanError: as for ``parse``; the message names the file.
        """
        try:
            return cls.parse(Path(path).read_text())
        except (PlanError, UnicodeDecodeError) as error:
            raise PlanError(f"{path}: {error}") from None


_GROUPS = {
    "recompute": "recomputed",
    "recompute-region": "recompute_regions",
    "offload": "offloaded",
}
"""The word that begins a line about a group, and the attribute that the line fills."""


def _group_text(group: ChosenGroup) -> str:
    return ", ".join(map(str, group))


def _part_words(pieces: Iterable[Piece], replica: int) -> list[str]:
    words = [f"{loop}[{lo}:{hi}]" for loop, lo, hi in pieces]
    return words + ([f"copy:{replica}"] if replica else [])


# --- from text ----------------------------------------------------------------------------------


def _part_of(words: Iterable[str]) -> tuple[tuple[Piece, ...], int]:
    pieces: list[Piece] = []
    replica = 0
    for word in words:
        piece = _PIECE.fullmatch(word)
        if piece is not None:
            pieces.append((piece[1], int(piece[2]), int(piece[3])))
        elif word.startswith("copy:") and word[5:].isdecimal():
            replica = int(word[5:])
        elif word != _WHOLE:
            raise PlanError(f"{word!r} is none of LOOP[FROM:TO], copy:NUMBER and {_WHOLE}.")
    return tuple(pieces), replica


def _chosen(text: str) -> Chosen:
    words = text.split(" ")
    end = len(words)
    # Read from the end, because names of modules, and therefore of ops, may contain spaces.
    while end > 1 and _PART_WORD.fullmatch(words[end - 1]):
        end -= 1
    op = name_of(" ".join(words[:end]))
    return Chosen(op, _part_of(words[end:]) if end < len(words) else None)


def _placed(text: str) -> PlacedPart:
    where, *words = text.split()
    pieces, replica = _part_of(words)
    return PlacedPart(pieces, replica, None if where == "-" else int(where))


def _with_op(found: Draft, rest: str) -> None:
    text, separator, parts = rest.partition(": ")
    op = name_of(text)
    known = found.setdefault("parts", {})
    if not separator or op in known:
        raise PlanError("an op has one line, 'op NAME: DEVICE PART; DEVICE PART; ...'.")
    known[op] = tuple(map(_placed, parts.split("; ")))


def _with_stage(found: Draft, rest: str) -> None:
    _with(found, "stages", name_of(rest.removeprefix("at ")))


def _with_place(found: Draft, rest: str) -> None:
    found["placement"] = Placement.parse(rest)


def _with_order(found: Draft, rest: str) -> None:
    first, arrow, then = rest.partition(" -> ")
    if not arrow:
        raise PlanError("an order is 'order FIRST -> THEN'.")
    _with(found, "orders", (_chosen(first), _chosen(then)))


def _with(found: Draft, attribute: str, value: Any) -> None:
    """Append one value to an attribute that becomes a tuple."""
    found.setdefault(attribute, []).append(value)


def _with_overlap(found: Draft, rest: str) -> None:
    found["overlap"] = Overlap.parse(rest)


def _with_slices(found: Draft, rest: str) -> None:
    lengths, _, stages = rest.partition(" at ")
    if not re.fullmatch(r"[1-9][0-9]{0,8}(,[1-9][0-9]{0,8})*", lengths):
        raise PlanError("slices are 'slices LENGTH,LENGTH,... at OP, OP'.")
    names = tuple(map(name_of, stages.split(", "))) if stages else ()
    found["slices"] = TokenSlices(tuple(map(int, lengths.split(","))), names)


def _with_name(attribute: str) -> Callable[[Draft, str], None]:
    def read(found: Draft, rest: str) -> None:
        _with(found, attribute, name_of(rest))

    return read


def _group(text: str) -> ChosenGroup:
    return tuple(map(_chosen, text.split(", ")))


def _with_unit(unshards: bool) -> Callable[[Draft, str], None]:
    def read(found: Draft, rest: str) -> None:
        _with(found, "fsdp_units", (_group(rest), unshards))

    return read


def _with_group(attribute: str) -> Callable[[Draft, str], None]:
    def read(found: Draft, rest: str) -> None:
        _with(found, attribute, _group(rest))

    return read


_READ: Mapping[str, Callable[[Draft, str], None]] = {
    "op": _with_op,
    "stage": _with_stage,
    "order": _with_order,
    "place": _with_place,
    **{word: _with_group(attribute) for word, attribute in _GROUPS.items()},
    "unshard": _with_unit(True),
    "reduce": _with_unit(False),
    "host": _with_name("on_host"),
    "overlap": _with_overlap,
    "note": _with_name("notes"),
    "slices": _with_slices,
}
"""How to read the rest of a line, by the word with which the line begins."""

_FORMER = {"rerun": "recompute-region", "swap": "offload", "gather": "unshard"}
"""Words of earlier versions, with those of today; they can be read for one release more."""
