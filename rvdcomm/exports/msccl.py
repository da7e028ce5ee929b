"""MSCCL: a schedule of a collective as the XML that the runtime of MSCCL reads (docs/exports.md).

Each GPU has an input, an output and a scratch buffer of equal chunks, and thread blocks, each of
which runs its steps one after another: it sends to one GPU at most, and receives from one. A step
that needs what another thread block wrote waits for that step.

Here a thread block sends to one GPU, receives from one, or copies and adds. Every place of a buffer
is written by one thread block, before it is read; so sends and receives have no circle, since their
order in all thread blocks is that of the rounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import gcd
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from rvdcomm.errors import LayoutError
from rvdcomm.exports.schedule import Parts, Schedule, Tensor
from rvdcomm.layout import Box

MAX_STEPS = 256
"""Steps of a thread block (``MSCCL_MAX_NUM_STEPS`` of the runtime)."""

MAX_COUNT = 72
"""Chunks of a step (``MSCCL_MAX_COUNT``)."""

MAX_THREAD_BLOCKS = 216
"""Thread blocks of a GPU (``MSCCL_MAX_NUM_THREAD_BLOCKS``)."""

INPUT, OUTPUT, SCRATCH = "i", "o", "s"

LOCAL = (-1, -1)
"""The ends of a thread block that copies and adds; of others: the GPUs that it sends to, and
receives from, of which one is -1."""

Ends = tuple[int, int]


def msccl_xml(schedule: Schedule, name: str = "rvdcomm") -> str:
    """The XML of a schedule that is an all-gather, reduce-scatter, all-reduce or all-to-all.

    Raises:
        LayoutError: the schedule is none of these over ranks 0, 1, 2, ..., with chunks that are
            equal runs of memory; or it is longer than the runtime allows.
    """
    if len(schedule.tensors) != 1:
        raise LayoutError(f"{len(schedule.tensors)} tensors are no collective of MSCCL.")
    (tensor,) = schedule.tensors
    collective = _collective(schedule, tensor)
    gpus = _Machine(schedule, tensor).run()
    num_chunks = max(max(gpu.sizes[INPUT], gpu.sizes[OUTPUT]) for gpu in gpus)
    root = Element(
        "algo",
        name=name,
        proto="Simple",
        nchannels="1",
        nchunksperloop=str(num_chunks),
        ngpus=str(len(gpus)),
        coll=collective,
        inplace="0",
        outofplace="1",
        minBytes="0",
        maxBytes=str(1 << 62),
    )
    for gpu in gpus:
        gpu.add_to(root)
    indent(root, "  ")
    return tostring(root, encoding="unicode") + "\n"


def _collective(schedule: Schedule, tensor: Tensor) -> str:
    """The name of the collective that brings the inputs to the outputs."""
    ranks = list(range(len(schedule.ranks)))
    ins = {each.rank: each for each in tensor.inputs}
    outs = {each.rank: each for each in tensor.outputs}
    dtypes = {tensor.src_dtype, tensor.dst_dtype, schedule.dtype}
    whole, n = tensor.box, len(ranks)

    def is_cut(boxes: list[Box]) -> bool:
        """Whether the boxes are equal pieces of the tensor, in the order of ranks."""
        starts = [box.flat_offset_within(whole) for box in boxes]
        size = whole.num_elements // n
        is_run = starts == [i * size for i in range(n)]
        return is_run and all(box.num_elements * n == whole.num_elements for box in boxes)

    if len(dtypes) == 1 and sorted(ins) == sorted(outs) == ranks and whole.num_elements:
        sent, got = [ins[i].box for i in ranks], [outs[i].box for i in ranks]
        are_parts = [ins[i].part for i in ranks] == ranks and set(sent) == {whole}
        is_one = not any(each.part for each in tensor.ends)
        has_sum = are_parts and not any(each.part for each in tensor.outputs)
        kinds = {
            "allreduce": has_sum and set(got) == {whole},
            "reducescatter": has_sum and is_cut(got),
            "allgather": is_one and is_cut(sent) and set(got) == {whole},
            "alltoall": is_one and is_cut(sent) and _is_transposed(sent, got),
        }
        for name, is_so in kinds.items():
            if is_so:
                return name
    raise LayoutError(
        "it is no all-gather, reduce-scatter, all-reduce or all-to-all of one tensor over ranks 0 "
        f"to {n - 1} with equal shards that are runs of memory, which is all that MSCCL names."
    )


def _is_transposed(sent: list[Box], got: list[Box]) -> bool:
    """Whether chunk j of GPU i becomes chunk i of GPU j."""
    n, size = len(sent), sent[0].num_elements
    for i, row in enumerate(sent):
        for j, column in enumerate(got):
            common = row.intersect(column)
            if common is None or common.num_elements * n != size or column.num_elements != size:
                return False
            places = common.flat_offset_within(row), common.flat_offset_within(column)
            if places != (j * size // n, i * size // n):
                return False
    return True


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a GPU has a box over some parts: ``start`` in a buffer, in elements; who wrote it."""

    box: Box
    buffer: str
    start: int
    writer: _Step | None

    def part(self, box: Box) -> tuple[int, _Step | None]:
        """The start of a box that is a run of this place, and who wrote it."""
        return self.start + _offset(box, self.box), self.writer


