"""SameCall: before a collective call, ranks compare which call each of them makes.

What ranks do to one model has to be the same on all of them. Without a comparison, ranks that part
either wait for each other until the group's timeout, or go on with different values. So every
collective call of a ``Trainer`` or a ``Parallel`` begins with one row of numbers from every rank: a
digest of what must be equal, and flags. Texts are exchanged only to say what differs. All ranks
read the same rows, so all raise the same error, and nothing of the call has happened before.
"""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from hashlib import blake2b
from operator import or_
from typing import Any

import torch

import rvdcomm as rv
from superscaler_core import errors
from superscaler_core.errors import PlanError
from superscaler_core.run.together import texts_of
from superscaler_core.run.transport import Transport
from superscaler_core.training.user_calls import UserCalls

_MAX_SHOWN = 300
"""Characters of a rank's value in an error."""


@dataclass
class CallRequest:
    """One rank's side of a call.

    Attributes:
        equal: what must be equal on all ranks, by the names that errors use.
        asks: what this rank asks for that all ranks then do together, a bit for each; after the
            comparison, what any rank asks for.
        form: a number; after the comparison ``is_one_form`` tells whether all ranks have the same.
    """

    equal: dict[str, str] = field(default_factory=dict)
    asks: int = 0
    form: int = 0
    is_one_form: bool = True


class SameCall:
    """Compares the collective calls of some ranks.

    Laws (tests/superscaler_core/training/test_same_call.py): all ranks raise, or none; a fault of
    one rank is raised on all, in its class.

    Attributes:
        digests: two numbers of this rank: one of the parameters that it stores, and one of what it
            did to them, which must be equal on ranks that store the same ones.
        users: the calls of the user, of which a comparison is a part.

    Args:
        ranks: the ranks, ascending.
        transport: exchanges rows and texts between them.
    """

    def __init__(self, ranks: tuple[int, ...], transport: Transport) -> None:
        self.ranks, self._transport = ranks, transport
        self.users = UserCalls(ranks, transport)
        self.digests: Callable[[], tuple[int, int]] = lambda: (0, 0)

    @contextmanager
    def prepared(self, call: str, **equal: str) -> Iterator[CallRequest]:
        """Inside this context a rank prepares a call alone; at its end all ranks compare.

        Args:
            call: the name of the call.
            equal: as in ``CallRequest``; the block may add to it.

        Raises:
            PlanError: ranks make different calls, or disagree about what must be equal.
            Exception: a rank failed in its block; it is raised on all ranks, in the rank's class.
        """
        with self.users.inside(call):
            yield from self._prepared(call, equal)

    def _prepared(self, call: str, equal: dict[str, str]) -> Iterator[CallRequest]:
        request, fault = CallRequest({"call": call, **equal}), None
        try:
            yield request
        except rv.CommError:
            raise  # Nothing can be compared with a rank that is lost.
        except Exception as error:
            fault = error
        if len(self.ranks) > 1:
            # What is prepared for the exchange outlives this call.
            with torch.inference_mode(False):
                self._compare(call, request, fault)
        elif fault is not None:
            raise fault

    def texts(self, text: str) -> dict[int, str]:
        """Every rank's text, on every rank; collective."""
        return dict(zip(self.ranks, texts_of(text, self.ranks, self._transport), strict=True))

    def rows(self, row: torch.Tensor) -> torch.Tensor:
        """Every rank's row, in the order of the ranks; collective."""
        return row[None] if len(self.ranks) == 1 else self._transport.rows(row, self.ranks)

    def _compare(self, call: str, request: CallRequest, fault: Exception | None) -> None:
        # A rank that failed may not know what is equal: it asks for the texts.
        own = [
            _digest(request.equal),
            fault is not None,
            request.asks,
            request.form,
            *self.digests(),
        ]
        rows = self._transport.rows(torch.tensor(own, dtype=torch.int64), self.ranks).tolist()
        if all(row == own for row in rows) and fault is None:
            return
        faults = {rank for rank, row in zip(self.ranks, rows, strict=True) if row[1]}
        if faults:
            self._raise(call, request, fault)
        request.asks = reduce(or_, (row[2] for row in rows))
        request.is_one_form = all(row[3] == own[3] for row in rows)
        if any(row[0] != own[0] for row in rows):
            said = {
                r: json.loads(text) for r, text in self.texts(json.dumps(request.equal)).items()
            }
            # What else differs may follow from the forms, which the caller looks at.
            names = None if request.is_one_form else ("call",)
            check_equal(said, call, names)
        first_of: dict[int, tuple[int, int]] = {}
        for rank, row in zip(self.ranks, rows, strict=True):
            *_, stored, digest = row
            other, wanted = first_of.setdefault(stored, (rank, digest))
            if digest != wanted:
                raise PlanError(
                    f"{call}: before it, ranks {other} and {rank} stepped optimizers over the same "
                    "parameters with other classes, other options (learning rate, weight decay, "
                    "...) or another number of times; each rank has to make the same optimizer, "
                    "the same changes of its groups and the same steps."
                )

    def _raise(self, call: str, request: CallRequest, fault: Exception | None) -> None:
        """Raise the fault of the first rank that has one; a rank with a fault raises its own."""
        text = json.dumps(
            [request.equal["call"], fault and type(fault).__name__, fault and str(fault)]
        )
        found = {rank: json.loads(each) for rank, each in self.texts(text).items()}
        if fault is not None:
            raise fault
        check_equal({rank: {"call": said[0]} for rank, said in found.items()}, call)
        rank, (_, kind, why) = next((r, said) for r, said in found.items() if said[1])
        raise _class_of(kind)(f"{call} failed on rank {rank}: {why}")


