"""Terms: what the segments of a block add to sums and buffers, which a plan decides.

A result that is added to a partial sum, to the loss or to a buffer leaves nothing else behind: no
value would be missing if its segment did not run. So a program is compared with its plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from superscaler_core.errors import PlanError
from superscaler_core.plan import Device
from superscaler_core.program.instruction import StepInstruction
from superscaler_core.program.value import Role

if TYPE_CHECKING:
    from superscaler_core.program.step_program import StepProgram

_TERM_ROLES = frozenset({Role.PARTIAL, Role.LOSS, Role.STATE})

Terms = Counter[tuple[str, Device]]
"""The segments that add to a value, each with its device."""


def check_terms(program: StepProgram, own: StepProgram) -> None:
    """Refuse a program whose blocks add other terms than those of its plan.

    The loss and buffers change in the runs in which they change in the plan. A partial sum belongs
    to the run that makes it, whichever that is, and has all its terms there.

    Args:
        program: a program.
        own: the plan's own program.

    Raises:
        PlanError: names the block, the value, and the segment whose term is missing or too much.
    """
    halves = [None] if own.num_halves == 1 else range(own.num_halves)
    for half in halves:
        wanted = {key: _terms(block, half) for key, block in own.blocks.items()}
        partial = {
            (stage, key): terms
            for (stage, _), mine in wanted.items()
            for key, terms in mine.items() if _is_partial(key)
        }  # fmt: skip
        for (stage, run), block in program.blocks.items():
            mine = _terms(block, half)
            there = {k: t for k, t in wanted.get((stage, run), {}).items() if not _is_partial(k)}
            there |= {key: partial.get((stage, key), Terms()) for key in mine if _is_partial(key)}
            for key in mine | there:
                _compare(f"stage {stage} {run}", key, mine.get(key), there.get(key))


def _is_partial(key: str) -> bool:
    return key.startswith(f"{Role.PARTIAL}:")


def _terms(block: Iterable[StepInstruction], half: int | None) -> dict[str, Terms]:
    """What segments add in a block, by the value that they add to."""
    found: dict[str, Terms] = {}
    for i in block:
        for value in i.writes if i.half == half else ():
            if value.role in _TERM_ROLES:
                terms = found.setdefault(value.key, Terms())
                terms.update((i.name, device) for device in value.devices or i.devices)
    return found


def _compare(title: str, key: str, mine: Terms | None, wanted: Terms | None) -> None:
    mine, wanted = mine or Terms(), wanted or Terms()
    for terms, words in ((wanted - mine, "has no"), (mine - wanted, "has one more")):
        for name, device in sorted(terms):
            raise PlanError(f"{title}: {key} {words} term of {name} on device {device}.")
