"""Blocks: parts of a model are detected from its ops, not from the names of its modules."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import chain

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody writes it
from torch import Tensor, nn

import superscaler_core as ss
from superscaler_core.graph.repeats import is_map
from superscaler_core.models import MODELS, build, config_of, example_inputs
from superscaler_core.plans import PLANS
from tests.superscaler_core.plans.renamed import renamed

SIZES = {
    "gpt": {"layers": 3},
    "moe": {"layers": 4},
    "moe_encoder": {"layers": 4},
    "mbart": {"layers": 3},
    "mlp": {"layers": 5},
    "swin": {"depths": (2, 2)},
    "wide_resnet": {"blocks": (2, 3)},
    "evoformer": {"layers": 3},
}


@cache
def graph_of(name: str, **sizes: object) -> ss.Graph:
    config = config_of(name, "tiny", **{**SIZES[name], **sizes})
    generator = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        model = MODELS[name].build(config)
    inputs = [t.to("meta") for t in MODELS[name].example_inputs(config, 4, generator)]
    return ss.capture(model, inputs, recycled=MODELS[name].recycled)


def captured(model: nn.Module, *inputs: Tensor) -> ss.Graph:
    return ss.capture(model, inputs)


def flat(graph: ss.Graph) -> ss.Graph:
    """The same ops, without module paths."""
    return replace(graph, ops=tuple(replace(op, module="") for op in graph.ops))


# --- models of the package ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "count"),
    [("gpt", 3), ("moe", 4), ("moe_encoder", 4), ("mbart", 6), ("mlp", 5), ("swin", 4),
     ("wide_resnet", 5), ("evoformer", 3)],
)  # fmt: skip
def test_blocks_are_the_layers_of_a_model(name: str, count: int) -> None:
    graph = graph_of(name)
    assert len(ss.find_blocks(graph).all) == count
    assert ss.find_blocks(graph).all == ss.find_blocks(graph, ss.Modules("layers.*")).all


@pytest.mark.parametrize("name", MODELS)
def test_groups_contain_all_ops_in_order(name: str) -> None:
    graph = graph_of(name)
    assert tuple(chain.from_iterable(ss.find_blocks(graph).groups)) == graph.ops


def test_single_layer_in_a_list_is_detected_as_a_block() -> None:
    (block,) = ss.find_blocks(graph_of("gpt", layers=1)).all
    assert {op.module.split(".")[:2][-1] for op in block} == {"0"}


def test_attention_group_lies_between_linear_maps() -> None:
    graph = graph_of("gpt", fused=False)
    (first, *_) = ss.find_blocks(graph).attention
    kinds = [op.kind for op in first]
    assert kinds[0] == "add_bias"
    assert kinds[-1] == "flatten"
    assert {"softmax", "matmul", "hide_later"} < set(kinds)
    assert not any(map(is_map, first))


def test_decoder_block_has_two_attentions() -> None:
    attention = ss.find_blocks(graph_of("mbart")).attention
    assert [sum(op.kind == "attention" for op in ops) for ops in attention] == [1, 1, 1, 2, 2, 2]


def test_gate_with_a_softmax_is_not_detected_as_attention() -> None:
    """The scores of a router come from a linear map, not from a product of two activations."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.steps = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for gate, line in zip(self.steps[::2], self.steps[1::2], strict=True):
                x = x + line(x * gate(x).softmax(-1))
            return x.mean()

    blocks = ss.find_blocks(captured(Gated(), torch.randn(4, 8)))
    assert not any(blocks.attention)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt", [("*.attn.q.weight", 0), ("*.mlp.up.weight", 0)]),
        ("moe", [("*.attn.q.weight", 0), ("*.mlp.up.weight", 0), ("*.experts.up", 2)]),
        ("mbart", [("*.attn.q.weight", 0), ("*.cross.q.weight", 0), ("*.mlp.up.weight", 0)]),
        ("swin", [("*.attn.q.weight", 0), ("*.mlp.up.weight", 0)]),
        ("wide_resnet", [("*.conv2.weight", 0)]),
        ("mlp", [("layers.*[024].weight", 0)]),
    ],
)
def test_inner_features_lie_between_two_linear_maps(
    name: str, parameters: list[tuple[str, int]]
) -> None:
    blocks = ss.find_blocks(graph_of(name))
    assert set(blocks.inner) == blocks.dims.of_params(*parameters)