def check_equal(
    said: Mapping[int, Mapping[str, str]], call: str, names: Collection[str] | None = None
) -> None:
    """Raise, the same on all ranks, if two ranks say different things.

    Args:
        said: by rank, what must be equal, by name.
        call: the name of the call.
        names: what is compared; all if None.

    Raises:
        PlanError: the message names both ranks and both values.
    """
    first = min(said)
    for rank, theirs in said.items():
        if said[first].get("call") != theirs.get("call"):
            raise PlanError(
                f"rank {first} calls {said[first].get('call')} and rank {rank} calls "
                f"{theirs.get('call')}: all ranks have to make the same calls in the same order."
            )
        for name in {**said[first], **theirs} if names is None else names:
            one, other = said[first].get(name, "nothing"), theirs.get(name, "nothing")
            if one != other:
                one, other = _difference(one, other)
                raise PlanError(
                    f"{call}: ranks disagree about {name}: rank {first} has {one}, rank {rank} has "
                    f"{other}; it has to be the same on all ranks."
                )


def _difference(one: str, other: str) -> tuple[str, str]:
    """The first lines in which two texts differ, of bounded length."""
    lines, others = one.splitlines() or [""], other.splitlines() or [""]
    for a, b in zip(lines, others, strict=False):
        if a != b:
            return _bounded(a), _bounded(b)
    longer = max(lines, others, key=len)[min(len(lines), len(others))]
    pair = (longer, "nothing") if len(lines) > len(others) else ("nothing", longer)
    return _bounded(pair[0]), _bounded(pair[1])


def _bounded(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _digest(equal: Mapping[str, str]) -> int:
    return digest_of("\0".join(f"{name}\1{value}" for name, value in equal.items()))


def digest_of(text: str) -> int:
    """A number of 63 bits that is equal for equal texts in all processes."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def _class_of(kind: str) -> type[Exception]:
    """The class of an error by its name: one of ours, of rvdcomm, or of Python."""
    for place in (errors, rv, builtins):
        found: Any = getattr(place, kind, None)
        if isinstance(found, type) and issubclass(found, Exception):
            try:
                found("a text")
            except TypeError:  # Such as UnicodeDecodeError, which takes five arguments.
                continue
            return found
    return RuntimeError
