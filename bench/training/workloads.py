"""Workloads: the models that are trained, and the facts about each that torch's methods need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody writes it
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from bench.machine.waiting import tokens_waited
from superscaler_core.models import gpt, moe
from superscaler_core.published.models import wide_resnet

Batch = tuple[Tensor, Tensor]
"""The inputs and the targets of samples."""


class Part(nn.Module):
    """A part of a model: some of its modules, and a function that computes with them.

    Args:
        function: computes the result, given this part and the inputs or hidden states.
        modules: the modules, by the attribute names that the function uses.
    """

    def __init__(self, function: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        self._function = function
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *values: Tensor) -> Any:
        """The result of the function."""
        return self._function(self, *values)


@dataclass(frozen=True)
class Workload:
    """A model and its data.

    Attributes:
        batch: samples per step.
        build: makes the model, whose ``forward(*batch)`` returns the loss, a scalar.
        inputs: makes random samples.
        blocks: path of the module list that holds the model's blocks.
        enter: the part of a model before its blocks: from inputs to hidden states.
        block: the part of a single block: from hidden states to hidden states.
        leave: the part after the blocks: from hidden states to the outputs that ``loss`` takes.
        loss: from outputs and targets to the loss, a mean over samples.
        cut: splits a block over a mesh for tensor parallelism; None if DTensor cannot split it.
        waits: whether its ops mostly wait, which needs no core.
    """

    batch: int
    build: Callable[[], nn.Module]
    inputs: Callable[[int, torch.Generator], Batch]
    blocks: str
    enter: Callable[[Any], nn.Module]
    leave: Callable[[Any], nn.Module]
    loss: Callable[..., Tensor]
    block: Callable[[Any, nn.Module], nn.Module] = lambda _, block: block
    cut: Callable[[Any, DeviceMesh], object] | None = None
    waits: bool = False

    @property
    def num_blocks(self) -> int:
        """The number of blocks of the model, which a pipeline can be cut between."""
        with torch.device("meta"):
            return len(self.blocks_of(self.build()))

    def blocks_of(self, model: nn.Module) -> nn.ModuleList:
        """The blocks of a model."""
        found = model.get_submodule(self.blocks)
        assert isinstance(found, nn.ModuleList)
        return found


class Stage(nn.Module):
    """A pipeline stage: some blocks of a model; the first and last stage also have the ends.

    Args:
        workload: the workload of the model.
        model: the model, whose modules are used without copying.
        index, num_stages: number of this stage, and of all; blocks are spread evenly.
    """

    def __init__(self, workload: Workload, model: nn.Module, index: int, num_stages: int) -> None:
        super().__init__()
        blocks = workload.blocks_of(model)
        first, last = (len(blocks) * i // num_stages for i in (index, index + 1))
        parts = [workload.block(model, block) for block in blocks[first:last]]
        parts = [workload.enter(model), *parts] if index == 0 else parts
        parts = [*parts, workload.leave(model)] if index == num_stages - 1 else parts
        self.parts = nn.ModuleList(parts)

    def forward(self, *values: Tensor) -> Any:
        """From inputs or hidden states to hidden states or the outputs that the loss takes."""
        for part in self.parts:
            made = part(*values)
            values = made if isinstance(made, tuple) else (made,)
        return values if len(values) > 1 else values[0]


# --- language models ------------------------------------------------------------------------------


def _enter(model: Any) -> nn.Module:
    def embedded(part: Any, tokens: Tensor) -> Tensor:
        made: Tensor = part.embed(tokens) + part.position(torch.arange(tokens.shape[1]))
        return made

    return Part(embedded, embed=model.embed, position=model.position)


def _leave(model: Any) -> nn.Module:
    return Part(lambda part, x: part.head(part.norm(x)), norm=model.norm, head=model.head)


def _cross_entropy(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, -2), targets.flatten())


def _cut_attention(block: Any, mesh: DeviceMesh) -> None:
    """Split an attention by heads, as Megatron does."""
    whole = (Replicate(),)
    plan = {
        # The input becomes a DTensor once for q, k and v, so the backward has 1 all-reduce, not 3.
        "attn": PrepareModuleInput(input_layouts=whole, desired_input_layouts=whole),
        **{f"attn.{name}": ColwiseParallel() for name in "qkv"},
        "attn.out": RowwiseParallel(),
    }
    parallelize_module(block, mesh, plan)
    block.attn.heads //= mesh.size()


def _cut_block(block: Any, mesh: DeviceMesh) -> None:
    """Split a block: the attention by heads, and the MLP or all experts by hidden features."""
    _cut_attention(block, mesh)
    if hasattr(block, "mlp"):
        both = {"mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()}
        parallelize_module(block, mesh, both)
    else:
        _cut_experts(block.moe.experts, mesh)


def _cut_experts(experts: nn.Module, mesh: DeviceMesh) -> None:
    def partition(_: str, module: Any, mesh: DeviceMesh) -> None:
        for name, dim in (("up", 2), ("down", 1)):
            cut = distribute_tensor(getattr(module, name).data, mesh, [Shard(dim)])
            module.register_parameter(name, nn.Parameter(cut))

    def given(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        return tuple(DTensor.from_local(x, mesh, [Replicate()]) for x in inputs)

    def made(_: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
        return output.redistribute(placements=[Replicate()]).to_local()

    distribute_module(experts, mesh, partition, given, made)


_GPT = gpt.GPTConfig(vocabulary=1000, sequence=64, layers=4, width=128, heads=8)

_MOE = moe.MoEConfig(vocabulary=1000, sequence=64, layers=4, width=128, heads=8, experts=8)


def _gpt(tiny: bool) -> Workload:
    config = gpt.GPTConfig.presets()["tiny"] if tiny else _GPT
    return Workload(
        batch=16,
        build=lambda: gpt.GPT(config),
        inputs=lambda batch, generator: gpt.example_inputs(config, batch, generator),
        blocks="layers",
        enter=_enter,
        leave=_leave,
        loss=_cross_entropy,
        cut=_cut_block,
    )


class WaitingMLP(gpt.MLP):
    """An MLP that also waits for each of its hidden values, as long as a device would compute."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = tokens_waited(F.gelu(self.up(x)), nanos=WAITING_NANOS)
        made: Tensor = self.down(hidden)
        return made


