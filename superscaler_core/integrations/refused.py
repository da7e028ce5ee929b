"""Refused: what of a ``transformers.Trainer`` no plan has, with what there is instead.

Every field of ``TrainingArguments`` is in one of two tables: those that work, and those that are
refused when they are set. A field of a later version of the library, in neither, is refused if it
differs from its default, so that nothing is ignored silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from transformers import TrainingArguments

from superscaler_core.errors import PlanError

_PLAN = "the plan says how ranks share the model: give plan=... of PlanTrainer"
_DTYPE = "bf16=True, or a model in bfloat16 and dtype=torch.float32 of PlanTrainer"
_COMPILE = "leave it out: a program is made of the model as it is"
_WRAPPER = "leave it out: no DistributedDataParallel wraps the model"
_RECOMPUTE = (
    "call model.activation_checkpointing_enable() before, or give keep=block_inputs among the "
    "options of the plan"
)
_HOOKS = "hooks of modules that change values are not captured: write it into the model's forward"

REFUSED: Mapping[str, str] = {
    "deepspeed": "plan='zero3', 'data_parallel:zero=1' or another plan",
    "fsdp": "plan='zero3'",
    "fsdp_config": "plan='zero3', and options such as keep=block_inputs",
    "parallelism_config": _PLAN,
    "ddp_find_unused_parameters": _WRAPPER,
    "ddp_bucket_cap_mb": "overlap=true among the options of the plan",
    "ddp_broadcast_buffers": _WRAPPER,
    "ddp_static_graph": _WRAPPER,
    "torch_compile": _COMPILE,
    "torch_compile_backend": _COMPILE,
    "torch_compile_mode": _COMPILE,
    "use_liger_kernel": _COMPILE,
    "liger_kernel_config": _COMPILE,
    "fp16": _DTYPE,
    "fp16_full_eval": _DTYPE,
    "bf16_full_eval": _DTYPE,
    "activation_checkpointing": _RECOMPUTE,
    "activation_checkpointing_kwargs": _RECOMPUTE,
    "gradient_checkpointing": _RECOMPUTE,
    "gradient_checkpointing_kwargs": _RECOMPUTE,
    "neftune_noise_alpha": _HOOKS,
    "label_smoothing_factor": "compute the smoothed loss in the model's forward",
    "debug": "torch.autograd.set_detect_anomaly, on one device",
    "auto_find_batch_size": "memory_limit= of PlanTrainer tells before a step what does not fit",
    "torch_empty_cache_steps": "a callback that calls torch.cuda.empty_cache()",
    "save_on_each_node": "an output_dir that all hosts share",
    "enable_jit_checkpoint": "save_steps: a signal does not come at the same step on all ranks",
    "optim_target_modules": "optimizer_cls_and_kwargs=(Class, options) of PlanTrainer",
}
"""Fields that must be unset (None, False, 0 or empty), with what to use instead."""

_CHOICES: Mapping[str, tuple[tuple[str, ...], str]] = {
    "optim": (
        ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop", "adafactor"),
        "optimizer_cls_and_kwargs=(Class, options) of PlanTrainer",
    ),
    "train_sampling_strategy": (
        ("random", "sequential"),
        "a data_collator that pads to a few lengths: each new shape needs a program",
    ),
    "mixed_precision": (("no", "bf16"), _DTYPE),
}
"""Fields that take some of their values: these, and what to use instead of others.

