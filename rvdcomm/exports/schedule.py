"""Schedule: what moves where in which round, without buffers or calls (docs/exports.md).

A rank has *values*: a box of a tensor, summed over some of the value parts of src. It starts with
its inputs. In every round it first adds values that it has, and then sends some to other ranks, all
at once. In the end it has its outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rvdcomm.errors import LayoutError, ProgramError
from rvdcomm.json_file import entry
from rvdcomm.layout import MAX_DIMS, MAX_RANKS, Box, dtype_name
from rvdcomm.program import MAX_SYMBOLS
from rvdcomm.text import MAX_INTEGER, quoted

FORMAT, VERSION = "rvdcomm schedule", 1

MAX_SCHEDULE_BYTES = 256 << 20
"""Longest file that is read."""

Parts = tuple[int, ...]
"""Value parts of src that were added, ascending; none for zeros."""

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Value:
    """A box of tensor number ``tensor``, summed over ``parts``."""

    tensor: int
    box: Box
    parts: Parts


@dataclass(frozen=True, slots=True)
class Message:
    """``src`` sends a value to ``dst``."""

    src: int
    dst: int
    value: Value


@dataclass(frozen=True, slots=True)
class Sum:
    """``rank`` adds a box over the parts ``left`` to the same box over the parts ``right``."""

    rank: int
    tensor: int
    box: Box
    left: Parts
    right: Parts

    @property
    def parts(self) -> Parts:
        """The parts of the result."""
        return tuple(sorted({*self.left, *self.right}))


@dataclass(frozen=True, slots=True)
class Round:
    """Sums in their order, then messages all at once."""

    sums: tuple[Sum, ...]
    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Input:
    """What ``rank`` has at the start: a box of value part ``part``."""

    rank: int
    part: int
    box: Box


@dataclass(frozen=True, slots=True)
class Output:
    """What ``rank`` has in the end: a box of value part ``part`` of dst, made of ``values``.

    The values tile the box. Outputs of one part and box are replicas.
    """

    rank: int
    part: int
    box: Box
    values: tuple[Value, ...]


@dataclass(frozen=True)
class Tensor:
    """One tensor: its shape, dtypes, inputs and outputs.

    Boxes are those of the tensor reshaped so that dim d has the dims ``dims[d]``.
    """

    dims: tuple[tuple[int, ...], ...]
    src_dtype: str
    dst_dtype: str
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the tensor."""
        return tuple(map(prod, self.dims))

    @property
    def ends(self) -> tuple[Input | Output, ...]:
        """Inputs and outputs."""
        return (*self.inputs, *self.outputs)

    @property
    def num_parts(self) -> int:
        """Number of value parts of src."""
        return 1 + max((each.part for each in self.inputs), default=-1)

    @property
    def box(self) -> Box:
        """The whole tensor."""
        return Box.of_shape(size for sizes in self.dims for size in sizes)


@dataclass(frozen=True)
class Schedule:
    """The rounds that bring tensors from their inputs to their outputs; messages have ``dtype``.

    Law (tests/exports/test_schedule.py): ``Schedule.from_json(x.to_json()) == x``.
    """

    dtype: str
    tensors: tuple[Tensor, ...]
    rounds: tuple[Round, ...]

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that take part, ascending."""
        ends = (each.rank for tensor in self.tensors for each in tensor.ends)
        return tuple(sorted(set(ends)))

    def prove(self) -> None:
        """Prove that every output follows from the inputs.

        Proved: ranks send and add only what they have, and no part is added twice; outputs are made
        of values that their ranks have; over the parts of dst each part of src is in every element
        once; replicas are equal.

        Raises:
            ProgramError: the message names the round and the ranks.
        """
        _Prover(self).run()

    # --- JSON -----------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """The schedule as plain values, as docs/schedule.schema.json describes them."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "dtype": self.dtype,
            "tensors": [_tensor_json(tensor) for tensor in self.tensors],
            "rounds": [_round_json(each) for each in self.rounds],
        }

    @classmethod
    def from_json(cls, values: Any) -> Schedule:
        """The schedule of plain values; they are not trusted.

        Raises:
            LayoutError: they are no schedule.
        """
        named = values.get("format") if isinstance(values, dict) else None
        if (named, values.get("version") if named else None) != (FORMAT, VERSION):
            raise LayoutError(f"it has no 'format': '{FORMAT}' of 'version': {VERSION}")
        tensors = tuple(_tensor(i, each) for i, each in enumerate(_items(values, "tensors")))
        num_dims = [len(tensor.box.lo) for tensor in tensors]
        rounds = tuple(_round(each, num_dims) for each in _items(values, "rounds"))
        return cls(dtype_name(entry(values, "dtype", str)), tensors, rounds)


