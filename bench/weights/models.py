"""State dicts of models: names and shapes of weights, with layouts of training and serving."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import rvdcomm as rv


@dataclass(frozen=True)
class Model:
    """Sizes of a Llama-like model, in elements."""

    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    vocab: int

    def scaled(self, divisor: int) -> Model:
        """The model with its widths divided by ``divisor``; all other sizes stay."""
        return Model(
            self.num_layers,
            self.hidden // divisor,
            self.intermediate // divisor,
            self.num_heads,
            self.num_kv_heads,
            self.vocab,
        )

    def weights(self) -> Iterator[tuple[str, tuple[int, ...], int, int | None]]:
        """(name, shape, layer, dim that tensor parallelism splits) of every weight.

        Layer -1 is the embedding; layer ``num_layers`` is everything after the last layer.
        """
        kv = self.hidden * self.num_kv_heads // self.num_heads
        yield "model.embed_tokens.weight", (self.vocab, self.hidden), -1, 0
        for i in range(self.num_layers):
            prefix = f"model.layers.{i}"
            for name, shape, dim in (
                ("self_attn.q_proj.weight", (self.hidden, self.hidden), 0),
                ("self_attn.k_proj.weight", (kv, self.hidden), 0),
                ("self_attn.v_proj.weight", (kv, self.hidden), 0),
                ("self_attn.o_proj.weight", (self.hidden, self.hidden), 1),
                ("mlp.gate_proj.weight", (self.intermediate, self.hidden), 0),
                ("mlp.up_proj.weight", (self.intermediate, self.hidden), 0),
                ("mlp.down_proj.weight", (self.hidden, self.intermediate), 1),
                ("input_layernorm.weight", (self.hidden,), None),
                ("post_attention_layernorm.weight", (self.hidden,), None),
            ):
                yield f"{prefix}.{name}", shape, i, dim
        yield "model.norm.weight", (self.hidden,), self.num_layers, None
        yield "lm_head.weight", (self.vocab, self.hidden), self.num_layers, 0


@dataclass(frozen=True)
class MoeModel:
    """Sizes of a mixture-of-experts model with latent attention, in elements."""

    num_layers: int
    hidden: int
    intermediate: int
    num_experts: int
    num_heads: int
    q_rank: int
    kv_rank: int

    def dense(self) -> Iterator[tuple[str, tuple[int, ...], int]]:
        """(name, shape, dim that tensor parallelism splits) of the dense weights of a layer."""
        heads = self.num_heads
        yield "q_a_proj", (self.q_rank, self.hidden), 0
        yield "q_b_proj", (heads * 192, self.q_rank), 0
        yield "kv_a_proj", (self.kv_rank + 64, self.hidden), 0
        yield "kv_b_proj", (heads * 256, self.kv_rank), 0
        yield "o_proj", (self.hidden, heads * 128), 1
        yield "router", (self.num_experts, self.hidden), 0

    def experts(self) -> Iterator[tuple[str, tuple[int, ...], int]]:
        """(name, shape, number of the expert) of the expert weights of a layer."""
        for e in range(self.num_experts):
            yield f"experts.{e}.gate_proj", (self.intermediate, self.hidden), e
            yield f"experts.{e}.up_proj", (self.intermediate, self.hidden), e
            yield f"experts.{e}.down_proj", (self.hidden, self.intermediate), e

    def trainer(self, ranks: Sequence[int], num_stages: int) -> dict[str, rv.Layout]:
        """Layouts of the trainer: layers are in stages.

        The ranks of a stage hold a shard of each dense weight, and distribute the experts.
        """
        size = len(ranks) // num_stages
        found = {}
        for i in range(self.num_layers):
            first = i * num_stages // self.num_layers * size
            stage = ranks[first : first + size]
            for name, shape, _ in self.dense():
                found[f"layers.{i}.{name}"] = rv.Layout(shape, f"R(1)V(1)D({size},1)", stage)
            for name, shape, e in self.experts():
                found[f"layers.{i}.{name}"] = self._whole(shape, e, stage)
        return found

    def server(self, ranks: Sequence[int], tp: int) -> dict[str, rv.Layout]:
        """Layouts of the server: ``tp`` ranks hold a replica of the dense weights.

        The experts are distributed over all ranks.
        """
        found = {}
        for i in range(self.num_layers):
            for name, shape, dim in self.dense():
                cut = f"{tp},1" if dim == 0 else f"1,{tp}"
                text = f"R({len(ranks) // tp})V(1)D({cut})"
                found[f"layers.{i}.{name}"] = rv.Layout(shape, text, ranks)
            for name, shape, e in self.experts():
                found[f"layers.{i}.{name}"] = self._whole(shape, e, ranks)
        return found

    def _whole(self, shape: tuple[int, ...], expert: int, ranks: Sequence[int]) -> rv.Layout:
        home = ranks[expert * len(ranks) // self.num_experts]
        return rv.Layout(shape, "R(1)V(1)D(1,1)", (home,))


MODELS = {
    "7b": Model(32, 4096, 11008, 32, 32, 32000),
    "70b": Model(80, 8192, 28672, 64, 8, 32000),
}

MOE_MODELS = {
    "moe-1t": MoeModel(61, 7168, 2048, 384, 64, 1536, 512),
    "moe-small": MoeModel(4, 1024, 768, 12, 4, 128, 64),
}
"""A model of 1 T parameters, and a small one of the same structure for an emulated cluster."""


def layouts(
    model: Model, ranks: Sequence[int], tp: int, pp: int = 1, dp: int = 1
) -> Mapping[str, rv.Layout]:
    """The layouts of a model on ``ranks``, stage by stage; in a stage, replicas are outermost."""
    assert len(ranks) == tp * pp * dp
    size = tp * dp
    stages = [tuple(ranks[i * size : (i + 1) * size]) for i in range(pp)]
    found = {}
    for name, shape, layer, dim in model.weights():
        stage = stages[min(max(layer, 0) * pp // model.num_layers, pp - 1)]
        counts = [tp if d == dim else 1 for d in range(len(shape))]
        r = dp if dim is not None else dp * tp
        text = f"R({r})V(1)D({','.join(map(str, counts))})"
        found[name] = rv.Layout(shape, text, ranks=stage)
    return found


def sides(
    name: str, divisor: int, trainers: Sequence[int], readers: Sequence[int], stages: int, tp: int
) -> tuple[Mapping[str, rv.Layout], Mapping[str, rv.Layout]]:
    """The layouts of a model on trainers and on readers; ``divisor`` makes Llamas narrower."""
    if name in MOE_MODELS:
        moe = MOE_MODELS[name]
        return moe.trainer(trainers, stages), moe.server(readers, tp)
    model = MODELS[name].scaled(divisor)
    trained = layouts(model, trainers, len(trainers) // stages, stages)
    return trained, layouts(model, readers, tp, dp=len(readers) // tp)