def test_features_that_a_norm_reduces_over_are_not_inner_features() -> None:
    blocks = ss.find_blocks(graph_of("evoformer"))
    assert blocks.dims.of("layers.0.tri_in.left.weight", 0) not in blocks.inner
    assert blocks.dims.of("layers.0.msa_transition.up.weight", 0) in blocks.inner


@pytest.mark.parametrize("name", ["gpt", "moe", "mbart"])
def test_mlp_group_starts_and_ends_with_a_linear_map(name: str) -> None:
    for ops in ss.find_blocks(graph_of(name)).mlp:
        assert is_map(ops[0])
        assert is_map([op for op in ops if op.kind != "add_bias"][-1])
        assert "gelu" in [op.kind for op in ops]
        assert not {"attention", "softmax"} & {op.kind for op in ops}


def test_embedding_lookups_and_head_are_detected() -> None:
    blocks = ss.find_blocks(graph_of("gpt"))
    assert blocks.embedding.name == "embed.weight"  # not the table of positions, which are no input
    assert [op.name for op in blocks.lookups] == ["embed:embedding"]
    assert [op.name for op in blocks.head] == ["head:linear"]
    tied = ss.find_blocks(graph_of("mbart", task="translation"))
    assert len(tied.lookups) == 2
    assert [op.parameters for op in tied.head] == [(tied.embedding,)]
    assert ss.find_blocks(graph_of("mbart")).head == ()  # its head scores classes, not words


def test_linear_maps_with_a_matrix_per_expert_are_detected() -> None:
    graph = graph_of("moe")
    assert ss.find_blocks(graph).experts == graph.ops_in("*.experts")
    assert ss.find_blocks(graph, experts=ss.Modules("*.experts")).experts == graph.ops_in(
        "*.experts"
    )


# --- renamed modules, and no modules ------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_detection_does_not_depend_on_module_names(name: str) -> None:
    """All attributes of all modules are renamed; the same ops are found."""
    config = config_of(name, "tiny", **SIZES[name])
    inputs = MODELS[name].example_inputs(config, 4, torch.Generator().manual_seed(0))
    model = renamed(build(name, **SIZES[name]))
    one = ss.find_blocks(graph_of(name))
    other = ss.find_blocks(ss.capture(model, inputs, recycled=MODELS[name].recycled))
    assert not {op.module for op in other.graph.ops} & {op.module for op in one.graph.ops} - {""}
    assert numbers(other) == numbers(one)


def numbers(blocks: ss.Blocks) -> list[object]:
    """The detected parts as indices of ops."""
    loops = [
        [(op.index, i) for op in blocks.graph.ops for i in blocks.dims.ids(op, dim)]
        for dim in blocks.inner
    ]
    groups = [*blocks.all, *blocks.attention, *blocks.mlp, blocks.head]
    return [[[op.index for op in ops] for ops in groups], sorted(loops)]


@pytest.mark.parametrize("name", ["gpt", "mbart", "evoformer"])
def test_blocks_are_detected_without_module_paths(name: str) -> None:
    """Blocks are the longest period of ops. The end of the last block is not compared."""
    graph = graph_of(name)
    found = ss.find_blocks(flat(graph)).all
    starts = [ops[0].index for ops in ss.find_blocks(graph).all]
    assert [ops[0].index for ops in found] == starts


# --- plain torch --------------------------------------------------------------------------------


class Encoder(nn.Module):
    """``nn.TransformerEncoder`` between an embedding and classes."""

    def __init__(self, norm_first: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(30, 16)
        layer = nn.TransformerEncoderLayer(
            16, 4, 32, dropout=0.0, batch_first=True, norm_first=norm_first
        )
        self.stack = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.scores = nn.Linear(16, 30)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.scores(self.stack(self.words(x))).transpose(1, 2), y)


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * self.scale


