"""Automatic: the plan that ``parallelize(plan="auto")`` searches for, the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

import torch

import rvdcomm as rv
from superscaler_core.cost import PROFILES, DeviceProfile
from superscaler_core.cost.presets import profile_of
from superscaler_core.errors import PlanError
from superscaler_core.front_end.model_call import ModelCall
from superscaler_core.parallel.sprogram import SProgram
from superscaler_core.planners.auto import Setting, auto
from superscaler_core.planners.auto.families import Filling, named
from superscaler_core.planners.search import search
from superscaler_core.precision import Precision
from superscaler_core.run.transport import Transport
from superscaler_core.training.same_call import SameCall

AUTO = "auto"


@dataclass(frozen=True)
class AutoOptions:
    """The options of ``plan="auto"``.

    Attributes:
        profile: profile of every device, or the name of a preset; if None, the preset of this
            rank's GPU, or else a V100's.
        budget_secs, max_tried: as in ``search``.
    """

    profile: DeviceProfile | str | None = None
    budget_secs: float = 60.0
    max_tried: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.profile, str):
            object.__setattr__(self, "profile", profile_of(self.profile))
        for name in ("budget_secs", "max_tried"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
                raise PlanError(f"auto takes {name} as a number from 0, not {value!r}.")
        if not isinstance(self.profile, DeviceProfile | None):
            raise PlanError(
                "auto takes profile as a DeviceProfile or the name of one "
                f"({', '.join(PROFILES)}), not {self.profile!r}."
            )

    @classmethod
    def of(cls, plan: str, options: Mapping[str, Any] | None) -> Self:
        """Options in the text of the plan (``auto:budget_secs=5,profile=a100``), and by name.

        Raises:
            PlanError: a name or a value is not known.
        """
        options = {**_said(plan), **(options or {})}
        names = [field.name for field in fields(cls)]
        if odd := [name for name in options if name not in names]:
            raise PlanError(f"auto takes no {', '.join(odd)}; it takes {', '.join(names)}.")
        return cls(**options)


def is_auto(plan: object) -> bool:
    """Whether a plan is to be searched for: ``auto``, which options may follow."""
    return isinstance(plan, str) and plan.partition(":")[0] == AUTO


def _said(plan: str) -> dict[str, Any]:
    """The options in the text of a plan; numbers as such."""
    found: dict[str, Any] = {}
    for word in filter(None, plan.partition(":")[2].split(",")):
        name, equals, value = (part.strip() for part in word.partition("="))
        if not equals:
            raise PlanError(f"{plan}: expected auto:OPTION=VALUE,OPTION=VALUE, not {word!r}.")
        try:
            found[name] = float(value)
        except ValueError:
            found[name] = value
    return found


def searched(
    model: torch.nn.Module,
    example: ModelCall,
    num_ranks: int,
    transport: Transport,
    device: torch.device,
    *,
    topology: rv.Topology | None = None,
    memory_limit: int | None = None,
    precision: Precision = Precision(),
    options: AutoOptions = AutoOptions(),
    can_cut: Callable[[int], bool] = lambda num: True,
) -> SProgram:
    """The plan that the first rank finds for a whole batch; collective over all ranks.

    Args:
        model, topology, memory_limit: as in ``parallelize``.
        example: a call with a whole batch.
        num_ranks, transport: the ranks, numbered from 0, and what shares the plan that was found.
        device: where this rank computes.
        precision: as in ``compile``.
        options: what the caller chose.
        can_cut: whether the loss of a batch is a sum over so many microbatches; called on the first
            rank.

    Raises:
        PlanError: nothing that was tried fits.
        CaptureError: the model cannot be captured.
        RuntimeError: the search failed for another reason on the first rank, which raises its own
            error; so no rank waits for one that failed.
    """
    calls = SameCall(tuple(range(num_ranks)), transport)
    assert not isinstance(options.profile, str), "names become profiles"
    chosen = options.profile or _profile_of(device)
    batch = next((len(x) for x in example.tensors if x.dim()), 1)
    factor = next((i for i in range(2, batch + 1) if batch % i == 0), 1)
    text = ""
    # The other ranks wait for this text, and learn of an error of the first rank.
    with calls.prepared("the search for a plan"):
        if transport.rank == 0:
            found = search(
                model,
                example,
                topology=topology or rv.Topology.single_host(num_ranks, 5e-6, 200e9),
                batch=batch,
                # Without other planners: a setting also fills the plans of other batches.
                planner=auto,
                memory_bytes=memory_limit,
                budget_secs=options.budget_secs,
                max_tried=int(options.max_tried),
                samples=() if factor == 1 or can_cut(factor) else (batch,),
                profile=chosen,
                devices=range(num_ranks),
                precision=precision,
            )
            sprogram = found.best.candidate.sprogram
            assert isinstance(sprogram, Filling)
            text = str(sprogram.setting)
    return filled(Setting.parse(calls.texts(text)[0]), batch, chosen)


def pasted(plan: str, example: ModelCall, num_ranks: int, device: torch.device) -> SProgram | None:
    """The plan that a name in the table of ``search`` stands for; None for other texts.

    Args:
        plan: such as ``hybrid dp=2 tp=2 pp=1 samples=4 zero=1``.
        example, num_ranks, device: as in ``searched``.

    Raises:
        PlanError: the name has another form, or is of another number of devices or batch.
    """
    setting = named(plan)
    if setting is None:
        return None
    sides = setting.dp * setting.tp * setting.pp
    batch = next((len(x) for x in example.tensors if x.dim()), 1)
    if sides != num_ranks or batch % setting.microbatch:
        raise PlanError(
            f"plan={plan!r} is of {sides} devices and microbatches of {setting.microbatch} "
            f"samples; here are {num_ranks} and a batch of {batch}."
        )
    return filled(setting, batch, _profile_of(device))


def filled(setting: Setting, batch: int, profile: DeviceProfile) -> SProgram:
    """What fills plans by a setting, for a whole batch of so many samples."""
    num = batch // setting.microbatch
    return SProgram(Filling(setting, profile, 0, num), {"microbatches": num})


def _profile_of(device: torch.device) -> DeviceProfile:
    name = torch.cuda.get_device_name(device).lower() if device.type == "cuda" else ""
    return next((PROFILES[each] for each in PROFILES if each in name), PROFILES["v100"])
