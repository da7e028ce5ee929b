"""Programs: a program for every shape of batch on which one model is trained or evaluated.

The first one, of the example that the user gave, decides how all of them store parameters. A shape
has several if the set of trained parameters changes, or what the capture read of the model.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from superscaler_core.compiled import Compiled, compile
from superscaler_core.errors import OpaqueWarning, PlanError
from superscaler_core.front_end import capture
from superscaler_core.front_end.autocast import active, entered
from superscaler_core.front_end.model_call import ModelCall
from superscaler_core.front_end.state_names import StateNames
from superscaler_core.graph.graph import Graph, Op
from superscaler_core.graph.without_grad import check_loss
from superscaler_core.parallel.batch import Batch, Inputs
from superscaler_core.parallel.homes import on_one_device, placed
from superscaler_core.parallel.routes import groups_of
from superscaler_core.parallel.sample_flow import flow_of
from superscaler_core.parallel.sprogram import SProgram
from superscaler_core.parallel.totals import result_fault, with_totals
from superscaler_core.parallel.watched import Originals, Reads, Watched
from superscaler_core.plan import Plan
from superscaler_core.schedules import ScheduleError
from superscaler_core.training.checksum import checksum

MAX_PROGRAMS = 16
"""Bound on kept programs besides the first; the least recently used one is dropped."""

_log = logging.getLogger("superscaler_core")


@dataclass(frozen=True, eq=False)
class MadeProgram:
    """A program, the values of the model that it depends on, and its number, equal on all ranks."""

    compiled: Compiled
    watched: Watched
    number: int


FORWARD: frozenset[str] = frozenset([""])
"""In place of the names of trained parameters: the forward alone, in the model's present mode."""

_CHECKPOINTS = (
    "backwards recompute what the model puts into torch.utils.checkpoint, as it asks; another "
    "keep=... among the plan's options, such as keep=everything, decides instead"
)


