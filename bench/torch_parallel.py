"""The baseline of training: a GPT by ``torch.distributed.pipelining`` and DTensor's TP alone."""

from __future__ import annotations

from copy import deepcopy

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody writes it
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from superscaler_core.models.gpt import GPT, Block


class TorchParallel:
    """This rank's share of a GPT on a mesh of ``pp`` stages times ``tp`` ranks, ``tp`` innermost.

    Collective over the world, whose size is ``pp * tp``. With one stage microbatches are run one
    after another, since pipelining wants two.

    Args:
        model: on every rank the same; copied.
        tp, pp: ranks that share a stage, and stages.
        num_microbatches: of a step.
    """

    def __init__(self, model: GPT, *, tp: int, pp: int, num_microbatches: int) -> None:
        mesh = init_device_mesh("cpu", (pp, tp), mesh_dim_names=("pp", "tp"))
        index = mesh.get_local_rank("pp")
        self._is_first, self._is_last = index == 0, index == pp - 1
        self._num_microbatches = num_microbatches
        self.module = StageOfGPT(deepcopy(model), index, pp)
        if tp > 1:
            for block in self.module.layers:
                assert isinstance(block, Block)
                parallelize(block, mesh["tp"])
        self._schedule: Schedule1F1B | None = None
        if pp > 1:
            group = mesh.get_group("pp")
            stage = PipelineStage(self.module, index, pp, torch.device("cpu"), group=group)
            self._schedule = Schedule1F1B(stage, num_microbatches, loss_fn=mean_loss)

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor | None:
        """Forward and backward of a global batch; the mean loss, on ranks of the last stage."""
        if self._schedule is None:
            return self._accumulate(tokens, targets)
        losses: list[Tensor] = []
        inputs = (tokens,) if self._is_first else ()
        target = targets if self._is_last else None
        self._schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
        return torch.stack(losses).mean().detach() if losses else None

    def _accumulate(self, tokens: Tensor, targets: Tensor) -> Tensor:
        total = torch.zeros(())
        count = self._num_microbatches
        for some, wanted in zip(tokens.chunk(count), targets.chunk(count), strict=True):
            loss = mean_loss(self.module(some), wanted) / count
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total


class StageOfGPT(nn.Module):
    """Blocks of a GPT, the embedding before the first, norm and head after the last."""

    def __init__(self, model: GPT, index: int, num_stages: int) -> None:
        super().__init__()
        is_first, is_last = index == 0, index == num_stages - 1
        self.embed = model.embed if is_first else None
        self.position = model.position if is_first else None
        ends = [len(model.layers) * i // num_stages for i in (index, index + 1)]
        self.layers = model.layers[ends[0] : ends[1]]
        self.norm = model.norm if is_last else None
        self.head = model.head if is_last else None

    def forward(self, x: Tensor) -> Tensor:
        """From tokens or the hidden state to the hidden state or scores."""
        if self.embed is not None and self.position is not None:
            x = self.embed(x) + self.position(torch.arange(x.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def parallelize(block: Block, mesh: DeviceMesh) -> None:
    """Cut heads and MLP features along a mesh of one dim, as Megatron does."""
    whole = (Replicate(),)
    plan = {
        # The input becomes a DTensor once for q, k and v: one all-reduce backward and not three.
        "attn": PrepareModuleInput(input_layouts=whole, desired_input_layouts=whole),
        **{f"attn.{name}": ColwiseParallel() for name in "qkv"},
        "attn.out": RowwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(),
    }
    parallelize_module(block, mesh, plan)
    block.attn.heads //= mesh.size()


def mean_loss(scores: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of a microbatch."""
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())
