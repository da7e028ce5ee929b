"""ManyMemory: which memory the tensors of one call may have in common, and which they may not.

A program writes its results in any order, and reads sources while it writes. So an out may share
bytes with nothing else of the call, with two exceptions. A tensor may be the part of its own out
that keeps its values. And names that are *tied*, as an embedding and the output layer of a language
model often are, may have one out: they have equal layouts, and every rank that holds their tensors
holds them in one memory, so their results are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from rvdcomm.api.float8 import Scale
from rvdcomm.api.overlap import Region, RegionIndex, first_overlap
from rvdcomm.errors import LayoutError
from rvdcomm.layout import Layout

Groups = Sequence[Sequence[str]]
"""The names of every memory that several names have."""


def overlap_text(other: str, why: str = "") -> str:
    """The error of an out that shares memory with that of ``other``."""
    return (
        f"out shares memory with the out of {other!r}{why}, so one result would overwrite the "
        "other; give outs that lie apart. Only tied tensors may have one out: on every rank one "
        "memory, with equal layouts and one scale."
    )


@dataclass(frozen=True)
class ManyMemory:
    """Where the tensors, outs and scales of a call lie on one rank.

    ``scales`` are by the names of dst; one for all has the name "".
    """

    tensors: Mapping[str, Tensor]
    outs: Mapping[str, Tensor]
    scales: Mapping[str, Scale]

    @cached_property
    def places(self) -> tuple[Mapping[str, Any], ...]:
        """Where everything lies: calls with equal places share equal memory.

        The shapes and dtypes of tensors and outs are left out: those of a call do not change.
        """
        tensors, outs = (
            {name: _place(tensor) for name, tensor in given.items()}
            for given in (self.tensors, self.outs)
        )
        return tensors, outs, {name: _scale_place(scale) for name, scale in self.scales.items()}

    @cached_property
    def outs_in_one(self) -> Groups:
        """The names of dst whose outs are one memory, by memory."""
        outs = self.places[1]
        is_each_apart = len(set(outs.values())) == len(outs)
        return () if is_each_apart else _groups(self.outs, self.scales)

    @cached_property
    def followers(self) -> frozenset[str]:
        """The names whose out is also that of a name before them."""
        return frozenset(name for group in self.outs_in_one for name in group[1:])

    def tensors_in_one(self, src_of: Mapping[str, str]) -> Groups:
        """The names of src whose tensors are one memory with one scale, by memory.

        Args:
            src_of: the name in src, by the name in dst.
        """
        scales = {src_of[name]: scale for name, scale in self.scales.items() if name in src_of}
        return _groups(self.tensors, scales)

    def overlap(self, are_tied: Callable[[str, str], bool]) -> tuple[str, str] | None:
        """The first two outs that overlap, except for those of tied names that are one memory."""
        for first, *others in self.outs_in_one:
            for name in others:
                if not are_tied(first, name):
                    return first, name
        outs = ((name, out) for name, out in self.outs.items() if name not in self.followers)
        return first_overlap(Region.of(out, name) for name, out in outs)

    def sharing(self) -> Iterator[tuple[str, str, list[str]]]:
        """("tensor" or "scale", its name, the names of outs) of all that have bytes in outs."""
        if not self.outs:
            return
        index = RegionIndex(Region.of(out, name) for name, out in self.outs.items())
        scales = {name: x for name, x in self.scales.items() if isinstance(x, Tensor)}
        for noun, given in (("tensor", self.tensors), ("scale", scales)):
            regions = [Region.of(tensor, name) for name, tensor in given.items()]
            for region, names in index.meeting(regions):
                yield noun, region.name, names

    def are_one_out(self, names: Iterable[str]) -> bool:
        """Whether the outs of these names are one memory."""
        return len({_whole_place(self.outs[name]) for name in names}) == 1


@dataclass(frozen=True)
class Tied:
    """What ranks told each other in the first call about names that are tied.

    Attributes:
        first: for every name of dst that is tied to others, the first name of these.
        sharing: the names that had one out with others on some rank.
    """

    first: Mapping[str, str]
    sharing: frozenset[str]

    def has(self, *names: str) -> bool:
        """Whether these names are tied to each other."""
        return len({self.first.get(name, name) for name in names}) == 1

    @classmethod
    def of(
        cls,
        groups: Mapping[int, tuple[Groups, Groups]],
        src_of: Mapping[str, str],
        src: Mapping[str, Layout],
        dst: Mapping[str, Layout],
    ) -> Tied:
        """The names that are tied, given ``tensors_in_one`` and ``outs_in_one`` of every rank.

        Raises:
            LayoutError: names that have one out on some rank are not tied.
        """
        held = {rank: group_of(tensors) for rank, (tensors, _) in groups.items()}
        alike: dict[Any, list[str]] = {}
        for name, src_name in src_of.items() if any(held.values()) else ():
            places = tuple(held[rank].get(src_name) for rank in src[src_name].ranks)
            if None not in places:
                alike.setdefault((src[src_name], dst[name], places), []).append(name)
        first = {name: names[0] for names in alike.values() for name in names[1:]}
        made = cls(
            first, frozenset(n for _, outs in groups.values() for names in outs for n in names)
        )
        for rank, (_, outs) in groups.items():
            for names in outs:
                for name in names:
                    if not made.has(names[0], name):
                        text = overlap_text(name, ", and the two are not tied on all ranks")
                        what = f"redistribute_many: tensor {names[0]!r}: rank {rank}"
                        raise LayoutError(f"{what}: {text}")
        return made


def _groups(given: Mapping[str, Tensor], scales: Mapping[str, Scale]) -> Groups:
    found: dict[Any, list[str]] = {}
    for name, tensor in given.items():
        if tensor.numel():
            key = _whole_place(tensor), _scale_place(scales.get(name))
            found.setdefault(key, []).append(name)
    return [names for names in found.values() if len(names) > 1]


def group_of(groups: Groups) -> dict[str, int]:
    """The number of the group of every name."""
    return {name: i for i, names in enumerate(groups) for name in names}


def _place(tensor: Tensor) -> Any:
    """Where a tensor of known shape and dtype lies."""
    address = tensor.data_ptr()
    return address if tensor.is_contiguous() else (address, tensor.stride())


def _whole_place(tensor: Tensor) -> Any:
    return tensor.data_ptr(), tensor.stride(), tensor.shape, tensor.dtype


def _scale_place(scale: Scale | None) -> Any:
    return _whole_place(scale) if isinstance(scale, Tensor) else scale