def _box_json(box: Box) -> list[list[int]]:
    return [[low, high] for low, high in zip(box.lo, box.hi, strict=True)]


def _tensor_json(tensor: Tensor) -> dict[str, Any]:
    return {
        "shape": tensor.shape,
        "dims": tensor.dims,
        "src_dtype": tensor.src_dtype,
        "dst_dtype": tensor.dst_dtype,
        "inputs": [
            {"rank": each.rank, "part": each.part, "box": _box_json(each.box)}
            for each in tensor.inputs
        ],
        "outputs": [
            {
                "rank": each.rank,
                "part": each.part,
                "box": _box_json(each.box),
                "values": [{"box": _box_json(v.box), "parts": v.parts} for v in each.values],
            }
            for each in tensor.outputs
        ],
    }


def _round_json(each: Round) -> dict[str, Any]:
    sums = [
        {"rank": s.rank, "tensor": s.tensor, "box": _box_json(s.box), "terms": [s.left, s.right]}
        for s in each.sums
    ]
    messages = [
        {
            "src": m.src,
            "dst": m.dst,
            "tensor": m.value.tensor,
            "box": _box_json(m.value.box),
            "parts": m.value.parts,
        }
        for m in each.messages
    ]
    return {"sums": sums, "messages": messages}


# --- reading ------------------------------------------------------------------------------------


def _items(values: Any, name: str) -> list[Any]:
    return entry(values, name, list)


def _number(values: Any, name: str, below: int) -> int:
    found = entry(values, name, int)
    if not 0 <= found < below:
        raise LayoutError(f"{name!r} must be 0 to {below - 1}, got {quoted(found)}")
    return found


def _numbers(values: Any, name: str, below: int) -> tuple[int, ...]:
    """Ascending numbers."""
    found = tuple(values) if type(values) is list else (None,)
    if any(type(each) is not int or not 0 <= each < below for each in found):
        raise LayoutError(f"{name!r} must be numbers below {below}, got {quoted(values)}")
    if list(found) != sorted(set(found)):
        raise LayoutError(f"{name!r} must ascend, got {quoted(values)}")
    return found


def _box(values: Any, num_dims: int) -> Box:
    bounds = entry(values, "box", list)
    for pair in bounds:
        is_pair = type(pair) is list and list(map(type, pair)) == [int, int]
        if not is_pair or not 0 <= pair[0] <= pair[1] <= MAX_INTEGER:
            raise LayoutError(f"'box' must be pairs [from, to], got {quoted(bounds)}")
    if len(bounds) != num_dims:
        raise LayoutError(f"'box' must have {num_dims} dims, got {quoted(bounds)}")
    return Box(tuple(low for low, _ in bounds), tuple(high for _, high in bounds))


