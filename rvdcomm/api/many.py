"""redistribute_many: a whole state dict in one call."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NoReturn, Unpack

import torch
from torch import Tensor
from tqdm import tqdm

from rvdcomm.api.float8 import Scale, dequantized, quantized
from rvdcomm.api.inspect import backend_of, has_agreed
from rvdcomm.api.many_agree import Agreed, agree
from rvdcomm.api.many_request import ManyRequest
from rvdcomm.api.options import AS_USUAL, CallOptions, OfMany, filled
from rvdcomm.api.pending import drain, submit
from rvdcomm.api.tensors import resolved, written
from rvdcomm.api.traced import breaks_graph
from rvdcomm.collector import paused_collector
from rvdcomm.layout import Layout
from rvdcomm.plans.fill import BundleBatch
from rvdcomm.program import is_src, shard_index
from rvdcomm.run import pool
from rvdcomm.run.choice import compiled_many
from rvdcomm.run.rank_program import RankProgram
from rvdcomm.run.request import shard_shape
from rvdcomm.run.world import World


@breaks_graph
def redistribute_many(
    tensors: Mapping[str, Tensor | None],
    src: Mapping[str, Layout | str],
    dst: Mapping[str, Layout | str],
    *,
    out: Mapping[str, Tensor] | None = None,
    progress: bool = False,
    async_op: bool = False,
    options: CallOptions = AS_USUAL,
    **by_name: Unpack[OfMany],
) -> Any:
    """Redistribute every tensor of a state dict, as one call: ``redistribute`` for many.

    Tensors are joined: in every step, the tensors of the same ranks travel as one message per pair
    of ranks, and ranks that read each other's memory wait for each other once per bucket. The first
    call of a state dict plans it and lets all ranks compare what they were asked for; later calls
    only run the plan.

    Collective over the ranks of all layouts.

    Args:
        tensors: this rank's shards by the names of ``src``, maybe strided: a part of a fused
            tensor is given as a view of it. A name may be missing where this rank has no shard.
        src, dst: the layouts of every tensor, by the names that it has on either side; texts need
            their ``shape(...)``.
        out: tensors for the results by the names of ``dst``, maybe strided; results without an
            entry are allocated. Outs may not overlap, except that tied tensors (one memory on every
            rank, with equal layouts) may have one ``out``. A tensor may be the part of its own
            ``out`` that keeps its values, as of ``redistribute``, and share memory with no other.
        progress: show a bar on stderr, for calls of several seconds.
        async_op: return a ``Pending`` at once; its ``wait()`` returns the dict.
        options: the following options as one value, for many calls.
        names: function from a name in ``src`` to the name in ``dst``; names stay the same if None.
        dst_dtype: the dtype of results: one for all floating-point tensors, or some by the names of
            ``dst``. Value parts are summed before they are rounded, and values travel in the
            narrower dtype.
        scale: the value that 1.0 in float8 stands for, one for all or by the names of ``dst``: a
            number, or a tensor that broadcasts against this rank's src shard (to float8) or dst
            shard (from float8). Values beyond the range of float8 become its largest.
        memory_limit: bytes that the buffers of no rank may exceed, the src and dst shards of all
            tensors included; the same on all ranks.
        group, topology, executor: as of ``redistribute``.
        dtype: the dtype that tensors have, one for all or some by the names of ``src``, as of
            ``redistribute``. A rank that passes no tensors may give it too. It converts nothing.

    Returns:
        This rank's dst shards by the names of ``dst``, None where it has none: a dict, or the
        ``Pending`` of it.

    Raises:
        LayoutError: names do not match, the request is illegal, or ranks disagree about it.
        ShapeMismatchError: some rank's shard is not what ``src`` gives it. In the first call, every
            rank raises this error or the LayoutError.
        MemoryLimitError: nothing fits ``memory_limit``; on every rank.
        CommError: a peer failed, or did not join within the group's timeout.
    """
    asked = filled("redistribute_many", options, by_name)
    world = World.of(asked.group)
    request = ManyRequest.of(tensors, src, dst, out, asked)
    if request.faults and has_agreed(world, request.transition):
        request.check(world.rank)
    key = request.key
    if not world.has_one_backend:
        key = *key, backend_of(world, *request.tensors.values(), *request.out.values())
    mover = _agreed_before(world, key)
    if mover is None:
        mover = _agreed(world, request, key)
    elif not mover.fits(request):
        mover.refuse(request)
    if async_op:
        return submit(
            partial(mover.run, request, progress),
            mover.device_of(request),
            [*request.tensors.values(), *request.out.values()],
        )
    drain()
    return mover.run(request, progress)


def _agreed_before(world: World, key: tuple[Any, ...]) -> _Mover | None:
    """The compiled bundle of the call, if ranks agreed on an equal call before; else None."""
    try:
        found: _Mover | None = world.agreed.get(key)
    except TypeError:  # An argument of a wrong type has no hash; the request reports it.
        return None
    return found


def _agreed(world: World, request: ManyRequest, key: tuple[Any, ...]) -> _Mover:
    """The compiled bundle that all ranks agree on; collective."""
    with world.together(request.ranks(world.size)):
        found = agree(world, request)
        with paused_collector():
            mover = world.agreed[key] = _Mover(request, found, world.on(found.device))
    return mover


@dataclass(frozen=True, slots=True)
class _Slot:
    """A buffer of a batch that is a tensor of the call, and which tensor it is."""

    is_src: bool
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_direct: bool


class _Mover:
    """A bundle compiled for this rank; construction is collective over its ranks."""

    def __init__(self, request: ManyRequest, agreed: Agreed, world: World) -> None:
        dtypes, self._tied = agreed.dtypes, agreed.tied
        self._bundle = request.bundle(dtypes)
        self._device = world.device
        self._rank = world.rank
        # The dtypes of results, which are not those in which scaled values travel.
        self._becomes = {
            name: getattr(torch, request.becomes(name, dtypes[s])) for s, name in request.pairs
        }
        self._scaled = {name for s, name in request.pairs if request.is_scaled(name, dtypes[s])}
        self._dst_of = dict(request.pairs)
        # Places of the last calls, two of them for outs that take turns.
        self._places: deque[Any] = deque(maxlen=2)
        self._batches = [
            (program, [self._slot(batch, program, name) for name in program.names])
            for batch, program in compiled_many(self._bundle, world)
        ]
        slots = [slot for _, found in self._batches for slot in found]
        self._src = {slot.name: slot.shape for slot in slots if slot.is_src}
        self._dst = {slot.name: slot.shape for slot in slots if not slot.is_src}
        self._sizes = [
            sum(prod(slot.shape) * slot.dtype.itemsize for slot in found)
            for _, found in self._batches
        ]

    def fits(self, request: ManyRequest) -> bool:
        """Whether the tensors of a later call fit this bundle; no layout is looked up.

        The dtypes of src tensors are right, because they are part of the request's key.
        """
        tensors, out, src, dst = request.tensors, request.out, self._src, self._dst
        return (
            not request.faults
            and len(tensors) == len(src)
            and all(name in src and src[name] == t.shape for name, t in tensors.items())
            and all(name in dst and dst[name] == t.shape for name, t in out.items())
            and all(self._becomes[name] == t.dtype for name, t in out.items())
            and not request.misused(self._rank)
            and self._is_apart(request)
        )

    def _is_apart(self, request: ManyRequest) -> bool:
        """Whether nothing shares memory that may not; quick if all lies where it lay before."""
        if not (request.out or self._tied.sharing):
            return True
        places = request.memory.places
        if places not in self._places:
            if request.overwritten(self._rank, self._tied):
                return False
            self._places.append(places)
        return True

    def refuse(self, request: ManyRequest) -> NoReturn:
        """Raise, on this rank alone, for tensors that do not fit."""
        request.check(self._rank, self._tied)
        request.check_out_dtypes(
            self._rank, {n: t.dtype for n, t in request.out.items()}, self._becomes
        )
        raise AssertionError("tensors that do not fit have something wrong")

    def run(self, request: ManyRequest, progress: bool) -> dict[str, Tensor | None]:
        """Move all tensors, batch by batch."""
        found: dict[str, Tensor | None] = dict.fromkeys(request.dst)
        device = self.device_of(request)
        sizes = self._sizes
        with (
            torch.no_grad(),
            tqdm(total=sum(sizes), unit="B", unit_scale=True, disable=not progress) as bar,
        ):
            for (program, slots), size in zip(self._batches, sizes, strict=True):
                # Results are long-lived, and as many as make the collector scan everything.
                with paused_collector():
                    shards = [self._shard(slot, request, device) for slot in slots]
                program.run(shards, device)
                for slot, shard in zip(slots, shards, strict=True):
                    if not slot.is_src:
                        found[slot.name] = self._result(slot, shard, request)
                bar.update(size)
        return found

    def device_of(self, request: ManyRequest) -> torch.device:
        """Where the tensors of a call are."""
        given = next(iter((*request.tensors.values(), *request.out.values())), None)
        return self._device if given is None else given.device

    def _slot(self, batch: BundleBatch, program: RankProgram, buffer: str) -> _Slot:
        member = self._bundle.members[batch.members[shard_index(buffer)]]
        transition = program.program.transition(buffer)
        shape = shard_shape(transition.layout(buffer), self._rank)
        assert shape is not None, "the buffers of a rank are its shards"
        return _Slot(
            is_src(buffer),
            member.src_name if is_src(buffer) else member.name,
            shape,
            getattr(torch, transition.dtype(buffer)),
            buffer in program.direct,
        )

    def _shard(self, slot: _Slot, request: ManyRequest, device: torch.device) -> Tensor:
        """The memory that the program reads or writes."""
        if not slot.is_src:
            # An out of several names is written by one of them. The others write equal values
            # later, as parts that were added to one memory twice would count twice.
            out = request.out.get(slot.name)
            if (
                out is not None
                and out.dtype == slot.dtype
                and (out.is_contiguous() or not slot.is_direct)
                and slot.name not in request.memory.followers
            ):
                return out
            return pool.empty(slot.shape, slot.dtype, device)
        tensor = request.tensors[slot.name]
        name = self._dst_of[slot.name]
        if name in self._scaled and tensor.dtype != slot.dtype:
            return quantized(tensor, _given(request.scale_of(name)), slot.dtype)
        return resolved(tensor)

    def _result(self, slot: _Slot, shard: Tensor, request: ManyRequest) -> Tensor:
        """The result for the caller, from the shard that the program wrote."""
        out = request.out.get(slot.name)
        if shard is out:
            return written(shard)
        becomes = self._becomes[slot.name]
        if out is None and shard.dtype == becomes:
            return shard
        if out is None:
            out = pool.empty(slot.shape, becomes, shard.device)
        if slot.name in self._scaled and shard.dtype != becomes:
            dequantized(shard, _given(request.scale_of(slot.name)), out)
        else:
            out.copy_(shard)
        return out


def _given(scale: Scale | None) -> Scale:
    assert scale is not None, "only what has a scale is scaled"
    return scale
