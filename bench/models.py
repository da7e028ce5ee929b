"""Llama-shaped state dicts: names, shapes and Megatron-style layouts of their weights."""

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
        """The same model, narrower by ``divisor`` in everything but layers and vocabulary."""
        return Model(
            self.num_layers,
            self.hidden // divisor,
            self.intermediate // divisor,
            self.num_heads,
            self.num_kv_heads,
            self.vocab,
        )

    def weights(self) -> Iterator[tuple[str, tuple[int, ...], int, int | None]]:
        """(name, shape, layer, the dim that tensor parallelism cuts) of every weight.

        Layer -1 is the embedding, ``num_layers`` what follows the last layer.
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


MODELS = {
    "7b": Model(32, 4096, 11008, 32, 32, 32000),
    "70b": Model(80, 8192, 28672, 64, 8, 32000),
}


def layouts(
    model: Model, ranks: Sequence[int], tp: int, pp: int = 1, dp: int = 1
) -> Mapping[str, rv.Layout]:
    """How ``ranks``, stage by stage, hold a model: replicas outermost, then tensor cuts."""
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
