"""DistributedConfig: sizes of transformers' parallelism as a plan with options, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from superscaler_core.errors import PlanError

READ = ("tp_size", "tp_plan", "ep_size", "fsdp_size", "dp_replicate_size")
"""The fields that say a plan. ``enable_expert_parallel`` follows from ``ep_size``."""

_DERIVED = "enable_expert_parallel"

_DIMS: Mapping[str, tuple[int, ...]] = {
    "colwise": (0,),
    "colwise_gather_output": (0,),
    "rowwise": (1,),
    # What is not cut follows from what is.
    "replicated_with_grad_allreduce": (),
    "replicate": (),
}
"""Styles of a ``tp_plan``, each with the dims of a weight ``[out, in]`` that it cuts."""

Options = dict[str, Any]


def is_config(value: Any) -> bool:
    """Whether a value is a ``DistributedConfig``; transformers need not be installed."""
    kind = type(value)
    is_ours = kind.__module__.partition(".")[0] == "transformers"
    return is_ours and kind.__name__ == "DistributedConfig"


def plan_of_config(config: Any, num_devices: int) -> tuple[str, Options]:
    """The plan of a ``DistributedConfig``, as the name of a plan and its options.

    Tensor parallel devices have consecutive numbers, and groups that shard weights come next, as in
    the mesh of transformers. ``ep_size`` consecutive devices share experts. If ``tp_plan`` is None
    or "auto", features are found by the model's structure.

    Args:
        config: the configuration.
        num_devices: devices of the job.

    Raises:
        PlanError: it sets what is not read here, or its sizes are not those of the job.
    """
    defaults = {each.name: each.default for each in dataclasses.fields(config)}
    defaults["pp_size"] = 1
    odd = [
        name
        for name, default in defaults.items()
        if name not in (*READ, _DERIVED) and getattr(config, name) != default
    ]
    if odd:
        said = ", ".join(f"{name}={getattr(config, name)!r}" for name in odd)
        raise PlanError(
            f"DistributedConfig({said}): a plan is read of {', '.join(READ)} alone. Use a plan by "
            "name instead, such as hybrid:tp=2,pp=2."
        )
    tp, ep, fsdp, copies = (
        getattr(config, name) for name in ("tp_size", "ep_size", "fsdp_size", "dp_replicate_size")
    )
    if tp * fsdp * copies != num_devices:
        raise PlanError(
            f"DistributedConfig(tp_size={tp}, fsdp_size={fsdp}, dp_replicate_size={copies}) is for "
            f"{tp * fsdp * copies} devices, and there are {num_devices}."
        )
    options: Options = {"microbatches": 1}
    if config.tp_plan != {}:
        options["tp"] = tp
    if isinstance(config.tp_plan, Mapping) and config.tp_plan:
        options["features"] = _features(config.tp_plan)
    if ep > 1:
        options["experts"] = ep
    if fsdp > 1:
        options |= {"zero": 3} | ({"shard": fsdp} if copies > 1 else {})
    return "hybrid", options


def _features(tp_plan: Mapping[str, str]) -> tuple[tuple[str, int], ...]:
    """The parameters that a ``tp_plan`` cuts, each with the dim."""
    if odd := sorted({style for style in tp_plan.values() if style not in _DIMS}):
        raise PlanError(
            f"tp_plan has styles {', '.join(odd)}, and {', '.join(_DIMS)} are read: leave it out "
            "to cut what the model's structure says, and use ep_size for experts."
        )
    cut = ((name, dim) for name, style in tp_plan.items() for dim in _DIMS[style])
    return tuple((f"*{name}.weight", dim) for name, dim in cut)


def config_of_plan(name: str, options: Mapping[str, Any], num_devices: int) -> Any:
    """The ``DistributedConfig`` of a plan with its options.

    Args:
        name: the plan.
        options: its options by name.
        num_devices: devices of the job.

    Raises:
        PlanError: transformers has no such parallelism.
    """
    tp = {"megatron": num_devices, "hybrid": options.get("tp", 1)}.get(name, 1)
    zero = 3 if name == "zero3" else options.get("zero", 0)
    known = {"tp", "zero", "shard", "experts", "microbatches"}
    odd = [f"{key}={value}" for key, value in options.items() if key not in known]
    if options.get("microbatches", 1 if name != "hybrid" else 8) != 1:
        odd.append("microbatches")
    if name not in ("data_parallel", "zero3", "megatron", "hybrid") or odd or zero not in (0, 3):
        raise PlanError(
            f"{name} with {', '.join(odd) or f'zero={zero}'} is no DistributedConfig: "
            "data_parallel, zero3, megatron and hybrid are, with tp, microbatches=1, zero=3, shard "
            "and experts."
        )
    from transformers.distributed.configuration_utils import DistributedConfig

    num = num_devices // tp
    fsdp = (options.get("shard") or num) if zero == 3 else 1
    experts = options.get("experts", False)
    ep = (fsdp * tp if experts is True else int(experts)) or 1
    return DistributedConfig(
        tp_size=tp, fsdp_size=fsdp, dp_replicate_size=num // fsdp, ep_size=ep
    )  # fmt: skip
