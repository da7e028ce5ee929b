"""The request of each rank, and the one plan, or the one error, that follows from all of them.

On the first call of a transition each rank posts its request (plain values, so that they travel as
JSON). All ranks read the same posts and reach the same conclusion here, without another message. So
an error of one rank is raised on all ranks, before any byte is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from math import prod
from typing import Any

from rvdcomm.errors import CommError, LayoutError, ShapeMismatchError
from rvdcomm.layout import RVD, Layout, dtype_name
from rvdcomm.network import Links
from rvdcomm.plans.adjoint import check_replica_grads
from rvdcomm.plans.plan import Plan
from rvdcomm.plans.planner import plan
from rvdcomm.run.agree import check_equal
from rvdcomm.run.process_group import Membership
from rvdcomm.text import quoted

SHARES_MEMORY = (
    "out shares memory with the tensor, which is not the part of out that keeps its values; give "
    "another out."
)


@dataclass(frozen=True)
class TransitionRequest:
    """What one rank was asked for: texts, and the shapes and dtypes of its tensors.

    ``requires_grad`` says whether a gradient flows back; None leaves the answer to the other ranks.
    ``asks_grad`` says that the caller passed ``requires_grad=True``, and so expects a scalar to
    call ``backward`` on if this rank gets no result. ``place`` is the position of the shard in
    ``out``, if the shard is a part of ``out``. ``device`` is the type of the device of the tensors,
    None if there are none. ``misuse`` describes an argument that cannot be used
    at all; if it is not None, only src and dst count besides it.
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
    requires_grad: bool | None = None
    asks_grad: bool = False
    replica_grads: str = "parts"
    memory_limit: int | None = None
    place: tuple[int, ...] | None = None
    device: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The request as plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> TransitionRequest:
        """The request whose ``to_json`` gave these values, before they travelled as JSON.

        Raises:
            CommError: another rank sent something else.
        """
        plain: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in values.items()
        }
        # Types are texts here, because of the import of annotations.
        types = {field.name: str(field.type) for field in fields(cls)}
        odd = [name for name in types if name in plain and not _FITS[types[name]](plain[name])]
        try:
            made = cls(**plain)
        except TypeError:
            odd = sorted(set(types) ^ set(plain))
        if odd:
            raise CommError(
                f"redistribute: what a rank posted is no request: {quoted(odd)} missing, unknown "
                "or of another type. Do all ranks run one version of rvdcomm?"
            )
        return made

    def __str__(self) -> str:
        return f"redistribute {self.src} -> {self.dst}"


def _is_tuple_of(kind: type) -> Callable[[Any], bool]:
    return lambda value: type(value) is tuple and all(type(each) is kind for each in value)


_FITS: dict[str, Callable[[Any], bool]] = {
    "str": lambda value: type(value) is str,
    "int | None": lambda value: value is None or type(value) is int,
    "str | None": lambda value: value is None or type(value) is str,
    "bool": lambda value: type(value) is bool,
    "bool | None": lambda value: value is None or type(value) is bool,
    "tuple[str, ...]": _is_tuple_of(str),
    "tuple[int, ...] | None": lambda value: value is None or _is_tuple_of(int)(value),
}
"""By type of a field of ``TransitionRequest``: whether a value from JSON has that type."""
assert {str(field.type) for field in fields(TransitionRequest)} <= set(_FITS)

COMMON = ("src", "dst", "shape", "topology", "executor", "memory_limit", "replica_grads")
"""Fields that must be equal on all ranks."""
assert {field.name for field in fields(TransitionRequest)} > set(COMMON)


def resolve(
    requests: Mapping[int, TransitionRequest],
    src: Layout | str,
    dst: Layout | str,
    topology: Links | None,
    group_size: int,
) -> Plan:
    """The plan that all ranks asked for.

    Args:
        requests: every rank's request.
        src, dst, topology: the arguments of this rank; the requests hold their texts.
        group_size: number of ranks of the group; RVD texts mean layouts over all of them.

    Raises:
        LayoutError, ShapeMismatchError: ranks disagree, or the request is illegal, or some rank's
            shard is not what ``src`` gives it.
    """
    mine = next(iter(requests.values()))
    for rank, request in sorted(requests.items()):
        if request.misuse is not None:
            raise LayoutError(f"{mine}: rank {rank}: {request.misuse}")
    _check_equal(requests, *COMMON)
    try:
        return _resolved(requests, src, dst, topology, group_size)
    except (LayoutError, ShapeMismatchError) as error:
        # Facts are raised deep; the transition is added once, here.
        if str(error).startswith("redistribute "):
            raise
        raise type(error)(f"{mine}: {error}") from None


def _resolved(
    requests: Mapping[int, TransitionRequest],
    src: Layout | str,
    dst: Layout | str,
    topology: Links | None,
    group_size: int,
) -> Plan:
    mine = next(iter(requests.values()))
    dtype = _common_dtype(requests)
    shape = known_shape(src, dst, mine.shape)
    src_layout = layout_meant(src, shape, group_size, requests)
    dst_layout = layout_meant(dst, src_layout.shape, group_size, requests)
    if shape is not None and src_layout.shape != shape:
        raise LayoutError(f"shape={shape} was given, but src {src_layout} has another.")
    check_in_group((*src_layout.ranks, *dst_layout.ranks), group_size, str(mine))
    check_replica_grads(mine.replica_grads)
    made = plan(src_layout, dst_layout, dtype, topology, mine.memory_limit, executor=mine.executor)
    for rank, request in sorted(requests.items()):
        check_tensors(made, rank, request)
    return made


