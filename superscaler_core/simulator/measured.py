"""Measured: a profile of this machine, from times of a program's own ops on real tensors."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from statistics import median
from time import thread_time
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from superscaler_core.compiled import Compiled
from superscaler_core.cost.op_time import signature
from superscaler_core.cost.profile import DeviceProfile
from superscaler_core.graph.part import Part
from superscaler_core.graph.tensor import CONSTANT, VTensor
from superscaler_core.run.evaluate import code_names
from superscaler_core.simulator.meter import Meter, one_thread, samples_in

Distinct = dict[str, tuple[Part, Mapping[str, Any]]]
"""One part for every signature, with the constants of its graph."""


@one_thread()
def measured(
    programs: Iterable[Compiled],
    *,
    name: str = "this machine",
    op_secs: float = 0.02,
    move_secs: float = 0.0,
    memory_bytes: int | None = None,
    known: Collection[str] = (),
    clock: Callable[[], float] | None = None,
) -> DeviceProfile:
    """Measure every distinct op shape of some programs on this process's device, a CPU.

    Forward and backward of each op run on tensors with the shapes of the parts, with one thread.
    Times are processor times of this thread, so other processes on its core do not matter. For
    plans with more ranks than cores, the profile says how many cores there are. Let as many ranks
    as there are cores measure at the same time, because in training they share the memory, too.
    Ops that were not measured are priced by the speeds of products and copies of a few sizes.

    Args:
        programs: programs whose parts are measured.
        name: name of the profile.
        op_secs: approximate time spent on each op, in seconds.
        move_secs: overhead of moving a tensor, in addition to its plan's time.
        memory_bytes: memory of a device; this machine's if None.
        known: signatures of ops that are left out.
        clock: the clock for ops, in seconds; this thread's processor time if None.
            ``time.perf_counter`` counts waiting, too.
    """
    every = _distinct(programs)
    dtypes = {view.tensor.dtype for part, _ in every.values() for view in part.outputs}
    distinct = {key: value for key, value in every.items() if key not in known}
    meter = Meter(torch.device("cpu"), op_secs)
    engine_secs = _engine_secs(meter)
    table = {
        key: (forward, max(0.0, backward - engine_secs))
        for key, (forward, backward) in _secs_of_ops(
            distinct, op_secs, clock or thread_time
        ).items()
    }
    floats = [dtype for dtype in sorted(dtypes) if dtype.startswith(("float", "bfloat"))]
    speeds = measured_speeds(meter, floats, name=name)
    return replace(
        speeds,
        memory_bytes=memory_bytes or speeds.memory_bytes,
        segment_secs=_segment_secs(meter),
        move_secs=move_secs,
        op_secs=table,
    )


@one_thread()
def measured_speeds(meter: Meter, dtypes: Collection[str], *, name: str) -> DeviceProfile:
    """Measure how fast products, copies and launches of a device are.

    On a GPU also how fast this host issues kernels from Python, and copies to the device.

    Args:
        meter: of the device.
        dtypes: floating-point dtypes whose products are measured.
        name: name of the profile.
    """
    products = {dtype: meter.products(dtype) for dtype in dtypes}
    bytes_per_sec, memory = meter.streams()
    kind, memory_bytes, num_cores = platform.machine(), _host_bytes(), num_cores_here()
    if meter.is_async:
        num_cores = 0
        kind = torch.cuda.get_device_name(meter.device)
        memory_bytes = torch.cuda.get_device_properties(meter.device).total_memory
    made = DeviceProfile(
        name,
        {dtype: peak for dtype, (peak, _) in products.items()},
        bytes_per_sec,
        memory_bytes,
        launch_secs=meter.launch_secs(),
        issue_secs=meter.issue_secs(),
        products={dtype: reach for dtype, (_, reach) in products.items()},
        memory=memory,
        num_cores=num_cores,
        notes=(
            f"measured on {kind}, torch {torch.__version__}",
            f"not measured: {'' if meter.is_async else 'copies to the host, '}the host's memory",
        ),
    )
    rate = meter.host_bytes_per_sec()
    return replace(made, host_bytes_per_sec=rate) if rate else made


def num_cores_here() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _host_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _distinct(programs: Iterable[Compiled]) -> Distinct:
    found: Distinct = {}
    for compiled in programs:
        graph = compiled.plan.graph
        for op in graph.ops:
            for part in compiled.plan.parts(op):
                found.setdefault(signature(part), (part, graph.constants))
    return found


# --- ops ----------------------------------------------------------------------------------------


def _secs_of_ops(
    distinct: Distinct, secs: float, clock: Callable[[], float]
) -> Mapping[str, tuple[float, float]]:
    """Medians of the forward and the backward of every op.

    As in a step, ops run one after another, so that none finds its weights or its code in a cache.
    """
    ops = {key: _Op(part, constants) for key, (part, constants) in distinct.items()}
    samples: dict[str, list[tuple[float, float]]] = {key: [] for key in ops}
    with tqdm(desc="measure ops", delay=2, leave=False, disable=None) as bar:
        for i in samples_in(secs * len(ops)):
            for key, op in ops.items():
                taken = op.sample(clock)
                # One-time work, such as choosing a kernel, happens in the first calls.
                if i > 0:
                    samples[key].append(taken)
                bar.update()
    ways = {key: zip(*mine, strict=True) for key, mine in samples.items()}
    return {key: tuple(map(median, both)) for key, both in ways.items()}


class _Op:
    """A part of an op, and tensors that it can read."""

    def __init__(self, part: Part, constants: Mapping[str, Any]) -> None:
        fields = [f"x{i}" for i in range(len(part.inputs))]
        code = f"lambda seed, {', '.join(fields)}: {part.call(fields, seed='seed')}"
        self._call: Callable[..., Any] = eval(code, code_names(part.op))
        self._inputs = [_tensor(view, constants) for view in part.inputs]
        self._is_single = len(part.outputs) == 1

    def sample(self, clock: Callable[[], float]) -> tuple[float, float]:
        """Seconds of the forward, and of the backward."""
        start = clock()
        result = self._call(0, *self._inputs)
        forward = clock() - start
        roots = [x for x in ([result] if self._is_single else result) if x.requires_grad]
        if not roots:
            return forward, 0.0
        grads = [torch.ones_like(x) for x in roots]
        start = clock()
        torch.autograd.backward(roots, grads)
        backward = clock() - start
        for value in self._inputs:
            value.grad = None
        return forward, backward


def _tensor(view: VTensor, constants: Mapping[str, Any]) -> Tensor:
    """A tensor that an op can read: constants unchanged, row numbers 0, masks true."""
    value = constants.get(view.tensor.name) if view.tensor.kind == CONSTANT else None
    if isinstance(value, Tensor) and not value.is_meta:
        return value[view.box.slices_within(view.tensor.box)] if value.shape else value
    dtype: torch.dtype = getattr(torch, view.tensor.dtype)
    shape = view.box.shape
    if dtype.is_floating_point:
        made = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
        return made.requires_grad_(view.tensor.requires_grad)
    return (
        torch.ones(shape, dtype=dtype) if dtype == torch.bool else torch.zeros(shape, dtype=dtype)
    )


# --- overheads ----------------------------------------------------------------------------------


def _engine_secs(meter: Meter) -> float:
    """Seconds of a backward that computes nothing."""
    leaf = torch.zeros(1, requires_grad=True)
    out, grad = leaf.view(1), torch.ones(1)
    return meter.timed(lambda: torch.autograd.grad(out, leaf, grad, retain_graph=True))


def _segment_secs(meter: Meter) -> float:
    """Seconds of a call of an empty segment: half of its forward and backward."""
    value, grad = torch.zeros(1), torch.ones(1)

    def both() -> None:
        leaf = value.detach().requires_grad_()
        out = leaf.view(1)
        out.detach()
        torch.autograd.backward([out], [grad])

    return meter.timed(both) / 2
