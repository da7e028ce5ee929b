"""Mixtures of experts: which ops are known, and what programs and logs say of them."""

import logging

import pytest
import torch
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


def test_unknown_experts_are_opaque():
    graph = compiled("Mixtral, opaque", "data_parallel", 2).plan.graph
    assert {op.kind for op in graph.opaque} == {"UnknownExperts"}


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
