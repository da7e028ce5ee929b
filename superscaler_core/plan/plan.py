"""Plan: what an sProgram decides about a graph, by op_trans, op_assign and op_order."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property
from itertools import accumulate, chain, groupby, pairwise, product
from math import prod
from operator import itemgetter
from typing import Any

from superscaler_core.checks import one_of
from superscaler_core.errors import PlanError
from superscaler_core.graph.blocks import Blocks, find_blocks
from superscaler_core.graph.dims import DimClass, dims_of
from superscaler_core.graph.form import OpForm
from superscaler_core.graph.graph import Graph, Op, TokenSlices
from superscaler_core.graph.part import Part, Piece
from superscaler_core.graph.tensor import PTensor
from superscaler_core.graph.token_slices import token_slices
from superscaler_core.graph.without_grad import without_grad
from superscaler_core.known import Known
from superscaler_core.plan.decisions import Chosen, Decisions, PlacedPart
from superscaler_core.plan.fitted import fitted
from superscaler_core.plan.keep import Keep
from superscaler_core.plan.members import check_member
from superscaler_core.plan.op_split import OpSplit, parts_of
from superscaler_core.plan.op_trans import Transformation, pieces, replicate, split
from superscaler_core.plan.overlap import NO_OVERLAP, Overlap
from superscaler_core.plan.placement import Placement
from superscaler_core.plan.savings import Groups, Savings
from superscaler_core.schedules import Schedule

Device = int
"""A device is named by the rank of the process that drives it."""


_WHOLE = OpSplit.of([((), 0, None)])
"""The split of every op in a new plan: one whole part without a device."""

MAX_CUTS = 1 << 16
"""Bound on cached splits of ops: layers repeat, and every plan cuts many ops alike."""

_CUTS: Known[tuple[OpForm, OpSplit, Transformation], OpSplit] = Known(MAX_CUTS)
"""The new split of an op, by its form, its old split, and the transformation of all its parts."""


def _copied(value: Any) -> Any:
    """A copy of a list or table of a plan, so that the copy can change independently."""
    is_changed = isinstance(value, dict | list | set | Groups)
    return copy(value) if is_changed else value


@dataclass(frozen=True)
class Axis:
    """One axis of a grid of devices, and the loops that are cut along it.

    Attributes:
        num: number of devices along the axis.
        dims: classes of dims. The first class that an op has is cut; an op that has none of them
            is replicated along the axis.
    """

    num: int
    dims: tuple[DimClass, ...] = ()

    @cached_property
    def places(self) -> Mapping[DimClass, int]:
        """The place of each class in ``dims``; the ops of deep models have hundreds of classes."""
        return {of: place for place, of in reversed([*enumerate(self.dims)])}


@dataclass(frozen=True, slots=True)
class Stage:
    """Ops that run together, forward and backward, for one microbatch at a time."""

    index: int
    ops: tuple[Op, ...]


class Plan(Savings):
    """The decisions of an sProgram about ``graph`` on ``devices``.

    A new plan has every op as one part without a device, all ops in one stage, and one microbatch
    in a step.
    """

    def __init__(self, graph: Graph, devices: Sequence[Device]) -> None:
        if len(set(devices)) != len(devices) or not devices:
            raise PlanError(f"devices {list(devices)}: they have to be distinct, and at least one.")
        super().__init__(graph)
        self.devices = tuple(devices)
        self.dims = dims_of(graph)
        self.notes: list[str] = list(graph.notes)
        """Differences between what the plan computes and what the model computes; empty if none."""
        self.schedule: Schedule | None = None
        self.overlap: Overlap = NO_OVERLAP
        """Which communication runs while devices compute."""
        self.placement: Placement | None = None
        """Which devices act as which workers of the schedule; None if not given."""
        self._splits: dict[int, OpSplit] = {}
        self._orders: list[tuple[Op | Part, Op | Part]] = []
        self._cuts: tuple[int, ...] = ()

    def rewrite(self, graph: Graph) -> None:
        """Plan another graph of the same computation instead, and drop all decisions so far."""
        devices = self.devices
        self.__dict__.clear()
        Plan.__init__(self, graph, devices)

    def slice_tokens(self, slices: TokenSlices) -> tuple[int, ...]:
        """Plan a graph in which every op works on a slice of its sequences at a time.

        Returns:
            For each stage and slice the index of its first op in the new graph.

        Raises:
            PlanError: as for ``token_slices``, or the graph has no op of that name.
        """
        firsts = (0, *(self.op(name).index for name in slices.stages), len(self.graph.ops))
        stages = [self.graph.ops[first:end] for first, end in pairwise(firsts)]
        tokens, dims = self.blocks.tokens, self.dims
        graph, places = token_slices(
            self.graph,
            lambda op: [loop for dim in tokens for loop in dims.ids(op, dim)],
            tuple(accumulate(slices.lengths)),
            stages,
        )
        self.rewrite(graph)
        return places

    @cached_property
    def blocks(self) -> Blocks:
        """The repeated blocks of the model.

        Set them where the search by structure does not find them:
        ``plan.blocks = find_blocks(graph, Modules("h.*"))``.
        """
        return find_blocks(self.graph)

    # --- op_trans -------------------------------------------------------------------------------

    def op_trans(self, what: Op | Part, how: Transformation) -> tuple[Part, ...]:
        """Replace an op, or one of its parts, by parts that do its work; return the new parts.

        If the op has several parts already, each of them is transformed.

        Raises:
            PlanError: the op cannot be cut that way, or the part was already replaced.
        """
        check_member(self.graph, "op_trans", what)
        if isinstance(what, Op):
            key = what.form, self.op_split(what), how
            self._set(what, _CUTS.of(key, lambda: OpSplit.of(
                (new.pieces, new.replica, None) for part in self.parts(what) for new in how(part)
            )))  # fmt: skip
            return self.parts(what)
        op, now = what.op, self.parts(what.op)
        if what not in now:
            raise PlanError(f"op_trans of {what}: it was already transformed; use its parts.")
        made = how(what)
        new = [((p, None) for p in made) if p == what else [(p, self.device(p))] for p in now]
        self._set(op, OpSplit.of((p.pieces, p.replica, d) for p, d in chain.from_iterable(new)))
        return made

    def _set(self, op: Op, chosen: OpSplit) -> None:
        self._splits[op.index] = chosen

    def parts(self, op: Op) -> tuple[Part, ...]:
        """The present parts of an op."""
        return parts_of(op, self.op_split(op))

    def has_parts(self, op: Op) -> bool:
        """Whether the plan has cut or assigned the op."""
        return op.index in self._splits

    # --- op_assign ------------------------------------------------------------------------------

    def op_assign(
        self, what: Op | Part | Iterable[Part], device: Device | Sequence[Device]
    ) -> None:
        """Put all parts on one device, or part i on the i-th device of a sequence.

        Raises:
            PlanError: the numbers of parts and devices differ, or the plan has no such device.
        """
        if isinstance(what, Op):
            check_member(self.graph, "op_assign", what)
            split = self.op_split(what)
            devices = self._known_devices(what, len(split.parts), device)
            self._splits[what.index] = split.placed(devices)
            return
        parts = (what,) if isinstance(what, Part) else tuple(what)
        for part in parts:
            check_member(self.graph, "op_assign", part)
        if parts:
            devices = self._known_devices(parts[0].op, len(parts), device)
            pairs = zip(parts, devices, strict=True)
            for op, mine in groupby(pairs, lambda pair: pair[0].op):
                given = dict(mine)
                places = [given.get(part, self.device(part)) for part in self.parts(op)]
                self._splits[op.index] = self.op_split(op).placed(tuple(places))

    def _known_devices(
        self, op: Op, num_parts: int, given: Device | Sequence[Device]
    ) -> tuple[Device, ...]:
        """The device of every part.

        Raises:
            PlanError: the numbers of devices and parts differ, or the plan lacks a device.
        """
        devices = (given,) * num_parts if isinstance(given, int) else tuple(given)
        if len(devices) != num_parts:
            raise PlanError(
                f"op_assign of {num_parts} parts of {op.name} to {len(devices)} devices: "
                "give one device, or as many as parts."
            )
        if unknown := set(devices).difference(self.devices):
            raise PlanError(
                f"op_assign of {op.name} to device {min(unknown)}: the plan has "
                f"{list(self.devices)}."
            )
        return devices

    def device(self, part: Part) -> Device | None:
        """The device on which a part runs; None if it is not assigned yet."""
        return self.op_split(part.op).places.get((part.pieces, part.replica))

    def stand_ins(self, op: Op) -> tuple[Mapping[Device, Device], ...]:
        """For each route, a map from an op's devices on the first route to those on that route.

        The parts that update a parameter are on no route.
        """
        is_update = op.index >= len(self.graph.ops)
        if self.schedule is None or self.placement is None or self.num_routes == 1 or is_update:
            return (dict(zip(self.devices, self.devices, strict=True)),)
        stage = bisect_right(self._cuts, op.index)
        routes = range(self.num_routes)
        return tuple(self.placement.standing_in(self.schedule, stage, route) for route in routes)

    def op_split(self, op: Op) -> OpSplit:
        """How an op is cut now, and where its parts run."""
        return self._splits.get(op.index, _WHOLE)

    def with_splits(self, splits: Mapping[Op, OpSplit]) -> Plan:
        """A copy of this plan in which these ops have other splits.

        Raises:
            PlanError: a split uses a device that the plan does not have, or has a part without one.
        """
        made = object.__new__(Plan)
        made.__dict__.update({name: _copied(value) for name, value in self.__dict__.items()})
        for op, chosen in splits.items():
            made.split_as(op, chosen)
        return made

    def split_as(self, op: Op, chosen: OpSplit) -> None:
        """Give an op this split in place of the one that it has.

        Raises:
            PlanError: the split uses a device that the plan does not have, or has a part without
                one.
        """
        self._set(op, chosen)
        self.op_assign(op, [p.device for p in chosen.parts if p.device is not None])

    @property
    def is_assigned(self) -> bool:
        """Whether any part has a device."""
        return any(split.devices for split in self._splits.values())

    # --- op_order -------------------------------------------------------------------------------

    def op_order(
        self, first: Op | Part | Schedule, then: Op | Part | Placement | None = None
    ) -> None:
        """Order one op or part before another, or order the stages by a schedule.

        Between parts on one device the order is followed as given. Across devices nothing is
        enforced besides the data dependencies; the order is only checked for cycles.

        Args:
            first: an op, a part, or a schedule.
            then: the op or part that runs after ``first``; for a schedule, the devices of its
                workers.

        Raises:
            PlanError: the schedule does not fit the plan's stages, or the placement does not fit
                the schedule's workers and the plan's devices.
        """
        if isinstance(first, Schedule):
            if isinstance(then, Op | Part):
                raise PlanError(f"schedule {first.name}: it orders stages, not {then}.")
            if first.num_stages != self.num_stages:
                raise PlanError(
                    f"schedule {first.name} of {first.num_stages} stages: the plan has "
                    f"{self.num_stages}; cut it by pipeline(...) before."
                )
            if first.num_recycling_passes and not self.graph.recycled:
                raise PlanError(
                    f"schedule {first.name}: it has forwards without gradient ('f'), and "
                    f"{self.graph.name} recycles nothing that they would make; capture it with "
                    "recycled={input: number of the output}."
                )
            self._check_workers(first, then)
            self.schedule, self.placement = first, then
            return
        if then is None or isinstance(then, Placement):
            raise PlanError(f"op_order of {first}: give the op or part that runs after it.")
        check_member(self.graph, "op_order", first)
        check_member(self.graph, "op_order", then)
        self._orders.append((first, then))

    def _check_workers(self, schedule: Schedule, placement: Placement | None) -> None:
        if placement is None:
            return
        if len(placement.workers) != schedule.num_workers:
            raise PlanError(
                f"schedule {schedule.name} of {schedule.num_workers} workers: placement "
                f"{placement} is of {len(placement.workers)}."
            )
        unknown = sorted({d for own in placement.workers for d in own}.difference(self.devices))
        if unknown:
            raise PlanError(
                f"schedule {schedule.name}: placement {placement} has devices {unknown}; the "
                f"plan has {list(self.devices)}."
            )

    @property
    def given_orders(self) -> tuple[tuple[Op | Part, Op | Part], ...]:
        """The pairs that ``op_order`` was given."""
        return tuple(self._orders)

    @property
    def orders(self) -> tuple[tuple[Part, Part], ...]:
        """All pairs of parts that ``op_order`` was given, for the parts that the ops have now.

        Raises:
            PlanError: an ordered part was transformed afterwards.
        """
        pairs = (product(self._parts_of(a), self._parts_of(b)) for a, b in self._orders)
        return tuple(chain.from_iterable(pairs))

    def _parts_of(self, what: Op | Part) -> tuple[Part, ...]:
        if isinstance(what, Op):
            return self.parts(what)
        if what not in self.parts(what.op):
            raise PlanError(f"op_order of {what}: it was transformed since; order its parts.")
        return (what,)

    # --- stages ---------------------------------------------------------------------------------

    def pipeline(self, cuts: Sequence[Op | int]) -> tuple[Stage, ...]:
        """Cut the ops into stages; a new stage begins at every op in ``cuts``. Return the stages.

        Raises:
            PlanError: the cuts are not in ascending order, or a stage would be empty.
        """
        points = [cut.index if isinstance(cut, Op) else cut for cut in cuts]
        ends = [0, *points, len(self.graph.ops)]
        if any(a >= b for a, b in pairwise(ends)):
            raise PlanError(
                f"stages of {self.graph.name} cut at ops {points}: cut points have to ascend "
                f"from 1 to {len(self.graph.ops) - 1}."
            )
        self._cuts = tuple(points)
        self.__dict__.pop("stages", None)
        return self.stages

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The stages, in order; one if the plan has no pipeline."""
        ends = (0, *self._cuts, len(self.graph.ops))
        return tuple(Stage(i, self.graph.ops[ends[i] : ends[i + 1]]) for i in range(len(ends) - 1))

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self._cuts) + 1

    @property
    def num_microbatches(self) -> int:
        """The number of microbatches in a step."""
        scheduled = 1 if self.schedule is None else self.schedule.num_microbatches
        return scheduled * self.overlap.num_halves

    @property
    def num_routes(self) -> int:
        """The number of routes of microbatches; above 1 if a stage runs on several workers."""
        return 1 if self.schedule is None else len(self.schedule.routes)

    @property
    def num_recycling_passes(self) -> int:
        """The number of forwards without gradient in a step, over all microbatches."""
        scheduled = 0 if self.schedule is None else self.schedule.num_recycling_passes
        return scheduled * self.overlap.num_halves

    # --- grids ----------------------------------------------------------------------------------

    def spread(self, op: Op, devices: Sequence[Device], axes: Sequence[Axis]) -> tuple[Part, ...]:
        """Cut or replicate an op along every axis of a grid of devices, and assign the parts.

        Args:
            op: the op.
            devices: devices of the grid; the last axis varies fastest.
            axes: the axes of the grid, and what is cut along each.
        """
        if prod(axis.num for axis in axes) != len(devices):
            raise PlanError(
                f"a grid of {' x '.join(str(a.num) for a in axes)} needs "
                f"{prod(a.num for a in axes)} devices, but {len(devices)} were given."
            )
        for axis in axes:
            self.op_trans(op, self.along(op, axis))
        self.op_assign(op, devices)
        return self.parts(op)

    def along(self, op: Op, axis: Axis) -> Transformation:
        """How an op is cut along an axis: by the first of the axis' dims that the op has."""
        own = [of for of in self.dims.of_op(op) if of in axis.places]
        if not own or axis.num == 1:
            return replicate(axis.num)
        first = min(own, key=axis.places.__getitem__)
        return split(self.dims.ids(op, first)[0], axis.num)

    # --- what is kept ---------------------------------------------------------------------------

    def keep(self, level: Keep | str, groups: Iterable[Iterable[Op]] | None = None) -> None:
        """Choose what of the forward is kept for the backward; the backward recomputes the rest.

        Levels combine: after ``BLOCK_INPUTS``, a call with ``SEGMENT_INPUTS`` lets the
        recomputation of a block keep only the inputs of its segments.

        Args:
            level: what is kept, or its name.
            groups: groups of ops to use instead of the blocks. For levels that are about stages or
                attentions, only ops in these groups are affected.
        """
        level = Keep(one_of("level of Keep", str(level), map(str, Keep)))
        given = None if groups is None else [tuple(group) for group in groups]
        chosen = set(self.graph.ops if given is None else chain.from_iterable(given))
        if level is Keep.SEGMENT_INPUTS:
            self.recompute(*(self.blocks.layers if given is None else given))
        if level is Keep.BLOCK_INPUTS:
            self.recompute_regions(*(self.blocks.layers if given is None else given))
        if level is Keep.STAGE_INPUT:
            inside = ([op for op in stage.ops if op in chosen] for stage in self.stages)
            self.recompute_regions(*filter(None, inside))
        if level is Keep.ATTENTION_ONLY:
            attentions = ([op for op in ops if op in chosen] for ops in self.blocks.attention)
            self.recompute(*filter(None, attentions))

    # --- weights --------------------------------------------------------------------------------

    def update(self, name: str) -> Op:
        """The op that applies the optimizer to a parameter; its parts define where it is stored."""
        return self.graph.updates[self.graph.parameter(name).name]

    def updates(self) -> Mapping[PTensor, tuple[Part, ...]]:
        """The optimizer parts that the plan sets; other parameters are stored where used."""
        return {
            op.outputs[0]: self.parts(op)
            for op in self.graph.updates.values()
            if self.has_parts(op)
        }

    def note(self, text: str) -> None:
        """Note a difference between what the plan computes and what the model computes."""
        self.notes.append(text)

    # --- decisions ------------------------------------------------------------------------------

    @property
    def key(self) -> Hashable:
        """A key of all decisions; plans of one graph with equal keys have equal decisions."""
        groups = (self._recomputed, self._regions, self._offloaded)
        splits = sorted(self._splits.items(), key=itemgetter(0))
        return (
            self.devices, tuple(splits), self._cuts, self.schedule, self.placement,
            self.given_orders, tuple(each.key for each in groups), self.on_host,
            self.fsdp_units, self.overlap, tuple(self.notes),
        )  # fmt: skip

    @property
    def decisions(self) -> Decisions:
        """All decisions of the plan, as a value.

        Groups are sorted by the first op of each, so the order of calls does not matter.
        """
        ops = (*self.graph.ops, *self.graph.updates.values())
        placed = {op.name: self.op_split(op).parts for op in ops}
        return Decisions(
            self.graph.name,
            self.devices,
            parts={name: parts for name, parts in placed.items() if parts != (PlacedPart(),)},
            stages=tuple(self.graph.ops[cut].name for cut in self._cuts),
            schedule=self.schedule,
            placement=self.placement,
            orders=tuple((self._chosen(a), self._chosen(b)) for a, b in self._orders),
            recomputed=self._groups(self.recompute_group),
            recompute_regions=self._groups(lambda part: self.region_group(part.op)),
            offloaded=self._groups(self.offload_group),
            on_host=tuple(sorted(self.on_host)),
            fsdp_units=tuple(
                (tuple(map(self._chosen, w.ops)), w.unshards) for w in self.fsdp_units
            ),
            overlap=self.overlap,
            notes=tuple(self.notes[len(self.graph.notes) :]),
            slices=self.graph.slices,
        )

    def decide(self, decisions: Decisions, *, fit: bool = False) -> None:
        """Apply ``decisions`` to a plan that has no decisions yet.

        Args:
            decisions: what to decide.
            fit: whether they may be about a graph of another size, such as another batch; ranges
                are then in proportion.

        Raises:
            PlanError: the decisions are for another model or other devices, or name an op that the
                graph does not have; or the plan already has decisions.
        """
        if (decisions.model, decisions.devices) != (self.graph.name, self.devices):
            raise PlanError(
                f"decisions about {decisions.model} on devices {list(decisions.devices)}: the plan "
                f"is about {self.graph.name} on {list(self.devices)}."
            )
        if self.decisions != Decisions(self.graph.name, self.devices, slices=self.graph.slices):
            raise PlanError("decide: the plan has decisions already; use a new plan.")
        if decisions.slices is not None and self.graph.slices is None:
            self.slice_tokens(decisions.slices)
        if decisions.slices != self.graph.slices:
            raise PlanError(
                f"decisions about slices {decisions.slices}: the plan's graph is of slices "
                f"{self.graph.slices}; give the graph that was captured."
            )
        if fit:
            decisions = fitted(decisions, lambda name: self.op(name).sizes)
        for name, placed in decisions.parts.items():
            op = self.op(name)
            parts = [self._part(op, one.pieces, one.replica) for one in placed]
            self._set(op, OpSplit.of((part.pieces, part.replica, None) for part in parts))
            pairs = [(p, o.device) for p, o in zip(parts, placed, strict=True)]
            self.op_assign(
                [p for p, d in pairs if d is not None], [d for _, d in pairs if d is not None]
            )
        if decisions.stages:
            self.pipeline([self.op(name) for name in decisions.stages])
        if decisions.schedule is not None:
            self.op_order(decisions.schedule, decisions.placement)
        elif decisions.placement is not None:
            raise PlanError(f"place {decisions.placement}: there is no schedule with workers.")
        for pair in decisions.orders:
            self.op_order(*map(self._meant, pair))
        self.recompute(*(map(self._meant, group) for group in decisions.recomputed))
        self.recompute_regions(
            *([self.op(one.op) for one in group] for group in decisions.recompute_regions)
        )
        self.offload(*(map(self._meant, group) for group in decisions.offloaded))
        if decisions.on_host:
            self.store_on_host(*decisions.on_host)
        for group, unshards in decisions.fsdp_units:
            say = self.unshard if unshards else self.reduce_grads
            say([self.op(one.op) for one in group])
        self.overlap = decisions.overlap
        for note in decisions.notes:
            self.note(note)

    def copy(self) -> Plan:
        """An independent copy of the plan."""
        made = Plan(self.graph, self.devices)
        made.decide(self.decisions)
        return made

    __copy__ = copy

    def without_grad(self) -> Plan:
        """The plan's forward alone: the same decisions about a graph without gradients.

        Parameters are stored as in the plan, so a program of either can read the other's.
        """
        made = Plan(without_grad(self.graph), self.devices)
        said = self.decisions
        units = tuple(unit for unit in said.fsdp_units if unit[1])
        made.decide(
            replace(said, recomputed=(), recompute_regions=(), offloaded=(), fsdp_units=units)
        )
        return made

    def _chosen(self, what: Op | Part) -> Chosen:
        if isinstance(what, Op):
            return Chosen(what.name)
        return Chosen(what.op.name, (what.pieces, what.replica))

    def _groups(self, number: Callable[[Part], int]) -> tuple[tuple[Chosen, ...], ...]:
        """Groups of parts, from the group number of each part; whole ops where all parts agree."""
        found: dict[int, list[Chosen]] = {}
        for op in self.graph.ops:
            parts = self.parts(op)
            numbers = [number(part) for part in parts]
            if len(set(numbers)) == 1:
                found.setdefault(numbers[0], []).append(self._chosen(op))
                continue
            for part, its_number in zip(parts, numbers, strict=True):
                found.setdefault(its_number, []).append(self._chosen(part))
        found.pop(0, None)
        return tuple(map(tuple, found.values()))

    @cached_property
    def _ops_by_name(self) -> Mapping[str, Op]:
        return {op.name: op for op in (*self.graph.ops, *self.graph.updates.values())}

    def op(self, name: str) -> Op:
        """The op of that name, or the one that updates that parameter.

        Raises:
            PlanError: there is none.
        """
        if name not in self._ops_by_name:
            near = get_close_matches(name, self._ops_by_name, 3, 0.0)
            raise PlanError(f"{self.graph.name} has no op {name!r}; it has {', '.join(near)}.")
        return self._ops_by_name[name]

    def _part(self, op: Op, ranges: Sequence[Piece], replica: int) -> Part:
        """A part with these ranges.

        Raises:
            PlanError: the op has no such loop, or it cannot be cut, or it has fewer iterations.
        """
        whole = Part(op)
        (made,) = pieces({loop: (lo, hi) for loop, lo, hi in ranges})(whole) if ranges else (whole,)
        return Part(op, made.pieces, replica)

    def _meant(self, chosen: Chosen) -> Op | Part:
        op = self.op(chosen.op)
        return op if chosen.part is None else self._part(op, *chosen.part)
