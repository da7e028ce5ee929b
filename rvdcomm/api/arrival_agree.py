"""Agreement about a call of ``prove``: what ranks tell each other before they compute digests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from rvdcomm.api.many_request import ManyRequest, name_of
from rvdcomm.api.tensors import fault_of
from rvdcomm.errors import LayoutError, ShapeMismatchError
from rvdcomm.layout import Layout, parse_ranges, ranges_text
from rvdcomm.run import compare_requests
from rvdcomm.run.request import shard_shape
from rvdcomm.run.world import World

WHAT = "prove"


def usable_results(given: Any) -> dict[str, Tensor]:
    """The results that are not None, by name.

    Raises:
        LayoutError: they are no mapping, or one of them cannot be read.
    """
    if not isinstance(given, Mapping):
        raise LayoutError(f"results is a {type(given).__name__}; give a mapping by name.")
    results = {name: tensor for name, tensor in given.items() if tensor is not None}
    for name, tensor in results.items():
        if fault := fault_of(tensor):
            raise LayoutError(f"result {name!r} {fault}")
    return results


def agree(
    world: World, members: tuple[int, ...], request: ManyRequest, given: Any
) -> tuple[dict[str, Tensor], dict[int, str]]:
    """Compare the requests of all ranks; collective over ``members``.

    Returns:
        The results that this rank passed, and the dtype in src of every tensor, by its number.

    Raises:
        LayoutError, ShapeMismatchError: ranks disagree, or some rank's request is illegal; the same
            on all ranks.
        CommError: a rank did not join.
    """
    fault: Exception | None = None
    asked: dict[str, Any] = {}
    results: dict[str, Tensor] = {}
    own: dict[str, dict[str, str]] = {"tensors": {}, "results": {}}
    try:
        request.check_usable(world.rank)
        results = usable_results(given)
        asked = request.asked()
        src, dst = request.layouts
        _check_shards("tensors", request.tensors, src, world.rank)
        _check_shards("results", results, dst, world.rank)
        own = _dtypes_here(request, results)
    except (LayoutError, ShapeMismatchError) as error:
        # The request is that of the call whose results are proved, and names it.
        fault = type(error)(f"{WHAT}: {str(error).removeprefix('redistribute_many: ')}")
    posts = compare_requests(world, members, asked, WHAT, fault=fault, **own)
    return results, _common_dtypes(request, posts)


def _check_shards(
    noun: str, given: Mapping[str, Tensor], layouts: Mapping[str, Layout], rank: int
) -> None:
    """Raise for shards that are not what the layouts give ``rank``."""
    odd = sorted(given.keys() - layouts.keys(), key=str)
    if odd:
        raise LayoutError(f"{noun} has the unknown names {odd[:5]}.")
    for name, layout in layouts.items():
        want, tensor = shard_shape(layout, rank), given.get(name)
        got = None if tensor is None else tuple(tensor.shape)
        if got != want:
            passed, its = (None if shape is None else list(shape) for shape in (got, want))
            raise ShapeMismatchError(
                f"tensor {name!r}: rank {rank} passed {passed} in {noun}, its shard is {its}."
            )


# --- dtypes: a rank may have a tensor on one side only, or on none ------------------------------


def _dtypes_here(request: ManyRequest, results: Mapping[str, Tensor]) -> dict[str, dict[str, str]]:
    """By side and dtype, the numbers of the tensors that this rank has, as ranges."""
    pairs = request.pairs
    return {
        "tensors": _numbers_by_dtype([request.tensors.get(name) for name, _ in pairs]),
        "results": _numbers_by_dtype([results.get(name) for _, name in pairs]),
    }


def _numbers_by_dtype(shards: Sequence[Tensor | None]) -> dict[str, str]:
    numbers: dict[str, list[int]] = {}
    for i, shard in enumerate(shards):
        if shard is not None:
            numbers.setdefault(name_of(shard.dtype), []).append(i)
    return {dtype: ranges_text(found) for dtype, found in numbers.items()}


def _common_dtypes(request: ManyRequest, posts: Mapping[int, Any]) -> dict[int, str]:
    """The dtype of every tensor in src, by its number.

    Raises:
        ShapeMismatchError: a shard or a result has another dtype than the others give it.
    """
    pairs = request.pairs
    found: dict[int, tuple[int, str]] = {}
    for rank, i, dtype in _dtypes_of(posts, "tensors", len(pairs)):
        other, known = found.setdefault(i, (rank, dtype))
        if known != dtype:
            raise ShapeMismatchError(
                f"{WHAT}: tensor {pairs[i][0]!r}: ranks disagree about dtype: rank {other} has "
                f"{known}, rank {rank} has {dtype}."
            )
    for rank, i, dtype in _dtypes_of(posts, "results", len(pairs)):
        name = pairs[i][1]
        becomes = request.becomes(name, found[i][1])
        if dtype != becomes:
            raise ShapeMismatchError(
                f"{WHAT}: tensor {name!r}: rank {rank} passed a result of {dtype}, it becomes "
                f"{becomes}."
            )
    return {i: dtype for i, (_, dtype) in sorted(found.items())}


def _dtypes_of(
    posts: Mapping[int, Any], noun: str, num_tensors: int
) -> Iterator[tuple[int, int, str]]:
    """Ranks, numbers and dtypes of tensors, without posts that repeat those of a lower rank.

    Most ranks have the same tensors, so this takes no time for each rank and each tensor.
    """
    seen = set()
    for rank, post in posts.items():
        for dtype, numbers in post[noun].items():
            if (dtype, numbers) not in seen:
                seen.add((dtype, numbers))
                yield from ((rank, i, dtype) for i in parse_ranges(numbers, num_tensors))
