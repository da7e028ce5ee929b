"""Measured: a profile of this machine, from the times of a program's own ops on real tensors."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Mapping
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from superscaler_core.compiled import Compiled
from superscaler_core.cost.op_time import signature
from superscaler_core.cost.profile import DeviceProfile
from superscaler_core.graph.part import Part
from superscaler_core.graph.tensor import CONSTANT, ITEM_BYTES, PARAMETER, VTensor
from superscaler_core.run.evaluate import code_names

NUM_ROUNDS = 3
"""All ops are measured so many times over, so that what disturbs a round does not count."""

MIN_SAMPLES, MAX_SAMPLES = 3, 200
"""Of every op in a round; it is the median that counts."""

STREAM_BYTES = CACHE_BYTES = 64 << 20
"""Of tensors that no cache holds."""

MIN_SETS, MAX_SETS = 2, 16
"""Of an op's tensors, which take turns."""

PRODUCT_SIZE = 512
"""Rows and columns of the product by which peaks are measured."""

Distinct = dict[str, tuple[Part, Mapping[str, Any]]]
"""A part of every signature, and the constants of its graph."""


def measured(
    programs: Iterable[Compiled],
    *,
    name: str = "this machine",
    op_secs: float = 0.02,
    move_secs: float = 0.0,
    memory_bytes: int | None = None,
) -> DeviceProfile:
    """Measure every distinct op shape of some programs on this process's device, a CPU.

    Forward and backward of each run on tensors of the shapes that the parts have, with as many
    threads as torch is set to. Where ranks share a machine, let all of them measure at once: they
    share its memory when they train, too.

    Args:
        programs: whose parts are measured.
        name: of the profile.
        op_secs: about how long each op is measured, in seconds.
        move_secs: what a call that communicates takes besides its plan's time.
        memory_bytes: of a device; this machine's if None.

    Returns:
        A profile whose table has these ops; others are priced by this machine's peaks.
    """
    distinct = _distinct(programs)
    dtypes = {view.tensor.dtype for part, _ in distinct.values() for view in part.outputs}
    rounds = [_round(distinct, op_secs / NUM_ROUNDS) for _ in range(NUM_ROUNDS)]
    engine_secs = _engine_secs(op_secs)
    table = {}
    for key in distinct:
        forward, backward = (median(found[key][way] for found in rounds) for way in (0, 1))
        table[key] = forward, max(0.0, backward - engine_secs)
    return DeviceProfile(
        name,
        {dtype: _peak_flops(dtype, op_secs) for dtype in sorted(dtypes) if _is_float(dtype)},
        _stream_bytes_per_sec(op_secs),
        memory_bytes or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        segment_secs=_segment_secs(op_secs),
        move_secs=move_secs,
        op_secs=table,
        notes=(
            f"measured with {torch.get_num_threads()} threads of {platform.machine()}, "
            f"torch {torch.__version__}",
        ),
    )


def _round(distinct: Distinct, secs: float) -> dict[str, tuple[float, float]]:
    """Forward and backward of every op, each measured for some time."""
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
    """Medians of the forward, and of the backward, which begins after those of others."""
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
            # What is done once, such as choosing a kernel, is in the first calls.
            times[0].clear()
            times[1].clear()
    return median(times[0]), median(times[1] or [0.0])


def _num_sets(part: Part) -> int:
    """How many tensors take turns, so that weights come from memory, as after other layers."""
    weights = [view for view in part.inputs if view.tensor.kind == PARAMETER]
    num_bytes = sum(v.box.num_elements * ITEM_BYTES[v.tensor.dtype] for v in weights)
    return MIN_SETS if num_bytes == 0 else min(MAX_SETS, max(MIN_SETS, CACHE_BYTES // num_bytes))


def _tensor(view: VTensor, constants: Mapping[str, Any]) -> Tensor:
    """A tensor that an op may read: constants as they are, numbers of rows 0, masks true."""
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


# --- what is around ops -------------------------------------------------------------------------


def _engine_secs(secs: float) -> float:
    """Of a backward that computes nothing."""
    leaf = torch.zeros(1, requires_grad=True)
    out, grad = leaf.view(1), torch.ones(1)
    return _timed(lambda: torch.autograd.grad(out, leaf, grad, retain_graph=True), secs)


def _segment_secs(secs: float) -> float:
    """Of a call of a segment that computes nothing: half of its forward and backward."""
    value, grad = torch.zeros(1), torch.ones(1)

    def both() -> None:
        leaf = value.detach().requires_grad_()
        out = leaf.view(1)
        out.detach()
        torch.autograd.backward([out], [grad])

    return _timed(both, secs) / 2


def _stream_bytes_per_sec(secs: float) -> float:
    src, dst = torch.zeros(2, STREAM_BYTES // 4)
    return 2 * STREAM_BYTES / _timed(lambda: dst.copy_(src), secs)


def _peak_flops(dtype: str, secs: float) -> float:
    square = torch.ones(PRODUCT_SIZE, PRODUCT_SIZE, dtype=getattr(torch, dtype))
    return 2 * PRODUCT_SIZE**3 / _timed(lambda: square @ square, secs)


# --- clocks -------------------------------------------------------------------------------------


def _timed(work: Callable[[], object], secs: float) -> float:
    """Median of one call."""
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
