"""One device: what a ``transformers.Trainer`` sees instead of a world of processes.

The engine makes a call on all ranks equal to the call on one device. So the library's loop has to
do on every rank what it does on one device: the same batches in the same order, no sum over ranks.
Only what it writes depends on the rank.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType, recursively_apply
from transformers import TrainingArguments


class OneDeviceState:
    """The state of processes that ``TrainingArguments`` read: one device, and who writes.

    Args:
        state: the state of ``accelerate``, which joined the world.
    """

    num_processes = 1
    distributed_type = DistributedType.NO

    def __init__(self, state: Any) -> None:
        self._state = state
        is_joined = dist.is_initialized()
        self.process_index = dist.get_rank() if is_joined else 0
        self.local_process_index = int(os.environ.get("LOCAL_RANK", self.process_index))
        self.is_main_process = self.process_index == 0
        self.is_local_main_process = self.local_process_index == 0
        self.device = state.device

    @contextmanager
    def as_first(self) -> Iterator[None]:
        """Inside, this process has the number 0.

        Workers of a ``DataLoader`` seed themselves by that number, and have to draw the same random
        numbers on all ranks.
        """
        number, self.process_index = self.process_index, 0
        try:
            yield
        finally:
            self.process_index = number

    def __reduce__(self) -> Any:
        # Saved arguments (training_args.bin) are then those of the library alone.
        return copy.copy, (self._state,)


class OneDeviceAccelerator(Accelerator):  # type: ignore[misc]
    """An accelerator that wraps loaders as on one device, and neither models nor optimizers."""

    num_processes = 1
    process_index = 0
    distributed_type = DistributedType.NO
    use_distributed = False

    def prepare_optimizer(self, optimizer: Any, device_placement: Any = None) -> Any:
        """The optimizer as it is: its parameters are on their device, and nothing is scaled."""
        return optimizer

    def gather(self, tensor: Any) -> Any:
        """The tensors as they are: every rank has all of them."""
        return tensor

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """The values as they are; of the last batch, as many as it has samples.

        The library repeats the loss of a batch as often as a full batch has samples.
        """
        state = self.gradient_state
        rest = state.remainder if state.end_of_dataloader else 0
        if rest <= 0:
            return input_data
        return recursively_apply(lambda tensor: tensor[:rest], input_data)

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False
    ) -> Any:
        """The tensors as they are: they have the same shapes on all ranks."""
        return tensor


def on_one_device(args: TrainingArguments) -> TrainingArguments:
    """A copy of the arguments, which say that there is one device; the rank stays that of torch."""
    device = args.device  # Joins the world that torchrun asks for, if there is none.
    args = copy.copy(args)
    args.distributed_state = OneDeviceState(args.distributed_state)
    # More would make the library split a batch over GPUs of one process.
    args._n_gpu = int(device.type == "cuda")
    return args
