"""A DistributedConfig of transformers is read as a plan, and written of one."""

from __future__ import annotations

import pytest
import torch
from transformers.distributed.configuration_utils import DistributedConfig

import superscaler_core as ss
from superscaler_core.hugging_face import config_of_plan, plan_of_config
from tests.superscaler_core.hugging_face.test_folders import CONFIGS, batch, seeded
from tests.superscaler_core.parallel.threads import on_threads

BOTH = [
    ({"tp_size": 4}, 4, {"tp": 4}),
    ({"fsdp_size": 4}, 4, {"tp": 1, "zero": 3}),
    ({"tp_size": 2, "fsdp_size": 2}, 4, {"tp": 2, "zero": 3}),
    ({"fsdp_size": 2, "dp_replicate_size": 2}, 4, {"tp": 1, "zero": 3, "shard": 2}),
    ({"tp_size": 2, "fsdp_size": 2, "ep_size": 4}, 4, {"tp": 2, "zero": 3, "experts": 4}),
    ({"tp_size": 2, "fsdp_size": 2, "ep_size": 2}, 4, {"tp": 2, "zero": 3, "experts": 2}),
    ({"dp_replicate_size": 4}, 4, {"tp": 1}),
]
"""Configurations, devices, and the options of ``hybrid`` besides one microbatch."""


@pytest.mark.parametrize(("sizes", "num", "options"), BOTH)
def test_configuration_is_read_as_a_plan_and_written_of_it(sizes, num, options):
    config = DistributedConfig(**sizes)
    name, read = plan_of_config(config, num)
    assert (name, read) == ("hybrid", {"microbatches": 1, **options})
    assert config_of_plan(name, read, num) == config


@pytest.mark.parametrize(
    ("name", "options", "sizes"),
    [
        ("data_parallel", {}, {"dp_replicate_size": 4}),
        ("zero3", {}, {"fsdp_size": 4}),
        ("zero3", {"shard": 2}, {"fsdp_size": 2, "dp_replicate_size": 2}),
        ("megatron", {}, {"tp_size": 4}),
        ("zero3", {"experts": True}, {"fsdp_size": 4, "ep_size": 4}),
    ],
)
def test_plans_are_written_by_name(name, options, sizes):
    assert config_of_plan(name, options, 4) == DistributedConfig(**sizes)


@pytest.mark.parametrize("family", ["Llama", "Mixtral"])
@pytest.mark.parametrize(("sizes", "num", "options"), [BOTH[2], BOTH[4], BOTH[5], BOTH[3]])
def test_model_under_a_configuration_trains_as_on_one_device(family, sizes, num, options):
    if family == "Llama" and "ep_size" in sizes:
        sizes = {"tp_size": 2, "fsdp_size": 2, "tp_plan": {
            "layers.*.mlp.gate_proj": "colwise", "layers.*.mlp.up_proj": "colwise",
            "layers.*.mlp.down_proj": "rowwise"}}  # fmt: skip
    name, read = plan_of_config(DistributedConfig(**sizes), num)
    model = seeded(CONFIGS[family])
    expected = model(**batch()).loss
    expected.backward()

    def work(parallel: ss.Parallel) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Size]]:
        loss = parallel.step(**batch())
        norm = parallel.clip_grad_norm_(1e9)
        return loss, norm, {n: p.shape for n, p in parallel.named_parameters()}

    found = on_threads(seeded(CONFIGS[family]), batch(), num, work, plan=name, options=read)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    for loss, total, shapes in found.values():
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=0)
        torch.testing.assert_close(total.float(), norm, rtol=1e-4, atol=0)
        if options.get("experts") and family == "Mixtral":
            (experts,) = {s[0] for n, s in shapes.items() if n.endswith("experts.down_proj")}
            assert experts == 4 // 4


def test_tensor_parallel_plan_says_what_is_cut():
    tp_plan = {"layers.*.mlp.up_proj": "colwise", "layers.*.self_attn.q_norm": "replicate"}
    _, options = plan_of_config(DistributedConfig(tp_size=2, tp_plan=tp_plan), 2)
    assert options["features"] == (("*layers.*.mlp.up_proj.weight", 0),)
    assert "tp" not in plan_of_config(DistributedConfig(tp_size=2, ep_size=2, tp_plan={}), 2)[1]


@pytest.mark.parametrize(
    ("fields", "num", "match"),
    [
        ({"pp_size": 2}, 2, r"DistributedConfig\(pp_size=2\): a plan is read of tp_size"),
        ({"tp_size": 2, "fsdp_cpu_offload": True}, 2, "fsdp_cpu_offload=True"),
        ({"tp_size": 2, "enable_sequence_parallel": True}, 2, "enable_sequence_parallel"),
        ({"tp_size": 2}, 4, "is for 2 devices, and there are 4"),
        ({"tp_size": 2, "tp_plan": {"mlp.experts": "packed_colwise"}}, 2, "styles packed_colwise"),
    ],
)
def test_what_is_not_read_is_refused_by_name(fields, num, match):
    with pytest.raises(ss.PlanError, match=match):
        plan_of_config(DistributedConfig(**fields), num)


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("hybrid", {"pp": 2, "microbatches": 1}, "pp=2 is no DistributedConfig"),
        ("hybrid", {}, "microbatches is no DistributedConfig"),
        ("zero1", {}, "zero1 with zero=0"),
        ("data_parallel", {"zero": 1}, "zero=1"),
    ],
)
def test_plan_that_transformers_does_not_have_is_refused(name, options, match):
    with pytest.raises(ss.PlanError, match=match):
        config_of_plan(name, options, 4)
