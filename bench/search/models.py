"""Models on which planners are compared: Alpa's GPT, MoE and Wide-ResNet, and HiDup's four.

Source of Alpa's models: its benchmark suites (``benchmark/alpa/suite_*.py``), ``alpa/model/moe.py``
and ``alpa/model/wide_resnet.py``. The GPT and the MoE are trained in float16, with Adam's states
and master weights in float32, and the Wide-ResNet in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bench.cells.cluster import PAPER, Cluster
from bench.cells.workload import Workload
from bench.hidup import models as hidup_models
from bench.studies.systems import DEEPSPEED, DEEPSPEED_MOE, FSDP, MEGATRON
from superscaler_core.evaluation import SearchPlanner


@dataclass(frozen=True)
class SearchModel:
    """A model and the cluster on which it is trained.

    Attributes:
        workload: the model, its batch and its optimizer.
        num_gpus: number of V100s, eight per host.
        baselines: planners of the systems that usually train the model, by name.
        cluster: the hosts and links.
    """

    workload: Workload
    num_gpus: int
    baselines: Mapping[str, SearchPlanner]
    cluster: Cluster = PAPER


TUNED: Mapping[str, SearchPlanner] = {system.name: system for system in (MEGATRON, DEEPSPEED, FSDP)}
TUNED_MOE = {**TUNED, DEEPSPEED_MOE.name: DEEPSPEED_MOE}


def _gpt(num_gpus: int, layers: int, width: int, heads: int) -> SearchModel:
    sizes = {
        "layers": layers, "width": width, "heads": heads, "sequence": 1024, "vocabulary": 51200,
        "fused": False,
    }  # fmt: skip
    return SearchModel(Workload("gpt", sizes, "float16", 1024), num_gpus, TUNED)


def _moe(num_gpus: int, layers: int, width: int, experts: int) -> SearchModel:
    """An expert has capacity for twice its even share of tokens; MLPs are eight times as wide."""
    sizes = {
        "layers": layers, "width": width, "heads": 16, "sequence": 1024, "vocabulary": 32000,
        "experts": experts, "capacity_factor": 2.0, "inner_factor": 8,
    }  # fmt: skip
    return SearchModel(Workload("moe", sizes, "float16", 1024), num_gpus, TUNED_MOE)


def _wide_resnet(
    num_gpus: int, base: int, width_factor: int, *, batch: int = 1536, third: int = 6
) -> SearchModel:
    sizes: Mapping[str, Any] = {
        "blocks": (3, 4, third, 3), "base": base, "width_factor": width_factor, "classes": 1024,
        "narrow_entry": True,
    }  # fmt: skip
    return SearchModel(Workload("wide_resnet", sizes, "float32", batch), num_gpus, TUNED)


ALPA_MODELS: Mapping[str, SearchModel] = {
    "gpt-2.6b": _gpt(8, 32, 2560, 32),
    "gpt-6.7b": _gpt(16, 32, 4096, 32),
    "gpt-15b": _gpt(32, 48, 5120, 40),
    "gpt-39b": _gpt(64, 48, 8192, 64),
    "moe-2.4b": _moe(8, 16, 1024, 16),
    "moe-10b": _moe(16, 16, 1536, 32),
    "moe-27b": _moe(32, 16, 2048, 48),
    "moe-70b": _moe(64, 32, 2048, 64),
    "wresnet-2b": _wide_resnet(8, 448, 2),
    "wresnet-4b": _wide_resnet(16, 640, 2),
    "wresnet-6.8b": _wide_resnet(32, 320, 16),
    "wresnet-13b": _wide_resnet(64, 320, 16, batch=1520, third=23),
}
"""The models by name, which has Alpa's count of parameters; numbers of GPUs as in its tests."""


def _hidup(model: str) -> SearchModel:
    """A model of HiDup on its largest cluster.

    Baselines are the systems that it was compared with, and today's, which have stages and tensor
    parallelism too.
    """
    name = "8x8-10gbps"
    num = hidup_models.num_gpus(name)
    own = {each: hidup_models.tuned(how) for each, how in hidup_models.SYSTEMS.items()}
    cluster = hidup_models.cluster_of(name)
    return SearchModel(hidup_models.workload(model, num), num, {**own, **TUNED_MOE}, cluster)


SEARCH_MODELS = {**ALPA_MODELS, **{name: _hidup(name) for name in hidup_models.MODELS}}
"""All models, by name."""
