"""Nodes: the groups of a model, their choices, and the costs of each choice by itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter

import numpy as np

from superscaler_core.cost import CostModel, StageCost, peak_bytes, product_of, recomputed, together
from superscaler_core.errors import PlanError
from superscaler_core.graph.blocks import Blocks
from superscaler_core.graph.graph import Op
from superscaler_core.graph.tensor import ACTIVATION, ITEM_BYTES, PTensor
from superscaler_core.materialize.sharding import shardings_of
from superscaler_core.plan import Device, Keep
from superscaler_core.space.choices import Choice, MeshSizes, choices_of
from superscaler_core.space.groups import OpGroup, groups_of, likeness
from superscaler_core.space.space import SpaceNode


@dataclass(frozen=True, eq=False)
class Nodes:
    """The groups of a model with their costs; the attributes are arguments of ``price_space``."""

    costs: CostModel
    blocks: Blocks
    ops: tuple[Op, ...]
    devices: tuple[Device, ...]
    mesh: MeshSizes
    microbatches: int
    same_blocks: bool
    keep: Keep
    recompute_regions: bool
    pieces: bool

    # --- groups ---------------------------------------------------------------------------------

    @cached_property
    def groups(self) -> tuple[tuple[OpGroup, ...], ...]:
        """The groups of every node: one group, or one from each of several equal blocks."""
        inside = set(self.ops)
        nodes: dict[object, list[OpGroup]] = {}
        for number, ops in enumerate(self.blocks.groups):
            groups = groups_of(self.costs.graph, [op for op in ops if op in inside])
            # Blocks are equal if they have equal ops in equal groups.
            run = tuple(tuple((op.index - ops[0].index, op.form) for op in g) for g in groups)
            for place, group in enumerate(groups):
                key = (run if self.same_blocks else number), place
                nodes.setdefault(key, []).append(group)
        return tuple(map(tuple, nodes.values()))

    @cached_property
    def places(self) -> Mapping[Op, tuple[int, int, int]]:
        """For every op: its node, the number of its group there, and its place in the group."""
        return {
            op: (node, number, place)
            for node, groups in enumerate(self.groups)
            for number, group in enumerate(groups)
            for place, op in enumerate(group)
        }

    # --- nodes ----------------------------------------------------------------------------------

    @cached_property
    def _priced(self) -> tuple[tuple[tuple[Choice, ...], tuple[StageCost, ...]], ...]:
        """The possible choices of every node, with their costs; equal groups are priced once."""
        found: dict[object, tuple[tuple[Choice, ...], tuple[StageCost, ...]]] = {}
        priced = []
        for group, *_ in self.groups:
            key = likeness(self.blocks.dims, group)
            if key not in found:
                pairs = []
                for choice in self._choices(group):
                    with suppress(PlanError):
                        pairs.append((choice, self._cost(group, choice)))
                found[key] = tuple(c for c, _ in pairs), tuple(c for _, c in pairs)
            priced.append(found[key])
        return tuple(priced)

    def _choices(self, group: OpGroup) -> Iterator[Choice]:
        graph = self.costs.graph
        for choice in choices_of(self.blocks.dims, group, self.devices, self.mesh):
            yield from choice.options(
                graph, group, recompute_regions=self.recompute_regions, pieces=self.pieces
            )

    def _cost(self, group: OpGroup, choice: Choice) -> StageCost:
        """The cost of a group by itself, without moves to other groups.

        Raises:
            PlanError: the group cannot be cut as the choice says.
        """
        storage = choice.storage(self.costs.graph, group)
        splits = choice.split_of(group)
        stage = self.costs.stage_cost(group, self.devices, splits, storage=storage)
        if not choice.is_recompute:
            return stage
        again = stage.forward_secs - self.costs.profile.segment_secs
        kept = self._read_bytes(group, choice)
        memory = replace(recomputed(stage.memory), kept_bytes=kept)
        return replace(stage, backward_secs=stage.backward_secs + again, memory=(memory,))

    def _read_bytes(self, group: OpGroup, choice: Choice) -> int:
        """Bytes that a recomputed group keeps on a device: the activations of others that it reads.

        If the whole block is recomputed, only activations of other blocks count, and one that
        several groups of the block read counts for the first of them.
        """
        graph, found = self.costs.graph, dict[PTensor, int]()
        block = self.block_of(group[0])
        for op, split in choice.split_of(group).items():
            for tensor, sharding in zip(
                op.inputs, shardings_of(op.form, split).inputs, strict=True
            ):
                if tensor.kind != ACTIVATION or graph.producer[tensor] in group:
                    continue
                inside = [r for r, _ in graph.readers[tensor] if self.block_of(r) == block]
                first = min(inside, key=attrgetter("index"))
                is_own = block is not None and self.block_of(graph.producer[tensor]) == block
                if block is None or not (is_own or first not in group):
                    size = max(sharding.num_elements.values()) * ITEM_BYTES[tensor.dtype]
                    found[tensor] = max(size, found.get(tensor, 0))
        return sum(found.values())

    def block_of(self, op: Op) -> int | None:
        """The number of the block with which an op is recomputed; None if it is not recomputed."""
        return self._blocks_of.get(op)

    @cached_property
    def _blocks_of(self) -> Mapping[Op, int]:
        layers = self.blocks.layers if self.keep is Keep.BLOCK_INPUTS else ()
        return {op: number for number, ops in enumerate(layers) for op in ops}

    @property
    def choices(self) -> tuple[tuple[Choice, ...], ...]:
        """The choices of every node."""
        return tuple(choices for choices, _ in self._priced)

    @cached_property
    def priced(self) -> tuple[SpaceNode, ...]:
        """The nodes of the space, with the costs of their choices."""
        found = []
        for number, (groups, (choices, stages)) in enumerate(
            zip(self.groups, self._priced, strict=True)
        ):
            # Every stage cost includes one segment; a step has one, which the first group keeps.
            # Segments that begin after communication are counted with the communication.
            extra = self.costs.profile.segment_secs * (1 if number else 1 - 1 / len(groups))
            biases = [self._bias_secs(groups[0], choice) for choice in choices]
            forward = [s.forward_secs - extra - x for s, x in zip(stages, biases, strict=True)]
            rest, kept, work = np.array([_bytes(stage) for stage in stages], dtype=float).T
            again = np.zeros(len(choices))
            if self.block_of(groups[0][0]) is not None:
                # One block at a time holds everything for its backward; all keep what they read.
                again, rest = np.array(forward), rest + kept / len(groups)
                kept = [self._read_bytes(groups[0], choice) for choice in choices]
            found.append(
                SpaceNode.of(
                    groups[0][0].name,
                    [choice.name for choice in choices],
                    forward_secs=forward,
                    backward_secs=again + [stage.backward_secs - extra for stage in stages],
                    sync_secs=[self._sync_secs(stage) for stage in stages],
                    resting_bytes=rest,
                    kept_bytes=kept,
                    work_bytes=work,
                    count=len(groups),
                )
            )
        return tuple(found)

    def _bias_secs(self, group: OpGroup, choice: Choice) -> float:
        """Forward seconds of ops whose bias another group's product may add; edges count them."""
        pairs = zip(group, choice.splits, strict=True)
        products = ((op, split, product_of(self.costs.graph, op)) for op, split in pairs)
        return sum(
            self.costs.op_cost(op, split).forward_secs
            for op, split, made in products
            if made in self.places and made not in group
        )

    def _sync_secs(self, stage: StageCost) -> float:
        """Seconds once per step, without the latency of calls, which all weights share."""
        calls = sum(
            together(replace(call, latency_secs=0.0) for call in each)
            for each in (stage.fetch, stage.reduce)
        )
        return calls + stage.update_secs + (self.microbatches - 1) * stage.accumulate_secs


def _bytes(stage: StageCost) -> tuple[int, int, int]:
    """Bytes that a group holds: at rest, per microbatch in flight, and more while it runs."""
    memory = stage.memory
    grads, kept = (
        sum(getattr(each, name) for each in memory) for name in ("grads_bytes", "kept_bytes")
    )
    rest = sum(each.resting_bytes for each in memory)
    return rest + grads, kept, max(0, peak_bytes(memory, microbatches=2) - grads - kept)
