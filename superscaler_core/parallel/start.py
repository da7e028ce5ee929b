"""Parallelize: from a model and the name of a plan to an object that trains it, in one call."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import rvdcomm as rv
from superscaler_core.errors import PlanError
from superscaler_core.front_end.model_call import ModelCall
from superscaler_core.hugging_face import give_buffers, is_config, plan_of_config, saved_on_meta
from superscaler_core.levels import levels_of
from superscaler_core.parallel.automatic import AutoOptions, is_auto, pasted, searched
from superscaler_core.parallel.batch import Batch
from superscaler_core.parallel.parallel import Parallel
from superscaler_core.parallel.programs import Programs
from superscaler_core.parallel.sprogram import SProgram
from superscaler_core.parallel.two_passes import TwoPasses
from superscaler_core.parallel.whole_loss import WholeLoss, prepared
from superscaler_core.precision import Precision
from superscaler_core.run.transport import DistTransport
from superscaler_core.training.first_values import share_buffers
from superscaler_core.training.same_call import SameCall
from superscaler_core.training.world import join_world, local_device


def parallelize(
    model: nn.Module,
    args: Sequence[Any] | Mapping[str, Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    plan: str | Callable[..., None] = "data_parallel",
    options: Mapping[str, Any] | None = None,
    batch: Batch | None = None,
    results: Sequence[str | int] = (),
    step_results: Sequence[str | int] = (),
    whole_loss: Callable[..., torch.Tensor] | None = None,
    group: Any = None,
    topology: rv.Topology | rv.Network | None = None,
    memory_limit: int | None = None,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    weights: str | Path | None = None,
    knobs: Mapping[str, Any] | None = None,
) -> Parallel:
    """Train a model by a plan on all ranks of a process group; collective over the group.

    Each rank gives the same model; it is captured, and each rank keeps its boxes of the parameters.
    They start with the values that the first rank's model has, and its buffers are given to all
    ranks' models, so seeds of ranks may differ. The model itself is kept to capture batches of
    other shapes; its parameters stay as they are and are no longer used.

    Args:
        model: as in ``capture``; on the CPU, a GPU, or the meta device (then ``load`` or
            ``load_state_dict`` gives it values).
        args, kwargs: an example of a whole batch of one step, by position and by name (``args`` may
            be a mapping too); of tensors only shapes and dtypes matter.
        plan: name of a plan (``docs/plans.md``), which options may follow as a text, such as
            ``"hybrid:tp=2,pp=2"``; or a file of decisions (``"best.plan"``), whose ranges are in
            proportion for batches of other sizes; or a name in the table of ``search``; or a
            function that fills a ``Plan``; or a ``DistributedConfig`` of transformers; or
            ``"auto"``: the first rank searches for one (``docs/planners.md``), and its options
            are ``profile``, ``budget_secs`` and ``max_tried`` of ``search``, such as
            ``"auto:budget_secs=5"``.
        options: options of the plan as values, by name, such as ``{"tp": 2, "pp": 2}``; they take
            precedence over those in the text.
        batch: which dims of the inputs have the samples, along which a plan cuts the batch, and
            whether every rank passes the whole batch or samples of its own; if None, dim 0 of
            every input has them, and every rank passes the whole batch.
        results: what ``evaluate`` returns beside the loss, as in ``capture``.
        step_results: what ``step`` leaves in ``results`` of what is returned here, likewise.
        whole_loss: a loss of what the model returns for the whole batch, for a model that returns
            features instead of a loss, such as one of a contrastive loss. A plan with microbatches
            then computes the features of all of them first, one loss, and then their backwards.
        group: process group; if None the default group, which is created as torchrun asks if there
            is none. A process that torchrun did not start trains alone.
        topology: hosts and links that communication is planned for, or a network, whose levels
            decide what is near; one host if None.
        memory_limit: bytes of memory that each device has; not checked if None.
        seed: seed of dropout.
        dtype: dtype of stored parameters; the model's if None. With float32 for a model in bfloat16
            the optimizer updates master weights.
        device: where this rank computes; the device of the model if None, or, if that is the meta
            device, this process's GPU if there is one.
        weights: a folder with the parameters' first values: one of ``save_pretrained`` of
            transformers, or any checkpoint with the names of the model. Each rank reads its boxes
            alone, so the model is best made on the meta device.
        knobs: the name of ``options`` in earlier versions; taken for one release more.

    Returns:
        An object with ``step``, ``evaluate``, ``parameters``, ``save``, ``load`` and more.

    Raises:
        CaptureError: the model cannot be captured; the message says what to do.
        PlanError: the plan does not fit the model, the batch or the number of ranks.
    """
    if knobs is not None:
        warnings.warn("parallelize(knobs=...) is options=... now.", FutureWarning, stacklevel=2)
        options = {**knobs, **(options or {})}
    where = torch.device(device) if device is not None else _device_of(model)
    kept: list[str] = []
    world = join_world(where, group)
    transport = DistTransport(world.rank, world.group, topology)
    if weights is not None:
        kept = saved_on_meta(model)
        give_buffers(model)
    said, buffers = batch or Batch(), dict(model.named_buffers())
    calls = SameCall(tuple(range(world.num_ranks)), transport)
    with calls.prepared("parallelize") as request:
        if not isinstance(said, Batch):
            raise PlanError(f'batch takes an ss.Batch, such as Batch(kind="local"), not {batch!r}.')
        if kept:
            raise PlanError(
                f"weights={str(weights)!r}: buffers of the state dict are on the meta device, such "
                f"as {kept[0]}, and the forward reads them: make this model on the CPU."
            )
        precision, levels = Precision(dtype), levels_of(topology)
        example = ModelCall.of(model, args, kwargs)
        loss: WholeLoss | None = None
        if whole_loss is not None:
            if said.is_local or results or step_results:
                raise PlanError(
                    "whole_loss takes whole batches, and keeps no other results: leave "
                    'Batch(kind="local"), results and step_results out.'
                )
            model, loss, example, said = prepared(model, whole_loss, example, said)
            results = loss.names
        chosen: AutoOptions | SProgram | None = None
        if is_config(plan):
            plan, read = plan_of_config(plan, world.num_ranks)
            options = {**read, **(options or {})}
        if isinstance(plan, str):
            chosen = pasted(plan, example, world.num_ranks, where)
        if is_auto(plan):
            chosen = AutoOptions.of(str(plan), options)
        if chosen is not None and not is_auto(plan) and options:
            raise PlanError(
                f"plan={plan!r} is a name of search, which says all options: leave out "
                f"{', '.join(options)}, or give a plan's name and options."
            )
        chosen = chosen or SProgram.of(plan, options)
        if is_auto(plan) and (said.dims or said.is_local):
            raise PlanError(
                f"plan={plan!r} searches for whole batches whose samples are along dim 0, not for "
                f"{said}: name a plan."
            )
        request.equal |= {
            "the plan": plan if isinstance(plan, str) else getattr(plan, "__name__", "a function"),
            "its options": _text(options or {}),
            "what a batch is": str(said),
            "results": str((tuple(results), tuple(step_results))),
            "dtype": str(precision.master),
            "memory_limit": str(memory_limit),
            "weights": str(weights),
            "the buffers of the model": "\n".join(
                f"{name} {list(buffer.shape)} {buffer.dtype}" for name, buffer in buffers.items()
            ),
        }
    share_buffers(buffers, world.num_ranks, transport, where)
    if isinstance(chosen, AutoOptions):
        trial = Programs(model, SProgram.of("data_parallel"), world.num_ranks, is_silent=True)
        chosen = searched(
            model, example, world.num_ranks, transport, where, options=chosen,
            topology=levels, memory_limit=memory_limit, precision=precision,
            can_cut=partial(trial.can_cut, example),
        )  # fmt: skip
    programs = Programs(
        model,
        chosen,
        world.num_ranks,
        batch=said,
        results=results,
        step_results=step_results,
        is_silent=world.rank > 0,
        topology=levels,
        memory_limit=memory_limit,
        precision=precision,
    )
    how: dict[str, Any] = {"seed": seed, "dtype": dtype, "device": where, "weights": weights}
    if loss is not None:
        return TwoPasses(programs, example, transport, whole_loss=loss, **how)
    return Parallel(programs, example, transport, **how)


def _text(options: Mapping[str, Any]) -> str:
    """Options as a text that is equal on all ranks; of other than plain values, their class."""
    return ", ".join(
        f"{name}={value!r}" if isinstance(value, bool | int | float | str | tuple | None)
        else f"{name}={type(value).__name__}"
        for name, value in sorted(options.items())
    )  # fmt: skip


def _device_of(model: nn.Module) -> torch.device:
    """The model's device; that of this process if the model is on the meta device."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    return local_device() if device.type == "meta" else device
