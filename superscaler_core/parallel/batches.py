"""Batches: from what every rank passes to a step to the inputs that its program reads."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import torch
from torch import Tensor

from superscaler_core.compiled import Compiled
from superscaler_core.front_end.model_call import ModelCall
from superscaler_core.known import Known
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
from superscaler_core.run.own_samples import OwnSamples
from superscaler_core.run.transport import Transport
from superscaler_core.training.checksum import checksum
from superscaler_core.training.same_call import SameCall, digest_of

MAX_ROUTES = 64
"""Bound on kept routes: of one program with one list of the ranks' numbers of samples."""

_LOCAL = (
    'With ss.Batch(kind="local"), ranks pass samples of their own where the plan divides the '
    "samples among them by data parallelism; all other arguments are equal."
)


class Batches:
    """What ranks pass to a step: here every rank passes the same whole batch.

    Attributes:
        is_local: whether the whole batch is known only after ranks compared theirs.

    Args:
        programs: the programs of the model.
        transport: moves what ranks compare.
    """

    is_local = False

    def __init__(self, programs: Programs, transport: Transport) -> None:
        self._programs, self._transport = programs, transport
        self._calls = SameCall(tuple(range(programs.num_devices)), transport)
        self._check, self._compared = programs.batch.check, set[Hashable]()
        self._forms: dict[Hashable, int] = {}

    @property
    def share(self) -> tuple[int, int]:
        """Which part of every batch this rank passes, and into how many parts batches are cut."""
        return 0, 1

    def _needs_check(self, call: ModelCall) -> bool:
        """Whether the values of a call are to be compared."""
        is_first = call.form not in self._compared
        return self._check == "every" or (self._check == "first" and is_first)

    def is_due(self, call: ModelCall) -> bool:
        """Whether ranks have to compare their batches before this call."""
        return len(self._calls.ranks) > 1 and self._needs_check(call)

    def form(self, call: ModelCall) -> int:
        """A number that is equal for calls whose batches need no comparison."""
        if call.form not in self._forms:
            self._forms[call.form] = digest_of(form_of(call, self._programs.inputs(call)))
        return self._forms[call.form]

    def whole(self, call: ModelCall) -> ModelCall:
        """The call of the whole batch, whose values may be missing; collective.

        Raises:
            ValueError: on all ranks, if ranks do not pass what belongs together.
        """
        check_same(call, self._programs.inputs(call), self._calls)
        self._compared.add(call.form)
        return call

    def given(self, compiled: Compiled, call: ModelCall) -> dict[str, Tensor | OwnSamples]:
        """What this rank's program reads, by the names of its inputs; collective."""
        graph, num = compiled.plan.graph, compiled.plan.num_microbatches
        found = dict(zip((t.name for t in graph.batch_inputs), call.tensors, strict=False))
        return {**found, **totals_of(graph, found, num)}

    def results(self, compiled: Compiled, results: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The results of a program, with the samples in the order of the batch."""
        return results

    def own(self, compiled: Compiled, results: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The results of the samples that this rank passed; here of all."""
        return results


class LocalBatches(Batches):
    """Every rank passes samples of its own, which ranks with the same work share.

    Args:
        programs, transport: as in ``Batches``; the first program is made.
        compiled: the first one, whose plan says which ranks have the same work.
        device: where programs compute.
    """

    is_local = True

    def __init__(
        self, programs: Programs, compiled: Compiled, transport: Transport, device: torch.device
    ) -> None:
        super().__init__(programs, transport)
        self._device, self._groups = device, groups_of(compiled.plan)
        self._sizes: tuple[int, ...] = ()
        self._routes: Known[tuple[Compiled, tuple[int, ...]], Routes] = Known(MAX_ROUTES)

    @property
    def share(self) -> tuple[int, int]:
        rank = self._transport.rank
        return next(i for i, own in enumerate(self._groups) if rank in own), len(self._groups)

    def is_due(self, call: ModelCall) -> bool:
        return True

    def form(self, call: ModelCall) -> int:
        return 0

    def whole(self, call: ModelCall) -> ModelCall:
        inputs = self._programs.inputs(call)
        sizes = self._agreed(call, inputs)
        self._sizes = tuple(sizes[group[0]] for group in self._groups)
        self._compared.add(call.form)
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

    def own(self, compiled: Compiled, results: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        plan, (group, _) = compiled.plan, self.share
        dims = {name: plan.dims.samples_dim(t) for name, t in plan.graph.results.items()}
        start, size = sum(self._sizes[:group]), self._sizes[group]
        return {
            name: value if (dim := dims[name]) is None else value.narrow(dim, start, size).clone()
            for name, value in self.results(compiled, results).items()
        }

    def _agreed(self, call: ModelCall, inputs: Inputs) -> list[int]:
        """The number of samples of every rank; collective."""
        form = form_of(call, inputs, counts_samples=False)
        counts = {*inputs.sizes.values()}
        size = counts.pop() if len(counts) == 1 else -1
        size = -2 if any(tensor.requires_grad for tensor in inputs.tensors) else size
        is_due = self._needs_check(call)
        digests = [checksum(tensor) for tensor in inputs.tensors] if is_due else []
        common = [d for d, dim in zip(digests, inputs.dims, strict=False) if dim is None]
        row = [digest_of(form), size, digest_of(str(digests)), digest_of(str(common))]
        rows = self._calls.rows(torch.tensor(row))
        if first_odd(rows[:, 0].tolist()):
            refuse_shapes(form, self._calls, _LOCAL)
        sizes: list[int] = rows[:, 1].tolist()
        if -2 in sizes:
            raise ValueError(
                f"an input of rank {sizes.index(-2)} requires a gradient, and a step gives "
                "gradients to parameters of its model alone: detach it."
            )
        if -1 in sizes:
            odd = sizes.index(-1)
            text = self._calls.texts(form_of(call, inputs))[odd]
            raise ValueError(f"inputs of rank {odd} differ in their number of samples: {text}.")
        for group in self._groups:
            if first_odd(sizes[rank] for rank in group):
                refuse_shapes(form_of(call, inputs), self._calls, self._hint, group)
        if any(first_odd(rows[list(group), 2].tolist()) for group in self._groups):
            refuse_values(inputs.names, digests, self._calls, self._groups, self._hint)
        if is_due and first_odd(rows[:, 3].tolist()):
            names = [n for n, dim in zip(inputs.names, inputs.dims, strict=True) if dim is None]
            refuse_values(names, common, self._calls, hint=_LOCAL)
        return sizes

    @property
    def _hint(self) -> str:
        groups = "; ".join(", ".join(map(str, group)) for group in self._groups)
        return f"{_LOCAL} This plan gives the same samples to ranks {groups}."

    def _routes_of(self, compiled: Compiled) -> Routes:
        key = compiled, self._sizes
        return self._routes.of(
            key, lambda: Routes(compiled.plan, self._groups, self._sizes, self._transport.rank)
        )


def agreed_example(programs: Programs, call: ModelCall, calls: SameCall) -> ModelCall:
    """The example by which all ranks make the first program; collective.

    Raises:
        ValueError: on all ranks, if a rank's example has other shapes; if ranks pass samples of
            their own, numbers of samples may differ, and the first rank's counts.
    """
    inputs = programs.inputs(call)
    if not programs.batch.is_local:
        check_same(call, inputs, calls, values=False)
        return call
    form = form_of(call, inputs, counts_samples=False)
    row = torch.tensor([digest_of(form), next(iter(inputs.sizes.values()), 0)])
    rows = calls.rows(row)
    if first_odd(rows[:, 0].tolist()):
        refuse_shapes(form, calls, _LOCAL)
    return inputs.of_size(call, int(rows[0, 1]))


def batches_of(
    programs: Programs, compiled: Compiled, transport: Transport, device: torch.device
) -> Batches:
    """What ranks pass, as ``Batch.kind`` says."""
    if programs.batch.is_local:
        return LocalBatches(programs, compiled, transport, device)
    return Batches(programs, transport)
