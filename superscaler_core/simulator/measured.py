"""Measured: a profile of this machine, from times of a program's own ops on real tensors."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import accumulate
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from superscaler_core.compiled import Compiled
from superscaler_core.cost.op_time import signature
from superscaler_core.cost.profile import DeviceProfile
from superscaler_core.cost.reach import Reach
from superscaler_core.graph.part import Part
from superscaler_core.graph.tensor import CONSTANT, ITEM_BYTES, PARAMETER, VTensor
from superscaler_core.run.evaluate import code_names

NUM_ROUNDS = 3
"""Rounds in which all ops are measured, so that a disturbed round does not decide."""

MIN_SAMPLES, MAX_SAMPLES = 3, 200
"""Samples per op and round; the median is used."""

CACHE_BYTES = 64 << 20
"""Size of tensors that no cache can hold."""

STREAM_BYTES = (CACHE_BYTES >> 10, CACHE_BYTES >> 5, CACHE_BYTES)
"""Sizes of the copies that measure the memory."""

MIN_SETS, MAX_SETS = 2, 16
"""Most copies of an op's tensors, which are used in turn."""

PRODUCT_ROWS = (32, 128, 512)
"""Rows and columns of the products that measure how fast products of each dtype are."""

Distinct = dict[str, tuple[Part, Mapping[str, Any]]]
"""One part for every signature, with the constants of its graph."""


def measured(
    programs: Iterable[Compiled],
    *,
    name: str = "this machine",
    op_secs: float = 0.02,
    move_secs: float = 0.0,
    memory_bytes: int | None = None,
) -> DeviceProfile:
    """Measure every distinct op shape of some programs on this process's device, a CPU.

    Forward and backward of each op run on tensors with the shapes of the parts, with the number of
    threads that torch is set to. If ranks share a machine, let all of them measure at the same
    time, because they share its memory in training, too.

    Args:
        programs: programs whose parts are measured.
        name: name of the profile.
        op_secs: approximate time spent on each op, in seconds.
        move_secs: overhead of a communication call, in addition to its plan's time.
        memory_bytes: memory of a device; this machine's if None.

    Returns:
        A profile with times of these ops; other ops are priced by the speeds of products and copies
        of a few sizes.
    """
    distinct = _distinct(programs)
    dtypes = {view.tensor.dtype for part, _ in distinct.values() for view in part.outputs}
    rounds = [_round(distinct, op_secs / NUM_ROUNDS) for _ in range(NUM_ROUNDS)]
    engine_secs = _engine_secs(op_secs)
    table = {}
    for key in distinct:
        forward, backward = (median(found[key][way] for found in rounds) for way in (0, 1))
        table[key] = forward, max(0.0, backward - engine_secs)
    launch_secs = _launch_secs(op_secs)
    products = {
        dtype: _peak_and_reach(_products(dtype, launch_secs, op_secs))
        for dtype in sorted(dtypes)
        if _is_float(dtype)
    }
    bytes_per_sec, memory = _peak_and_reach(_streams(launch_secs, op_secs))
    return DeviceProfile(
        name,
        {dtype: peak for dtype, (peak, _) in products.items()},
        bytes_per_sec,
        memory_bytes or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        launch_secs=launch_secs,
        products={dtype: reach for dtype, (_, reach) in products.items()},
        memory=memory,
        segment_secs=_segment_secs(op_secs),
        move_secs=move_secs,
        op_secs=table,
        notes=(
            f"measured with {torch.get_num_threads()} threads of {platform.machine()}, "
            f"torch {torch.__version__}",
        ),
    )


def _round(distinct: Distinct, secs: float) -> dict[str, tuple[float, float]]:
    """Measure the forward and the backward of every op."""
    with tqdm(distinct.items(), desc="measure ops", delay=2, leave=False, disable=None) as bar:
        return {key: _op_secs(part, constants, secs) for key, (part, constants) in bar}


def _distinct(programs: Iterable[Compiled]) -> Distinct:
    found: Distinct = {}
    for compiled in programs:
        graph = compiled.plan.graph
        for op in graph.ops:
            for part in compiled.plan.parts(op):
                found.setdefault(signature(part), (part, graph.constants))
    return found


# --- ops ----------------------------------------------------------------------------------------