class Attend(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(16, 16, bias=False) for _ in range(3))
        self.d = nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        q, k, v = (
            line(t).view(*t.shape[:2], 4, 4).transpose(1, 2)
            for line, t in ((self.a, x), (self.b, memory), (self.c, memory))
        )
        mixed = (q @ k.transpose(-1, -2) / math.sqrt(4)).softmax(-1) @ v
        return self.d(mixed.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(16, 24, bias=False), nn.Linear(16, 24, bias=False)
        self.w2 = nn.Linear(24, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class LlamaBlock(nn.Module):
    def __init__(self, reads_memory: bool = False) -> None:
        super().__init__()
        self.n1, self.n2 = RMSNorm(), RMSNorm()
        self.att, self.ffn = Attend(), SwiGLU()
        if reads_memory:
            self.n3, self.look = RMSNorm(), Attend()

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        y = self.n1(x)
        x = x + self.att(y, y)
        if memory is not None:
            x = x + self.look(self.n3(x), memory)
        return x + self.ffn(self.n2(x))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(30, 16)
        self.h = nn.ModuleList(LlamaBlock() for _ in range(3))
        self.n = RMSNorm()
        self.lm = nn.Linear(16, 30, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.tok(x)
        for block in self.h:
            x = block(x)
        return F.cross_entropy(self.lm(self.n(x)).transpose(1, 2), y)


class T5(nn.Module):
    """The encoder and the decoder are two lists of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(30, 16)
        self.encoder = nn.ModuleDict({"b": nn.ModuleList(LlamaBlock() for _ in range(2))})
        self.decoder = nn.ModuleDict({"b": nn.ModuleList(LlamaBlock(True) for _ in range(2))})
        self.lm = nn.Linear(16, 30, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        memory, z = self.tok(x), self.tok(y)
        for block in self.encoder["b"]:
            memory = block(memory)
        for block in self.decoder["b"]:
            z = block(z, memory)
        return F.cross_entropy(self.lm(z).transpose(1, 2), y)


class Functional(nn.Module):
    """A model of parameters in lists, which calls no module."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ParameterList(torch.randn(32, 16) for _ in range(3))
        self.down = nn.ParameterList(torch.randn(16, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + F.linear(F.gelu(F.linear(x, up)), down)
        return x.pow(2).mean()


class Bottle(nn.Module):
    def __init__(self, width: int, stride: int) -> None:
        super().__init__()
        self.a = nn.Conv2d(width // stride, width, 3, stride, 1)
        self.b = nn.Conv2d(width, width, 3, 1, 1)
        self.short = nn.Conv2d(width // stride, width, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.b(F.relu(self.a(x))) + self.short(x))


class ResNet(nn.Module):
    """Blocks in three lists, some with a convolution as the shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.scores = nn.Conv2d(3, 8, 3, 1, 1), nn.Linear(32, 5)
        self.low = nn.Sequential(Bottle(8, 1), Bottle(8, 1))
        self.middle = nn.Sequential(Bottle(16, 2), Bottle(16, 1))
        self.high = nn.Sequential(Bottle(32, 2), Bottle(32, 1))

    def forward(self, x: Tensor) -> Tensor:
        made = self.high(self.middle(self.low(self.stem(x))))
        return self.scores(made.mean((2, 3))).pow(2).mean()


class Mixture(nn.Module):
    """A block with a list of experts, which have most of its maps but are no blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 8)
        self.each = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(8)
        )

    def forward(self, x: Tensor) -> Tensor:
        shares = self.gate(x).softmax(-1)
        for number, expert in enumerate(self.each):
            x = x + shares[..., number : number + 1] * expert(x)
        return x


class Shared(nn.Module):
    """One block that is applied four times."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.scores = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = x + self.down(F.gelu(self.up(x)))
        return self.scores(x).pow(2).mean()


class Mean(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).pow(2).mean()


WORDS = torch.randint(30, (4, 6), generator=torch.Generator().manual_seed(0))


@cache
def plain(name: str) -> ss.Blocks:
    makers: dict[str, Callable[[], ss.Graph]] = {
        "pre-norm": lambda: captured(Encoder(True), WORDS, WORDS),
        "post-norm": lambda: captured(Encoder(False), WORDS, WORDS),
        "llama": lambda: captured(Llama(), WORDS, WORDS),
        "t5": lambda: captured(T5(), WORDS, WORDS),
        "functional": lambda: captured(Functional(), torch.randn(4, 16)),
        "resnet": lambda: captured(ResNet(), torch.randn(2, 3, 16, 16)),
        "experts": lambda: captured(
            Mean(nn.Linear(8, 16), Mixture(), Mixture(), nn.Linear(16, 4)), torch.randn(4, 8)
        ),
        "shared": lambda: captured(Shared(), torch.randn(4, 16)),
    }
    return ss.find_blocks(makers[name]())


@pytest.mark.parametrize(
    ("name", "maps"),
    [
        ("pre-norm", [4] * 3),
        ("post-norm", [4] * 3),
        ("llama", [7] * 3),
        ("t5", [7, 7, 11, 11]),
        ("functional", [2] * 3),
        ("resnet", [2, 2, 3, 2, 3, 2]),
        ("experts", [17, 17]),
        ("shared", [2] * 4),
    ],
)
def test_blocks_of_plain_torch_models_are_found(name: str, maps: list[int]) -> None:
    """Counts the linear maps of each block; torch's attention has one for q, k and v together."""
    assert [sum(map(is_map, ops)) for ops in plain(name).all] == maps


@pytest.mark.parametrize("name", ["pre-norm", "post-norm", "llama", "t5"])
def test_attentions_of_plain_torch_models_are_found(name: str) -> None:
    blocks = plain(name)
    for ops in blocks.attention:
        assert {"softmax", "attention"} & {op.kind for op in ops}
        assert not any(map(is_map, ops))


def test_gated_mlp_has_one_inner_dim_for_both_up_projections() -> None:
    blocks = plain("llama")
    assert set(blocks.inner) == blocks.dims.of_params(("h.*.att.a.weight", 0), ("h.*.w1.weight", 0))
    (mlp, *_) = blocks.mlp
    assert [op.module for op in mlp if is_map(op)] == ["h.0.ffn.w1", "h.0.ffn.w3", "h.0.ffn.w2"]


@pytest.mark.parametrize("name", ["pre-norm", "llama", "t5"])
def test_embedding_and_head_of_plain_torch_models_are_found(name: str) -> None:
    blocks = plain(name)
    assert blocks.embedding.shape == (30, 16)
    assert [op.parameters[0].shape for op in blocks.head] == [(30, 16)]


# --- parts that cannot be detected --------------------------------------------------------------


class Once(nn.Module):
    """A convolution and a linear map: nothing repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(2, 3, 3), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu()).mean()


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("all", r"no blocks: looked for modules beside each other, or a run of ops, that repeat; "
                r"its modules are first, second: say find_blocks\(graph, Modules\('layers"),
        ("embedding", r"no embedding: looked for a parameter whose rows integer inputs choose; say "
                      r"find_blocks\(graph, embedding='NAME'\)"),
    ],
)  # fmt: skip
def test_error_states_what_was_searched_and_how_to_specify_the_part(part: str, words: str) -> None:
    blocks = ss.find_blocks(captured(Once(), torch.randn(4, 2, 8)))
    with pytest.raises(ss.PlanError, match=words):
        getattr(blocks, part)


def test_explicit_blocks_and_features_override_detection() -> None:
    graph = captured(Once(), torch.randn(4, 2, 8))
    said = ss.find_blocks(graph, ss.Modules("first", "second"), features=(("first.weight", 0),))
    assert [ops[0].module for ops in said.all] == ["first", "second"]
    assert said.inner == (said.dims.of("first.weight", 0),)
    with pytest.raises(ss.PlanError, match=r"looked for modules h\.\*; its modules are first"):
        _ = ss.find_blocks(graph, ss.Modules("h.*")).all
    with pytest.raises(ss.PlanError, match="no parameter that fits 'x'"):
        _ = ss.find_blocks(graph, features=(("x", 0),)).inner
    with pytest.raises(ss.PlanError, match=r"no experts: looked for parameters in h\.\*"):
        _ = ss.find_blocks(graph, experts=ss.Modules("h.*")).experts


def test_explicit_embedding_replaces_the_detected_embedding_and_head() -> None:
    blocks = ss.find_blocks(graph_of("gpt"), embedding="position.weight")
    assert blocks.embedding.name == "position.weight"
    assert blocks.head == ()  # the head of the model scores the rows of another table
    assert blocks.vocabulary == (blocks.dims.of("position.weight", 0),)


def test_layers_are_modules_with_parameters_if_there_are_no_blocks() -> None:
    class Uneven(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(9, 4)
            self.recurrent = nn.GRU(4, 6, batch_first=True)
            self.head = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.recurrent(self.words(x))[0][:, -1].tanh()).square().mean()

    graph = ss.capture(Uneven(), (torch.zeros(2, 5, dtype=torch.int64),))
    blocks = ss.find_blocks(graph)
    with pytest.raises(ss.PlanError, match="has no blocks"):
        _ = blocks.all
    assert [layer[0].module for layer in blocks.layers] == ["words", "recurrent", "head"]
    assert [op for group in blocks.groups for op in group] == list(graph.ops)
    assert blocks.inner == (blocks.dims.of("head.weight", 0),)
    for name in ("zero2", "zero3", "one_f_one_b", "recompute", "swap", "megatron", "mesh_2d"):
        plan = ss.Plan(graph, range(2))
        PLANS[name](plan)
        assert ss.compile(plan).memory
    repeating = ss.find_blocks(ss.capture(build("gpt"), example_inputs("gpt", 2)))
    assert repeating.layers == repeating.all
