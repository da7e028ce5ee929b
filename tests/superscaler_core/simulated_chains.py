"""Chains of equal layers with given times, on networks without communication costs."""

from __future__ import annotations

from math import inf

import rvdcomm as rv
import superscaler_core as ss
from superscaler_core.cost import signature

FREE = rv.Link(0.0, inf)


def free(num_devices: int) -> rv.Topology:
    """A host whose communication takes no time."""
    return rv.Topology.single_host(num_devices, FREE.alpha_secs, FREE.bytes_per_sec)


def chain(num_layers: int, batch: int = 4, width: int = 8, *, recycles: bool = False) -> ss.Graph:
    """``sum(x w0^T w1^T ...)`` with square weights; the product may be recycled as ``x``."""
    builder = ss.GraphBuilder("chain")
    x = first = builder.input("x", (batch, width), "float32")
    for i in range(num_layers):
        weight = builder.parameter(f"layers.{i}.weight", (width, width), "float32")
        (x,) = builder.op(
            "linear", "b k+, n k+ -> b n", [x, weight], [((batch, width), "float32")],
            "F.linear({x0}, {x1})", module=f"layers.{i}", flops=2.0,
        )  # fmt: skip
    (loss,) = builder.op("sum", "b+ n+ -> ()", [x], [((), "float32")], "{x0}.sum()", module="loss")
    return builder.build(loss, {first: x} if recycles else None)


def given(graph: ss.Graph, forward_secs: float, backward_secs: float) -> ss.DeviceProfile:
    """A profile in which every unsplit layer takes the given times; other ops take no time."""
    return ss.DeviceProfile(
        "given",
        {"float32": inf},
        inf,
        1 << 40,
        op_secs={
            signature(ss.Part(op)): (forward_secs, backward_secs)
            for op in graph.ops
            if op.kind == "linear"
        },
    )


def pipelined(
    num_layers: int,
    num_devices: int,
    schedule: ss.Schedule,
    topology: rv.Topology,
    *,
    recycles: bool = False,
) -> ss.Compiled:
    """A chain in stages of equally many layers; the stages are assigned to devices in turn."""
    graph = chain(num_layers, recycles=recycles)
    plan = ss.Plan(graph, range(num_devices))
    size = num_layers // schedule.num_stages
    for stage in plan.pipeline([size * i for i in range(1, schedule.num_stages)]):
        for op in stage.ops:
            plan.op_assign(op, stage.index % num_devices)
    plan.op_order(schedule, ss.Placement.even(plan.devices, schedule.num_workers))
    return ss.compile(plan, topology=topology)
