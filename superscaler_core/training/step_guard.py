"""StepGuard: a batch that fails on one rank is skipped by all, as if it had not been tried."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from superscaler_core.run.rank import Rank
from superscaler_core.run.together import sum_of_all
from superscaler_core.run.transport import Transport
from superscaler_core.training.user_calls import FROM_PEERS


@dataclass
class StepGuard:
    """What became of a guarded block.

    Attributes:
        skipped: after the block, whether it failed on a rank; the same on all ranks.
        reason: the first rank that failed, and its error.
    """

    skipped: bool = False
    reason: str = ""


@contextmanager
def guarded(ranks: Sequence[Rank], transport: Transport) -> Iterator[StepGuard]:
    """A block of steps that succeeds on all ranks, or is skipped by all; collective.

    Args:
        ranks: this rank of all programs of the model; the first one stores its parameters.
        transport: moves tensors between ranks.

    Raises:
        CommError: a rank is lost.
    """
    guard, before = StepGuard(), Before(ranks)
    is_agreed = False
    try:
        yield guard
        is_agreed = _all_succeeded(ranks[0], transport)
        # A rank that has left may fail in its next block, while another one is here still. It
        # leaves only when all are past the first sum, and so know that all succeeded.
        _all_succeeded(ranks[0], transport)
    except Exception as error:
        if not is_agreed:
            guard.reason = recovered(error, transport)
            guard.skipped = True
            before.restore()
            warnings.warn(f"step_guard: all ranks skip this batch: {guard.reason}", stacklevel=3)
    except BaseException as error:
        transport.fail(error)
        raise


def _all_succeeded(rank: Rank, transport: Transport) -> bool:
    """Wait until all ranks come here; raises if one has failed. Collective."""
    sum_of_all(torch.zeros(()), rank.tables, transport)
    return True


def recovered(fault: Exception, transport: Transport) -> str:
    """Let all ranks communicate again; returns the first rank with a fault of its own. Collective.

    Args:
        fault: the error on this rank.
        transport: moves tensors between ranks.
    """
    transport.fail(fault)
    own = "" if isinstance(fault, FROM_PEERS) else f"{type(fault).__name__}: {fault}"
    texts = enumerate(transport.restart(own))
    return next((f"rank {rank}: {text}" for rank, text in texts if text), str(fault))


class Before:
    """What steps change on one rank, as it was: gradients, buffers, and counts of random draws."""

    def __init__(self, ranks: Sequence[Rank]) -> None:
        stored = ranks[0].weights.stored.values()
        self._grads: list[tuple[nn.Parameter, Tensor | None]] = [
            (p, None if p.grad is None else p.grad.clone()) for p in stored
        ]
        self._buffers: list[tuple[Tensor, Tensor]] = [
            (buffer, buffer.clone()) for rank in ranks for buffer in rank.changing.values()
        ]
        self._draws: Mapping[Rank, tuple[int, int]] = {rank: rank.draws for rank in ranks}

    def restore(self) -> None:
        """Give all of it the values that it had."""
        for parameter, grad in self._grads:
            parameter.grad = grad
        with torch.no_grad():
            for buffer, value in self._buffers:
                buffer.copy_(value)
        for rank, draws in self._draws.items():
            rank.draws = draws
