"""GSPMD: an sProgram that completes a few specs of tensors and cuts every op by them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

import rvdcomm as rv
from superscaler_core.cost import PROFILES, CostModel, DeviceProfile
from superscaler_core.errors import PlanError
from superscaler_core.graph.graph import Graph
from superscaler_core.graph.shard_spec import ShardSpec
from superscaler_core.plan import Device, Plan
from superscaler_core.plan.mesh import Mesh
from superscaler_core.plans import plan_row
from superscaler_core.plans.option_texts import MESH_TEXT, words
from superscaler_core.plans.row import OptionReader
from superscaler_core.published.gspmd.price import Prices
from superscaler_core.published.gspmd.propagate import Propagated, propagate

_log = logging.getLogger("superscaler_core")


def specs_of(text: str) -> dict[str, ShardSpec]:
    """Specs by names with ``*``, such as ``tokens:d0@x;*.up.weight:d0@y``."""
    found = {}
    for word in words(text, ";"):
        name, _, spec = word.rpartition(":")
        if not name:
            raise ValueError(word)
        found[name.strip()] = ShardSpec.parse(spec)
    return found


@plan_row(
    readers={
        "mesh": MESH_TEXT,
        "specs": OptionReader(
            specs_of, "NAME:SPEC with semicolons between, such as tokens:d0@x;*.up.weight:d0@y"
        ),
    },
    is_proposed=False,
)
def gspmd(
    plan: Plan,
    *,
    mesh: Mesh | None = None,
    specs: Mapping[str, ShardSpec] | None = None,
    profile: DeviceProfile = PROFILES["v100"],
    topology: rv.Topology | None = None,
) -> None:
    """Cut every op as the specs of a few tensors say, completed by propagation.

    A parameter with a given spec is stored as the spec says; others are stored where they are read.
    Where specs exclude each other, prices decide, and the log says so.

    Args:
        plan: to fill.
        mesh: a mesh of the plan's devices; one axis x if None.
        specs, profile, topology: as in ``complete``.

    Raises:
        PlanError: as in ``complete``.

    Source: Xu et al., GSPMD, 2021; see ``propagate``.
    """
    mesh = mesh or Mesh((("x", len(plan.devices)),))
    found = complete(
        plan.graph, plan.devices, mesh, specs, profile=profile, topology=topology
    )  # fmt: skip
    for choice in found.choices:
        _log.info("%s", choice)
    for op in plan.graph.ops:
        plan.split_as(op, found.split(op))
    for name, tensor in plan.graph.parameters.items():
        if name in found.said and name in found.specs:
            plan.split_as(plan.update(name), found.prices.storage(tensor, found.specs))


def complete(
    graph: Graph,
    devices: Sequence[Device],
    mesh: Mesh,
    specs: Mapping[str, ShardSpec] | None = None,
    *,
    profile: DeviceProfile = PROFILES["v100"],
    topology: rv.Topology | None = None,
) -> Propagated:
    """The specs of all tensors and the cuts of all ops, from the specs of a few tensors.

    The given specs are the marks of the model (``superscaler_core.shard``) and the argument
    ``specs``, which replaces marks of the same tensors.

    Args:
        graph: the graph.
        devices: the devices of the mesh, whose last axis varies fastest.
        mesh: the mesh of the devices.
        specs: specs by names, which may have ``*``: of inputs, parameters, activations, or ops (for
            their outputs). If several names fit a tensor, the first counts.
        profile: the profile of every device.
        topology: a topology with these devices; one host with NVLink if None.

    Raises:
        PlanError: the mesh has another number of devices, a name fits nothing, or a spec does not
            fit its tensor or the mesh.
    """
    if mesh.num_devices != len(devices):
        raise PlanError(
            f"mesh {mesh} has {mesh.num_devices} devices, and {len(devices)} were given."
        )
    cluster = topology or rv.Topology.single_host(max(devices) + 1, 5e-6, 200e9)
    prices = Prices(CostModel(graph, profile, cluster), mesh, devices)
    said = {**graph.marks, **_named(graph, specs or {})}
    return propagate(graph, _in_graph(graph, said), prices)


def _named(graph: Graph, specs: Mapping[str, ShardSpec]) -> dict[str, ShardSpec]:
    """The specs by tensor, from specs by names with ``*``.

    Raises:
        PlanError: a name fits nothing; the message has similar names.
    """
    names = dict(_names(graph))
    found: dict[str, ShardSpec] = {}
    for pattern, spec in specs.items():
        fitting = [tensors for name, tensors in names.items() if fnmatchcase(name, pattern)]
        if not fitting:
            near = get_close_matches(pattern, names, 3, 0.0)
            raise PlanError(
                f"{graph.name} has no tensor or op {pattern!r}; it has {', '.join(near)}."
            )
        for tensors in fitting:
            for tensor in tensors:
                found.setdefault(tensor, spec)
    return found


def _names(graph: Graph) -> Iterator[tuple[str, tuple[str, ...]]]:
    """All names that a spec can be given by, each with its tensors."""
    for tensor in (*graph.inputs, *graph.parameters.values()):
        yield tensor.name, (tensor.name,)
    for name, of in graph.aliases.items():
        yield name, (of,)
    for op in graph.ops:
        for tensor in op.outputs:
            yield tensor.name, (tensor.name,)
        yield op.name, tuple(tensor.name for tensor in op.outputs)


def _in_graph(graph: Graph, specs: Mapping[str, ShardSpec]) -> dict[str, ShardSpec]:
    """The specs of the graph's tensors: a packed parameter has one dim more than the model's."""
    made = {}
    for name, spec in specs.items():
        packing = graph.packed.get(name)
        if packing is not None:
            dims = tuple((dim + (dim >= packing.dim), axes) for dim, axes in spec.dims)
            spec = ShardSpec(dims, spec.others_whole)
        made[name] = spec
    return made
