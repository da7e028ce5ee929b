"""Agreed: a block of code that fails on all ranks, with one error, if it fails on one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import rvdcomm as rv

MAX_ERROR_CHARS = 2000
"""Longer messages are cut, because every rank gets those of all ranks."""


@dataclass
class Told:
    """What ranks tell each other at the end of a block.

    Attributes:
        here: the text of this rank; set it inside the block.
        of_all: after the block, the texts of all ranks in their order.
    """

    here: str = ""
    of_all: Sequence[str] = field(default_factory=list)


@contextmanager
def agreed(
    what: str, ranks: Sequence[int], texts_of_all: Callable[[str], list[str]]
) -> Iterator[Told]:
    """A block that ends on all ranks together; collective.

    Args:
        what: the request, as it begins messages.
        ranks: the numbers of all ranks.
        texts_of_all: gives every rank's text to every rank; collective.

    Raises:
        CheckpointError: the block failed on a rank; raised on all ranks. Whatever failed, it is
            this class; on the rank itself the cause follows.
        CommError: another rank is lost, so nothing can be agreed.
    """
    told, fault = Told(), None
    try:
        yield told
    except rv.CommError:
        raise
    except Exception as error:
        fault = error
    sent = json.dumps([_message(fault), told.here])
    found = [json.loads(text) for text in texts_of_all(sent)]
    for rank, (message, _) in zip(ranks, found, strict=True):
        if message:
            raise rv.CheckpointError(f"{what}: rank {rank}: {message}") from fault
    told.of_all = [text for _, text in found]


def _message(fault: Exception | None) -> str:
    """What an error says, with its class unless it is one of ours, which say what was asked."""
    if fault is None:
        return ""
    text = str(fault)[:MAX_ERROR_CHARS]
    is_ours = type(fault).__module__.partition(".")[0] in ("rvdcomm", "superscaler_core")
    return text if is_ours and text else f"{type(fault).__name__}: {text}"
