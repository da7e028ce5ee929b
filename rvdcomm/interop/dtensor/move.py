"""Move: a transition of placed tensors, planned, agreed on and compiled for this rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rvdcomm import (
    LayoutError,
    Network,
    Plan,
    Redistributor,
    ShapeMismatchError,
    Topology,
    plan,
)
from rvdcomm.interop.dtensor.numbering import numbering_of
from rvdcomm.interop.dtensor.slabs import slices_of
from rvdcomm.interop.dtensor.transition import PlacementChange, shard_shape, transition_of
from rvdcomm.layout import dtype_name
from rvdcomm.run import World, compare_requests, executor_name

Slices = tuple[slice, ...] | None


@dataclass(frozen=True)
class Options:
    """Options of ``rvdcomm.redistribute``, and the most slabs that a transition may have.

    Options of one group are compared; those of different groups are kept apart by their worlds.
    """

    topology: Topology | Network | None = None
    executor: str | None = None
    max_slabs: int | None = None
    group: Any = field(default=None, compare=False)

    def world(self, src: Any) -> World:
        """The world that moves the tensors of a mesh.

        Raises:
            LayoutError: no backend of the group serves its devices.
        """
        return World.of(self.group).on(src.device_mesh.device_type)


@dataclass(frozen=True)
class Draft:
    """A transition with a plan for every slab, equal on all ranks that take part."""

    transition: PlacementChange
    plans: tuple[Plan, ...]
    dtype: torch.dtype
    options: Options
    device_type: str

    @classmethod
    def of(cls, src: Any, dst: Any, dtype: torch.dtype, options: Options) -> Draft:
        """Plan from one spec to another, without a message to anyone.

        Args:
            src, dst: DTensorSpecs, or other objects with a mesh, placements and a shape; of one
                shape. The ranks of a mesh are ranks of the default group; those of the plans are
                ranks of the group in ``options``.

        Raises:
            LayoutError: there is no such transition.
        """
        rank, numbering = options.world(src).rank, numbering_of(options.group)
        transition = transition_of(src, dst, dtype, rank, numbering)
        if options.max_slabs is not None and len(transition.slabs) > options.max_slabs:
            raise LayoutError(
                f"{transition} takes {len(transition.slabs)} slabs, more than {options.max_slabs}."
            )
        plans = tuple(
            plan(
                transition.src.layout(slab),
                transition.dst.layout(slab),
                dtype_name(dtype),
                options.topology,
            )
            for slab in transition.slabs
        )
        return cls(transition, plans, dtype, options, src.device_mesh.device_type)


class DTensorMove:
    """A compiled transition of this rank's shard, from ``src`` to ``dst``; calls are collective.

    Construction is collective over the ranks of both meshes: they compare what they were asked for,
    and trust each other from then on. A rank in neither mesh has nothing to do.

    Args:
        draft: the transition and its plans.
        shape: shape of this rank's shard of ``src``; ignored outside the mesh of ``src``.

    Raises:
        LayoutError: ranks disagree about the transition.
        ShapeMismatchError: some rank's shard is not what ``src`` gives it. All ranks of both meshes
            raise this error, or all raise the LayoutError.
        CommError: a rank did not join.
    """

    def __init__(self, draft: Draft, shape: tuple[int, ...]) -> None:
        world = World.of(draft.options.group)
        src, dst = draft.transition.src, draft.transition.dst
        self._divisor = draft.transition.divisor
        self._has_src = world.rank in src.ranks
        self._dst_shape = shard_shape(dst, world.rank)
        self._steps: list[tuple[Redistributor, Slices, Slices]] = []
        if world.rank in draft.transition.members:
            _agree(world, draft, shape)
            for slab, made in zip(draft.transition.slabs, draft.plans, strict=True):
                src_slices, dst_slices = (slices_of(s, world.rank, slab) for s in (src, dst))
                step = _compiled(world, made, draft), src_slices, dst_slices
                self._steps.append(step)

    def __call__(self, shard: Tensor) -> Tensor:
        """This rank's shard under ``dst``; a tensor without elements outside that mesh."""
        if shard.requires_grad:
            shard = shard.detach()
        result: Tensor | None
        if len(self._steps) == 1 and self._has_src:
            result = self._steps[0][0](shard)
        else:
            result = self._in_slabs(shard)
        if result is None:
            return shard.new_empty(0)
        return result.div_(self._divisor) if self._divisor > 1 else result

    def _in_slabs(self, shard: Tensor) -> Tensor | None:
        """Redistribute slab by slab, on the device of ``shard``, which all ranks pass."""
        result = None if self._dst_shape is None else shard.new_empty(self._dst_shape)
        for redistributor, src_slices, dst_slices in self._steps:
            redistributor(
                None if src_slices is None else shard[src_slices],
                out=None if result is None or dst_slices is None else result[dst_slices],
            )
        return result


def _compiled(world: World, made: Plan, draft: Draft) -> Redistributor:
    """The compiled plan; transitions with the same layouts share it."""
    options, device = draft.options, draft.device_type
    key = ("dtensor", made.src, made.dst, made.dtype, options, device)

    def make() -> Redistributor:
        return Redistributor(made, options.group, executor=options.executor, device=device)

    found: Redistributor = world.once(key, make)
    return found


def _agree(world: World, draft: Draft, shape: tuple[int, ...]) -> None:
    """Raise, on all members, if they were asked for different things or a shard does not fit."""
    transition = draft.transition
    asked = {
        "transition": str(transition),
        "dtype": dtype_name(draft.dtype),
        "topology": repr(draft.options.topology),
        "executor": executor_name(draft.options.executor),
    }
    fault, want = None, shard_shape(transition.src, world.rank)
    if want is not None and shape != want:
        fault = ShapeMismatchError(
            f"{transition}: rank {world.rank} passed a local tensor {list(shape)}, its shard is "
            f"{list(want)}."
        )
    compare_requests(world, transition.members, asked, str(transition), fault=fault)
