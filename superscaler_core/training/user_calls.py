"""UserCalls: which call of the user a rank is in, and after a failure, which one every rank is in.

A rank that waits for another one in vain knows the collective that it waits in. Its user wants to
know which of *their* calls that belongs to, and what the other ranks do instead. So every rank
leaves a note when a call begins and when it ends, and errors of communication end with the notes of
all ranks.
"""

from __future__ import annotations

import json
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from torch import Tensor

import rvdcomm as rv
from superscaler_core.run.trail import Trail
from superscaler_core.run.transport import Transport
from superscaler_core.training import flight_record

P = ParamSpec("P")
T = TypeVar("T")

FROM_PEERS = (rv.CommError, TimeoutError)
"""Errors by which a rank learns that another one failed, or did not come."""

MAX_CALLS = 256
"""A rank remembers so many of its calls."""

MAX_BATCH_CHARS = 300
"""Characters of a batch's shapes in a note."""

MAX_RANKS = 8
"""An error lists so many ranks that are in one place."""

SETTLE_SECS = 1.0
"""After a failure, ranks that are still in a call may take this time to say how they end."""

_PAUSE_SECS = 0.02

_PAUSE_SECS_PER_RANK = 1e-3
"""All ranks ask the store for the notes of all ranks, so many ranks ask less often."""


@dataclass(frozen=True, slots=True)
class UserCall:
    """A collective call of the user on one rank.

    Attributes:
        name: the method, such as ``step``.
        number: how many calls of this name the rank has made, with this one.
        seq: how many calls of any name; equal on all ranks, as they make the same calls.
        batch: the shapes and dtypes that it was given, if it takes a batch.
        begun_ns, ended_ns: when it began and ended, by ``time.time_ns``; 0 while it runs.
        position: the instruction in which it failed; empty if it did not, or not in its program.
        failed: whether it raised an error.
    """

    name: str
    number: int
    seq: int
    batch: str = ""
    begun_ns: int = 0
    ended_ns: int = 0
    position: str = ""
    failed: bool = False

    def __str__(self) -> str:
        return f"{self.name} {self.number}" + (f" with {self.batch}" if self.batch else "")

    def where(self, now_ns: int) -> str:
        """Where a rank whose last call this is stands, as errors say it.

        >>> UserCall("step", 3, 5, "x [4, 6] float32", ended_ns=2 * 10**9).where(5 * 10**9)
        'in no call: its last, step 3 with x [4, 6] float32, ended 3.0 s ago'
        """
        if self.ended_ns and not self.failed:
            return f"in no call: its last, {self}, ended {(now_ns - self.ended_ns) / 1e9:.1f} s ago"
        if not self.ended_ns:
            return f"in {self}, which still runs there"
        return f"in {self}, {f'at {self.position}' if self.position else 'outside of its program'}"


class UserCalls:
    """The collective calls of a user to one model, on this rank.

    Law (tests/superscaler_core/training/test_user_calls.py): an error of communication says for
    each rank which call it is in, or which one was its last.

    Args:
        ranks: all ranks of the model.
        transport: carries notes between them.

    Attributes:
        trail: gives the instructions of the program that ran last.
        calls: the last calls, with the present one.
    """

    def __init__(self, ranks: Sequence[int], transport: Transport) -> None:
        self._ranks, self._transport = ranks, transport
        self._numbers = Counter[str]()
        self._is_inside = False
        self.trail: Callable[[], Trail] = Trail
        self.calls: deque[UserCall] = deque(maxlen=MAX_CALLS)
        if len(ranks) > 1:
            flight_record.recorded(self)

    @property
    def global_ranks(self) -> tuple[int, ...]:
        """The numbers of the ranks among all processes of the job."""
        known = self._transport.global_ranks
        return tuple(known[rank] for rank in self._ranks)

    @contextmanager
    def inside(
        self, name: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Iterator[None]:
        """A call of the user; a call inside of another one is part of it.

        Args:
            name: the method.
            args, kwargs: what it was given, of which shapes are told.
        """
        if self._is_inside:
            yield
            return
        self._is_inside = True
        try:
            self._begin(name, args, kwargs or {})
            yield
            self._end()
        except BaseException as error:
            self._end(failed=True)
            if isinstance(error, FROM_PEERS) and len(self._ranks) > 1:
                error.args = (f"{error}\n{self.places()}", *error.args[1:])
                flight_record.dump_if_asked()
            raise
        finally:
            self._is_inside = False

    def _begin(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._numbers[name] += 1
        batch = _shapes(args, kwargs)
        number, seq = self._numbers[name], self._numbers.total()
        self._put(UserCall(name, number, seq, batch, time.time_ns()))

    def _end(self, *, failed: bool = False) -> None:
        call = self.calls.pop()
        position = self.position(call) if failed else ""
        self._put(replace(call, ended_ns=time.time_ns(), position=position, failed=failed))

    def _put(self, call: UserCall) -> None:
        self.calls.append(call)
        if len(self._ranks) > 1:
            # Without a group nobody can be told, and the call itself will say that.
            with suppress(rv.CommError):
                self._transport.tell(json.dumps(asdict(call)))

    def position(self, call: UserCall) -> str:
        """The instruction that the program is in, if it began in this call."""
        trail = self.trail()
        last = trail.last
        return "" if last is None or last.since_ns < call.begun_ns else trail.position

    def _told(self) -> dict[int, UserCall]:
        """The last call of every rank, as far as it is known."""
        with suppress(rv.CommError):
            return {rank: UserCall(**json.loads(t)) for rank, t in self._transport.told().items()}
        return {}

    def places(self) -> str:
        """Where all ranks are, a line for each place, as far as they said so."""
        deadline = time.monotonic() + SETTLE_SECS
        told = self._told()
        while time.monotonic() < deadline and any(not call.ended_ns for call in told.values()):
            time.sleep(_PAUSE_SECS + _PAUSE_SECS_PER_RANK * len(self._ranks))
            told = self._told()
        now_ns, ranks_at = time.time_ns(), dict[str, list[int]]()
        for rank in self._ranks:
            place = told[rank].where(now_ns) if rank in told else "in no call: it has made none"
            ranks_at.setdefault(place, []).append(rank)
        return "\n".join(f"{_text(ranks)} {place}." for place, ranks in ranks_at.items())


def user_call(
    method: Callable[Concatenate[Any, P], T],
) -> Callable[Concatenate[Any, P], T]:
    """A method that is a call of the user; what it belongs to has ``calls``, a ``SameCall``."""

    @wraps(method)
    def call(owner: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with owner.calls.users.inside(method.__name__):
            return method(owner, *args, **kwargs)

    return call


def _text(ranks: Sequence[int]) -> str:
    """Some ranks with their verb; the first few if there are many."""
    if len(ranks) == 1:
        return f"Rank {ranks[0]} is"
    more = f" and {len(ranks) - MAX_RANKS} more" if len(ranks) > MAX_RANKS else ""
    return f"Ranks {', '.join(map(str, ranks[:MAX_RANKS]))}{more} are"


def _shapes(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    given = [*map(_form, args), *(f"{name} {_form(value)}" for name, value in kwargs.items())]
    text = ", ".join(given)
    return text if len(text) <= MAX_BATCH_CHARS else f"{text[:MAX_BATCH_CHARS]}..."


def _form(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return type(value).__name__
