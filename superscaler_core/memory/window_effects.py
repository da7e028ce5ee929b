"""Window effects: what gathers, releases and reductions of weights do to a device's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from superscaler_core.graph.tensor import PTensor
from superscaler_core.memory.effects import Effect
from superscaler_core.memory.fold import Fold
from superscaler_core.memory.stored import StoredMemory, copy_bytes
from superscaler_core.memory.terms import Statement, begin
from superscaler_core.plan import Device
from superscaler_core.program.instruction import StepInstruction
from superscaler_core.program.materialized import Materialized
from superscaler_core.program.segments import Step
from superscaler_core.program.sequence import Close, Open
from superscaler_core.program.value import Role
from superscaler_core.program.verb import Phase, Verb
from superscaler_core.program.weights import Use
from superscaler_core.schedules import ActionKind


class WindowEffects:
    """Lowers communication of weights in windows.

    Args:
        made: the plan.
        here: the device.
        stored: the plan's parameters.
        places: the places of the stage's steps.

    Attributes:
        grads: the names of gradients of weights, by number.
    """

    def __init__(
        self, made: Materialized, here: Device, stored: StoredMemory, places: Mapping[Step, int]
    ) -> None:
        self._made, self._here, self._stored, self._places = made, here, stored, places
        self.grads: dict[str, int] = {}

    def number(self, name: str) -> int:
        """The number of a gradient of a weight."""
        return self.grads.setdefault(name, len(self.grads))

    def lower(self, i: StepInstruction, run: ActionKind) -> Iterator[Statement]:
        """The effects of an instruction in a run of the stage."""
        # Gradients outside windows are counted at the step's end, and copies at its start.
        if not self._made.is_of_bucket(i):
            here, uses = self._here, self._made.uses_of(i)
            mine = [u for u in uses if here in u.side.shards or here in u.storage.shards]
            yield list(_LOWER[i.kind](self, i, mine, run))

    def _gather(self, i: StepInstruction, uses: Sequence[Use], run: ActionKind) -> Iterator[Effect]:
        opened = self._opened(uses)
        # Weights that are stored on the host are first copied from it.
        arriving = opened + sum(self._stored.passing_bytes(use, self._here) for use in uses)
        if i.phase is Phase.START:
            yield _shift(buffers=arriving)
            return
        yield self._at_window(i, opens=not (run.goes_back or run is ActionKind.WEIGHTS))
        yield _shift(opened, passing_bytes=arriving if i.phase is Phase.WHOLE else 0)
        if i.phase is Phase.WAIT:
            yield _shift(buffers=-arriving)

    def _release(
        self, i: StepInstruction, uses: Sequence[Use], run: ActionKind
    ) -> Iterator[Effect]:
        # A backward of inputs (I) drops a window at the step that opens it in the forward; other
        # runs drop it at the step that closes it.
        yield self._at_window(i, opens=run is ActionKind.INPUTS)
        yield _shift(-self._opened(uses))

    def _reduce(self, i: StepInstruction, uses: Sequence[Use], _: ActionKind) -> Iterator[Effect]:
        num_bytes, on_host = self._stored.stored_grad_bytes, self._made.plan.on_host
        arriving = sum(num_bytes(use, self._here) for use in uses)
        if i.phase is not Phase.WAIT:
            is_whole = i.phase is Phase.WHOLE
            yield self._at_window(i, opens=True)
            yield _shift(passing_bytes=arriving) if is_whole else _shift(buffers=arriving)
        else:
            yield _shift(buffers=-arriving)
        if i.phase is not Phase.START:
            stays = [u for u in uses if u.reduce and u.tensor.name not in on_host]
            stored = (
                (self.number(_stored_name(u.tensor)), num_bytes(u, self._here)) for u in stays
            )
            gone = tuple(self.number(use.name) for use in uses)
            yield Effect(Fold.reduce, (gone, tuple(stored)))
        is_open = any(value.role is Role.COPY for value in i.frees)
        if is_open and self._made.subject(i).gathers:
            yield _shift(-self._opened(uses))

    def _at_window(self, i: StepInstruction, *, opens: bool) -> Effect:
        window = self._made.subject(i)
        return begin(self._places[Open(window) if opens else Close(window)])

    def _opened(self, uses: Iterable[Use]) -> int:
        """Bytes of copies of weights."""
        return sum(copy_bytes(use, self._here) for use in uses)


def _shift(opened: int = 0, buffers: int = 0, passing_bytes: int = 0) -> Effect:
    return Effect(Fold.shift, (opened, buffers, passing_bytes))


def _stored_name(tensor: PTensor) -> str:
    """The name of the gradient of a parameter where it is stored."""
    return f"{tensor.name} (stored)"


_LOWER: Mapping[
    Verb, Callable[[WindowEffects, StepInstruction, Sequence[Use], ActionKind], Iterator[Effect]]
] = {
    Verb.GATHER: WindowEffects._gather,
    Verb.RELEASE: WindowEffects._release,
    Verb.REDUCE: WindowEffects._reduce,
}