def common_device(devices: Mapping[int, str | None], member: Membership, what: str) -> str | None:
    """The type of the devices whose tensors a call moves; None if no rank passes any.

    Args:
        devices: by rank, the type of the device of its tensors, None if it passes none.
        member: the group, whose backends serve the devices.
        what: names the call in errors.

    Raises:
        LayoutError: the group has no backend for a device, or two backends would have to move the
            tensors of one call.
    """
    found = {rank: device for rank, device in sorted(devices.items()) if device is not None}
    if not found:
        return None
    first = next(iter(found))
    for rank, device in found.items():
        if member.serving(device) != member.serving(found[first]):
            raise LayoutError(
                f"{what}: the tensor of rank {first} is on {found[first]} and that of rank {rank} "
                f"on {device}, which {member.serving(found[first])} and {member.serving(device)} "
                "of the group serve; use one device."
            )
    return found[first]


def needs_grad(requests: Mapping[int, TransitionRequest], made: Plan) -> bool:
    """Whether a gradient flows back by the adjoint of ``made``; the same on all ranks.

    Raises:
        LayoutError: ranks disagree about it, a rank passed ``out``, the dtype has no gradient, or a
            rank that gets no result did not ask for the scalar that replaces the result.
    """
    known = {rank: r for rank, r in requests.items() if r.requires_grad is not None}
    if known:
        _check_equal(known, "requires_grad")
    if not any(request.requires_grad for request in known.values()):
        return False
    what = f"redistribute {made.src.rvd} -> {made.dst.rvd}"
    for rank, request in sorted(requests.items()):
        check_grad(made, rank, request.out is not None, request.asks_grad, what)
    return True


def check_grad(made: Plan, rank: int, has_out: bool, asks_grad: bool, what: str) -> None:
    """Raise a LayoutError if no gradient can flow back through a call on ``rank``."""
    if not made.dtype.startswith(("float", "bfloat", "complex")):
        raise LayoutError(f"{what}: {made.dtype} has no gradient; leave out requires_grad=True.")
    if has_out:
        raise LayoutError(
            f"{what}: rank {rank} passed out, through which no gradient flows; leave it out, or "
            "pass requires_grad=False."
        )
    if rank in made.src and rank not in made.dst and not asks_grad:
        raise LayoutError(
            f"{what}: a gradient flows back, but rank {rank} is outside dst and has no result to "
            "start from; pass requires_grad=True on all ranks, and call backward() on the scalar "
            "that it then gets, or requires_grad=False."
        )


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


def check_tensors(made: Plan, rank: int, request: TransitionRequest) -> None:
    """Raise a ShapeMismatchError or LayoutError if the tensors of ``rank`` do not fit the plan."""
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
    if request.place is not None and request.place != kept_place(made.src, made.dst, rank):
        raise LayoutError(f"{what}: rank {rank}: {SHARES_MEMORY}")


# Cached, because every call asks for it, for every tensor of a state dict.
@lru_cache(maxsize=1 << 14)
def kept_place(src: Layout, dst: Layout, rank: int) -> tuple[int, ...] | None:
    """The position of a rank's src shard within its dst shard; None if it is not a part of it.

    A call whose tensor is this part of ``out`` overwrites it with the values that it already has.
    """
    if rank not in src or rank not in dst or src.rvd.v > 1 or dst.rvd.v > 1:
        return None
    part, whole = src.cell(rank).box, dst.cell(rank).box
    if part.intersect(whole) != part:
        return None
    return tuple(a - b for a, b in zip(part.lo, whole.lo, strict=True))


# Cached for the same reason.
@lru_cache(maxsize=1 << 14)
def shard_shape(layout: Layout, rank: int) -> tuple[int, ...] | None:
    """Shape of a rank's shard; None outside the layout."""
    return layout.cell(rank).box.shape if rank in layout else None


def _shape_text(shape: tuple[int, ...] | None) -> str:
    return "None" if shape is None else str(list(shape))


def _check_equal(requests: Mapping[int, TransitionRequest], *names: str) -> None:
    """Raise a LayoutError if two ranks were asked for different things."""
    asked = {r: {name: getattr(each, name) for name in names} for r, each in requests.items()}
    check_equal(asked, "redistribute")


def _common_dtype(requests: Mapping[int, TransitionRequest]) -> str:
    found = {name: rank for rank, request in requests.items() for name in request.dtypes}
    what = next(iter(requests.values()))
    if len(found) > 1:
        each = ", ".join(f"rank {rank} has {name}" for name, rank in sorted(found.items()))
        raise ShapeMismatchError(f"{what}: ranks disagree about dtype: {each}.")
    if not found:
        raise ShapeMismatchError(f"{what}: no rank passed a shard, so the dtype is unknown.")
    return dtype_name(next(iter(found)))


def layout_meant(
    layout: Layout | str,
    shape: tuple[int, ...] | None,
    group_size: int,
    requests: Mapping[int, TransitionRequest] | None = None,
) -> Layout:
    """The layout that a text means in this group; without a shape, it is inferred from shards."""
    if isinstance(layout, Layout):
        return layout
    if "shape(" in layout:
        return Layout.parse(layout)
    rvd = RVD(layout)
    # The counts must fit the group before shards can be added up.
    Layout([0] * len(rvd.d), rvd, range(group_size))
    return Layout(
        _inferred_shape(rvd, requests or {}) if shape is None else shape, rvd, range(group_size)
    )


def _inferred_shape(rvd: RVD, requests: Mapping[int, TransitionRequest]) -> tuple[int, ...]:
    """The global shape: sizes of shards added up along every dim (ranks row-major, R outermost)."""
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