def _tensor(index: int, values: Any) -> Tensor:
    dims = entry(values, "dims", list)
    for sizes in dims:
        if type(sizes) is not list or any(type(s) is not int or s < 0 for s in sizes) or not sizes:
            raise LayoutError(f"'dims' must be lists of sizes, got {quoted(dims)}")
    tensor = Tensor(tuple(map(tuple, dims)), "", "", (), ())
    if sum(map(len, dims)) > MAX_DIMS or tensor.box.num_elements > MAX_INTEGER:
        raise LayoutError(f"'dims' are too many or too large: {quoted(dims)}")
    if entry(values, "shape", list) != list(tensor.shape):
        raise LayoutError(f"'shape' must be {list(tensor.shape)}, got {quoted(values['shape'])}")
    num_dims = len(tensor.box.lo)
    inputs = tuple(
        Input(_rank(each, "rank"), _number(each, "part", MAX_RANKS), _box(each, num_dims))
        for each in _items(values, "inputs")
    )
    outputs = tuple(
        Output(
            _rank(each, "rank"),
            _number(each, "part", MAX_RANKS),
            _box(each, num_dims),
            tuple(
                Value(index, _box(v, num_dims), _numbers(v.get("parts"), "parts", MAX_RANKS))
                for v in _items(each, "values")
            ),
        )
        for each in _items(values, "outputs")
    )
    src, dst = (dtype_name(entry(values, name, str)) for name in ("src_dtype", "dst_dtype"))
    for name, ends in (("inputs", inputs), ("outputs", outputs)):
        ranks = [each.rank for each in ends]
        if len(set(ranks)) < len(ranks):
            raise LayoutError(f"{name!r} name a rank twice")
    return Tensor(tensor.dims, src, dst, inputs, outputs)


def _rank(values: Any, name: str) -> int:
    return _number(values, name, 2**31)


def _round(values: Any, num_dims: list[int]) -> Round:
    def tensor(each: Any) -> int:
        return _number(each, "tensor", len(num_dims))

    sums = []
    for each in _items(values, "sums"):
        terms = _items(each, "terms")
        if len(terms) != 2:
            raise LayoutError(f"'terms' must be two lists of parts, got {quoted(terms)}")
        left, right = (_numbers(term, "terms", MAX_RANKS) for term in terms)
        box = _box(each, num_dims[tensor(each)])
        sums.append(Sum(_rank(each, "rank"), tensor(each), box, left, right))
    messages = []
    for each in _items(values, "messages"):
        box = _box(each, num_dims[tensor(each)])
        value = Value(tensor(each), box, _numbers(each.get("parts"), "parts", MAX_RANKS))
        messages.append(Message(_rank(each, "src"), _rank(each, "dst"), value))
    return Round(tuple(sums), tuple(messages))


# --- proof --------------------------------------------------------------------------------------


