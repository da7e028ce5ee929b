"""Stage cost: the time and memory of a pipeline stage under a setting, from those of its blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import rvdcomm as rv
from superscaler_core.cost import CostModel
from superscaler_core.graph.tensor import ACTIVATION, ITEM_BYTES, PTensor
from superscaler_core.known import remembers
from superscaler_core.materialize.sharding import Sharding
from superscaler_core.memory import STATES
from superscaler_core.plan import Device, Keep
from superscaler_core.planners.auto.model_cost import BlockCost, WeightCosts, as_one
from superscaler_core.planners.auto.setting import Setting


@dataclass(frozen=True, slots=True)
class StageForm:
    """One stage on one device.

    Attributes:
        forward_secs, backward_secs: seconds per microbatch, without recomputation.
        again_secs: seconds of recomputation per microbatch.
        weights_secs: seconds of a backward that compute gradients of weights, if they are apart.
        step_secs: seconds once per step: weights, their gradients, and the update.
        stored_bytes: bytes that do not depend on the microbatches in flight.
        kept_bytes: bytes kept from forward to backward per microbatch.
        working_bytes: most further bytes while the device computes.
    """

    forward_secs: float
    backward_secs: float
    again_secs: float
    weights_secs: float
    step_secs: float
    stored_bytes: float
    kept_bytes: float
    working_bytes: float

    @property
    def secs(self) -> float:
        """Seconds per microbatch."""
        return self.forward_secs + self.backward_secs + self.again_secs


@dataclass(frozen=True, eq=False)
class GatherTimes:
    """The times of gathering pieces of weights in one request, from its cost functions."""

    costs: CostModel

    @remembers()
    def line(self, num: int, home: tuple[Device, ...]) -> tuple[float, float]:
        """Latency and seconds per byte of an all-gather among ``num`` devices, in all groups."""
        groups = len(home) // num
        places = [(i, row, home[i * groups + row]) for i in range(num) for row in range(groups)]

        def secs(size: int) -> float:
            """Seconds if each device has a piece of so many elements."""
            pieces = [
                (device, rv.Box((row, i * size), (row + 1, (i + 1) * size)), ())
                for i, row, device in places
            ]
            whole = [
                (device, rv.Box((row, 0), (row + 1, num * size)), ()) for _, row, device in places
            ]
            tensor = PTensor("weights", (groups, num * size), "float32", ACTIVATION, True)
            moved = self.costs.move_cost(tensor, Sharding.of(pieces), Sharding.of(whole))
            return moved.forward_secs

        small, large = PIECES
        per_element = (secs(large) - secs(small)) / (large - small)
        per_byte = per_element / (num * ITEM_BYTES["float32"])
        return secs(small) - per_element * small, per_byte


@dataclass(frozen=True, eq=False)
class Stages:
    """The stages of a setting.

    Attributes:
        gathers: the cost functions of the request, and times of gathering weights.
        setting: the decisions.
        replicas: replicas of a stage for each that its blocks were priced with.
        home: the devices that have a stage's weights.
    """

    gathers: GatherTimes
    setting: Setting
    replicas: int
    home: tuple[Device, ...]

    def of(self, blocks: Sequence[BlockCost], held: Sequence[BlockCost]) -> StageForm:
        """The stage of some blocks.

        Args:
            blocks: their costs.
            held: their costs for the memory from forward to backward.
        """
        own = {block: [w.among(self.replicas) for w in block.weights] for block in {*blocks}}
        weights = [weight for block in blocks for weight in own[block]]
        secs = {block: self._secs(block, mine) for block, mine in own.items()}
        forward, backward, again = map(sum, zip(*(secs[block] for block in blocks), strict=True))
        memory = as_one([block.memory for block in held])
        kept, peak = memory.kept_bytes, max(memory.forward_bytes, memory.backward_bytes)
        working = peak - kept
        if self.setting.keep is Keep.STAGE_INPUT:
            again, kept, working = forward, blocks[0].memory.input_bytes, peak
        segment_secs = self.gathers.costs.profile.segment_secs
        return StageForm(
            forward + segment_secs,
            backward + segment_secs,
            again,
            sum(block.backward_secs for block in blocks) / 2,
            self._step_secs(weights, backward),
            self._stored_bytes(weights, [own[block] for block in blocks]),
            kept,
            working,
        )

    # --- time -----------------------------------------------------------------------------------

    def _secs(self, block: BlockCost, weights: Sequence[WeightCosts]) -> tuple[float, float, float]:
        """Seconds of a block's forward, backward and recomputation, with its communication."""
        forward, backward, again = block.forward_secs, block.backward_secs, block.again_secs
        sent, received = block.sent_secs, block.received_secs
        if self.setting.moves:
            # A gradient travels while the other half of the backward computes those of weights.
            received = max(0.0, received - backward / 2)
        if self.setting.zero == 3:
            forth, back = self._sharded_secs(block, weights)
            sent, received = sent + forth, received + back
        if self.setting.duplex:
            return max(forward, sent), max(backward, received), again
        return forward + sent, backward + received, again

    def _sharded_secs(
        self, block: BlockCost, weights: Sequence[WeightCosts]
    ) -> tuple[float, float]:
        """Seconds of a block's forward and backward that wait for weights and their gradients.

        What is on its way is hidden by the computing before the block's own communication, which
        waits for it.
        """
        setting = self.setting
        fetch, reduce = self._moving_secs(weights)
        copied = self._copied_secs(weights) if setting.offload else 0.0
        fetch, reduce = fetch + copied, reduce + copied
        ahead, behind = fetch * (setting.prefetch > 0), reduce * setting.reductions
        first, last = block.alone_shares
        forth = fetch - ahead + max(0.0, ahead - first * block.forward_secs)
        computing = last * (block.backward_secs + block.again_secs)
        if setting.keep in (Keep.BLOCK_INPUTS, Keep.STAGE_INPUT):
            # The block's forward is recomputed first, with its communication.
            computing = first * block.again_secs
        back = fetch - ahead + reduce - behind + max(0.0, ahead + behind - computing)
        return forth, back

    def _step_secs(self, weights: Sequence[WeightCosts], backward_secs: float) -> float:
        """Seconds once per step: the update, and moving what is not moved in every microbatch."""
        setting, costs = self.setting, self.gathers.costs
        stored = round(sum(w.grad_bytes / (w.replicas if setting.zero else 1) for w in weights))
        here, hosted = (0, stored) if setting.offload else (stored, 0)
        secs = costs.times.update_secs(STATES[costs.optimizer], here, hosted)
        if setting.zero == 3:
            return secs
        fetch, scatter = self._moving_secs(weights)
        # An all-reduce takes as long as a reduce-scatter and an all-gather.
        reduce = scatter if setting.zero else 2 * scatter
        secs += fetch if setting.zero else 0.0
        secs += max(0.0, reduce - backward_secs * setting.reductions)
        if setting.offload:
            secs += 2 * sum(w.num_bytes for w in weights) / costs.profile.host_bytes_per_sec
        return secs

    def _moving_secs(self, weights: Iterable[WeightCosts]) -> tuple[float, float]:
        """Seconds to gather weights from the devices that store pieces, and to sum gradients."""
        fetch = reduce = 0.0
        totals: dict[int, tuple[int, int]] = {}
        for weight in weights:
            if weight.grad_bytes and weight.replicas > 1:
                read, grads = totals.get(weight.replicas, (0, 0))
                totals[weight.replicas] = read + weight.num_bytes, grads + weight.grad_bytes
        for num, (read, grads) in totals.items():
            latency, per_byte = self.gathers.line(num, self.home)
            fetch += latency + per_byte * read
            reduce += latency + per_byte * grads
        return fetch, reduce

    def _copied_secs(self, weights: Iterable[WeightCosts]) -> float:
        """Seconds to copy the device's pieces of weights from its host, or gradients back."""
        profile = self.gathers.costs.profile
        trip = 1 / profile.host_bytes_per_sec + 1 / profile.host_memory_bytes_per_sec
        return sum(trip * w.num_bytes / w.replicas for w in weights if w.grad_bytes)

    # --- memory ---------------------------------------------------------------------------------

    def _stored_bytes(
        self, weights: Sequence[WeightCosts], blocks: Sequence[Sequence[WeightCosts]]
    ) -> float:
        """Bytes of weights, gradients and optimizer states, and of weights that are fetched."""
        setting, states = self.setting, STATES[self.gathers.costs.optimizer]
        if setting.zero < 3:
            return sum(_bytes(weight, setting, states) for weight in weights)
        pieces = 0.0 if setting.offload else sum(w.grad_bytes / w.replicas for w in weights)
        total = (2 + states) * pieces + sum(w.num_bytes for w in weights if not w.grad_bytes)
        read = [sum(w.num_bytes for w in mine if w.grad_bytes) for mine in blocks]
        ahead = 1 + max(1, setting.prefetch)
        fetched = max(sum(read[i : i + ahead]) for i in range(len(read)))
        return total + fetched + max(sum(w.grad_bytes for w in mine) for mine in blocks)


PIECES = 1 << 18, 1 << 22
"""Elements of a device's piece in the two prices of an all-gather: 1 MiB and 16 MiB, the size of
a bucket (``Overlap.bucket_bytes``). Its time is linear in between."""


def _bytes(weight: WeightCosts, setting: Setting, states: int) -> float:
    """Bytes of weights that are not gathered, with their gradients and optimizer states."""
    cut = weight.replicas if setting.zero else 1
    is_apart = setting.zero > 0 or setting.offload or weight.num_bytes != weight.grad_bytes
    total = weight.grad_bytes + (weight.num_bytes if is_apart else 0)
    return total + (0.0 if setting.offload else (1 + states) * weight.grad_bytes / cut)
