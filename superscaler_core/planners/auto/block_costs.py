"""Block costs: what the blocks of a model cost under a setting, by the shared cost functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from math import inf

from superscaler_core.cost import CostModel, MemoryCost, recomputed
from superscaler_core.cost.memory_cost import counted_once
from superscaler_core.cost.neighbours import Neighbours, product_of
from superscaler_core.cost.split_memory import weights_of
from superscaler_core.errors import PlanError
from superscaler_core.evaluation.request import Request
from superscaler_core.evaluation.shortened import forms_of, repeats_of
from superscaler_core.graph.blocks import OpGroup, find_blocks
from superscaler_core.graph.graph import Op
from superscaler_core.graph.part import Part
from superscaler_core.graph.tensor import ACTIVATION, ITEM_BYTES, PTensor
from superscaler_core.known import remembers
from superscaler_core.materialize.sharding import shardings_of
from superscaler_core.plan import Keep, OpSplit, Plan
from superscaler_core.planners.auto.families import Filling
from superscaler_core.planners.auto.model_cost import (
    BlockCost,
    ModelCost,
    Output,
    WeightCosts,
    as_one,
)
from superscaler_core.planners.auto.setting import MAX_SAMPLES, Setting


@dataclass(frozen=True, eq=False)
class BlockCosts:
    """The costs of a model's blocks under all settings of one request.

    One stage of the model is filled with few of its blocks, as the setting fills it, and the costs
    of its parts on one device are added (``CostModel``). Blocks of equal ops cost the same, so a
    deep model costs no more than a shallow one.
    """

    request: Request

    def of(self, setting: Setting) -> ModelCost:
        """The costs of all blocks.

        Raises:
            PlanError: the model cannot be cut by the setting.
        """
        keep = Keep.EVERYTHING if setting.keep is Keep.STAGE_INPUT else setting.keep
        names = ("tp", "samples", "sequence", "vocabulary", "experts", "coshard", "heavy")
        chosen = Setting(
            "hybrid" if setting.family == "interlaced" else setting.family,
            dp=self.replicas(setting),
            keep=keep,
            keep_coshard=setting.keep_coshard,
            **setting.options(*names),
        )
        if setting.sequence and chosen.dp < setting.dp:
            # Samples and tokens may be one dim, which all replicas cut together.
            self._stage(replace(chosen, dp=setting.dp, keep=Keep.EVERYTHING, keep_coshard=None))
        return self._costs(chosen)

    def near(self, setting: Setting) -> ModelCost:
        """The costs of all blocks, interpolated between two microbatch sizes.

        Bytes are linear in the samples, except where another op has the peak. Times are nearly so:
        speeds grow with the work, and the roofline has a corner. So this is a heuristic.
        """
        sizes = [n for n in range(1, MAX_SAMPLES + 1) if n * setting.dp in self.request.samples]
        ends = sizes[:1] + sizes[-1:]
        if setting.samples in ends or setting.samples not in sizes:
            return self.of(setting)
        try:
            first, last = (self.of(replace(setting, samples=num)) for num in ends)
        except PlanError:
            # One sample may have too few tokens to cut.
            return self.of(setting)
        return self._between(first, last, (setting.samples - ends[0]) / (ends[1] - ends[0]))

    @remembers()
    def _between(self, first: ModelCost, last: ModelCost, share: float) -> ModelCost:
        return first.between(last, share)

    def replicas(self, setting: Setting) -> int:
        """Replicas of the stage that is priced: one suffices where they do not communicate."""
        is_alone = setting.samples in self.request.samples and not setting.experts
        return 1 if is_alone else setting.dp

    @remembers()
    def _costs(self, chosen: Setting) -> ModelCost:
        stage = self._stage(chosen) if chosen.coshard > 1 else self._keeping(chosen)
        blocks = stage.plan.blocks
        firsts: dict[object, OpGroup] = {}
        for ops in blocks.layers:
            firsts.setdefault(forms_of(ops), ops)
        like = {forms: stage.cost(ops) for forms, ops in firsts.items()}
        before = blocks.graph.ops[: blocks.layers[0][0].index]
        whole = find_blocks(self.request.graph_of(chosen.microbatch))
        return ModelCost(
            tuple(map(stage.cost, filter(None, [before]))),
            tuple(like[forms_of(ops)] for ops in whole.layers),
            tuple(map(stage.cost, filter(None, [blocks.behind]))),
        )

    def _keeping(self, chosen: Setting) -> _Priced:
        """The stage of a setting, from that of the setting that keeps everything."""
        whole = self._stage(replace(chosen, keep=Keep.EVERYTHING, keep_coshard=None))
        # Which ops are recomputed together does not depend on their splits.
        plan = Plan(whole.plan.graph, whole.plan.devices)
        plan.keep(chosen.keep)
        return replace(whole, plan=plan)

    @remembers()
    def _stage(self, chosen: Setting) -> _Priced:
        """The only stage of a setting."""
        request = self.request
        graph = repeats_of(request.graph_of(chosen.microbatch)).fewest
        plan = Plan(graph, request.devices[: chosen.dp * chosen.tp])
        sizes = (len(plan.blocks.layers),)
        Filling(chosen, request.profile, request.recycle, 1)(plan, 1, sizes)
        costs = replace(request.costs(chosen.microbatch), graph=graph)
        return _Priced(costs, plan, {op: plan.op_split(op) for op in graph.ops}, {})


@dataclass(frozen=True, slots=True)
class _Placed:
    """A part on the priced device, with the split of which it is the only part.

    ``region`` is recomputed as a whole, and ``group`` without its communication: the number of the
    group, and of the piece of it between two communications. Both are 0 if there is none.
    """

    op: Op
    part: Part
    split: OpSplit
    region: int
    group: tuple[int, int]


@dataclass(frozen=True, eq=False)
class _Priced:
    """A filled plan of one stage, with the costs on its first device, and of the moves so far."""

    costs: CostModel
    plan: Plan
    splits: Mapping[Op, OpSplit]
    moved_secs: dict[PTensor, tuple[float, float]]

    def cost(self, ops: OpGroup) -> BlockCost:
        """The cost of consecutive ops."""
        forward = backward = again = 0.0
        working: dict[Op, tuple[float, float]] = {}
        parts = self._parts(ops)
        left_out = self._left_out(parts)
        for each in parts:
            cost = self.costs.op_cost(each.op, each.split)
            secs = 0.0 if self._near.is_joined(each.op) else cost.forward_secs
            forward += secs
            backward += cost.backward_secs + cost.accumulate_secs
            before = working.get(each.op, (0.0, 0.0))
            working[each.op] = before[0] + secs, before[1] + cost.backward_secs
            # A region's recomputation leaves out a group that nothing else in it reads.
            is_in_region = each.region > 0 and each.group not in left_out
            again += secs * ((each.group != _NONE) + is_in_region)
        moves = [(op, self._moving(tensor)) for op in ops for tensor in op.outputs]
        again += sum(secs for op, (secs, _) in moves if self._stays_inside(op))
        return BlockCost(
            forward,
            backward,
            again,
            sum(secs for _, (secs, _) in moves),
            sum(secs for _, (_, secs) in moves),
            self._alone_shares(ops, working),
            as_one(self._memory(parts)),
            tuple(self._weights(ops)),
            tuple(self._outputs(ops)),
        )

    def _alone_shares(
        self, ops: OpGroup, working: Mapping[Op, tuple[float, float]]
    ) -> tuple[float, float]:
        """Shares of computing before the first communication: forward, and backward."""
        inside = {tensor for op in ops for tensor in op.outputs}
        into = [(op, [self._moving(x) for x in op.inputs if x in inside]) for op in ops]
        mine = {*ops}
        leaving = (x for op in ops for x in op.outputs if not mine.issuperset(self._readers([x])))
        out = [self._moving(x)[1] for x in leaving]
        first = next((op.index for op, moves in into if any(there for there, _ in moves)), inf)
        last = next((op.index for op, moves in reversed(into) if any(b for _, b in moves)), -1)
        forward, backward = (sum(secs[i] for secs in working.values()) or 1.0 for i in range(2))
        alone = sum(secs for op, (secs, _) in working.items() if op.index < first)
        alone_back = sum(secs for op, (_, secs) in working.items() if op.index >= last)
        return alone / forward, 0.0 if any(out) else alone_back / backward

    def _outputs(self, ops: OpGroup) -> Iterator[Output]:
        """The results that later blocks read, with the end of their first reader there."""
        graph, last = self.plan.graph, ops[-1].index
        for op in ops:
            src = shardings_of(op.form, self.splits[op]).outputs
            for number, of in enumerate(op.outputs):
                later = ((r, i) for r, i in graph.readers.get(of, ()) if r.index > last)
                for reader, i in islice(later, 1):
                    dst = shardings_of(reader.form, self.splits[reader]).inputs[i]
                    yield Output(of.shape, of.dtype, of.requires_grad, src[number], dst)

    def _moving(self, tensor: PTensor) -> tuple[float, float]:
        """Seconds of moving a result to its readers, and its gradient back."""
        if tensor not in self.moved_secs:
            readers = self._readers([tensor])
            secs = self.costs.moving_secs(tensor, self.splits) if readers else (0.0, 0.0, 0.0)
            # A bias that no product adds in its call is no communication.
            added = (
                self.costs.op_cost(op, self.splits[op]).forward_secs
                for op in readers
                if product_of(self.plan.graph, op) and not self._near.is_joined(op)
            )
            self.moved_secs[tensor] = secs[0] - sum(added), secs[1]
        return self.moved_secs[tensor]

    @cached_property
    def _near(self) -> Neighbours:
        return Neighbours(self.plan.graph, self.splits)

    def _readers(self, tensors: Iterable[PTensor]) -> list[Op]:
        readers = self.plan.graph.readers
        return [op for tensor in tensors for op, _ in readers.get(tensor, ())]

    def _parts(self, ops: OpGroup) -> list[_Placed]:
        """The parts on the device, in the order of their ops."""
        plan, found, piece = self.plan, list[_Placed](), 0
        for op in ops:
            piece += any(t in plan.graph.producer and self._moving(t)[0] > 0 for t in op.inputs)
            for placed in self.splits[op].parts:
                if placed.device == plan.devices[0]:
                    part = Part(op, placed.pieces, placed.replica)
                    number = plan.recompute_group(part)
                    split = OpSplit.of([(placed.pieces, placed.replica, placed.device)])
                    group = (number, piece) if number else _NONE
                    found.append(_Placed(op, part, split, plan.region_group(op), group))
        return found

    def _left_out(self, parts: Sequence[_Placed]) -> set[tuple[int, int]]:
        """The groups in regions that nothing else in their region reads."""
        groups: dict[tuple[Op, int], set[int]] = {}
        for each in parts:
            groups.setdefault((each.op, each.region), set()).add(each.group[0])
        found = {each.group for each in parts if each.region and each.group != _NONE}
        for each in parts:
            read = (groups.get((reader, each.region)) for reader in self._readers(each.op.outputs))
            if any(numbers is not None and each.group[0] not in numbers for numbers in read):
                found.discard(each.group)
        return found

    def _stays_inside(self, op: Op) -> bool:
        """Whether the results of an op in a region are read in the region."""
        region = self.plan.region_group(op)
        return region > 0 and any(
            self.plan.region_group(reader) == region for reader in self._readers(op.outputs)
        )

    # --- memory ---------------------------------------------------------------------------------

    def _memory(self, parts: Sequence[_Placed]) -> list[MemoryCost]:
        """The memory of the parts in order; parts that are recomputed together are one."""
        groups: dict[tuple[int, int], list[_Placed]] = {}
        for each in parts:
            groups.setdefault(each.group, []).append(each)
        costs: dict[_Placed, MemoryCost] = {}
        for group in groups.values():
            alone = [self.costs.memory_cost(each.op, each.split) for each in group]
            once = counted_once([each.op for each in group], alone)
            costs |= zip(group, once, strict=True)
        found: list[MemoryCost] = []
        kept: set[PTensor] = set()
        for mine in _by_region(parts):
            region, chain = mine[0].region, list[MemoryCost]()
            inner = kept if not region else set[PTensor]()
            for each in mine:
                if each.group == _NONE:
                    chain.append(costs[each])
                elif each is groups[each.group][0]:
                    again = [costs[other] for other in groups[each.group]]
                    chain.append(_again(again, groups[each.group], inner))
            found += [_again(chain, mine, kept)] if region else chain
        return found

    def _weights(self, ops: OpGroup) -> Iterator[WeightCosts]:
        """The parameters that the ops read on the device, each once."""
        graph, precision = self.plan.graph, self.costs.precision
        read = {op.inputs[i]: (op, i) for op in reversed(ops) for i in weights_of(op.form)}
        found: dict[tuple[str, int, bool], list[int]] = {}
        for of, (op, i) in read.items():
            views = shardings_of(op.form, self.splits[op]).inputs[i].views
            boxes = {view.box for view in views if view.device == self.plan.devices[0]}
            replicas = len({view.device for view in views if view.box in boxes})
            is_shared = any(reader not in ops for reader, _ in graph.readers[of])
            key = of.name if is_shared else "", replicas, of.requires_grad
            num = sum(box.num_elements for box in boxes)
            sums = found.setdefault(key, [0, 0])
            sums[0] += num * ITEM_BYTES[of.dtype]
            sums[1] += num * precision.item_bytes(of.dtype) * of.requires_grad
        for (name, replicas, _), (num_bytes, grad_bytes) in found.items():
            yield WeightCosts(num_bytes, grad_bytes, replicas, name)


_NONE = (0, 0)
"""The group of a part that is in no group."""


def _by_region(parts: Iterable[_Placed]) -> list[list[_Placed]]:
    """The parts of each region, in the order of their first parts; parts in none are alone.

    Ops without a gradient, as that expands a mask, stand in the middle of a region and in none.
    """
    found: list[list[_Placed]] = []
    regions: dict[int, list[_Placed]] = {}
    for each in parts:
        mine = regions.get(each.region, []) if each.region else []
        if not mine:
            found.append(mine)
            regions[each.region] = mine
        mine.append(each)
    return found


def _again(chain: Sequence[MemoryCost], parts: Sequence[_Placed], kept: set[PTensor]) -> MemoryCost:
    """The memory of parts that are recomputed together, and keep the inputs of all of them.

    Inputs in ``kept`` are kept already; those of these parts are added.
    """
    made = {tensor for each in parts for tensor in each.op.outputs}
    num_bytes = 0
    for each in parts:
        for of, (box, _) in zip(each.op.inputs, each.part.form.inputs, strict=True):
            if of.kind == ACTIVATION and of not in made and of not in kept:
                kept.add(of)
                num_bytes += box.num_elements * ITEM_BYTES[of.dtype]
    return replace(recomputed(chain), kept_bytes=num_bytes, input_bytes=num_bytes)