class _Prover:
    """Which rank has which atoms of which sums; an atom is a box between neighbouring bounds."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.bounds: list[list[dict[int, int]]] = []
        boxes: list[list[Box]] = [[] for _ in schedule.tensors]
        for index, box in _boxes_of(schedule):
            if not schedule.tensors[index].box.contains(box):
                raise ProgramError(f"{box} is not in tensor {index}.")
            boxes[index].append(box)
        for tensor, mine in zip(schedule.tensors, boxes, strict=True):
            ends = [{0, size} for size in tensor.box.hi]
            for box in mine:
                for cut, low, high in zip(ends, box.lo, box.hi, strict=True):
                    cut |= {low, high}
            self.bounds.append([{b: i for i, b in enumerate(sorted(cut))} for cut in ends])
        self.has: dict[tuple[int, int, Parts], Mask] = {}

    def run(self) -> None:
        schedule = self.schedule
        for index, tensor in enumerate(schedule.tensors):
            for each in tensor.inputs:
                self._gain(each.rank, Value(index, each.box, (each.part,)))
        for number, a_round in enumerate(schedule.rounds):
            where = f"round {number}"
            for one in a_round.sums:
                if set(one.left) & set(one.right):
                    raise ProgramError(
                        f"{where}: rank {one.rank} adds parts twice: {one.left} and {one.right}."
                    )
                for parts in (one.left, one.right):
                    self._need(one.rank, Value(one.tensor, one.box, parts), f"{where}: rank")
                self._gain(one.rank, Value(one.tensor, one.box, one.parts))
            for message in a_round.messages:
                self._need(message.src, message.value, f"{where}: rank")
            for message in a_round.messages:
                self._gain(message.dst, message.value)
        for index, tensor in enumerate(schedule.tensors):
            self._check_outputs(index, tensor)

    def _check_outputs(self, index: int, tensor: Tensor) -> None:
        """Check that values tile outputs, that replicas are equal, and that parts are complete."""
        first: dict[tuple[int, Box], NDArray[np.int64]] = {}
        totals: dict[Box, NDArray[np.int64]] = {}
        is_whole = np.zeros(self._shape(index), np.bool_)
        for each in tensor.outputs:
            slices = self._slices(index, each.box)
            is_whole[slices] = True
            counts = np.zeros((tensor.num_parts, *self._shape(index)), np.int64)
            covered = np.zeros(self._shape(index), np.int64)
            for value in each.values:
                self._need(each.rank, value, "outputs: rank")
                is_known = not value.parts or value.parts[-1] < tensor.num_parts
                if not each.box.contains(value.box) or not is_known:
                    raise ProgramError(f"rank {each.rank}: {value} is not of its output.")
                mine: tuple[Any, ...] = (..., *self._slices(index, value.box))
                covered[mine] += 1
                for part in value.parts:
                    counts[part : part + 1][mine] += 1
            if (covered[slices] != 1).any():
                raise ProgramError(f"rank {each.rank}: values do not tile its output {each.box}.")
            found = counts[(slice(None), *slices)]
            known = first.setdefault((each.part, each.box), found)
            if not np.array_equal(known, found):
                raise ProgramError(f"rank {each.rank} and other replicas of {each.box} differ.")
            if known is found:
                totals[each.box] = totals.get(each.box, 0) + found
        if not is_whole.all():
            raise ProgramError(f"the outputs of tensor {index} leave some of it out.")
        for box, total in totals.items():
            if (total != 1).any():
                raise ProgramError(f"in {box} of tensor {index} a part is not added just once.")

    def _shape(self, index: int) -> tuple[int, ...]:
        return tuple(len(bounds) - 1 for bounds in self.bounds[index])

    def _slices(self, index: int, box: Box) -> tuple[slice, ...]:
        ends = zip(self.bounds[index], box.lo, box.hi, strict=True)
        return tuple(slice(bounds[low], bounds[high]) for bounds, low, high in ends)

    def _need(self, rank: int, value: Value, where: str) -> None:
        """Raise unless the rank has the value; every rank has zeros."""
        mask = self.has.get((rank, value.tensor, value.parts))
        slices = self._slices(value.tensor, value.box)
        is_there = value.box.is_empty or (mask is not None and bool(mask[slices].all()))
        if value.parts and not is_there:
            raise ProgramError(
                f"{where} {rank} has no {value.box} of tensor {value.tensor} over the parts "
                f"{list(value.parts)}."
            )

    def _gain(self, rank: int, value: Value) -> None:
        key = rank, value.tensor, value.parts
        if key not in self.has:
            num_atoms = prod(self._shape(value.tensor))
            if (len(self.has) + 1) * num_atoms > MAX_SYMBOLS:
                raise ProgramError(
                    f"too large to prove: {len(self.has) + 1} sums of {num_atoms} boxes, at most "
                    f"{MAX_SYMBOLS} together."
                )
            self.has[key] = np.zeros(self._shape(value.tensor), np.bool_)
        self.has[key][self._slices(value.tensor, value.box)] = True


def _boxes_of(schedule: Schedule) -> Iterator[tuple[int, Box]]:
    """All boxes, with the numbers of their tensors."""
    for index, tensor in enumerate(schedule.tensors):
        yield from ((index, each.box) for each in tensor.ends)
        yield from ((index, value.box) for each in tensor.outputs for value in each.values)
    for a_round in schedule.rounds:
        yield from ((one.tensor, one.box) for one in a_round.sums)
        yield from ((one.value.tensor, one.value.box) for one in a_round.messages)
