"""Batches: from what every rank passes to a step to the inputs that its program reads."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from superscaler_core.compiled import Compiled
from superscaler_core.front_end.model_call import ModelCall
from superscaler_core.parallel.batch import Inputs
from superscaler_core.parallel.programs import Programs
from superscaler_core.parallel.routes import Routes, groups_of, whole_of
from superscaler_core.parallel.same_batch import (
    check_same,
    first_odd,
    form_of,
    refuse_shapes,
    refuse_values,
)
from superscaler_core.parallel.totals import totals_of
from superscaler_core.run.checksum import checksum
from superscaler_core.run.own_samples import OwnSamples
from superscaler_core.run.same_call import digest_of
from superscaler_core.run.together import rows_of, texts_of
from superscaler_core.run.transport import Transport

MAX_ROUTES = 64
"""Bound on kept routes: of one program with one list of the ranks' numbers of samples."""

_LOCAL = (
    'With ss.Batch(kind="local"), ranks pass samples of their own where the plan divides the '
    "samples among them by data parallelism; all other arguments are equal."
)


class Batches(Protocol):
    """What ranks pass to a step.

    Attributes:
        is_local: whether the whole batch is known only after ranks compared theirs.
    """

    is_local: bool

    def is_due(self, call: ModelCall) -> bool:
        """Whether ranks have to compare their batches before this call."""

    def form(self, call: ModelCall) -> int:
        """A number that is equal for calls whose batches need no comparison."""

    def whole(self, call: ModelCall) -> ModelCall:
        """The call of the whole batch, whose values may be missing; collective.

        Raises:
            ValueError: on all ranks, if ranks do not pass what belongs together.
        """

    def given(self, compiled: Compiled, call: ModelCall) -> dict[str, Tensor | OwnSamples]:
        """What this rank's program reads, by the names of its inputs; collective."""

    def results(self, compiled: Compiled, results: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The results of a program, with the samples in the order of the batch."""


class WholeBatches:
    """Every rank passes the same whole batch.

    Args:
        programs: the programs of the model.
        transport: compares batches.
    """

    def __init__(self, programs: Programs, transport: Transport) -> None:
        self._programs, self._transport = programs, transport
        self._ranks = tuple(range(programs.num_devices))
        self._compared = _Compared(programs.batch.check)
        self._forms: dict[Hashable, int] = {}
        self.is_local = False

    def is_due(self, call: ModelCall) -> bool:
        return len(self._ranks) > 1 and self._compared.is_due(call)

    def form(self, call: ModelCall) -> int:
        if call.form not in self._forms:
            self._forms[call.form] = digest_of(form_of(call, self._programs.inputs(call)))
        return self._forms[call.form]

    def whole(self, call: ModelCall) -> ModelCall:
        check_same(call, self._programs.inputs(call), self._ranks, self._transport)
        self._compared.add(call)
        return call

    def given(self, compiled: Compiled, call: ModelCall) -> dict[str, Tensor | OwnSamples]:
        graph, num = compiled.plan.graph, compiled.plan.num_microbatches
        found = dict(zip((t.name for t in graph.batch_inputs), call.tensors, strict=False))
        return {**found, **totals_of(graph, found, num)}

    def results(self, compiled: Compiled, results: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return results


class LocalBatches:
    """Every rank passes samples of its own, which ranks with the same work share.

    Args:
        programs: the programs of the model, of which the first is made.
        compiled: the first one, whose plan says which ranks have the same work.
        transport: moves samples.
        device: where programs compute.
    """

    def __init__(
        self, programs: Programs, compiled: Compiled, transport: Transport, device: torch.device
    ) -> None:
        self._programs, self._transport, self._device = programs, transport, device
        self._ranks = tuple(range(programs.num_devices))
        self._groups = groups_of(compiled.plan)
        self._compared = _Compared(programs.batch.check)
        self._sizes: tuple[int, ...] = ()
        self._routes: dict[tuple[Compiled, tuple[int, ...]], Routes] = {}
        self.is_local = True

    def is_due(self, call: ModelCall) -> bool:
        return True

    def form(self, call: ModelCall) -> int:
        return 0

    def whole(self, call: ModelCall) -> ModelCall:
        inputs = self._programs.inputs(call)
        sizes = self._agreed(call, inputs)
        self._sizes = tuple(sizes[group[0]] for group in self._groups)
        self._compared.add(call)
        return inputs.of_size(call, sum(self._sizes))

    def given(self, compiled: Compiled, call: ModelCall) -> dict[str, Tensor | OwnSamples]:
        graph, num = compiled.plan.graph, compiled.plan.num_microbatches
        found = self._routes_of(compiled).moved(call.tensors, self._transport, self._device)
        if not graph.totals:
            return found
        read = {t.name for total in graph.totals for op in total.ops for t in op.inputs}
        whole = {name: whole_of(value) for name, value in found.items() if name in read}
        return {**found, **whole, **totals_of(graph, whole, num)}

    def results(self, compiled: Compiled, results: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        routes, plan = self._routes_of(compiled), compiled.plan
        dims = {name: plan.dims.samples_dim(t) for name, t in plan.graph.results.items()}
        return {
            name: value if dims[name] is None else routes.in_rank_order(value, dims[name] or 0)
            for name, value in results.items()
        }

    def _agreed(self, call: ModelCall, inputs: Inputs) -> dict[int, int]:
        """The number of samples of every rank; collective."""
        form = form_of(call, inputs, counts_samples=False)
        counts = {*inputs.sizes.values()}
        size = counts.pop() if len(counts) == 1 else -1
        size = -2 if any(tensor.requires_grad for tensor in inputs.tensors) else size
        is_due = self._compared.is_due(call)
        digests = [checksum(tensor) for tensor in inputs.tensors] if is_due else []
        common = [d for d, dim in zip(digests, inputs.dims, strict=False) if dim is None]
        row = [digest_of(form), size, digest_of(str(digests)), digest_of(str(common))]
        rows = rows_of(torch.tensor(row), self._ranks, self._transport)
        if first_odd(rows[:, 0].tolist()):
            refuse_shapes(form, self._ranks, self._transport, _LOCAL)
        if -2 in rows[:, 1]:
            raise ValueError(
                f"an input of rank {rows[:, 1].tolist().index(-2)} requires a gradient, and a step "
                "gives gradients to parameters of its model alone: detach it."
            )
        if -1 in rows[:, 1]:
            odd = rows[:, 1].tolist().index(-1)
            text = texts_of(form_of(call, inputs), self._ranks, self._transport)[odd]
            raise ValueError(f"inputs of rank {odd} differ in their number of samples: {text}.")
        for group in self._groups:
            if first_odd(rows[list(group), 1].tolist()):
                said = form_of(call, inputs)
                refuse_shapes(said, self._ranks, self._transport, self._hint, group)
        if any(first_odd(rows[list(group), 2].tolist()) for group in self._groups):
            among = self._groups
            refuse_values(inputs.names, digests, self._ranks, self._transport, among, self._hint)
        if is_due and first_odd(rows[:, 3].tolist()):
            names = [n for n, dim in zip(inputs.names, inputs.dims, strict=True) if dim is None]
            refuse_values(names, common, self._ranks, self._transport, (), _LOCAL)
        return dict(zip(self._ranks, rows[:, 1].tolist(), strict=True))

    @property
    def _hint(self) -> str:
        groups = "; ".join(", ".join(map(str, group)) for group in self._groups)
        return f"{_LOCAL} This plan gives the same samples to ranks {groups}."

    def _routes_of(self, compiled: Compiled) -> Routes:
        key = compiled, self._sizes
        if key not in self._routes:
            if len(self._routes) == MAX_ROUTES:
                self._routes.clear()
            made = Routes(compiled.plan, self._groups, self._sizes, self._transport.rank)
            self._routes[key] = made
        return self._routes[key]


class _Compared:
    """The forms of calls whose values ranks have compared."""

    def __init__(self, check: str) -> None:
        self._check, self._forms = check, set[Hashable]()

    def is_due(self, call: ModelCall) -> bool:
        """Whether a call is to be compared."""
        if self._check == "first":
            return call.form not in self._forms
        return self._check == "every"

    def add(self, call: ModelCall) -> None:
        """Note that a call was compared."""
        self._forms.add(call.form)


def agreed_example(programs: Programs, call: ModelCall, transport: Transport) -> ModelCall:
    """The example by which all ranks make the first program; collective.

    Raises:
        ValueError: on all ranks, if a rank's example has other shapes; if ranks pass samples of
            their own, numbers of samples may differ, and the first rank's counts.
    """
    ranks, inputs = tuple(range(programs.num_devices)), programs.inputs(call)
    if not programs.batch.is_local:
        check_same(call, inputs, ranks, transport, values=False)
        return call
    form = form_of(call, inputs, counts_samples=False)
    row = torch.tensor([digest_of(form), next(iter(inputs.sizes.values()), 0)])
    rows = rows_of(row, ranks, transport)
    if first_odd(rows[:, 0].tolist()):
        refuse_shapes(form, ranks, transport, _LOCAL)
    return inputs.of_size(call, int(rows[0, 1]))


def batches_of(
    programs: Programs, compiled: Compiled, transport: Transport, device: torch.device
) -> Batches:
    """What ranks pass, as ``Batch.kind`` says."""
    if programs.batch.is_local:
        return LocalBatches(programs, compiled, transport, device)
    return WholeBatches(programs, transport)
