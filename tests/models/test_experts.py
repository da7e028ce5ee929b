"""Mixtures of experts: which ops are known, and what programs and logs say of them."""

import logging

import pytest
import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

import superscaler_core as ss
from superscaler_core.cost import profile_of
from tests.models.cells import compiled
from tests.models.experts import MIXTURES

pytestmark = pytest.mark.filterwarnings("ignore::superscaler_core.OpaqueWarning")


@pytest.mark.parametrize("family", MIXTURES)
def test_program_of_experts_has_a_summary_peak_memory_and_simulated_time(family):
    program = compiled(family, "data_parallel", 2)
    assert program.memory[0].total_bytes > 0
    opaque = {op.kind for op in program.plan.graph.opaque}
    assert ("opaque" in program.summary()) == bool(opaque)
    assert ss.simulate(program, profile=profile_of("a100")).secs > 0


def test_ops_of_known_experts_can_be_split_by_tokens():
    graph = compiled("Mixtral", "data_parallel", 2).plan.graph
    experts = [op for op in graph.ops if op.kind == "MixtralExperts"]
    assert len(experts) == 4
    assert all(op.is_splittable("t") for op in experts)
    assert not graph.opaque


@pytest.mark.parametrize("family", ["Mixtral, opaque", "Mixtral, batched and traced"])
def test_experts_of_unknown_classes_are_found_by_their_form(family):
    graph = compiled(family, "data_parallel", 2).plan.graph
    experts = [op for op in graph.ops if op.kind == "UnknownExperts"]
    assert len(experts) == 4
    assert all(op.is_splittable("expert") for op in experts)


class Alike(nn.Module):
    """It is called as experts are, and is none: every token's result depends on all tokens."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4, 4))

    def forward(self, x, ids, weights):
        scale = weights.sum() * ids.float().mean()
        return (x @ self.weight[0] + x @ self.weight[1]) * scale


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Alike()

    def forward(self, x, ids, weights):
        return self.inner(x, ids, weights).square().mean()


def test_module_whose_parts_do_not_add_up_is_traced_as_any_other():
    ids = torch.randint(3, (6, 2))
    graph = ss.capture(Around(), (torch.randn(6, 4), ids, torch.rand(6, 2)))
    assert "Alike" not in {op.kind for op in graph.ops}
    assert not graph.opaque


class Listed(nn.Module):
    """Experts that are modules of their own."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        chosen = x.sum(-1) > 0
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            result = result.index_add(0, rows, expert(x[rows]))
        return result


class AroundListed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Listed()

    def forward(self, x):
        return self.inner(x).square().mean()


def test_experts_that_cannot_be_dealt_out_are_refused_by_name():
    x = torch.randn(6, 4)
    options = {"experts": True, "expert": ss.Modules("inner")}
    with pytest.raises(ss.PlanError, match=r"inner are Listed and have no loop of experts"):
        ss.parallelize(AroundListed(), args=(x,), plan="data_parallel", options=options)


def test_balancing_loss_under_microbatches_is_noted(caplog):
    options = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    config = MixtralConfig(
        vocab_size=64, output_router_logits=True, use_cache=False, **options, **heads
    )
    tokens = torch.arange(32).view(4, 8)
    batch = {"input_ids": tokens, "labels": tokens}
    with caplog.at_level(logging.WARNING, "superscaler_core"):
        plan, options = "accumulate", {"microbatches": 2}
        model = ss.parallelize(MixtralForCausalLM(config), kwargs=batch, plan=plan, options=options)
    assert "capacity and balancing loss are those of each microbatch" in caplog.text
    assert model.step(**batch).isfinite()


def test_mixture_in_bfloat16_with_grouped_products_and_recorded_scores_trains():
    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4,
        output_router_logits=True, use_cache=False,
    )  # fmt: skip
    model = MixtralForCausalLM(config).bfloat16()
    tokens = torch.arange(32).view(4, 8)
    batch = {"input_ids": tokens, "labels": tokens}
    found = ss.parallelize(model, kwargs=batch).step(**batch)
    torch.testing.assert_close(found, model(**batch).loss.detach(), rtol=2e-2, atol=0)


def test_memory_that_was_never_set_is_no_constant():
    class Joined(nn.Module):
        def forward(self, x):
            whole = x.new_empty(2, 4)
            whole[:, :2], whole[:, 2:] = 1.0, 2.0
            return (whole * x).square().mean() + x.new_empty(1).numel()

    graphs = [ss.capture(Joined(), (torch.ones(2, 4, requires_grad=True),)) for _ in range(2)]
    one, other = ({n: v.tolist() for n, v in g.constants.items()} for g in graphs)
    assert one == other