class Programs:
    """The programs of one model under one plan, by the shape of the batch.

    A program is made when its shape first comes, the same on all ranks. Where the plan cannot cut
    a batch (three samples among four devices), the program uses as many microbatches and devices
    as the plan can use for it, and gives the same loss and gradients.

    Args:
        model: the model; it is captured once per shape, in its present autocasts, and again if
            what the capture read changed.
        sprogram, num_devices: what fills the plans, each of so many devices.
        batch: where the samples of the inputs are.
        results, step_results: what evaluation and steps keep beside the loss, as in ``capture``.
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
        step_results: Sequence[str | int] = (),
        is_silent: bool = False,
        **options: Any,
    ) -> None:
        self.model, self.num_devices, self.batch = model, num_devices, batch or Batch()
        self._sprogram, self._options = sprogram, options
        self._results, self._step_results = tuple(results), tuple(step_results)
        self._autocasts = active()
        self._is_silent = is_silent
        self._carried: Mapping[str, str] = {}
        self._num_halves = 1  # of a microbatch of the schedule, see ``Overlap.duplex``
        self._first: Compiled | None = None
        self._made: OrderedDict[Hashable, list[MadeProgram]] = OrderedDict()
        self._num_made = 0
        self._watched = Watched()  # of the last capture
        self._trained: frozenset[str] = frozenset()
        # Ranks that are threads of one process share the programs.
        self._lock = threading.RLock()

    def of_model(
        self,
        model: nn.Module,
        batch: Batch,
        results: Sequence[str | int] = (),
        carried: Mapping[str, str] | None = None,
    ) -> Programs:
        """The programs that evaluate another model, of the same parameters, stored likewise.

        Args:
            model: the other model.
            batch: where the samples of its inputs are.
            results: what evaluation keeps beside the loss, as in ``capture``.
            carried: results that stay in boxes, each with the name of the input that it is in the
                next call, or "".
        """
        made = copy.copy(self)
        made._carried = carried or {}
        made.model, made.batch = model, batch
        made._results, made._step_results = tuple(results), ()
        made._made, made._num_made, made._watched = OrderedDict(), 0, Watched()
        return made

    def captured(self, call: ModelCall) -> Graph:
        """The graph of a call in ``eval()`` mode, without a program."""
        with self._lock:
            return self._captured(call, 1, None)

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
                made = compile(self._plan_of_example(call), **self._options)
                if any(op.checkpoint and made.plan.region_group(op) for op in made.plan.graph.ops):
                    self._say(logging.INFO, _CHECKPOINTS)
                self._first = made
                self._trained = frozenset(n for n, p in self.parameters.items() if p.requires_grad)
                self._keep((call.form, self._trained), made)
                self.originals = Originals(self.model, self._changing)
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

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The model's own parameters, by the names that programs give them."""
        assert self._first is not None, "its names are known"
        named = StateNames.of(self.model).parameters
        names = self._first.plan.graph.parameters
        return {name: named[name] for name in names if name in named}

    def find(self, call: ModelCall, trained: frozenset[str] | None) -> MadeProgram | None:
        """The program for a call if there is one already, and the model is as it was captured.

        ``trained`` are the names of parameters that a step trains; None to evaluate, or
        ``FORWARD``.
        """
        with self._lock:
            made = self._made.get((call.form, trained), ())
            return next((each for each in made if each.watched.holds()), None)

    def change(self, call: ModelCall, trained: frozenset[str] | None) -> str:
        """What changed in the model since it was captured for such a call; empty if nothing."""
        made = self._made.get((call.form, trained), ())
        return made[-1].watched.difference() if made else ""

    def of(self, call: ModelCall, trained: frozenset[str] | None) -> MadeProgram:
        """The program for a call, which is made if there is none; arguments as of ``find``."""
        with self._lock:  # Another thread may be making it.
            key, found = (call.form, trained), self.find(call, trained)
            if found is None:
                if change := self.change(call, trained):
                    self._say(logging.INFO, f"captures the model again, because {change}")
                found = self._keep(key, self._compiled(call, trained))
            self._made.move_to_end(key)
            return found

    def _keep(self, key: Hashable, compiled: Compiled) -> MadeProgram:
        found = MadeProgram(compiled, self._watched, self._num_made)
        self._num_made += 1
        self._made.setdefault(key, []).append(found)
        self._made.move_to_end(key)
        if sum(map(len, self._made.values())) > MAX_PROGRAMS:
            oldest, programs = next(iter(self._made.items()))
            del programs[0]
            if not programs:
                del self._made[oldest]
        return found

    @contextmanager
    def _in_mode(self, trained: frozenset[str] | None) -> Iterator[None]:
        """Inside this context the model trains these parameters, or evaluates if it is None."""
        modes = {module: module.training for module in self.model.modules()}
        flags = {p: p.requires_grad for p in self.model.parameters()}
        if trained is None:
            self.model.eval()
        if self._first is not None:
            for name, parameter in self.parameters.items():
                parameter.requires_grad_(name in (self._trained if trained is None else trained))
        try:
            yield
        finally:
            for module, mode in modes.items():
                module.training = mode
            for parameter, flag in flags.items():
                parameter.requires_grad_(flag)

    def _graph(
        self, call: ModelCall, num_microbatches: int, trained: frozenset[str] | None
    ) -> Graph:
        """The graph of one microbatch, whose mean over microbatches is the whole batch's loss.

        Raises:
            PlanError: the batch cannot be cut, or the loss of the whole is no sum of microbatches.
        """
        narrow = self._captured(call, num_microbatches, trained)
        if num_microbatches == 1:
            return narrow
        # Any two sizes would do: they tell which numbers in the graph grow with the samples.
        inputs = self.inputs(call)
        wide = self._captured(inputs.repeated(call), num_microbatches, trained)
        num = 2 * next(iter(inputs.sizes.values())) // num_microbatches
        flow = flow_of(narrow, wide, num, self._note_of, self._has_experts)
        if flow.loss.is_mixed:
            raise PlanError(
                f"the plan cuts a step into {num_microbatches} microbatches, and the loss of the "
                f"whole batch is no sum over them: {flow.loss.why} (of "
                f"{', '.join(sorted(flow.loss.given))}). Use a plan without microbatches, or "
                "microbatches=1 of one that takes them; or let "
                "the model return features, and give their loss as whole_loss=...; or, if an input "
                "has its samples along another dim than 0, or belongs to all samples, "
                'say so, such as batch=ss.Batch(dims={"x": 1, "table": None}).'
            )
        for name, extent in flow.results.items():
            if fault := result_fault(narrow, narrow.results[name], extent):
                raise PlanError(
                    f"the plan cuts a step into {num_microbatches} microbatches, which do not make "
                    f"the result {name!r} of the whole batch: {fault}. Use a plan without "
                    "microbatches, or let the model return what it is computed of."
                )
        changed = [name for name in sorted(changing_names(narrow)) if not self._is_statistic(name)]
        if changed:
            flow.notes.append(f"{', '.join(changed)}: changed once for each, not once in a step")
        for note in flow.notes:
            self._say(logging.WARNING, f"{num_microbatches} microbatches: {note}")
        return with_totals(narrow, flow, num_microbatches)

    def can_cut(self, call: ModelCall, num_microbatches: int) -> bool:
        """Whether the loss of a batch is a sum over microbatches."""
        try:
            self._graph(call, num_microbatches, frozenset())
        except PlanError:
            return False
        return True

    def _note_of(self, op: Op) -> str:
        """A note about statistics that a microbatch may have of its own."""
        module = self.model.get_submodule(op.module)
        is_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
        if not is_norm or isinstance(module, nn.SyncBatchNorm):
            return ""
        kind = type(module).__name__
        return f"{kind} normalizes every microbatch by its own statistics, as ranks under DDP do"

    def _has_experts(self, path: str) -> bool:
        """Whether a module has a matrix for each of several experts, or modules that are alike.

        Of the whole model, whose layers are alike, only the former counts.
        """
        module = self.model.get_submodule(path)
        convolutions = [m for m in module.modules() if isinstance(m, nn.modules.conv._ConvNd)]
        others = {id(p) for m in convolutions for p in m.parameters(recurse=False)}
        matrices = (p.shape for p in module.parameters() if p.dim() == 3 and id(p) not in others)
        if any(shape[0] > 1 for shape in matrices):
            return True
        lists = (m for m in module.modules() if isinstance(m, nn.ModuleList | nn.ModuleDict))
        return bool(path) and any(map(_are_alike, lists))

    def _is_statistic(self, name: str) -> bool:
        """Whether a buffer that a forward replaces is a running statistic of a norm."""
        module = self.model.get_submodule(name.rpartition(".")[0])
        return isinstance(module, nn.modules.batchnorm._NormBase)

    def _captured(
        self, call: ModelCall, num_microbatches: int, trained: frozenset[str] | None
    ) -> Graph:
        inputs = self.inputs(call)
        part = inputs.microbatch(call, num_microbatches)
        casts = entered(self._autocasts)
        with self._in_mode(trained), casts, warnings.catch_warnings():
            if self._first is not None:
                # The capture of the example has warned of opaque ops already.
                warnings.simplefilter("ignore", OpaqueWarning)
            results = self._step_results if _trains(trained) else self._results
            changing = self._changing
            with Reads(self.model) as reads:
                graph = capture(self.model, *part.arguments, results=results, changing=changing)
        if _trains(trained):
            check_loss(graph)
        changing = changing if self._first is not None else changing_in(graph)
        # Evaluation is in one mode, whatever that of the model is.
        self._watched = reads.watched({*changing, *(["training"] if trained is None else [])})
        given = dict(zip(inputs.names, graph.batch_inputs, strict=True))
        carried = {name: given[of] if of else None for name, of in self._carried.items()}
        return replace(graph, samples=_samples(graph, inputs), carried=carried)

    @property
    def _changing(self) -> frozenset[str]:
        """The buffers that a step of the first program changes, or a state dict may change.

        The model is the caller's, and keeps the values with which the training started.
        """
        return frozenset() if self._first is None else changing_in(self._first.plan.graph)

    @property
    def kept(self) -> frozenset[Compiled]:
        """The programs that are kept."""
        with self._lock:
            made = [each.compiled for found in self._made.values() for each in found]
            return frozenset([*made, *filter(None, [self._first])])

    # --- plans ----------------------------------------------------------------------------------

    def _plan_of_example(self, call: ModelCall) -> Plan:
        num = self._sprogram.num_microbatches
        plan = Plan(self._graph(call, num, frozenset()), range(self.num_devices))
        self._sprogram(plan, num)
        if plan.schedule is not None and plan.schedule.weights is not None:
            raise PlanError(
                f"{self._sprogram.name} updates weights between microbatches, and parallelize "
                "leaves the optimizer to its caller: compile the plan, and see Trainer.update_with."
            )
        if plan.num_microbatches == num:
            return plan
        num, self._num_halves = plan.num_microbatches, plan.overlap.num_halves
        return self._filled(self._graph(call, num, frozenset()), self.num_devices, num)

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

    def _compiled(self, call: ModelCall, trained: frozenset[str] | None) -> Compiled:
        """A program that stores parameters as the first one does."""
        trains = _trains(trained)
        start = time.perf_counter()
        fault: Exception | None = None
        for make in self._candidates(call, trained):
            try:
                made = compile(self._at_home(make(), trains), **self._options)
            except (PlanError, ScheduleError) as error:
                fault = fault or error
                continue
            did = f"{'trains on' if trains else 'evaluates'} {_text(call)}"
            self._say(logging.INFO, f"a program that {did}: {time.perf_counter() - start:.1f} s")
            if fault is not None:
                splits = map(made.plan.op_split, made.plan.graph.ops)
                used = sorted({device for split in splits for device in split.devices})
                text = f"a program that {did} uses devices {used} alone: {fault}"
                self._say(logging.WARNING, text)
            return made
        assert fault is not None
        raise fault

    def _say(self, level: int, text: str) -> None:
        _log.log(logging.DEBUG if self._is_silent else level, "%s", text)

    def _candidates(
        self, call: ModelCall, trained: frozenset[str] | None
    ) -> Iterator[Callable[[], Plan]]:
        """Plans for a batch, the one that uses most microbatches and devices first."""
        assert self._first is not None
        inputs = self.inputs(call)
        for num in range(self._first.plan.num_microbatches, 0, -1):
            if inputs.can_cut(num):
                try:
                    graph = self._graph(call, num, trained)
                except PlanError as error:
                    yield partial(_refuse, error)
                    continue
                for devices in range(self.num_devices, 0, -1):
                    yield partial(self._filled, graph, devices, num)
        yield lambda: on_one_device(self._graph(call, 1, trained))

    def _at_home(self, plan: Plan, trains: bool) -> Plan:
        """The same decisions among all devices, with parameters stored as in the first program."""
        assert self._first is not None
        said, first = plan.decisions, self._first.plan
        homes = {
            plan.update(tensor.name).name: placed(sharding)
            for tensor, sharding in self._first.materialized.weights.storage.items()
        }
        parts, hosted = {**said.parts, **homes}, first.decisions.on_host
        made = Plan(plan.graph, first.devices)
        made.decide(replace(said, devices=first.devices, parts=parts, on_host=hosted))
        return made if trains else made.without_grad()


