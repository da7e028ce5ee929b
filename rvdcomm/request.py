"""Request: what every rank was asked for, and the one plan, or the one error, that follows.

On the first call of a transition each rank posts its request (plain values, so that they travel as
JSON). From equal posts every rank draws an equal conclusion here, without another message: that is
how an error that one rank made comes on all of them, before any byte is sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from math import prod
from typing import Any

from rvdcomm.dtypes import dtype_name
from rvdcomm.errors import LayoutError, ShapeMismatchError
from rvdcomm.layout import Layout
from rvdcomm.planner import Plan, plan
from rvdcomm.rvd import RVD
from rvdcomm.topology import Topology


@dataclass(frozen=True)
class Request:
    """What one rank was asked for: texts, and the shapes and dtypes of its tensors.

    ``misuse`` says what is wrong with the tensors themselves, if anything is.
    """

    src: str
    dst: str
    shape: tuple[int, ...] | None
    topology: str | None
    shard: tuple[int, ...] | None
    out: tuple[int, ...] | None
    dtypes: tuple[str, ...]
    executor: str = "auto"
    misuse: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Request:
        """What ``to_json`` gave, after a journey as JSON."""
        plain: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in values.items()
        }
        return cls(**plain)

    def __str__(self) -> str:
        return f"redistribute {self.src} -> {self.dst}"


COMMON = ("src", "dst", "shape", "topology", "executor")
"""Fields that must be equal on all ranks."""
assert {field.name for field in fields(Request)} > set(COMMON)


def resolve(
    requests: Mapping[int, Request],
    src: Layout | str,
    dst: Layout | str,
    topology: Topology | None,
    group_size: int,
) -> Plan:
    """The plan that all ranks asked for.

    Args:
        requests: every rank's request.
        src, dst, topology: what this rank was given, of which the requests hold the texts.
        group_size: ranks of the group; texts mean layouts over all of them.

    Raises:
        LayoutError, ShapeMismatchError: ranks disagree, or the request is illegal, or some rank's
            shard is not what ``src`` gives it.
    """
    mine = next(iter(requests.values()))
    _check_equal(requests)
    try:
        return _resolved(requests, src, dst, topology, group_size)
    except (LayoutError, ShapeMismatchError) as error:
        # Facts are raised deep; the transition is added once, here.
        if str(error).startswith("redistribute "):
            raise
        raise type(error)(f"{mine}: {error}") from None


def _resolved(
    requests: Mapping[int, Request],
    src: Layout | str,
    dst: Layout | str,
    topology: Topology | None,
    group_size: int,
) -> Plan:
    mine = next(iter(requests.values()))
    dtype = _common_dtype(requests)
    shape = known_shape(src, dst, mine.shape)
    src_layout = _layout(src, shape, group_size, requests)
    dst_layout = _layout(dst, src_layout.shape, group_size, requests)
    if shape is not None and src_layout.shape != shape:
        raise LayoutError(f"shape={shape} was given, but src {src_layout} has another.")
    check_in_group((*src_layout.ranks, *dst_layout.ranks), group_size, str(mine))
    made = plan(src_layout, dst_layout, dtype, topology)
    for rank, request in sorted(requests.items()):
        check_tensors(made, rank, request)
        if request.misuse:
            raise LayoutError(f"{mine}: rank {rank}: {request.misuse}")
    return made


def known_shape(
    src: Layout | str, dst: Layout | str, shape: tuple[int, ...] | None
) -> tuple[int, ...] | None:
    """The global shape, if it was given or a layout has it; None if it has to be inferred."""
    if shape is not None:
        return tuple(shape)
    for layout in (src, dst):
        if isinstance(layout, Layout):
            return layout.shape
        if "shape(" in layout:
            return Layout.parse(layout).shape
    return None


def check_in_group(ranks: tuple[int, ...], group_size: int, what: str) -> None:
    """Raise a LayoutError if a rank is outside the group."""
    outside = sorted({rank for rank in ranks if rank >= group_size})
    if outside:
        raise LayoutError(
            f"{what}: ranks {outside} are outside the group, which has ranks 0 to {group_size - 1}."
        )


def check_tensors(made: Plan, rank: int, request: Request) -> None:
    """Raise a ShapeMismatchError if what ``rank`` passed is not its shard."""
    what = f"redistribute {made.src.rvd} -> {made.dst.rvd}"
    for noun, layout, got in (("shard", made.src, request.shard), ("out", made.dst, request.out)):
        want = shard_shape(layout, rank)
        if got != want and not (noun == "out" and got is None):
            raise ShapeMismatchError(
                f"{what}: rank {rank} passed {_shape_text(got)}, its {noun} is {_shape_text(want)}."
            )
    odd = [dtype for dtype in request.dtypes if dtype != made.dtype]
    if odd:
        raise ShapeMismatchError(f"{what}: rank {rank} passed {odd[0]}, the plan is {made.dtype}.")


def shard_shape(layout: Layout, rank: int) -> tuple[int, ...] | None:
    """Shape of a rank's shard; None outside the layout."""
    return layout.cell(rank).box.shape if rank in layout else None


def _shape_text(shape: tuple[int, ...] | None) -> str:
    return "None" if shape is None else str(list(shape))


def _check_equal(requests: Mapping[int, Request]) -> None:
    """Raise if two ranks were asked for different things."""
    first, mine = next(iter(requests.items()))
    for rank, other in requests.items():
        for name in COMMON:
            if getattr(other, name) != getattr(mine, name):
                raise LayoutError(
                    f"redistribute: ranks disagree about {name}: rank {first} asks for "
                    f"{getattr(mine, name)}, rank {rank} for {getattr(other, name)}."
                )


def _common_dtype(requests: Mapping[int, Request]) -> str:
    found = {name: rank for rank, request in requests.items() for name in request.dtypes}
    what = next(iter(requests.values()))
    if len(found) > 1:
        each = ", ".join(f"rank {rank} has {name}" for name, rank in sorted(found.items()))
        raise ShapeMismatchError(f"{what}: ranks disagree about dtype: {each}.")
    if not found:
        raise ShapeMismatchError(f"{what}: no rank passed a shard, so the dtype is unknown.")
    return dtype_name(next(iter(found)))


def _layout(
    layout: Layout | str,
    shape: tuple[int, ...] | None,
    group_size: int,
    requests: Mapping[int, Request],
) -> Layout:
    """The layout that a text means in this group; its shape comes from the shards if not given."""
    if isinstance(layout, Layout):
        return layout
    if "shape(" in layout:
        return Layout.parse(layout)
    rvd = RVD(layout)
    # The counts must fit the group before shards can be added up.
    Layout([0] * len(rvd.d), rvd, range(group_size))
    return Layout(
        _inferred_shape(rvd, requests) if shape is None else shape, rvd, range(group_size)
    )


def _inferred_shape(rvd: RVD, requests: Mapping[int, Request]) -> tuple[int, ...]:
    """Add up the shards along every dim; ranks are numbered row-major, R outermost."""
    sizes = []
    for d, count in enumerate(rvd.d):
        stride = prod(rvd.d[d + 1 :])
        shards = [
            requests[i * stride].shard if i * stride in requests else None for i in range(count)
        ]
        extents = [shard[d] for shard in shards if shard is not None and len(shard) == len(rvd.d)]
        if len(extents) != count:
            raise ShapeMismatchError(
                f"{rvd}: the global shape cannot be inferred from shards of shapes "
                f"{[_shape_text(shard) for shard in shards]}; pass shape=."
            )
        sizes.append(sum(extents))
    return tuple(sizes)
