"""Programs: a program for every shape of batch on which one model is trained or evaluated.

All programs store parameters alike, so that they share them. The first one decides how: it is the
program of the batch that the user gave as an example.
"""

from __future__ import annotations

import logging
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

import rvdcomm as rv
from superscaler_core.compiled import Compiled, compile
from superscaler_core.errors import OpaqueWarning, PlanError
from superscaler_core.front_end import capture
from superscaler_core.front_end.autocast import active, entered
from superscaler_core.front_end.model_call import ModelCall
from superscaler_core.graph.graph import Graph, Op
from superscaler_core.parallel.batch import Batch, Inputs
from superscaler_core.parallel.routes import groups_of
from superscaler_core.parallel.sample_flow import flow_of
from superscaler_core.parallel.sprogram import SProgram
from superscaler_core.parallel.totals import with_totals
from superscaler_core.plan import Device, PlacedPart, Plan
from superscaler_core.program.side import Side
from superscaler_core.schedules import ScheduleError

MAX_PROGRAMS = 16
"""Bound on kept programs besides the first; the least recently used one is dropped."""

_log = logging.getLogger("superscaler_core")


class Programs:
    """The programs of one model under one plan, by the shape of the batch.

    A program is made when its shape first comes, the same on all ranks. Where the plan cannot cut
    a batch (three samples among four devices), the program uses as many microbatches and devices
    as the plan can use for it, and gives the same loss and gradients.

    Args:
        model: the model; it is captured once per shape, in its present modes and autocasts.
        sprogram: fills the plans.
        num_devices: number of devices of every plan.
        batch: where the samples of the inputs are.
        results: what evaluation keeps beside the loss, as in ``capture``.
        is_silent: whether it logs for debugging only, because another rank logs the same.
        options: options of ``compile``.
    """

    def __init__(
        self,
        model: nn.Module,
        sprogram: SProgram,
        num_devices: int,
        *,
        batch: Batch | None = None,
        results: Sequence[str | int] = (),
        is_silent: bool = False,
        **options: Any,
    ) -> None:
        self.model, self.num_devices, self.batch = model, num_devices, batch or Batch()
        self._sprogram, self._results, self._options = sprogram, tuple(results), options
        self._modes = {name: module.training for name, module in model.named_modules()}
        self._autocasts = active()
        self._is_silent = is_silent
        self._num_halves = 1  # of a microbatch of the schedule, see ``Overlap.duplex``
        self._first: Compiled | None = None
        self._made: OrderedDict[Hashable, Compiled] = OrderedDict()
        # Ranks that are threads of one process share the programs.
        self._lock = threading.Lock()

    def call(
        self, args: Sequence[Any] | Mapping[str, Any], kwargs: Mapping[str, Any] | None
    ) -> ModelCall:
        """A call of the model, as in ``ModelCall.of``."""
        return ModelCall.of(self.model, args, kwargs)

    def inputs(self, call: ModelCall) -> Inputs:
        """The tensors of a call, and where their samples are."""
        return Inputs.of(self.batch, self.model, call)

    def first(self, call: ModelCall) -> Compiled:
        """The program that trains on the example, which decides where parameters are stored.

        Raises:
            PlanError: the plan does not fit the model, the batch or the devices.
        """
        with self._lock:
            if self._first is None:
                if self.batch.is_local:
                    call = self._whole_example(call)
                self._first = compile(self._plan_of_example(call), **self._options)
                self._made[call.form, True] = self._first
            return self._first

    def _whole_example(self, call: ModelCall) -> ModelCall:
        """The whole batch if every group of ranks passes as many samples as this example has."""
        inputs = self.inputs(call)
        size = next(iter(inputs.sizes.values()), 1)
        num = self.num_devices
        while True:
            # A plan is asked with samples for all devices first: it may need as many.
            whole = inputs.of_size(call, num * size)
            found = len(groups_of(self._plan_of_example(whole)))
            if found == num:
                return whole
            num = found

    def of(self, call: ModelCall, *, trains: bool) -> Compiled:
        """The program for a batch of this shape.

        Args:
            call: the call that a single device would make.
            trains: whether it trains, or evaluates.
        """
        key = call.form, trains
        with self._lock:
            if key not in self._made:
                self._made[key] = self._compiled(call, trains)
                if len(self._made) > MAX_PROGRAMS:
                    self._made.popitem(last=False)
            self._made.move_to_end(key)
            return self._made[key]

    @contextmanager
    def _in_mode(self, trains: bool) -> Iterator[None]:
        """Inside this context the model trains as it did at first, or evaluates."""
        before = {module: module.training for module in self.model.modules()}
        if not trains:
            self.model.eval()
        for name, module in self.model.named_modules() if trains else ():
            module.training = self._modes[name]
        try:
            yield
        finally:
            for module, mode in before.items():
                module.training = mode

    def _graph(self, call: ModelCall, num_microbatches: int, trains: bool) -> Graph:
        """The graph of one microbatch, whose mean over microbatches is the whole batch's loss.

        Raises:
            PlanError: the batch cannot be cut, or the loss of the whole is no sum of microbatches.
        """
        narrow = self._captured(call, num_microbatches, trains)
        if num_microbatches == 1:
            return narrow
        # Any two sizes would do: they tell which numbers in the graph grow with the samples.
        inputs = self.inputs(call)
        wide = self._captured(inputs.repeated(call, num_microbatches), num_microbatches, trains)
        num = 2 * next(iter(inputs.sizes.values())) // num_microbatches
        flow = flow_of(narrow, wide, num, self._note_of)
        if flow.loss.is_mixed:
            raise PlanError(
                f"the plan cuts a step into {num_microbatches} microbatches, and the loss of the "
                f"whole batch is no sum over them: {flow.loss.why} (of "
                f"{', '.join(sorted(flow.loss.given))}). Use a plan without microbatches; or, if "
                "an input has its samples along another dim than 0, or belongs to all samples, "
                'say so, such as batch=ss.Batch(dims={"x": 1, "table": None}).'
            )
        for note in flow.notes:
            self._say(logging.WARNING, f"{num_microbatches} microbatches: {note}")
        return with_totals(narrow, flow, num_microbatches)

    def can_cut(self, call: ModelCall, num_microbatches: int) -> bool:
        """Whether the loss of a batch is a sum over microbatches."""
        try:
            self._graph(call, num_microbatches, trains=True)
        except PlanError:
            return False
        return True

    def _note_of(self, op: Op) -> str:
        """A note about statistics that a microbatch may have of its own."""
        module = self.model.get_submodule(op.module)
        is_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
        if not is_norm or isinstance(module, nn.SyncBatchNorm):
            return ""
        return (
            f"{type(module).__name__} {op.module} normalizes every microbatch by its own statistics"
        )

    def _captured(self, call: ModelCall, num_microbatches: int, trains: bool) -> Graph:
        inputs = self.inputs(call)
        part = inputs.microbatch(call, num_microbatches)
        casts = entered(self._autocasts)
        with self._in_mode(trains), casts, warnings.catch_warnings():
            if self._first is not None:
                # The capture of the example has warned of opaque ops already.
                warnings.simplefilter("ignore", OpaqueWarning)
            results = () if trains else self._results
            graph = capture(
                self.model, part.args, part.kwargs, results=results, changing=self._changing
            )
        return replace(graph, samples=_samples(graph, inputs))

    @property
    def _changing(self) -> frozenset[str]:
        """The buffers that a step of the first program changes, or a state dict may change.

        The model is the caller's, and keeps the values with which the training started.
        """
        if self._first is None:
            return frozenset()
        graph = self._first.plan.graph
        loaded = graph.buffers.keys() - graph.folded
        return frozenset(loaded | {buffer.name for buffer in graph.state})

    @property
    def kept(self) -> frozenset[Compiled]:
        """The programs that are kept."""
        with self._lock:
            return frozenset([*self._made.values(), *filter(None, [self._first])])

    # --- plans ----------------------------------------------------------------------------------

    def _plan_of_example(self, call: ModelCall) -> Plan:
        num = self._sprogram.num_microbatches
        plan = Plan(self._graph(call, num, trains=True), range(self.num_devices))
        self._sprogram(plan, num)
        if plan.schedule is not None and plan.schedule.weights is not None:
            raise PlanError(
                f"{self._sprogram.name} updates weights between microbatches, and parallelize "
                "leaves the optimizer to its caller: compile the plan, and see Trainer.update_with."
            )
        if plan.num_microbatches == num:
            return plan
        num, self._num_halves = plan.num_microbatches, plan.overlap.num_halves
        return self._filled(self._graph(call, num, trains=True), self.num_devices, num)

    def _filled(self, graph: Graph, num_devices: int, num_microbatches: int) -> Plan:
        plan = Plan(graph, range(num_devices))
        try:
            self._sprogram(plan, num_microbatches // self._num_halves or 1)
        except (PlanError, ScheduleError):
            raise
        except Exception as error:
            # A function may read ``plan.devices[1]``, although the plan has one device here.
            raise PlanError(
                f"{self._sprogram.name} does not fill a plan of {num_devices} devices and "
                f"{num_microbatches} microbatches: {type(error).__name__}: {error}."
            ) from error
        if num_microbatches % self._num_halves:
            # An odd number of samples has no halves.
            plan.overlap = replace(plan.overlap, duplex=False)
        if plan.num_microbatches != num_microbatches:
            raise PlanError(
                f"{self._sprogram.name} cuts a step into {plan.num_microbatches} microbatches, and "
                f"this batch can be cut into {num_microbatches}."
            )
        return plan

    def _compiled(self, call: ModelCall, trains: bool) -> Compiled:
        """A program that stores parameters as the first one does."""
        start = time.perf_counter()
        fault: Exception | None = None
        for make in self._candidates(call, trains):
            try:
                made = compile(self._at_home(make(), trains), **self._options)
            except (PlanError, ScheduleError) as error:
                fault = fault or error
                continue
            did = f"{'trains on' if trains else 'evaluates'} {_text(call)}"
            self._say(logging.INFO, f"a program that {did}: {time.perf_counter() - start:.1f} s")
            if fault is not None:
                used = sorted(
                    {d for op in made.plan.graph.ops for d in made.plan.op_split(op).devices}
                )
                self._say(
                    logging.WARNING, f"a program that {did} uses devices {used} alone: {fault}"
                )
            return made
        assert fault is not None
        raise fault

    def _say(self, level: int, text: str) -> None:
        _log.log(logging.DEBUG if self._is_silent else level, "%s", text)

    def _candidates(self, call: ModelCall, trains: bool) -> Iterator[Callable[[], Plan]]:
        """Plans for a batch, the one that uses most microbatches and devices first."""
        assert self._first is not None
        inputs = self.inputs(call)
        for num in range(self._first.plan.num_microbatches, 0, -1):
            if inputs.can_cut(num):
                try:
                    graph = self._graph(call, num, trains)
                except PlanError as error:
                    yield partial(_refuse, error)
                    continue
                for devices in range(self.num_devices, 0, -1):
                    yield partial(self._filled, graph, devices, num)
        yield lambda: _on_one_device(self._graph(call, 1, trains))

    def _at_home(self, plan: Plan, trains: bool) -> Plan:
        """The same decisions among all devices, with parameters stored as in the first program."""
        assert self._first is not None
        said, first = plan.decisions, self._first.plan
        homes = {
            plan.update(tensor.name).name: _placed(side)
            for tensor, side in self._first.materialized.weights.storage.items()
        }
        made = Plan(plan.graph, first.devices)
        made.decide(
            replace(
                said,
                devices=first.devices,
                parts={**said.parts, **homes},
                on_host=first.decisions.on_host,
            )
        )
        return made if trains else made.without_grad()


def _text(call: ModelCall) -> str:
    return ", ".join(str(list(tensor.shape)) for tensor in call.tensors)


def _refuse(error: PlanError) -> Plan:
    raise error


def _samples(graph: Graph, inputs: Inputs) -> dict[str, int | None]:
    """The dims of samples that are not dim 0, by the names of the graph's inputs."""
    dims = dict(zip(graph.batch_inputs, inputs.dims, strict=True))
    return {t.name: dim for t, dim in dims.items() if dim != (0 if t.shape else None)}


# --- decisions ----------------------------------------------------------------------------------


def _on_one_device(graph: Graph) -> Plan:
    plan = Plan(graph, [0])
    for op in graph.ops:
        plan.op_assign(op, 0)
    return plan


def _placed(storage: Side) -> tuple[PlacedPart, ...]:
    """The parts of an optimizer's op by which a parameter is stored like this."""
    holders: dict[rv.Box, list[Device]] = {}
    for device, shard in sorted(storage.shards.items()):
        holders.setdefault(shard.box, []).append(device)
    return tuple(
        PlacedPart(
            tuple((f"d{i}", lo, hi) for i, (lo, hi) in enumerate(zip(box.lo, box.hi, strict=True))),
            replica,
            device,
        )
        for box, devices in holders.items()
        for replica, device in enumerate(devices)
    )
