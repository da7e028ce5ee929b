"""World: the process group that torchrun asks for, and this process's place in it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from superscaler_core.errors import PlanError


@dataclass(frozen=True)
class JoinedWorld:
    """The place of this process among all processes of a group.

    Attributes:
        rank: number of this process.
        num_ranks: number of processes.
        group: the process group; None for the default group, or if there is one process alone.
    """

    rank: int
    num_ranks: int
    group: Any = None


def join_world(device: torch.device, group: Any = None) -> JoinedWorld:
    """This process's place in a group; if there is none, it is created as torchrun asks.

    A process that torchrun did not start is alone.

    Args:
        device: where tensors live: a created group uses NCCL for a GPU, and gloo for the CPU.
        group: process group; the default group if None.

    Raises:
        PlanError: this process is not in the group.
    """
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            return JoinedWorld(0, 1)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank = dist.get_rank(group)
    if rank < 0:
        raise PlanError(f"rank {dist.get_rank()} is not in the group that it gave.")
    return JoinedWorld(rank, dist.get_world_size(group), group)


def local_device() -> torch.device:
    """The GPU of this process, which becomes torch's current one; the CPU if there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device