``mixed_precision`` is no field, but what ``fp16``, ``bf16`` and accelerate's environment say.
"""

_LOADERS = {"split_batches": False, "dispatch_batches": None}
"""Fields of ``accelerator_config`` that must have these values."""

WORKING = frozenset(
    {
        *("output_dir", "per_device_train_batch_size", "num_train_epochs", "max_steps"),
        *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "optim"),
        *("optim_args", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"),
        *("gradient_accumulation_steps", "average_tokens_across_devices", "max_grad_norm", "bf16"),
        *("tf32", "use_cache", "logging_strategy", "logging_steps", "logging_first_step"),
        *("log_on_each_node", "logging_nan_inf_filter", "include_num_input_tokens_seen"),
        *("log_level", "log_level_replica", "disable_tqdm", "report_to", "run_name", "project"),
        *("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id", "eval_strategy"),
        *("eval_steps", "eval_delay", "per_device_eval_batch_size", "prediction_loss_only"),
        *("eval_on_start", "eval_do_concat_batches", "eval_use_gather_object"),
        *("eval_accumulation_steps", "include_for_metrics", "batch_eval_metrics"),
        *("save_only_model", "save_strategy", "save_steps", "save_total_limit", "push_to_hub"),
        *("hub_token", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push"),
        *("hub_revision", "load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
        *("ignore_data_skip", "restore_callback_states_from_checkpoint", "full_determinism"),
        *("seed", "data_seed", "use_cpu", "accelerator_config", "dataloader_drop_last"),
        *("dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers"),
        *("dataloader_prefetch_factor", "dataloader_multiprocessing_context"),
        *("dataloader_in_order", "remove_unused_columns", "label_names"),
        *("train_sampling_strategy", "length_column_name", "ddp_backend", "ddp_timeout"),
        *("skip_memory_metrics", "do_train", "do_eval", "do_predict", "resume_from_checkpoint"),
        *("local_rank",),
    }
)
"""Fields that do what they do on one device; the two of ``ddp_`` are those of the group."""

_OPTIONS: Mapping[str, str] = {
    "compute_loss_func": "compute the loss in the model's forward",
    "model_init": "make the model, and a PlanTrainer for each one",
}
"""Arguments of ``transformers.Trainer`` that must be None."""

_METHODS: Mapping[str, str] = {
    "compute_loss": "compute the loss in the model's forward, which is captured",
}
"""Methods that a subclass must not replace, because a program does their work."""


def check_arguments(args: TrainingArguments) -> None:
    """Refuse arguments that no plan has.

    Raises:
        PlanError: a field is set that does not work; the message names it and what to use.
    """
    for name, instead in REFUSED.items():
        if value := getattr(args, name, None):
            raise _refusal(f"{name}={value!r}", instead)
    for name, (allowed, instead) in _CHOICES.items():
        if (
            value := str(getattr(getattr(args, name), "value", getattr(args, name)))
        ) not in allowed:
            raise _refusal(f"{name}={value!r}", f"{', '.join(allowed)}; or {instead}")
    for name, wanted in _LOADERS.items():
        if (value := getattr(args.accelerator_config, name)) != wanted:
            raise _refusal(
                f"accelerator_config={{{name!r}: {value!r}}}",
                "leave it out: every rank has the whole batch",
            )
    for field in fields(TrainingArguments):
        if field.name in WORKING or field.name in REFUSED:
            continue
        default = field.default
        if field.default_factory is not MISSING:
            default = field.default_factory()
        if (value := getattr(args, field.name)) != default:
            raise _refusal(
                f"{field.name}={value!r}", f"its default, {default!r}: it is newer than this table"
            )


def check_options(options: Mapping[str, Any], optimizer: Any) -> None:
    """Refuse arguments of the trainer that no plan has.

    Args:
        options: those of ``transformers.Trainer``, by name.
        optimizer: the first of its ``optimizers``.

    Raises:
        PlanError: as ``check_arguments``.
    """
    for name, instead in _OPTIONS.items():
        if options.get(name) is not None:
            raise _refusal(f"{name}=...", instead)
    if optimizer is not None:
        raise _refusal(
            "optimizers=(optimizer, ...)",
            "optimizer_cls_and_kwargs=(Class, options), or a create_optimizer of a subclass, over "
            "self.parallel.parameters()",
        )


def check_methods(of: type, base: type) -> None:
    """Refuse methods of a subclass that a program replaces.

    Raises:
        PlanError: as ``check_arguments``.
    """
    for name, instead in _METHODS.items():
        if getattr(of, name) is not getattr(base, name):
            raise _refusal(f"{of.__name__}.{name}", instead)


def _refusal(said: str, instead: str) -> PlanError:
    return PlanError(f"PlanTrainer does not take {said}; use instead: {instead}.")
