"""Table text: the data of one rank's program, as a value and as Python text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from functools import lru_cache
from typing import Any

import rvdcomm as rv
from superscaler_core.codegen.text import INDENT, wrapped
from superscaler_core.errors import PlanError
from superscaler_core.graph.graph import Graph
from superscaler_core.materialize.edges import Edge
from superscaler_core.materialize.materialized import Materialized
from superscaler_core.materialize.segments import Segment
from superscaler_core.materialize.sharding import Sharding
from superscaler_core.materialize.transfer import Transfer
from superscaler_core.materialize.weights import Use
from superscaler_core.plan import Device
from superscaler_core.quoted import commented, literal, quoted
from superscaler_core.run.tables import RankEdge, Stored, SubTransfer, Tables, Weight
from superscaler_core.training.plain import text_of

MAX_TEXTS = 1 << 14
"""Bound on cached sub-transfers and their texts; most devices share them."""


# --- the value ----------------------------------------------------------------------------------


def tables_of(made: Materialized, device: Device) -> Tables:
    """The data of one device's program."""
    plan, graph = made.plan, made.plan.graph
    every = made.weights.uses
    uses = [u for u in every if device in u.sharding.shards or device in u.storage.shards]
    steps = (s for program in made.stages for s in program.steps.get(device, ()))
    segments = [step for step in steps if isinstance(step, Segment)]
    for segment in segments:
        for part in segment.parts:
            made.sources.inputs_of(part, device)
    schedule = plan.schedule if made.is_asynchronous else None
    names = dict.fromkeys(name for use in uses for name in (use.tensor.name, use.name))
    return Tables(
        rank=device,
        num_ranks=max(plan.devices) + 1,
        num_microbatches=plan.num_microbatches,
        inputs={tensor.name: (tensor.shape, tensor.dtype) for tensor in graph.batch_inputs},
        boxes=made.sources.boxes_on(device),
        samples=dict(graph.samples),
        loss_dtype=graph.loss.dtype,
        loss=_sub_transfers(made.loss, device),
        edges={e.name: _edge(e, device) for e in made.edges.all if device in e.devices},
        weights={use.name: _weight(use, device) for use in uses},
        parameters=_parameters(made, device),
        order=tuple(tensor.name for tensor in graph.parameters.values()),
        aliases=dict(graph.aliases),
        recomputed=frozenset(segment.name for segment in segments if segment.recompute),
        offloaded=frozenset(segment.name for segment in segments if segment.swap),
        buffers={name: name in graph.folded for name in graph.buffers},
        results={
            edge.name: (edge.result, plan.dims.samples_dim(edge.tensor))
            for edge in made.edges.all
            if edge.result
        },
        states={t.name: _sub_transfers(found, device) for t, found in made.states.items()},
        extra={name: text for name, text in _extra(graph) if isinstance(text, str)},
        arguments=dict(graph.arguments),
        carried={name: given.name if given else "" for name, given in graph.carried.items()},
        microbatches_per_update=None if schedule is None else schedule.microbatches_per_update,
        delays={name: made.delays[name] for name in names if name in made.delays},
        one_version=made.has_one_version,
    )


def _edge(edge: Edge, device: Device) -> RankEdge:
    ends = _box(edge.src, device), _box(edge.dst, device)
    sub_transfers = _sub_transfers(edge.forward, device), _sub_transfers(edge.backward, device)
    return RankEdge(*ends, edge.tensor.dtype, *sub_transfers)


def _weight(use: Use, device: Device) -> Weight:
    return Weight(
        use.tensor.name,
        _box(use.sharding, device),
        use.tensor.dtype,
        _sub_transfers(use.fetch, device),
        _sub_transfers(use.reduce, device),
        "" if use.unit is None else "unshard" if use.unit.unshards else "reduce",
        use.owner is not None,
    )


def _parameters(made: Materialized, device: Device) -> Mapping[str, Stored]:
    """Every parameter, with the box that this device stores."""
    graph, hosted = made.plan.graph, made.plan.on_host
    # Layers have equal parameters.
    known: dict[Any, Stored] = {}
    found = {}
    for tensor in graph.parameters.values():
        storage, packed = made.weights.storage[tensor], graph.packed.get(tensor.name)
        of = tensor.shape, tensor.dtype, tensor.requires_grad, tensor.name in hosted
        key = *of, storage, None if packed is None else id(packed)
        if key not in known:
            shape, dtype, is_trained, is_hosted = of
            whole, box = _sub_transfers(made.whole[tensor], device), _box(storage, device)
            known[key] = Stored(shape, dtype, box, is_trained, whole, is_hosted, packed)
        found[tensor.name] = known[key]
    return found


