"""FormProblem: calls, forms in which they read and write tensors, and costs of changing forms."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from superscaler_core.errors import PlanError
from superscaler_core.published.hidup.recurrence import DuplexStage

Form = Hashable
"""How devices hold a tensor; in the problem it is only a name."""


@dataclass(frozen=True, slots=True)
class Signature:
    """One way to run a call on all devices.

    Attributes:
        reads, writes: the forms of the call's tensors.
        work: computing of one half of a microbatch, and the communication that may start with the
            stage, such as that of weights, which exist before.
        name: for people.
    """

    reads: tuple[Form, ...]
    writes: tuple[Form, ...]
    work: DuplexStage
    name: str = ""


@dataclass(frozen=True, slots=True)
class FormCall:
    """One call of a model, with all ways to run it.

    Attributes:
        name: for people.
        reads, writes: the tensors, by number; every tensor is written once.
        signatures: at least one.
    """

    name: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    signatures: tuple[Signature, ...]


@dataclass(frozen=True, eq=False)
class FormProblem:
    """Calls in a fixed order that follows the data flow.

    Attributes:
        calls: in that order.
        reforms: for every tensor the communication that changes one form to another, as a stage
            without computing; a missing pair is impossible.
        results: the forms that tensors must have at the end.
    """

    calls: tuple[FormCall, ...]
    reforms: Mapping[int, Mapping[tuple[Form, Form], DuplexStage]]
    results: Mapping[int, Form] = field(default_factory=dict)

    def __post_init__(self) -> None:
        written: set[int] = set()
        for call in self.calls:
            fits = all(
                (len(s.reads), len(s.writes)) == (len(call.reads), len(call.writes))
                for s in call.signatures
            )
            early = set(call.reads) - written
            if not call.signatures or not fits or early or written & set(call.writes):
                raise PlanError(
                    f"call {call.name}: it has a signature at least, each with one form of every "
                    "tensor; it reads what calls before it wrote, and each tensor is written once."
                )
            written |= set(call.writes)

    @cached_property
    def last_use(self) -> Mapping[int, int]:
        """The number of the last call that needs each tensor; for a result, the number of calls."""
        found = {t: i for i, call in enumerate(self.calls) for t in (*call.writes, *call.reads)}
        return found | dict.fromkeys(self.results, len(self.calls))


@dataclass(frozen=True, slots=True)
class FormStage:
    """One stage of a strategy.

    Attributes:
        reforms: (tensor, form before, form after) of its communications.
        signatures: for each of its calls, in order, the number in ``FormCall.signatures``.
        work: its communication and its computing.
    """

    reforms: tuple[tuple[int, Form, Form], ...]
    signatures: tuple[int, ...]
    work: DuplexStage


@dataclass(frozen=True, slots=True)
class FormStrategy:
    """A signature for every call, in stages, with the seconds of a step by the recurrence."""

    stages: tuple[FormStage, ...]
    secs: float

    @property
    def signatures(self) -> tuple[int, ...]:
        """The number of the signature of every call."""
        return tuple(number for stage in self.stages for number in stage.signatures)
