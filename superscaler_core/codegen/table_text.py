"""Table text: the tables of a rank's file, as Python text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import rvdcomm as rv
from superscaler_core.errors import PlanError
from superscaler_core.graph.packing import Packing
from superscaler_core.graph.tensor import PTensor
from superscaler_core.plan import Device
from superscaler_core.program.edges import Edge
from superscaler_core.program.materialized import Materialized
from superscaler_core.program.side import Side
from superscaler_core.program.transfer import Transfer
from superscaler_core.program.weights import Use
from superscaler_core.quoted import commented, literal, quoted
from superscaler_core.run.plain import text_of

MAX_TEXTS = 1 << 14
"""Bound on cached texts of transfers and parameters; most devices share them."""


def tables_text(
    made: Materialized, device: Device, recomputed: Sequence[str], swapped: Sequence[str]
) -> str:
    """The assignment of ``TABLES`` for one device."""
    plan = made.plan
    buffers = {name: name in plan.graph.folded for name in plan.graph.buffers}
    results = {
        edge.name: (edge.result, plan.dims.samples_dim(edge.tensor))
        for edge in made.edges.all
        if edge.result
    }
    arguments = dict(plan.graph.arguments)
    lines = [
        "TABLES = Tables(",
        f"    rank={device},",
        f"    num_ranks={max(plan.devices) + 1},",
        f"    num_microbatches={plan.num_microbatches},",
        *_delay_lines(made, device),
        "    inputs={",
        *(
            f"        {quoted(t.name)}: ({t.shape!r}, {t.dtype!r}),"
            for t in plan.graph.batch_inputs
        ),
        "    },",
        *([f"    samples={literal(dict(plan.graph.samples))},"] if plan.graph.samples else []),
        f"    loss_dtype={plan.graph.loss.dtype!r},",
        f"    loss={_legs(made.loss, device)},",
        "    edges={",
        *_indented(_edge_lines(edge, device) for edge in made.edges.all if device in edge.devices),
        "    },",
        "    weights={",
        *_indented(_weight_lines(use, device) for use in _uses_on(made, device)),
        "    },",
        "    parameters={",
        *_parameter_lines(made, device),
        "    },",
        f"    aliases={literal(dict(plan.graph.aliases))},",
        f"    recomputed=frozenset({sorted(recomputed)!r}),",
        *([f"    swapped=frozenset({sorted(swapped)!r}),"] if swapped else []),
        *([f"    buffers={literal(buffers)},"] if buffers else []),
        *([f"    results={literal(results)},"] if results else []),
        *_extra_lines(plan.graph.extra),
        *([f"    arguments={literal(arguments)},"] if arguments else []),
        *_state_lines(made, device),
        ")",
    ]
    return "\n".join(lines)


def _extra_lines(extra: Mapping[str, Any]) -> Iterator[str]:
    """What modules add to the state dict, as texts of plain values."""
    texts = {}
    for name, value in extra.items():
        try:
            texts[name] = text_of(value, name)
        except PlanError as error:
            yield f"    # {commented(str(error))} It is left out of state dicts."
    if texts:
        yield f"    extra={literal(texts)},"


def _delay_lines(made: Materialized, device: Device) -> Iterator[str]:
    """The facts about updates between microbatches."""
    schedule = made.plan.schedule
    if not made.is_asynchronous or schedule is None:
        return
    yield f"    microbatches_per_update={schedule.microbatches_per_update},"
    yield "    delays={"
    uses = _uses_on(made, device)
    for name in dict.fromkeys(name for use in uses for name in (use.tensor.name, use.name)):
        if name in made.delays:
            yield f"        {quoted(name)}: {made.delays[name]!r},"
    yield "    },"
    yield f"    one_version={made.has_one_version!r},"


def _state_lines(made: Materialized, device: Device) -> Iterator[str]:
    if made.states:
        yield "    states={"
        for tensor, legs in made.states.items():
            yield f"        {quoted(tensor.name)}: {_legs(legs, device)},"
        yield "    },"


def _uses_on(made: Materialized, device: Device) -> list[Use]:
    return [
        use
        for use in made.weights.uses
        if device in use.side.shards or device in use.storage.shards
    ]


def _edge_lines(edge: Edge, device: Device) -> list[str]:
    return [
        f"# {commented(f'{edge.tensor}: {_route(edge)}')}",
        f"{quoted(edge.name)}: RankEdge(",
        f"    src={_box(edge.src, device)},",
        f"    dst={_box(edge.dst, device)},",
        f"    dtype={edge.tensor.dtype!r},",
        f"    forward={_legs(edge.forward, device)},",
        f"    backward={_legs(edge.backward, device)},",
        "),",
    ]


def _route(edge: Edge) -> str:
    route = _layouts(edge.forward)
    if edge.recycles is not None:
        route += f", to {edge.recycles.name} of the next turn"
    if edge.result:
        route += f", out as {edge.result}"
    if edge.src_stage != edge.dst_stage:
        route = f"stage {edge.src_stage} to {edge.dst_stage}, {route}"
    return route


def _layouts(legs: Sequence[Transfer]) -> str:
    if len(legs) != 1:
        return f"{len(legs)} cells"
    return f"{legs[0].src.rvd} -> {legs[0].dst.rvd}"


def _weight_lines(use: Use, device: Device) -> list[str]:
    windowed = "" if use.window is None else "gather" if use.window.gathers else "reduce"
    return [
        f"# {commented(str(use.tensor))}: gradient {_layouts(use.reduce)}",
        f"{quoted(use.name)}: Weight(",
        f"    name={quoted(use.tensor.name)},",
        f"    box={_box(use.side, device)},",
        f"    dtype={use.tensor.dtype!r},",
        f"    fetch={_legs(use.fetch, device)},",
        f"    reduce={_legs(use.reduce, device)},",
        f"    windowed={windowed!r},",
        *(["    is_borrowed=True,"] if use.owner is not None else []),
        "),",
    ]


def _parameter_lines(made: Materialized, device: Device) -> Iterator[str]:
    """Every parameter, with the box that this device stores."""
    hosted = made.plan.on_host
    for tensor in made.plan.graph.parameters.values():
        storage, whole = made.weights.storage[tensor], made.whole[tensor]
        shard = storage.shards.get(device)
        # When parameters are saved they go to all devices, so this device is in most legs.
        legs = whole
        if not all(device in leg.dst for leg in whole):
            legs = tuple(leg for leg in whole if device in leg.src or device in leg.dst)
        is_hosted = tensor.name in hosted
        packing = made.plan.graph.packed.get(tensor.name)
        yield _stored_text(tensor, None if shard is None else shard.box, legs, is_hosted, packing)


@lru_cache(maxsize=MAX_TEXTS)
def _stored_text(
    tensor: PTensor,
    box: rv.Box | None,
    whole: tuple[Transfer, ...],
    is_hosted: bool,
    packing: Packing | None,
) -> str:
    """The lines of one parameter."""
    lines = [
        f"{quoted(tensor.name)}: Stored(",
        f"    shape={tensor.shape!r},",
        f"    dtype={tensor.dtype!r},",
        f"    box={None if box is None else repr(str(box))},",
        f"    is_trained={tensor.requires_grad},",
        f"    whole={_legs_text(whole)},",
        *(["    on_host=True,"] if is_hosted else []),
        *([f"    packing={packing},"] if packing else []),
        "),",
    ]
    return "\n".join(_indented([lines]))


def _box(side: Side, device: Device) -> str:
    shard = side.shards.get(device)
    return "None" if shard is None else repr(str(shard.box))


def _legs(legs: Iterable[Transfer], device: Device) -> str:
    """The legs in which the device takes part."""
    return _legs_text(tuple(leg for leg in legs if device in leg.src or device in leg.dst))


@lru_cache(maxsize=MAX_TEXTS)
def _legs_text(legs: tuple[Transfer, ...]) -> str:
    texts = [
        f"Leg({str(leg.box)!r}, {_layout(leg.src)}, {_layout(leg.dst)}, {leg.dtype!r})"
        for leg in legs
    ]
    return f"({', '.join(texts)}{',' if len(texts) == 1 else ''})"


@lru_cache(maxsize=MAX_TEXTS)
def _layout(layout: rv.Layout) -> str:
    return repr(str(layout))


def _indented(entries: Iterable[Sequence[str]]) -> list[str]:
    return [" " * 8 + line for entry in entries for line in entry]