def _op_secs(part: Part, constants: Mapping[str, Any], secs: float) -> tuple[float, float]:
    """Medians of the forward, and of the backward without the overhead of starting autograd."""
    fields = [f"x{i}" for i in range(len(part.inputs))]
    code = f"lambda seed, {', '.join(fields)}: {part.call(fields, seed='seed')}"
    call: Callable[..., Any] = eval(code, code_names(part.op))
    sets = [[_tensor(view, constants) for view in part.inputs] for _ in range(_num_sets(part))]
    times: tuple[list[float], list[float]] = [], []
    for i in _while(secs):
        kept = []
        for inputs in sets:
            start = perf_counter()
            result = call(0, *inputs)
            times[0].append(perf_counter() - start)
            outputs = result if len(part.outputs) > 1 else [result]
            roots = [x for x in outputs if x.requires_grad]
            kept.append((roots, [x for x in inputs if x.requires_grad]))
        grads = [torch.ones_like(x) for x in kept[0][0]]
        while kept:
            roots, wanted = kept.pop()
            if roots:
                start = perf_counter()
                found = torch.autograd.grad(roots, wanted, grads, allow_unused=True)
                times[1].append(perf_counter() - start)
                del found
        if i == 0:
            # One-time work, such as choosing a kernel, happens in the first calls.
            times[0].clear()
            times[1].clear()
    return median(times[0]), median(times[1] or [0.0])


def _num_sets(part: Part) -> int:
    """Number of tensor copies used in turn, so that weights come from memory, as in training."""
    weights = [view for view in part.inputs if view.tensor.kind == PARAMETER]
    num_bytes = sum(v.box.num_elements * ITEM_BYTES[v.tensor.dtype] for v in weights)
    return MIN_SETS if num_bytes == 0 else min(MAX_SETS, max(MIN_SETS, CACHE_BYTES // num_bytes))


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


def _is_float(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat"))


# --- overheads ----------------------------------------------------------------------------------


def _engine_secs(secs: float) -> float:
    """Seconds of a backward that computes nothing."""
    leaf = torch.zeros(1, requires_grad=True)
    out, grad = leaf.view(1), torch.ones(1)
    return _timed(lambda: torch.autograd.grad(out, leaf, grad, retain_graph=True), secs)


def _segment_secs(secs: float) -> float:
    """Seconds of a call of an empty segment: half of its forward and backward."""
    value, grad = torch.zeros(1), torch.ones(1)

    def both() -> None:
        leaf = value.detach().requires_grad_()
        out = leaf.view(1)
        out.detach()
        torch.autograd.backward([out], [grad])

    return _timed(both, secs) / 2


def _launch_secs(secs: float) -> float:
    """Seconds of an op that computes next to nothing."""
    one = torch.zeros(1)
    return _timed(lambda: one + one, secs)


def _streams(launch_secs: float, secs: float) -> list[tuple[float, float]]:
    """Bytes that copies of several sizes read and write, and how many they move in a second."""
    found = []
    for num_bytes in STREAM_BYTES:
        src, dst = torch.zeros(2, num_bytes // 4)
        taken = _timed(partial(dst.copy_, src), secs)
        found.append((2.0 * num_bytes, 2 * num_bytes / _beyond(taken, launch_secs)))
    return found


def _products(dtype: str, launch_secs: float, secs: float) -> list[tuple[float, float]]:
    """Operations of products of several sizes, and how many they do in a second.

    A larger product is taken to be at least as fast: what a cache or another process does to one
    of them is noise here, and bounds of planners rely on it.
    """
    found = []
    for rows in PRODUCT_ROWS:
        square = torch.ones(rows, rows, dtype=getattr(torch, dtype))
        taken = _timed(partial(torch.mm, square, square), secs)
        found.append((2.0 * rows**3, 2 * rows**3 / _beyond(taken, launch_secs)))
    amounts, speeds = zip(*found, strict=True)
    return list(zip(amounts, accumulate(speeds, max), strict=True))


def _beyond(taken: float, launch_secs: float) -> float:
    """The part of a time that a profile does not count as a launch; never nothing."""
    return max(taken - launch_secs, taken / 2)


def _peak_and_reach(speeds: list[tuple[float, float]]) -> tuple[float, Reach]:
    """The greatest speed, and the share of it that each amount reaches."""
    peak = max(speed for _, speed in speeds)
    return peak, Reach.lawful((amount, speed / peak) for amount, speed in speeds)


# --- clocks -------------------------------------------------------------------------------------


def _timed(work: Callable[[], object], secs: float) -> float:
    """Median time of one call."""
    work()
    times = []
    for _ in _while(secs):
        start = perf_counter()
        work()
        times.append(perf_counter() - start)
    return median(times)


def _while(secs: float) -> Iterable[int]:
    """Count samples until enough time has passed, at least ``MIN_SAMPLES``."""
    end = perf_counter() + secs
    for i in range(MAX_SAMPLES):
        if i >= MIN_SAMPLES and perf_counter() > end:
            return
        yield i
