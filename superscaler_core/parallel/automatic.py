"""Automatic: the plan that ``parallelize(plan="auto")`` searches for, the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

import rvdcomm as rv
from superscaler_core.cost import PROFILES, DeviceProfile
from superscaler_core.errors import CaptureError, PlanError
from superscaler_core.front_end.model_call import ModelCall
from superscaler_core.parallel.sprogram import SProgram
from superscaler_core.planners.auto import Setting, auto
from superscaler_core.planners.auto.families import Filling
from superscaler_core.planners.search.search import search
from superscaler_core.run.first_values import share_buffers
from superscaler_core.run.transport import Transport

AUTO = "auto"

_ERRORS: Mapping[str, type[Exception]] = {"PlanError": PlanError, "CaptureError": CaptureError}
"""Errors of the caller, by name; all ranks raise them."""


def searched(
    model: torch.nn.Module,
    example: ModelCall,
    num_ranks: int,
    transport: Transport,
    device: torch.device,
    *,
    topology: rv.Topology | None = None,
    memory_limit: int | None = None,
    master_dtype: str | None = None,
    profile: DeviceProfile | None = None,
    budget_secs: float = 60.0,
    max_tried: int = 0,
    can_cut: Callable[[int], bool] = lambda num: True,
) -> SProgram:
    """The plan that the first rank finds for a whole batch; collective over all ranks.

    Args:
        model, topology, memory_limit: as in ``parallelize``.
        example: a call with a whole batch.
        num_ranks: number of all ranks, which are numbered from 0.
        transport: shares the plan that was found.
        device: where this rank computes.
        master_dtype: as in ``compile``.
        profile: profile of every device; if None, the preset of this rank's GPU, or else a V100's.
        budget_secs, max_tried: as in ``search``.
        can_cut: whether the loss of a batch is a sum over so many microbatches; called on the first
            rank.

    Raises:
        PlanError: nothing that was tried fits.
        CaptureError: the model cannot be captured.
        RuntimeError: the search failed for another reason on the first rank, which raises its own
            error; so no rank waits for one that failed.
    """
    chosen = profile or _profile_of(device)
    batch = next((len(x) for x in example.tensors if x.dim()), 1)
    text = ""
    fault: Exception | None = None
    try:
        if transport.rank == 0:
            found = search(
                model,
                example,
                topology=topology or rv.Topology.single_host(num_ranks, 5e-6, 200e9),
                batch=batch,
                # Without other planners: a setting also fills the plans of other batches.
                planner=auto,
                memory_bytes=memory_limit,
                budget_secs=budget_secs,
                max_tried=max_tried,
                samples=() if batch == 1 or can_cut(_least_factor(batch)) else (batch,),
                profile=chosen,
                devices=range(num_ranks),
                master_dtype=master_dtype,
            )
            sprogram = found.best.candidate.sprogram
            assert isinstance(sprogram, Filling)
            text = str(sprogram.setting)
    except Exception as error:
        fault = error
    # The other ranks wait for this text, so the first rank sends one in any case.
    sent = f"{_kind(fault)}\n{fault or text}"
    kind, _, text = _shared(sent, num_ranks, transport, device).partition("\n")
    if fault is not None:
        raise fault
    if kind in _ERRORS:
        raise _ERRORS[kind](text)
    if kind:
        raise RuntimeError(f"the search for a plan failed on rank 0: {kind}: {text}")
    setting = Setting.parse(text)
    num = batch // setting.microbatch
    return SProgram(Filling(setting, chosen, 0, num), {"microbatches": num})


def _least_factor(number: int) -> int:
    return next(i for i in range(2, number + 1) if number % i == 0)


def _kind(fault: Exception | None) -> str:
    """The name of an error's class in ``_ERRORS``, or else its own; empty if there is no error."""
    if fault is None:
        return ""
    return next((n for n, kind in _ERRORS.items() if isinstance(fault, kind)), type(fault).__name__)


def _profile_of(device: torch.device) -> DeviceProfile:
    name = torch.cuda.get_device_name(device).lower() if device.type == "cuda" else ""
    return next((PROFILES[each] for each in PROFILES if each in name), PROFILES["v100"])


def _shared(text: str, num_ranks: int, transport: Transport, device: torch.device) -> str:
    """The first rank's text, on all ranks."""
    data = list(text.encode())
    size = torch.tensor([len(data)])
    share_buffers({"size": size}, num_ranks, transport, device)
    letters = torch.tensor(data if transport.rank == 0 else [0] * int(size), dtype=torch.uint8)
    share_buffers({"text": letters}, num_ranks, transport, device)
    return bytes(letters.tolist()).decode()