def _trains(trained: frozenset[str] | None) -> bool:
    """Whether a program runs a backward."""
    return trained is not None and trained != FORWARD


def changing_in(graph: Graph) -> frozenset[str]:
    """The buffers of a graph whose values a step or a state dict may change."""
    loaded = graph.buffers.keys() - graph.folded
    return changing_names(graph) | loaded


def changing_names(graph: Graph) -> frozenset[str]:
    """The buffers of a graph, and frozen parameters, that a forward replaces."""
    return frozenset(buffer.name for buffer in graph.state)


def _are_alike(modules: nn.ModuleList | nn.ModuleDict) -> bool:
    """Whether modules are at least two, all with parameters of the same shapes."""
    shapes = [tuple(p.shape for p in module.parameters()) for module in modules.children()]
    return len(shapes) > 1 and all(each and each == shapes[0] for each in shapes)


def fingerprint_of(compiled: Compiled) -> dict[str, str]:
    """What has to be equal of a program on all ranks, by names that errors use."""
    graph = compiled.plan.graph
    ops = [f"{op.name}: {op.code}" for op in graph.ops]
    parameters = [
        f"{t.name} {list(t.shape)} {t.dtype} requires_grad={t.requires_grad}"
        for t in graph.parameters.values()
    ]
    # The first rank's values of parameters count, also of those that are state.
    own = ((name, v) for name, v in sorted(graph.constants.items()) if name not in graph.averages)
    constants = [f"{name}: {checksum(value)}" for name, value in own]
    return {
        "the parameters of the model": "\n".join(parameters),
        "the ops of the model": "\n".join(ops),
        "constants of the model": "\n".join(constants),
        "the plan": str(compiled.plan.decisions),
    }


def _text(call: ModelCall) -> str:
    return ", ".join(str(list(tensor.shape)) for tensor in call.tensors)


def _refuse(error: PlanError) -> Plan:
    raise error


def _samples(graph: Graph, inputs: Inputs) -> dict[str, int | None]:
    """The dims of samples that are not dim 0, by the names of the graph's inputs."""
    dims = dict(zip(graph.batch_inputs, inputs.dims, strict=True))
    return {t.name: dim for t, dim in dims.items() if dim != (0 if t.shape else None)}