def _extra(graph: Graph) -> Iterator[tuple[str, str | PlanError]]:
    """What modules add to the state dict, as texts of plain values, or why it is left out."""
    for name, value in graph.extra.items():
        try:
            yield name, text_of(value, name)
        except PlanError as error:
            yield name, error


def _box(sharding: Sharding, device: Device) -> str | None:
    shard = sharding.shards.get(device)
    return None if shard is None else _text_of_box(shard.box)


_text_of_box: Callable[[rv.Box], str] = lru_cache(maxsize=MAX_TEXTS)(str)


def _sub_transfers(transfers: tuple[Transfer, ...], device: Device) -> tuple[SubTransfer, ...]:
    """The sub-transfers in which the device takes part."""
    return sub_transfers_of(tuple(t for t in transfers if device in t.src or device in t.dst))


@lru_cache(maxsize=MAX_TEXTS)
def sub_transfers_of(transfers: tuple[Transfer, ...]) -> tuple[SubTransfer, ...]:
    """Transfers as values of tables."""
    return tuple(SubTransfer(str(t.box), str(t.src), str(t.dst), t.dtype) for t in transfers)


# --- the text -----------------------------------------------------------------------------------


def tables_text(tables: Tables, graph: Graph) -> str:
    """The assignment of ``TABLES``: equal edges, weights and parameters are written once."""
    lines = ["TABLES = Tables("]
    for each in fields(tables):
        value = getattr(tables, each.name)
        if value == _default(each):
            continue
        if each.name in ("edges", "weights", "parameters"):
            lines += [f"    {each.name}={{", *_grouped(value), "    },"]
        elif each.name == "order":
            lines.append(wrapped("    order=(", [*map(quoted, value)], ",),", ""))
        else:
            lines.append(f"    {each.name}={_literal(value)},")
    left = (str(why) for _, why in _extra(graph) if isinstance(why, PlanError))
    lines += [f"    # {commented(why)} It is left out of state dicts." for why in left]
    return "\n".join([*lines, ")"])


def _default(of: Any) -> Any:
    return of.default if of.default_factory is MISSING else of.default_factory()


def _grouped(entries: Mapping[str, Any]) -> Iterator[str]:
    """The entries; those that differ in their names alone are written once."""
    groups: dict[Any, list[str]] = {}
    same: dict[int, list[str]] = {}
    for name, entry in entries.items():
        if getattr(entry, "name", name) != name:
            yield f"{2 * INDENT}{quoted(name)}: {_literal(entry)},"
        elif hasattr(entry, "name"):
            groups.setdefault(replace(entry, name=""), []).append(name)
        else:
            # Most equal entries are one object.
            if id(entry) not in same:
                same[id(entry)] = groups.setdefault(entry, [])
            same[id(entry)].append(name)
    for entry, names in groups.items():
        head = f"{2 * INDENT}**{_literal(entry)}.named("
        yield wrapped(head, [*map(quoted, names)], "),", 2 * INDENT)


def _literal(value: Any) -> str:
    """A value as Python text: plain values, and values of the classes of tables."""
    if is_dataclass(value) and not isinstance(value, type):
        return _fields_text(value)  # type: ignore[arg-type]
    if isinstance(value, frozenset):
        return f"frozenset({sorted(value)!r})"
    if isinstance(value, tuple) and any(map(is_dataclass, value)):
        return f"({', '.join(map(_literal, value))}{',' * (len(value) == 1)})"
    if isinstance(value, dict) and any(isinstance(v, tuple) for v in value.values()):
        pairs = (f"{_literal(key)}: {_literal(v)}" for key, v in value.items())
        return f"{{{', '.join(pairs)}}}"
    return literal(value)


@lru_cache(maxsize=MAX_TEXTS)
def _fields_text(value: Any) -> str:
    given = (
        f"{each.name}={_literal(getattr(value, each.name))}"
        for each in fields(value)
        if getattr(value, each.name) != _default(each)
    )
    return f"{type(value).__name__}({', '.join(given)})"
