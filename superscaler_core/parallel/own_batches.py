"""OwnBatches: which samples of a dataset a rank passes to the steps of a parallel model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.utils.data import Sampler


@dataclass(eq=False)
class OwnBatches(Sampler[list[int]]):
    """The indices of one rank's samples, step by step.

    Laws (tests/superscaler_core/parallel/test_own_batches.py): in an epoch every sample is passed
    once, whatever the number of shares; the shares of a step, one after another, are a batch in the
    order of the epoch; all ranks take as many steps, and no share is empty.

    Attributes:
        num_samples: samples of the dataset.
        batch_size: samples of the whole batch of a step.
        share, num_shares: which part of every batch this rank passes, and into how many parts
            batches are cut.
        shuffle: whether each epoch has an order of its own.
        seed: of the orders, the same on all ranks.
        drop_last: whether a last batch with fewer samples is left out. If it has fewer samples
            than there are shares, it is otherwise a part of the batch before.
        epoch: number of the epoch, for its order.
    """

    num_samples: int
    batch_size: int
    share: int = 0
    num_shares: int = 1
    shuffle: bool = False
    seed: int = 0
    drop_last: bool = False
    epoch: int = 0

    def __post_init__(self) -> None:
        least = min(self.num_samples, self.batch_size)
        if least < self.num_shares:
            raise ValueError(
                f"batches of {self.batch_size} of {self.num_samples} samples are cut among "
                f"{self.num_shares} ranks: each needs at least one sample of every batch."
            )

    def set_epoch(self, epoch: int) -> None:
        """Use the order of an epoch, as ``DistributedSampler.set_epoch``."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self._batches())

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self._batches():
            n = len(batch)
            lo, hi = (n * (self.share + i) // self.num_shares for i in (0, 1))
            yield list(batch[lo:hi])

    def _batches(self) -> list[Sequence[int]]:
        order: Sequence[int] = range(self.num_samples)
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.num_samples, generator=generator).tolist()
        found = [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]
        if self.drop_last and found and len(found[-1]) < self.batch_size:
            return found[:-1]
        if len(found) > 1 and len(found[-1]) < self.num_shares:
            found[-2:] = [[*found[-2], *found[-1]]]
        return found