@dataclass(eq=False)
class _Step:
    """One step; ``needs`` are the steps of other thread blocks that have to be done before."""

    kind: str
    ends: Ends
    src: tuple[str, int]
    dst: tuple[str, int]
    num_elements: int
    needs: tuple[_Step, ...] = ()


@dataclass
class _Gpu:
    """The steps of a GPU by thread block; sizes of buffers are in elements, then in chunks."""

    rank: int
    sizes: dict[str, int]
    steps: list[_Step] = field(default_factory=list)
    places: dict[Parts, list[_Place]] = field(default_factory=dict)
    chunk: int = 1

    @cached_property
    def blocks(self) -> dict[Ends, list[_Step]]:
        """Steps by thread block, in pieces of at most ``MAX_COUNT`` chunks, with waits."""
        found: dict[Ends, list[_Step]] = {}
        for step in self.steps:
            mine = found.setdefault(step.ends, [])
            needs = [one for one in dict.fromkeys(step.needs) if one.ends != step.ends]
            # A step waits for one other; what else it needs, steps before it wait for.
            for one in needs[1:]:
                mine.append(_Step("nop", step.ends, (INPUT, 0), (INPUT, 0), 0, (one,)))
            step.needs = tuple(needs[:1])
            mine.append(step)
        return found

    def add_to(self, root: Element) -> None:
        """Add the GPU to the XML."""
        sizes = {f"{name}_chunks": str(self.sizes[name]) for name in (INPUT, OUTPUT, SCRATCH)}
        gpu = SubElement(root, "gpu", {"id": str(self.rank), **sizes})
        numbers = {ends: i for i, ends in enumerate(self.blocks)}
        at = {id(s): (numbers[e], i) for e, mine in self.blocks.items() for i, s in enumerate(mine)}
        awaited = {id(one) for mine in self.blocks.values() for s in mine for one in s.needs}
        longest = max(map(len, self.blocks.values()), default=0)
        if longest > MAX_STEPS or len(numbers) > MAX_THREAD_BLOCKS:
            raise LayoutError(
                f"GPU {self.rank} needs {len(numbers)} thread blocks of up to {longest} steps; the "
                f"runtime of MSCCL has {MAX_THREAD_BLOCKS} of {MAX_STEPS}. Plan in fewer slices."
            )
        for (send, recv), mine in self.blocks.items():
            number = str(numbers[send, recv])
            block = SubElement(gpu, "tb", id=number, send=str(send), recv=str(recv), chan="0")
            for i, step in enumerate(mine):
                depid, deps = at[id(step.needs[0])] if step.needs else (-1, -1)
                SubElement(
                    block,
                    "step",
                    s=str(i),
                    type=step.kind,
                    srcbuf=step.src[0],
                    srcoff=str(step.src[1] // self.chunk),
                    dstbuf=step.dst[0],
                    dstoff=str(step.dst[1] // self.chunk),
                    cnt=str(max(1, step.num_elements // self.chunk)),
                    depid=str(depid),
                    deps=str(deps),
                    hasdep=str(int(id(step) in awaited)),
                )


class _Machine:
    """All GPUs, while the schedule is run on places of their buffers."""

    def __init__(self, schedule: Schedule, tensor: Tensor) -> None:
        self.schedule = schedule
        self.ins = {each.rank: each for each in tensor.inputs}
        self.outs = {each.rank: each for each in tensor.outputs}
        self.all_parts = tuple(range(tensor.num_parts))
        self.gpus: dict[int, _Gpu] = {}
        for rank in schedule.ranks:
            box = self.ins[rank].box
            sizes = {INPUT: box.num_elements, OUTPUT: self.outs[rank].box.num_elements, SCRATCH: 0}
            gpu = self.gpus[rank] = _Gpu(rank, sizes)
            gpu.places[self.ins[rank].part,] = [_Place(box, INPUT, 0, None)]

    def run(self) -> list[_Gpu]:
        """The GPUs with their steps, sizes in chunks."""
        for each in self.schedule.rounds:
            for one in each.sums:
                self._sum(one.rank, one.box, one.left, one.right)
            for message in each.messages:
                self._send(message.src, message.dst, message.value.box, message.value.parts)
        for rank in self.schedule.ranks:
            self._finish(rank)
        chunk = gcd(*(n for gpu in self.gpus.values() for n in self._numbers(gpu)))
        for gpu in self.gpus.values():
            gpu.chunk = chunk
            gpu.sizes = {name: size // chunk for name, size in gpu.sizes.items()}
            gpu.steps = [piece for step in gpu.steps for piece in _pieces(step, chunk)]
        return list(self.gpus.values())

    @staticmethod
    def _numbers(gpu: _Gpu) -> Iterator[int]:
        yield from gpu.sizes.values()
        for step in gpu.steps:
            yield from (step.src[1], step.dst[1], step.num_elements)

    def _found(
        self, rank: int, box: Box, parts: Parts, *others: Box
    ) -> Iterator[tuple[_Place, Box]]:
        """The places that together hold a box over these parts, outputs first.

        Each piece of the box is a run of its place, and of every other box that holds it.
        """
        places = sorted(self.gpus[rank].places.get(parts, ()), key=lambda p: p.buffer != OUTPUT)
        left = [box]
        for place in places:
            rest = []
            for each in left:
                common = each.intersect(place.box)
                if common is not None:
                    yield from ((place, piece) for piece in _runs(common, place.box, *others))
                rest += [part for part in each.subtract(place.box) if not part.is_empty]
            left = rest

    def _new_place(self, rank: int, box: Box, parts: Parts) -> tuple[str, int]:
        """Where a rank puts a run: in its output if it belongs there and is not there yet."""
        gpu, output = self.gpus[rank], self.outs[rank].box
        is_there = any(
            place.buffer == OUTPUT and place.box.overlaps(box)
            for place in gpu.places.get(parts, ())
        )
        if parts == self.all_parts and output.contains(box) and not is_there:
            return OUTPUT, _offset(box, output)
        start = gpu.sizes[SCRATCH]
        gpu.sizes[SCRATCH] += box.num_elements
        return SCRATCH, start

    def _settle(self, rank: int, box: Box, parts: Parts, at: tuple[str, int], step: _Step) -> None:
        self.gpus[rank].places.setdefault(parts, []).append(_Place(box, *at, step))

    def _send(self, src: int, dst: int, box: Box, parts: Parts) -> None:
        for place, piece in self._found(src, box, parts, self.outs[dst].box):
            start, writer = place.part(piece)
            at = self._new_place(dst, piece, parts)
            needs = () if writer is None else (writer,)
            source, size = (place.buffer, start), piece.num_elements
            self.gpus[src].steps.append(_Step("s", (dst, -1), source, at, size, needs))
            received = _Step("r", (-1, src), source, at, size)
            self.gpus[dst].steps.append(received)
            self._settle(dst, piece, parts, at, received)

    def _sum(self, rank: int, box: Box, left: Parts, right: Parts) -> None:
        parts = tuple(sorted({*left, *right}))
        for run in _runs(box, self.outs[rank].box):
            at = self._new_place(rank, run, parts)
            self._into(rank, run, left, at, "cpy")
            self._settle(rank, run, parts, at, self._into(rank, run, right, at, "re"))

    def _into(self, rank: int, box: Box, parts: Parts, at: tuple[str, int], kind: str) -> _Step:
        """Copy or add a box to the run that begins at a place of a buffer; the last step."""
        steps = self.gpus[rank].steps
        for place, piece in self._found(rank, box, parts, box):
            start, writer = place.part(piece)
            needs = () if writer is None else (writer,)
            there = at[0], at[1] + _offset(piece, box)
            source, size = (place.buffer, start), piece.num_elements
            steps.append(_Step(kind, LOCAL, source, there, size, needs))
        return steps[-1]

    def _finish(self, rank: int) -> None:
        """Copy what belongs into the output and is elsewhere."""
        output = self.outs[rank].box
        for place, piece in [*self._found(rank, output, self.all_parts, output)]:
            if place.buffer != OUTPUT:
                self._into(rank, piece, self.all_parts, (OUTPUT, _offset(piece, output)), "cpy")


def _offset(box: Box, outer: Box) -> int:
    """The offset of a box that is a run of memory in another one."""
    found = box.flat_offset_within(outer)
    assert found is not None
    return found


def _runs(box: Box, *outers: Box) -> Iterator[Box]:
    """Pieces of a box, each a run of memory in every one of the outer boxes that holds the box."""
    outers = tuple(outer for outer in outers if outer.contains(box))
    if all(box.flat_offset_within(outer) is not None for outer in outers):
        yield box
        return
    d = next(i for i, extent in enumerate(box.shape) if extent > 1)
    for i in range(box.lo[d], box.hi[d]):
        lo, hi = (*box.lo[:d], i, *box.lo[d + 1 :]), (*box.hi[:d], i + 1, *box.hi[d + 1 :])
        yield from _runs(Box(lo, hi), *outers)


def _pieces(step: _Step, chunk: int) -> list[_Step]:
    """A step in pieces of at most ``MAX_COUNT`` chunks; the last one is the step itself."""
    most = MAX_COUNT * chunk
    pieces, done = [], 0
    while step.num_elements - done > most:
        src, dst = ((name, start + done) for name, start in (step.src, step.dst))
        pieces.append(_Step(step.kind, step.ends, src, dst, most, step.needs))
        done += most
    step.src, step.dst = ((name, start + done) for name, start in (step.src, step.dst))
    step.num_elements -= done
    return [*pieces, step]