WAITING_NANOS = 250.0
"""The blocks of a whole step wait for 1.6 s in all, several times as long as they compute."""


def _waiting_gpt(tiny: bool) -> Workload:
    """The GPT, whose blocks mostly wait: for hosts that share the cores of this machine."""
    workload = _gpt(tiny)

    def build() -> nn.Module:
        model: Any = workload.build()
        for block in model.layers:
            width, inner = block.mlp.up.in_features, block.mlp.up.out_features
            waiting = WaitingMLP(width, inner)
            waiting.load_state_dict(block.mlp.state_dict())
            block.mlp = waiting
        return model

    return replace(workload, build=build, waits=True)


def _moe(tiny: bool) -> Workload:
    """A mixture of experts; stages exchange hidden states and the sum of the balancing losses."""
    config = moe.MoEConfig.presets()["tiny"] if tiny else _MOE

    def enter(model: Any) -> nn.Module:
        return Part(lambda part, ids: (part.inner(ids), torch.zeros(())), inner=_enter(model))

    def block(_: Any, block: nn.Module) -> nn.Module:
        def balanced(part: Any, x: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
            y, balance = part.block(x)
            return y, total if balance is None else total + balance

        return Part(balanced, block=block)

    def leave(model: Any) -> nn.Module:
        return Part(lambda part, x, total: (part.inner(x), total), inner=_leave(model))

    def loss(made: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
        return _cross_entropy(made[0], targets) + config.balance * made[1]

    return Workload(
        batch=16,
        build=lambda: moe.MoETransformer(config),
        inputs=lambda batch, generator: moe.example_inputs(config, batch, generator),
        blocks="layers",
        enter=enter,
        block=block,
        leave=leave,
        loss=loss,
        cut=_cut_block,
    )


def _llama(tiny: bool) -> Workload:
    """HuggingFace's Llama; its loss is that of predicting the next token."""
    from transformers import LlamaConfig, LlamaForCausalLM

    vocabulary, sequence, layers, width = (40, 8, 2, 16) if tiny else (1000, 64, 4, 128)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=4 if tiny else 8,
        num_key_value_heads=4 if tiny else 8,
        max_position_embeddings=sequence,
        use_cache=False,
    )

    def build() -> nn.Module:
        model = LlamaForCausalLM(config)
        return Part(lambda part, ids, labels: part.llama(input_ids=ids, labels=labels).loss,
                    llama=model)  # fmt: skip

    def inputs(batch: int, generator: torch.Generator) -> Batch:
        ids = torch.randint(vocabulary, (batch, sequence), generator=generator)
        return ids, ids

    def block(model: Any, block: nn.Module) -> nn.Module:
        def turned(part: Any, x: Tensor) -> Tensor:
            places = torch.arange(x.shape[1])[None]
            made: Tensor = part.block(x, position_embeddings=part.rotary(x, places))
            return made

        return Part(turned, block=block, rotary=model.llama.model.rotary_emb)

    def leave(model: Any) -> nn.Module:
        norm, head = model.llama.model.norm, model.llama.lm_head
        return Part(lambda part, x: part.head(part.norm(x)), norm=norm, head=head)

    def cut(block: Any, mesh: DeviceMesh) -> None:
        columns = [*(f"self_attn.{name}_proj" for name in "qkv"), "mlp.gate_proj", "mlp.up_proj"]
        rows = ["self_attn.o_proj", "mlp.down_proj"]
        plan = {name: ColwiseParallel() for name in columns}
        parallelize_module(block, mesh, {**plan, **{name: RowwiseParallel() for name in rows}})

    return Workload(
        batch=16,
        build=build,
        inputs=inputs,
        blocks="llama.model.layers",
        enter=lambda model: Part(
            lambda part, ids: part.embed(ids), embed=model.llama.model.embed_tokens
        ),
        block=block,
        leave=leave,
        loss=lambda scores, ids: _cross_entropy(scores[:, :-1], ids[:, 1:]),
        cut=cut,
    )


# --- images ---------------------------------------------------------------------------------------

_RESNET = wide_resnet.WideResNetConfig(
    blocks=(1, 1, 1, 1), base=16, width_factor=2, classes=100, image=32
)


def _wide_resnet(tiny: bool) -> Workload:
    """A Wide-ResNet with group norms instead of batch norms.

    Under DDP, a batch norm uses only the rows of its rank, so losses would differ.
    """
    config = wide_resnet.WideResNetConfig.presets()["tiny"] if tiny else _RESNET

    def build() -> nn.Module:
        model = wide_resnet.WideResNet(config)
        for path, module in list(model.named_modules()):
            if isinstance(module, nn.BatchNorm2d):
                model.set_submodule(path, nn.GroupNorm(4, module.num_features))
        return model

    def enter(model: Any) -> nn.Module:
        def stem(part: Any, x: Tensor) -> Tensor:
            return F.max_pool2d(F.relu(part.norm(part.stem(x))), 3, 2, padding=1)

        return Part(stem, stem=model.stem, norm=model.norm)

    def leave(model: Any) -> nn.Module:
        def scores(part: Any, x: Tensor) -> Tensor:
            made: Tensor = part.head(F.adaptive_avg_pool2d(x, 1).flatten(1))
            return made

        return Part(scores, head=model.head)

    return Workload(
        batch=32,
        build=build,
        inputs=lambda batch, generator: wide_resnet.example_inputs(config, batch, generator),
        blocks="layers",
        enter=enter,
        leave=leave,
        loss=_cross_entropy,
    )


WORKLOADS: Mapping[str, Callable[[bool], Workload]] = {
    "gpt": _gpt,
    "moe": _moe,
    "wide_resnet": _wide_resnet,
    "llama": _llama,
    "waiting_gpt": _waiting_gpt,
}
"""Functions that make the workloads, by name; their argument says whether the model is tiny."""
